"""What the blocking and the asyncio consumer share: settings, and the messages that are taken and not yet given out.

A consumer takes messages from its session in handfuls, so that it takes the lock, if there is one, once for many.
Before the consumer gives a message to the program, it checks the message once more: a message that another consumer may
have by now goes back instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from fairway.client.cluster.consumer import ClusterConsumer
from fairway.errors import Misuse
from fairway.protocol.consumer_options import ConsumerCounts, ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message, begin, may_begin
from fairway.protocol.messages import CoalescePolicy, OrderPolicy, WantedTags, Whence
from fairway.runtime.clock import Clock

ResultT = TypeVar("ResultT")

HANDFUL = 256  # the lock and a look at the line cost about 20 µs, a message alone less than 1 µs
LEAVE_S = 10.0  # a closing consumer waits so long until its settlements are stored


Start: TypeAlias = Literal["earliest", "latest"] | Whence

_STARTS = {"earliest": Whence.EARLIEST, "latest": Whence.LATEST}


class ConsumerSettings(TypedDict, total=False):
    """The settings of a consumer, all optional."""

    consumer: str
    start: Start
    is_broadcast: bool
    config_version: int
    wanted: WantedTags | None
    order: OrderPolicy | None
    coalesce: CoalescePolicy | None
    rate_per_s: float | None
    rate_per_key: float | None
    prefetch_messages: int
    prefetch_bytes: int
    decoded_bytes_max: int
    linger_ms: float
    settle_messages: int
    wait_ms: int | None


def options_of(subject: str, group: str, settings: ConsumerSettings) -> ConsumerOptions:
    """The `ConsumerOptions` for these settings."""
    given = dict(settings)
    start = given.pop("start", Whence.EARLIEST)
    if not isinstance(start, Whence):
        if start not in _STARTS:
            raise Misuse(f"a new group starts at 'earliest' or 'latest', not at {start!r}; seek afterwards")
        start = _STARTS[str(start)]
    return ConsumerOptions(subject, group, start=start, **given)  # type: ignore[arg-type]


Source: TypeAlias = ConsumerSession | ClusterConsumer[Any]  # of messages


class Waiter(Protocol):
    """The part of a link that both kinds of consumers use."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def check(self) -> None: ...

    def pump(self) -> None: ...


class TakenMessages(ABC):
    """The part of a consumer that never waits."""

    def __init__(self, session: Source, forget: Callable[[], None], link: Waiter, clock: Clock) -> None:
        """`forget` removes the session from its line, and is called under the lock."""
        self._session = session
        self._forget = forget
        self._link = link
        self._clock = clock
        self._in_hand: deque[Message] = deque()
        self._is_closed = False
        self._is_stopped = False  # or closed
        self._is_resting = False

    @property
    def name(self) -> str:
        """The consumer's name at the broker."""
        return self._session.consumer

    @property
    def counts(self) -> ConsumerCounts:
        return self._session.counts

    def ack(self, messages: Sequence[Message]) -> None:
        """Ack many messages, faster than one by one."""
        self._session.ack(messages)

    def pause(self) -> None:
        """Take no more messages from the broker until `resume`. Messages in hand stay in hand."""
        with self._link.lock:
            self._session.pause()

    def resume(self) -> None:
        self._change(self._session.resume)

    def rest(self) -> bool:
        """Give back the messages that no handler has begun, and take no more until the next call asks for a message.

        For a program whose handlers are all busy for long: other consumers get the messages. False: there were none.
        """
        return self._change(self._rest)

    def stop(self) -> None:
        """Begin to end. Loops over the consumer end, and messages that no handler has begun go back at once.

        Handlers may still settle the messages that they have begun. `close` follows.
        """
        if self._is_stopped or self._is_orphan:
            return
        self._is_stopped = True
        self._give_back()
        self._change(lambda: self._session.drain(self._clock.monotonic_ns()))

    @property
    def _is_orphan(self) -> bool:
        """Whether this is a forked child, and the session belongs to the parent."""
        return False

    @abstractmethod
    def _change(self, change: Callable[[], ResultT]) -> ResultT:
        """Change the session under the lock. Then wake those who wait, and send what there is to send."""

    def _sound(self) -> Iterator[Message]:
        """Yield the messages in hand that may begin. Several threads may do this at once."""
        in_hand = self._in_hand
        while in_hand:
            try:
                message = in_hand.popleft()
            except IndexError:  # another thread was faster
                return
            if may_begin(message):
                yield message
            else:
                message.release()

    def _some(self, most: int) -> list[Message]:
        """At most `most` messages in hand that may begin."""
        taken: list[Message] = []
        with suppress(IndexError):  # another thread was faster
            while len(taken) < most and self._in_hand:
                taken.append(self._in_hand.popleft())
        return begin(taken)

    def _grab(self, most: int) -> bool:
        """Take a handful from the session; False: the session has no message."""
        found = self._session.take_messages(most)
        if not found and self._session.is_finished and not self._is_stopped:
            raise self._session.error or Misuse("this consumer has ended")
        self._in_hand.extend(found)
        return bool(found)

    def _has_news(self) -> bool:
        session = self._session
        is_over = session.is_finished or self._is_stopped
        # A worker that waits while the consumer rests is not busy: it ends the rest.
        return bool(self._in_hand) or session.has_ready or is_over or self._is_resting

    @property
    def _has_unbegun(self) -> bool:
        return bool(self._in_hand) or self._session.waiting_count > 0

    def _rest(self) -> bool:
        """Give back the messages that no handler has begun, and pull no more until the next take.

        False: there is nothing to give back. A pull that is under way may bring messages again, so the caller calls
        this again after a while.
        """
        if (self._session.is_paused and not self._is_resting) or not self._has_unbegun:
            return False
        self._is_resting = True
        self._session.pause()
        self._give_back()
        self._session.hand_back()
        return True

    def _wake(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._session.resume()

    def _is_quiet(self) -> bool:
        return self._session.is_quiet or self._session.is_finished

    def _check_lasting(self) -> None:
        """Raise the error of a session that has ended by itself: it never confirms the last settlements."""
        if self._session.is_finished and self._session.error is not None:
            raise self._session.error

    def _give_back(self) -> None:
        while self._in_hand:
            message = self._in_hand.popleft()
            if not message.is_settled:
                message.release()


def check_most(most: int) -> None:
    if most < 1:
        raise Misuse(f"take({most}): at least 1")
