"""One replica, as its master sees it: how far it was sent, how far it has synced, and the credits it has given.

A replica counts as caught up at a moment when it has synced everything that the master had synced at that moment. It
says so a little later, so the moment is remembered with each credit and believed when a later one confirms it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fairway.errors import Refused
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.replicating import Want
from fairway.storage import copying

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Connected(Protocol):
    """The connection of whoever asks."""

    @property
    def is_gone(self) -> bool: ...


class ReplicaQuestion(Protocol):
    """What a replica asks, with the way back to it. It is answered once, or never because the replica is gone."""

    @property
    def message(self) -> ControlMessage: ...

    @property
    def attachments(self) -> Sequence[Bytes]: ...

    @property
    def session(self) -> Connected: ...

    def respond(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None: ...

    def refuse(self, refused: Refused) -> None: ...

    def end(self) -> None: ...


class Credit(NamedTuple):
    """A request that is answered when there is something to send, or when its time is up."""

    question: ReplicaQuestion
    until_ns: int


class Peer:
    """A replica that follows, or did. Ends and cursors are pairs: messages, actions."""

    def __init__(self, directory: str, session: Connected, now_ns: int, verifier: bytes = b"") -> None:
        """`verifier`: of the secret that it has shown."""
        self.directory = directory
        self.verifier = verifier
        self.session = session
        self.heard_ns = now_ns
        self.caught_up_ns = now_ns  # when it last had everything
        self.confirmed: tuple[int, int] | None = None  # None: it has not said yet
        self.cursor: list[int] = [0, 0]
        self.told: tuple[int, int] = (0, 0)  # committed ends
        self.first_bases: tuple[int, int] = (0, 0)  # that it was told
        self.news_ns: int | None = None  # since when it does not know of a committed end
        self.wanted: Want | None = None  # of it, for what has rotted here; it is told with the next answer
        self.credits: deque[Credit] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_ns = 0
        self.free_ns = 0  # before it nothing is sent: it catches up, and that is slowed down
        self.is_fetching = False  # what it lacks is not in memory, and is being read
        self.fetched: tuple[int, copying.SegmentChunk] | None = None  # by log: it was
        self.is_sent_away = False  # it cannot go on from where it is, and has to follow again
        self._mark: tuple[int, int] = (0, 0)
        self._marked_ns = now_ns

    @property
    def is_connected(self) -> bool:
        return not self.session.is_gone and not self.is_sent_away

    def lag_bytes(self, own_ends: tuple[int, int]) -> int:
        """What it has not said to have synced, of what is synced here."""
        confirmed = self.confirmed or (0, 0)
        return sum(max(own - its, 0) for own, its in zip(own_ends, confirmed, strict=True))

    def begin(self, starts: list[int]) -> None:
        """It wants everything from here on."""
        self.cursor = list(starts)

    def heard(self, ends: tuple[int, int], own_ends: tuple[int, int], now_ns: int) -> None:
        """It has synced so much."""
        self.heard_ns = now_ns
        self.confirmed = ends
        if has(ends, self._mark):
            self.caught_up_ns = max(self.caught_up_ns, self._marked_ns)
            self._mark, self._marked_ns = own_ends, now_ns
        if has(ends, own_ends):
            self.caught_up_ns = now_ns

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def drop(self) -> None:
        """Answer nothing any more."""
        self.cancel_timer()
        while self.credits:
            self.credits.popleft().question.end()


def has(ends: tuple[int, int], wanted: tuple[int, int]) -> bool:
    return ends[0] >= wanted[0] and ends[1] >= wanted[1]
