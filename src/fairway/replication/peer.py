"""One replica, as its master sees it, and the master's answers about its own logs.

A `Peer` holds how far the master has sent, how far the replica has synced, and the credits that the replica has given.
A replica counts as caught up at a moment if it has synced everything that the master had synced at that moment. Its
confirmation comes a little later. So the peer marks the master's ends at a moment, and a later confirmation of these
ends counts for that moment.

`extent`, `compare` and `mend` answer how far the logs reach, which records they hold, and bytes to repair a copy with.
Any copy may ask, whether it follows or not: these answers change nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fairway.errors import Code, Refused
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.replication_messages import (
    ACTIONS,
    MESSAGES,
    Compare,
    Compared,
    LogExtent,
    Mend,
    Mended,
    RecordMark,
    Want,
)
from fairway.storage import log_copies
from fairway.storage.log import Damaged, Log
from fairway.storage.store import Store

COMPARED_MAX = 1_024
_LOGS = (MESSAGES, ACTIONS)


def extent(store: Store, log: int) -> LogExtent:
    of = _log(store, log)
    return LogExtent(of.log_id, store.first_bases()[log], store.ends()[log], of.committed_end)


def compare(store: Store, asked: Compare) -> Compared:
    """The epoch and checksum of the records at these positions."""
    _log(store, asked.log)
    if len(asked.positions) > COMPARED_MAX:
        raise Refused(Code.BAD_REQUEST, f"{len(asked.positions)} positions at once: at most {COMPARED_MAX}")
    marks = store.marks(asked.log, asked.positions)
    if log_copies.ROTTEN_MARK in marks and not asked.knows_rot:
        position = asked.positions[marks.index(log_copies.ROTTEN_MARK)]
        raise Refused(Code.DAMAGED, f"what was at {position} of log {asked.log} has rotted: nobody can compare")
    return Compared([RecordMark(epoch, crc) for epoch, crc in marks])


def mend(store: Store, asked: Mend, bytes_max: int) -> tuple[Mended, bytes]:
    """Whole records below the committed end, from the record that begins at the position."""
    of = _log(store, asked.log)
    rest = of.committed_end - asked.position
    if rest <= 0:
        raise Refused(Code.BAD_REQUEST, "only what is committed can be mended with")
    try:
        chunk = store.read_chunk(asked.log, asked.position, min(asked.size, rest, bytes_max))
    except Damaged as damaged:
        raise Refused(Code.DAMAGED, str(damaged)) from damaged
    if chunk is None or chunk.position + len(chunk.data) > of.committed_end:
        raise Refused(Code.BAD_REQUEST, "only what is committed can be mended with")
    return Mended(chunk.position), chunk.data


def _log(store: Store, log: int) -> Log:
    if log not in _LOGS:
        raise Refused(Code.BAD_REQUEST, f"there is no log {log}: 0 is that of messages, 1 that of actions")
    return store.messages.log if log == MESSAGES else store.actions.log


NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Connected(Protocol):
    """The connection of the replica."""

    @property
    def is_gone(self) -> bool: ...


class ReplicaQuestion(Protocol):
    """A request of a replica, with the way back. It is answered once, or never because the replica is gone."""

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
    """A request that the master answers when it has something to send, or when its time is up."""

    question: ReplicaQuestion
    until_ns: int


class Peer:
    """A replica that follows, or did. Ends and cursors are pairs: messages, actions."""

    def __init__(self, directory: str, session: Connected, now_ns: int, verifier: bytes = b"") -> None:
        """`verifier`: of the secret that the replica has shown."""
        self.directory = directory
        self.verifier = verifier
        self.session = session
        self.heard_ns = now_ns
        self.caught_up_ns = now_ns  # when it last had everything
        self.confirmed: tuple[int, int] | None = None  # None: it has confirmed nothing yet
        self.cursor: list[int] = [0, 0]
        self.told: tuple[int, int] = (0, 0)  # committed ends
        self.first_bases: tuple[int, int] = (0, 0)  # as sent to it
        self.news_ns: int | None = None  # since when there is a committed end that it does not know
        self.wanted: Want | None = None  # what the master wants from it, for rotten logs; the next answer says so
        self.credits: deque[Credit] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_ns = 0
        self.free_ns = 0  # the master sends nothing before this: the catch-up of a copy out of sync is slowed down
        self.is_fetching = False  # a read of what it lacks is under way
        self.fetched: tuple[int, log_copies.SegmentChunk] | None = None  # the result of that read, by log
        self.is_sent_away = False  # it cannot go on from where it is, and has to follow again
        self._mark: tuple[int, int] = (0, 0)
        self._marked_ns = now_ns

    @property
    def is_connected(self) -> bool:
        return not self.session.is_gone and not self.is_sent_away

    def lag_bytes(self, own_ends: tuple[int, int]) -> int:
        """The bytes that the master has synced and the replica has not confirmed."""
        confirmed = self.confirmed or (0, 0)
        return sum(max(own - its, 0) for own, its in zip(own_ends, confirmed, strict=True))

    def begin(self, starts: list[int]) -> None:
        """Send everything from here on."""
        self.cursor = list(starts)

    def heard(self, ends: tuple[int, int], own_ends: tuple[int, int], now_ns: int) -> None:
        """Note that the replica has synced so much."""
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
