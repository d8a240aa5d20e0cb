"""What a consumer of either face has in hand: messages taken from the session and not yet given to the program.

They are taken in handfuls, so that the lock, where there is one, is taken once for many. Before one is given out it is
looked at once more: if others may have it by now, it goes back instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from fairway.errors import FairwayError, Misuse
from fairway.protocol.consumption import ConsumerCounts
from fairway.protocol.delivery import Message, may_begin

HANDFUL = 256  # the lock and a look at the line cost about 20 µs; a message by itself less than one
LEAVE_S = 10.0  # for what was settled to be stored, when a consumer is closed


class Source(Protocol):
    """Where messages come from: a session (`protocol.consuming`), or several that are used as one (`herd`)."""

    is_paused: bool

    @property
    def consumer(self) -> str: ...

    @property
    def counts(self) -> ConsumerCounts: ...

    @property
    def error(self) -> FairwayError | None: ...

    @property
    def is_finished(self) -> bool: ...

    @property
    def is_quiet(self) -> bool: ...

    @property
    def waiting_count(self) -> int: ...

    @property
    def has_ready(self) -> bool: ...

    def take_messages(self, most: int | None = None) -> list[Message]: ...

    def wish(self, count: int) -> None: ...

    def ack(self, messages: Sequence[Message]) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def hand_back(self) -> int: ...

    def drain(self, now_ns: int, until_ns: int | None = None) -> None: ...

    def abandon(self) -> None: ...


class TakenMessages:
    """The part of a consumer that waits for nothing."""

    def __init__(self, session: Source) -> None:
        self._session = session
        self._in_hand: deque[Message] = deque()
        self._is_closed = False
        self._is_stopped = False  # or closed
        self._is_resting = False

    @property
    def name(self) -> str:
        """Under which the broker knows it."""
        return self._session.consumer

    @property
    def counts(self) -> ConsumerCounts:
        return self._session.counts

    def ack(self, messages: Sequence[Message]) -> None:
        """`ack` of each, faster."""
        self._session.ack(messages)

    def _sound(self) -> Iterator[Message]:
        """What is in hand, one after the other; several threads may do this at once."""
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
        return [message for message, _ in zip(self._sound(), range(most), strict=False)]

    def _grab(self, most: int) -> bool:
        """Take a handful from the session; False: it has none."""
        found = self._session.take_messages(most)
        if not found and self._session.is_finished and not self._is_stopped:
            raise self._session.error or Misuse("this consumer has ended")
        self._in_hand.extend(found)
        return bool(found)

    def _has_news(self) -> bool:
        session = self._session
        is_over = session.is_finished or self._is_stopped
        return bool(self._in_hand) or session.has_ready or is_over or self._is_resting  # who waits is not busy

    @property
    def _has_unbegun(self) -> bool:
        return bool(self._in_hand) or self._session.waiting_count > 0

    def _rest(self) -> bool:
        """Give back what nobody has begun, and pull no more until somebody takes again; False: there is no need.

        A pull that is under way may bring it all back here: whoever calls this calls it again after a while.
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
        """A session that has ended by itself will never say what became of the last settlements."""
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
