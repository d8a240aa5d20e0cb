"""What both faces have in common: a line to the broker with a producer and a desk for questions on it.

The faces add the waiting, each in its own way: `sync` by a threaded link, `aio_face` on the caller's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from fairway.client.asking import AnswerT, CommandRequest, Questions
from fairway.client.spool import SpoolOptions
from fairway.client.url import META_SCHEME, SCHEME, BrokerAddress
from fairway.errors import InvariantViolated, Misuse, Unreachable
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.pending import Pending, PendingBatch
from fairway.protocol.producing import ProducerOptions, ProducerSession
from fairway.protocol.session import Ask, ClientSession, RequestOutcome
from fairway.world.clock import Clock
from fairway.world.rng import Rng

PendingT = TypeVar("PendingT", bound=Pending)
BatchT = TypeVar("BatchT", bound=PendingBatch)

Duration: TypeAlias = float | timedelta  # seconds, or a timedelta

ASK_S = 30.0  # for an answer to a question, the wait for a connection included
CLOSE_S = 30.0  # for what is buffered to be stored when a client is closed


def seconds_of(duration: Duration) -> float:
    """A wait as a number of seconds."""
    if isinstance(duration, bool) or not isinstance(duration, int | float | timedelta):
        raise Misuse(f"a duration is seconds or a timedelta, not {type(duration).__name__}")
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not seconds >= 0:
        raise Misuse(f"a duration of {seconds:g} s: it is 0 or more")
    return seconds


def limit_of(timeout: Duration | None) -> float | None:
    """The same where None means for ever."""
    return None if timeout is None else seconds_of(timeout)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client behaves; each part says what it offers."""

    producer: ProducerOptions = field(default_factory=ProducerOptions)
    line: ReconnectOptions = field(default_factory=ReconnectOptions)
    spool: SpoolOptions | None = None

    def check(self) -> None:
        """What the parts cannot know of each other."""
        if self.producer.when_full == "spool" and self.spool is None:
            raise Misuse("when_full='spool' needs a spool: fairway.connect(url, spool='/var/lib/app/spool')")


class Mute:
    """A producer's session that keeps its time and says nothing."""

    def __init__(self, producing: ClientSession) -> None:
        self._producing = producing

    def opened(self, now_ns: int) -> None:
        """That is no news for it."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        return self._producing.asks(0, now_ns)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        raise InvariantViolated(f"{outcome!r} came to a session that asks nothing")

    def next_deadline(self) -> int | None:
        return self._producing.next_deadline()


class ConnectionWatch(Protocol):
    """Who is told how one connection stands."""

    def trouble(self, reason: str, now_ns: int) -> None:
        """It cannot be had, or was lost."""

    def opened(self, now_ns: int) -> None:
        """It was made, handshake included."""


_OWN_SESSIONS = 2  # of a line: what is sent, and what is asked


class ClientCore(Generic[PendingT, BatchT]):
    """One line and the sessions that every client has on it. Called under the face's lock, or on its loop."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        options: ClientOptions,
        *,
        pending_type: type[PendingT],
        batch_type: Callable[[str, Callable[[Callable[[], None]], None]], BatchT],
        stores: bool = True,
        watch: ConnectionWatch | None = None,
    ) -> None:
        """With `stores=False` the line is to somebody who stores nothing: what is added here waits to be lent.

        `watch` is told how the connection stands, without the lock."""
        now_ns = clock.monotonic_ns()
        self._watch = watch
        self.line = Line(rng, options.line, now_ns=now_ns, on_trouble=self._on_trouble, on_open=self._on_open)
        self.producing: ProducerSession[PendingT, BatchT] = ProducerSession(
            clock,
            rng,
            options.producer,
            run_later=self.line.run_later,
            pending_type=pending_type,
            batch_type=batch_type,  # type: ignore[arg-type]  # whatever makes one will do
        )
        self.questions = Questions()
        self.line.add(self.producing if stores else Mute(self.producing), now_ns)
        self.line.add(self.questions, now_ns)

    def _on_trouble(self, sentence: str, now_ns: int) -> None:
        self.producing.trouble(sentence, now_ns)
        if self._watch is not None:
            self.line.run_later(partial(self._watch.trouble, sentence, now_ns))

    def _on_open(self, now_ns: int) -> None:
        if self._watch is not None:
            self.line.run_later(partial(self._watch.opened, now_ns))

    def is_decided(self) -> bool:
        """Whether the first attempt to connect has succeeded or failed."""
        return self.line.is_open or self.line.connections > 0 or self.line.trouble is not None

    def is_connected(self) -> bool:
        return self.line.connections > 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody would miss a connection: nothing is to be sent or asked, and no consumer is on the line."""
        return self.line.sessions == _OWN_SESSIONS and self.questions.is_idle and not self.producing.unsettled()


@dataclass(frozen=True, slots=True)
class Goal:
    """Whom a line is for, and how a person would start it."""

    addresses: tuple[BrokerAddress, ...]
    name: str = "broker"
    command: str = "fairway up --data data"
    scheme: str = SCHEME
    stores: bool = True  # messages
    is_routed: bool = False  # a meta server says where it is, and may say something else later

    @property
    def patience_ms(self) -> int | None:
        """For answers, when a client is closed: what a meta server is asked waits for changes, and those are of no
        interest any more."""
        return None if self.stores else 0

    @property
    def place(self) -> str:
        """Such as `broker at fairway://127.0.0.1:20880`, or `broker group west`."""
        where = ",".join(map(str, self.addresses))
        return self.name if self.is_routed else f"{self.name} at {self.scheme}{where}"

    @property
    def remedy(self) -> str:
        """For a person who finds that it is not there."""
        return "" if self.is_routed else f"Is it running there (`{self.command} --port {self.addresses[0].port}`)?"


def meta_server(addresses: tuple[BrokerAddress, ...]) -> Goal:
    return Goal(addresses, "meta server", "fairway meta --registry sqlite:meta", META_SCHEME, stores=False)


def delay_server(addresses: tuple[BrokerAddress, ...]) -> Goal:
    return Goal(addresses, "delay server", "fairway delay serve --data delay --broker HOST:PORT")


def unreachable(goal: Goal, trouble: str | None) -> Unreachable:
    """The sentence for who cannot be connected, with the remedy."""
    why = trouble or "no answer yet"
    remedy = f"{goal.remedy} To wait for it, connect with patience=SECONDS (--patience-s)".lstrip()
    return Unreachable(f"no {goal.place}: {why}. {remedy}")


def not_stored_yet(messages: int, timeout: Duration | None) -> TimeoutError:
    return TimeoutError(f"{messages} messages are not stored after {timeout} s: they may still be")


def no_answer(question: CommandRequest[AnswerT], timeout: Duration, trouble: str | None) -> Exception:
    """What ends the wait for an answer: the refusal that did not pass, or silence."""
    if question.refused is not None:
        return question.refused
    kind = type(question.message).__name__
    return TimeoutError(f"no answer to {kind} after {timeout} s: {trouble or 'the broker is silent'}")


def failures(unseen: list[Exception]) -> ExceptionGroup[Exception]:
    return ExceptionGroup("messages were sent and not stored, and nobody looked", unseen)


def note_failures(error: BaseException, failed: ExceptionGroup[Exception]) -> None:
    """Beside what ended a `with`, say what else went wrong."""
    for each in failed.exceptions:
        error.add_note(f"and a message was not stored: {each}")
