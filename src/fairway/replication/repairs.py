"""What has rotted in a master's own logs, and which copy is asked for it.

    a reader meets damage, or recovery did ─► a span ─► a copy in sync is told that it is wanted ─► GIVE ─► mended

One span at a time, from one copy at a time: rot is rare, and the loop waits while the bytes are synced. A copy that has
not got it either is not asked for that span again before it has followed anew. One that does not answer is asked again
and again, behind the others. If it stands still it is soon in sync no more, and then it is not hoped for; one that is
in sync and has not answered for a minute is left alone for as long. While there is hope, readers wait for the span
instead of stepping over it (`hopes_for`).

Only copies that are in sync are asked, over the connection on which they follow: what they have there is by the law of
replication what the master had. It is checked all the same, record by record, before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fairway.errors import Code, DiskFull, FairwayError, Refused, StorageFault
from fairway.protocol.replicating import MESSAGES, Give
from fairway.replication.peer import NS_PER_MS, Peer
from fairway.replication.tally import ReplicationCounters
from fairway.storage.checkpoint import RotMark
from fairway.storage.mending import DamagedRange
from fairway.storage.store import Store

_FOR_EVER_NS = 1 << 62
_SOON_NS = 200 * NS_PER_MS  # a checkpoint is written by then


class RepairRequest(NamedTuple):
    """A span that a copy was told of."""

    directory: str
    span: DamagedRange
    until_ns: int


class Repairs:
    """Of one master, in one reign."""

    def __init__(self, store: Store, tally: ReplicationCounters, answer_ms: int, again_ms: int) -> None:
        """`answer_ms`: a copy has so long to answer; `again_ms`: one that has never done so for so long is then not
        asked for as long."""
        self._store = store
        self._tally = tally
        self._answer_ns = answer_ms * NS_PER_MS
        self._again_ns = again_ms * NS_PER_MS
        self._asked: RepairRequest | None = None
        self._rest_until_ns = 0
        self._marks: list[RotMark] = []
        self._spans: list[DamagedRange] = []
        self._denied: dict[tuple[str, int, int], int] = {}  # by copy, log and end of a span: until when
        self._silent: dict[str, int] = {}  # by copy: until when it is left alone
        self._unanswered: dict[str, tuple[int, int]] = {}  # by copy: since when, and when it was asked last
        self._owed: set[tuple[str, int, int]] = set()  # what copies were asked for: copy, log, where it begins

    def spans(self) -> list[DamagedRange]:
        """What is to be mended: all of it was committed, so that the copies in sync have had it."""
        marks = self._store.rotten
        if marks != self._marks:
            self._marks, self._spans = marks, self._store.rotten_spans()
            self._unanswered.clear()  # who did not answer for one span has not been asked for another yet
            self._owed.clear()
        ends = self._store.committed_ends()
        return [each for each in self._spans if each.end <= ends[each.log]]

    # --- hope --------------------------------------------------------------------------------------------------------

    def is_hopeful(self, others: Iterable[str], now_ns: int) -> bool:
        """Whether any of these copies may still have something that has rotted here."""
        others = list(others)
        return any(self._has_hope(span, others, now_ns) for span in self.spans())

    def hopeless(self, others: Iterable[str], now_ns: int) -> int:
        """How many spans none of them has."""
        others = list(others)
        self.spans()
        return sum(not self._has_hope(span, others, now_ns) for span in self._spans)

    def hopes_for(self, position: int, others: Iterable[str], now_ns: int) -> bool:
        """The same for a message that was there."""
        lost = [each for each in self.spans() if each.log == MESSAGES and each.start <= position < each.end]
        return bool(lost) and self._has_hope(lost[0], list(others), now_ns)

    def _has_hope(self, span: DamagedRange, others: list[str], now_ns: int) -> bool:
        return any(self._may_have(span, each, now_ns) for each in others)

    def _may_have(self, span: DamagedRange, directory: str, now_ns: int) -> bool:
        denied_until_ns = self._denied.get((directory, span.log, span.end), 0)
        return now_ns >= max(denied_until_ns, self._silent.get(directory, 0))

    def forget(self, directory: str) -> None:
        """The copy follows anew: it may have been repaired itself, or be another version. For how long it has not
        answered is remembered, or one that comes and goes would be hoped for for ever."""
        self._silent.pop(directory, None)
        self._owed = {each for each in self._owed if each[0] != directory}
        self._denied = {key: until_ns for key, until_ns in self._denied.items() if key[0] != directory}
        if self._asked is not None and self._asked.directory == directory:
            self._asked = None

    # --- asking ------------------------------------------------------------------------------------------------------

    def choose(self, peers: Iterable[Peer], now_ns: int) -> tuple[Peer, DamagedRange] | None:
        """Whom to ask for what, now."""
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
        """What a copy has brought, soon or late; up to where everything is whole again."""
        self._unanswered.pop(directory, None)
        owed = (directory, give.log, give.position)
        span = next((each for each in self.spans() if (each.log, each.start) == owed[1:]), None)
        if span is None or owed not in self._owed:
            return give.position  # somebody else has brought it
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
        """It could not be put in place: now, or not from this copy."""
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
