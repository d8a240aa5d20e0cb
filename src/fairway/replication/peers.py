"""The replicas of a master, as the master sees them: how far each has come, answers about the master's logs, and the
repair of these logs from the replicas.

A `Peer` holds how far the master has sent, how far the replica has synced, and the credits that the replica has given.
A replica counts as caught up at a moment if it has synced everything that the master had synced at that moment. Its
confirmation comes a little later. So the peer marks the master's ends at a moment, and a later confirmation of these
ends counts for that moment.

`extent`, `compare` and `mend` answer how far the logs reach, which records they hold, and bytes to repair a copy with.
Any copy may ask, whether it follows or not: these answers change nothing.

`Repairs` keeps what is rotten in the master's own logs, and which copy the master asks for it.

    a reader or recovery finds damage ─► a span ─► the master names it to a copy in sync ─► GIVE ─► repaired

The master asks for one span at a time, from one copy at a time: rot is rare, and the loop waits while the bytes are
synced. A copy that does not have a span is not asked for that span again before it has followed again. A silent copy is
asked again and again, after the others. A copy that stands still is soon out of sync, and then cannot be hoped for. A
copy in sync that has not answered for a minute is left alone for a minute. While there is hope, readers wait for the
span instead of stepping over it (`hopes_for`).

The master asks only copies in sync, over the connection on which they follow: by the rules of replication they have the
same records there. The store still checks every record before it writes anything.

`ReplicationCounters` counts for as long as the process lives, whichever copy leads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fairway.errors import Code, DiskFull, FairwayError, Refused, StorageFault
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.replication_messages import (
    ACTIONS,
    MESSAGES,
    Compare,
    Compared,
    Give,
    LogExtent,
    Mend,
    Mended,
    RecordMark,
    Want,
)
from fairway.storage import log_copies
from fairway.storage.checkpoint import RotMark
from fairway.storage.log import Damaged, Log
from fairway.storage.repair import DamagedRange
from fairway.storage.store import Store

COMPARED_MAX = 1_024
LOGS = (MESSAGES, ACTIONS)


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
    if log not in LOGS:
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


@dataclass(slots=True)
class ReplicationCounters:
    reigns: int = 0
    depositions: int = 0
    refused_follows: int = 0  # of directories that are not registered, or without the copy's secret
    catch_up_bytes: int = 0  # sent to replicas that were not in sync
    fetches: int = 0  # reads for replicas that missed memory
    mended_spans: int = 0  # of the own logs, from another copy
    mended_bytes: int = 0


_FOR_EVER_NS = 1 << 62
_SOON_NS = 200 * NS_PER_MS  # the store has written a checkpoint by then


class RepairRequest(NamedTuple):
    """A span that the master has asked a copy for."""

    directory: str
    span: DamagedRange
    until_ns: int


class Repairs:
    """The repairs of one master, in one epoch."""

    def __init__(self, store: Store, tally: ReplicationCounters, answer_ms: int, again_ms: int) -> None:
        """`answer_ms`: how long a copy has to answer. `again_ms`: how long the master asks a silent copy before it
        leaves the copy alone for as long."""
        self._store = store
        self._tally = tally
        self._answer_ns = answer_ms * NS_PER_MS
        self._again_ns = again_ms * NS_PER_MS
        self._asked: RepairRequest | None = None
        self._rest_until_ns = 0
        self._marks: list[RotMark] = []
        self._spans: list[DamagedRange] = []
        # by copy, log and end of a span: until when the copy does not have it
        self._denied: dict[tuple[str, int, int], int] = {}
        self._silent: dict[str, int] = {}  # by copy: until when the master leaves it alone
        # by copy: since when it is silent, and when it was asked last
        self._unanswered: dict[str, tuple[int, int]] = {}
        self._owed: set[tuple[str, int, int]] = set()  # what copies were asked for: copy, log, position

    def spans(self) -> list[DamagedRange]:
        """The spans to repair. All of them were committed, so the copies in sync have had them."""
        marks = self._store.rotten
        if marks != self._marks:
            self._marks, self._spans = marks, self._store.rotten_spans()
            self._unanswered.clear()  # a copy that is silent about one span was not asked for another yet
            self._owed.clear()
        ends = self._store.committed_ends()
        return [each for each in self._spans if each.end <= ends[each.log]]

    # --- hope --------------------------------------------------------------------------------------------------------

    def is_hopeful(self, others: Iterable[str], now_ns: int) -> bool:
        """Whether any of these copies may still have a rotten span."""
        others = list(others)
        return any(self._has_hope(span, others, now_ns) for span in self.spans())

    def hopeless(self, others: Iterable[str], now_ns: int) -> int:
        """How many rotten spans none of these copies has."""
        others = list(others)
        self.spans()
        return sum(not self._has_hope(span, others, now_ns) for span in self._spans)

    def hopes_for(self, position: int, others: Iterable[str], now_ns: int) -> bool:
        """Whether any of these copies may still have the message at this position."""
        lost = [each for each in self.spans() if each.log == MESSAGES and each.start <= position < each.end]
        return bool(lost) and self._has_hope(lost[0], list(others), now_ns)

    def _has_hope(self, span: DamagedRange, others: list[str], now_ns: int) -> bool:
        return any(self._may_have(span, each, now_ns) for each in others)

    def _may_have(self, span: DamagedRange, directory: str, now_ns: int) -> bool:
        denied_until_ns = self._denied.get((directory, span.log, span.end), 0)
        return now_ns >= max(denied_until_ns, self._silent.get(directory, 0))

    def forget(self, directory: str) -> None:
        """Forget what the copy lacked: it follows again, and may have been repaired, or run another version. Its
        silence stays on record. Otherwise the master would hope for ever for a copy that comes and goes."""
        self._silent.pop(directory, None)
        self._owed = {each for each in self._owed if each[0] != directory}
        self._denied = {key: until_ns for key, until_ns in self._denied.items() if key[0] != directory}
        if self._asked is not None and self._asked.directory == directory:
            self._asked = None

    # --- asking ------------------------------------------------------------------------------------------------------

    def choose(self, peers: Iterable[Peer], now_ns: int) -> tuple[Peer, DamagedRange] | None:
        """Which peer to ask for which span now."""
        asked = self._asked
        if asked is not None:
            if now_ns < asked.until_ns:
                return None
            self._asked = None
            self._note_silence(asked, now_ns)
        spans = self.spans() if now_ns >= self._rest_until_ns else []
        by_turns = sorted(peers, key=lambda each: self._unanswered.get(each.directory, (0, 0))[1])
        for peer in by_turns if spans else ():
            for span in spans:
                if self._may_have(span, peer.directory, now_ns) and _reaches(peer, span):
                    self._asked = RepairRequest(peer.directory, span, now_ns + self._answer_ns)
                    self._owed.add((peer.directory, span.log, span.start))
                    return peer, span
        return None

    def _note_silence(self, asked: RepairRequest, now_ns: int) -> None:
        since_ns, _ = self._unanswered.pop(asked.directory, (asked.until_ns - self._answer_ns, 0))
        if now_ns - since_ns < self._again_ns:
            self._unanswered[asked.directory] = since_ns, asked.until_ns
        else:
            self._silent[asked.directory] = now_ns + self._again_ns

    def take(self, directory: str, give: Give, data: bytes, now_ns: int) -> int:
        """Put the bytes that a copy has brought in place, soon or late. Returns the end of what is whole again."""
        self._unanswered.pop(directory, None)
        owed = (directory, give.log, give.position)
        span = next((each for each in self.spans() if (each.log, each.start) == owed[1:]), None)
        if span is None or owed not in self._owed:
            return give.position  # another copy has brought it
        self._owed.discard(owed)
        if self._asked is not None and self._asked.span == span:
            self._asked = None
        asked = RepairRequest(directory, span, 0)
        if not data:
            self._deny(asked, _FOR_EVER_NS)
            return give.position
        try:
            end = self._store.mend(give.log, give.position, data)
        except FairwayError as error:
            self._cannot(asked, error, now_ns)
            return give.position
        self._tally.mended_bytes += end - give.position
        self._tally.mended_spans += end >= asked.span.end
        return end

    def _cannot(self, asked: RepairRequest, error: FairwayError, now_ns: int) -> None:
        """Note that the bytes could not be put in place: now, or never from this copy."""
        if isinstance(error, Refused) and error.code is Code.BUSY:
            self._rest_until_ns = now_ns + _SOON_NS
        elif isinstance(error, DiskFull):
            self._deny(asked, now_ns + self._again_ns)
        elif isinstance(error, StorageFault):
            self._store.poison(error)
        else:
            self._deny(asked, _FOR_EVER_NS)

    def _deny(self, asked: RepairRequest, until_ns: int) -> None:
        self._denied[asked.directory, asked.span.log, asked.span.end] = until_ns


def _reaches(peer: Peer, span: DamagedRange) -> bool:
    return peer.confirmed is not None and peer.confirmed[span.log] >= span.end
