"""The parts that the blocking and the asyncio client share: durations, options, one line with its sessions, sentences.

`ClientCore` is the line to one server with a producer's session and a queue of single requests. The two clients add the
waiting: `fairway.client.sync` with a threaded link, `fairway.client.aio` on the caller's loop. `ServerConnection` is
what their connections have in common, for the parts that work with either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from fairway import limits
from fairway.batch import MessageId
from fairway.client.commands import AnswerT, CommandRequest, repeats
from fairway.client.spool.spool import SpoolOptions
from fairway.client.url import META_SCHEME, SCHEME, BrokerAddress
from fairway.errors import InvariantViolated, Misuse, Unreachable
from fairway.protocol.line import Ask, ClientSession, Line, ReconnectOptions, RequestOutcome
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.receipts import Pending, PendingBatch
from fairway.protocol.request_queue import RequestQueue
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

if TYPE_CHECKING:
    from fairway.client.client_log import ConnectionLog

PendingT = TypeVar("PendingT", bound=Pending)
BatchT = TypeVar("BatchT", bound=PendingBatch)

Duration: TypeAlias = float | timedelta  # seconds, or a timedelta

FIRST_S = 30.0  # wait so long for the first attempt to connect; a running host answers much sooner
ASK_S = 30.0  # time-out of a request, the wait for a connection included
CLOSE_S = 30.0  # a closing client waits so long until buffered messages are stored


def seconds_of(duration: Duration) -> float:
    """A duration in seconds. Raises `Misuse` for a negative one, or for another type."""
    if isinstance(duration, bool) or not isinstance(duration, int | float | timedelta):
        raise Misuse(f"a duration is seconds or a timedelta, not {type(duration).__name__}")
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not seconds >= 0:
        raise Misuse(f"a duration of {seconds:g} s: it is 0 or more")
    return seconds


def limit_of(timeout: Duration | None) -> float | None:
    """The same for a timeout that may be None: for ever."""
    return None if timeout is None else seconds_of(timeout)


def end_of(timeout: Duration | None, clock: Clock) -> int | None:
    """The end of a timeout that begins now, on the monotonic clock in ns; None: never."""
    return None if timeout is None else clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)


SPAN_HELP: Final = "90s, 15m, 2h, 3d"
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)


def as_span(text: str) -> timedelta | None:
    """Parse a stretch of time; None: the text is not one."""
    found = _SPAN.fullmatch(text)
    try:
        return None if found is None else timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        raise Misuse(f"{text} is longer than there is time") from None


def span(text: str) -> timedelta:
    """Parse a stretch of time. Raises `Misuse` with examples."""
    found = as_span(text)
    if found is None:
        raise Misuse(f"{text!r} is no stretch of time: write {SPAN_HELP}")
    return found


def id_of(given: MessageId | str) -> MessageId:
    """A message id, parsed if it is text."""
    return MessageId.parse(given) if isinstance(given, str) else given


SLICE_MESSAGES = 4 * limits.BATCH_MESSAGES_MAX  # the first batches travel while the next slice is encoded


class MessageSlice(NamedTuple):
    """A part of the messages of `send_many`, with the same part of every column."""

    payloads: Sequence[bytes]
    columns: dict[str, Any]

    def at(self, places: Sequence[int]) -> MessageSlice:
        """The messages at these indexes."""
        columns = {name: [column[at] for at in places] for name, column in self.columns.items()}
        return MessageSlice([self.payloads[at] for at in places], columns)


def slices(payloads: Sequence[bytes] | bytes | str, **columns: Sequence[Any] | None) -> Iterator[MessageSlice]:
    """Yield the messages in order, a slice at a time. Columns that are None are left out."""
    if isinstance(payloads, bytes | bytearray | str):
        raise TypeError(f"payloads are a list of bytes, not one {type(payloads).__name__}: write [payload]")
    given = {name: column for name, column in columns.items() if column is not None}
    count = len(payloads)
    for name, column in given.items():
        if len(column) != count:
            raise Misuse(f"{len(column)} {name} for {count} payloads: give one for each, or None for the whole column")
    if count <= SLICE_MESSAGES:
        if count:
            yield MessageSlice(payloads, given)
        return
    for at in range(0, count, SLICE_MESSAGES):
        end = at + SLICE_MESSAGES
        yield MessageSlice(payloads[at:end], {name: column[at:end] for name, column in given.items()})


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of a client, in parts that each describe their own."""

    producer: ProducerOptions = field(default_factory=ProducerOptions)
    line: ReconnectOptions = field(default_factory=ReconnectOptions)
    spool: SpoolOptions | None = None

    def check(self) -> None:
        """Check the parts against each other."""
        if self.producer.when_full == "spool" and self.spool is None:
            raise Misuse("when_full='spool' needs a spool: fairway.connect(url, spool='/var/lib/app/spool')")


class Mute:
    """Wraps a producer's session on a line to a server that stores nothing: deadlines run, and no request leaves."""

    def __init__(self, producing: ClientSession) -> None:
        self._producing = producing

    def opened(self, now_ns: int) -> None:
        """Do nothing: nothing is sent on this connection."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        return self._producing.asks(0, now_ns)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        raise InvariantViolated(f"{outcome!r} came to a session that asks nothing")

    def next_deadline(self) -> int | None:
        return self._producing.next_deadline()


_OWN_SESSIONS = 2  # of a line: the producer's session and the commands' session


class ClientCore(Generic[PendingT, BatchT]):
    """One line and the sessions that every client has on it. Called under the client's lock, or on its loop."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        options: ClientOptions,
        *,
        pending_type: type[PendingT],
        batch_type: Callable[[str, Callable[[Callable[[], None]], None]], BatchT],
        stores: bool = True,
        watch: ConnectionLog | None = None,
    ) -> None:
        """Make the line and its sessions.

        With `stores=False` the server stores nothing, and messages that are added here wait to be lent to another
        connection. The calls to `watch` come without the lock.
        """
        now_ns = clock.monotonic_ns()
        self._watch = watch
        self.line = Line(rng, options.line, now_ns=now_ns, on_trouble=self._on_trouble, on_open=self._on_open)
        self.producing: ProducerSession[PendingT, BatchT] = ProducerSession(
            clock,
            rng,
            options.producer,
            run_later=self.line.run_later,
            pending_type=pending_type,
            batch_type=batch_type,  # type: ignore[arg-type]  # any callable that makes a batch will do
        )
        self.requests = RequestQueue(repeats)
        self.line.add(self.producing if stores else Mute(self.producing), now_ns)
        self.line.add(self.requests, now_ns)

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
        """Whether no connection is needed: nothing is to be sent or asked, and no consumer is on the line."""
        return self.line.sessions == _OWN_SESSIONS and self.requests.is_idle and not self.producing.unsettled()


class Linked(Protocol):
    """A link, driven by a thread or by a loop."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def stir(self) -> None: ...

    def pump(self) -> None: ...

    def check(self) -> None: ...

    def redirect(self, addresses: Sequence[BrokerAddress], leader: BrokerAddress | None) -> None: ...


class ServerConnection(Protocol):
    """A line, its sessions and its link: what the connections of both clients have in common."""

    @property
    def core(self) -> ClientCore[Any, Any]: ...

    @property
    def producing(self) -> ProducerSession[Any, Any]: ...

    @property
    def link(self) -> Linked: ...


ConnectionT = TypeVar("ConnectionT", bound=ServerConnection)


@dataclass(frozen=True, slots=True)
class Goal:
    """The server that a line leads to, with words for people: its name, and the command that starts it."""

    addresses: tuple[BrokerAddress, ...]
    name: str = "broker"
    command: str = "fairway up --data data"
    scheme: str = SCHEME
    stores: bool = True  # whether the server stores messages
    is_routed: bool = False  # a meta server names the addresses, and may change them later

    @property
    def patience_ms(self) -> int | None:
        """How long a closing client waits for answers.

        0 for a meta server: the long poll of routes would only answer after a change, which no longer matters.
        """
        return None if self.stores else 0

    @property
    def place(self) -> str:
        """The server for people, such as `broker at fairway://127.0.0.1:20880`, or `broker group west`."""
        where = ",".join(map(str, self.addresses))
        return self.name if self.is_routed else f"{self.name} at {self.scheme}{where}"

    @property
    def remedy(self) -> str:
        """A hint for people who cannot reach the server."""
        return "" if self.is_routed else f"Is it running there (`{self.command} --port {self.addresses[0].port}`)?"


def meta_server(addresses: tuple[BrokerAddress, ...]) -> Goal:
    return Goal(addresses, "meta server", "fairway meta --registry sqlite:meta", META_SCHEME, stores=False)


def delay_server(addresses: tuple[BrokerAddress, ...]) -> Goal:
    return Goal(addresses, "delay server", "fairway delay serve --data delay --broker HOST:PORT")


def unreachable(goal: Goal, trouble: str | None) -> Unreachable:
    """The error of a client that cannot connect, with the remedy."""
    why = trouble or "no answer yet"
    remedy = f"{goal.remedy} To wait for it, connect with patience=SECONDS (--patience-s)".lstrip()
    return Unreachable(f"no {goal.place}: {why}. {remedy}")


def not_stored_yet(messages: int, timeout: Duration | None) -> TimeoutError:
    return TimeoutError(f"{messages} messages are not stored after {timeout} s: they may still be")


def no_answer(request: CommandRequest[AnswerT], timeout: Duration, trouble: str | None) -> Exception:
    """The error after a time-out: the last refusal, if there was one, or a TimeoutError."""
    if request.refused is not None:
        return request.refused
    kind = type(request.message).__name__
    return TimeoutError(f"no answer to {kind} after {timeout} s: {trouble or 'the broker is silent'}")


def failures(unseen: list[Exception]) -> ExceptionGroup[Exception]:
    return ExceptionGroup("messages were sent and not stored, and nobody looked", unseen)


@contextmanager
def failures_noted(error: BaseException | None) -> Iterator[None]:
    """Add the failures of messages as notes to the error that ends a `with`; without one, raise them."""
    try:
        yield
    except ExceptionGroup as failed:
        if error is None:
            raise
        for each in failed.exceptions:
            error.add_note(f"and a message was not stored: {each}")
