"""Recovery: how a start repairs a log that a crash, a bad disk or a careless hand left behind.

Let S be the *synced end*: the highest end that any valid record names, or that a checkpoint vouches for. Everything
below S was once safely on disk. The table says what recovery does at a position where a record should begin:

    found                                             below S                         at or above S
    ------------------------------------------------  ------------------------------  --------------------------------
    intact     magic, CRCs, log id, own position      serve                           serve
    damaged    unreadable header, or body fails CRC   ROTTEN: quarantine the span up  TORN: cut here, whatever follows,
                                                      to the next intact record,      valid-looking records included
                                                      report, serve the rest
    missing    the file, or its end, is not there     ROTTEN (nothing to quarantine)  the log ends here
    stale      epoch lower than the record before     ROTTEN                          TORN
    misplaced  valid, but of another log or place     ROTTEN                          TORN
    newer      an unknown format version              refuse to open, touch nothing   refuse to open, touch nothing

Recovery deletes no damage: it copies a torn tail to `aside/` before it cuts, and leaves a rotten span where it is. A
crash cannot damage anything below S, so ROTTEN is always news for an operator. A crash can leave holes above S in any
order. So a valid record behind a hole proves nothing: neither its predecessors nor the record itself was confirmed.

Each step can be repeated: after a kill at any point, recovery starts over and arrives at the same log. For that, S must
not sink when the cut removes records that name it. So where rot lies below a cut, recovery first writes S down
(`<S>.synced`). Recovery also syncs the tail above S before anybody reads it, because a killed process may leave bytes
only in the page cache.

A replica holds its master's records, and so its master's synced ends. They are true on the replica too, because it
writes no record before it has synced what the record names. A replica that is catching up breaks this rule; then only
its own file counts (`replica_directory`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest

from fairway.batch import checksum
from fairway.runtime.disk import Disk, File
from fairway.storage import segment
from fairway.storage.log import LogState
from fairway.storage.record import Record
from fairway.storage.segment import MISSING, STALE, Damage, Segment, SegmentScan

ASIDE = "aside"
_WITNESS = ".synced"


class DamageVerdict(enum.Enum):
    ROTTEN = "rotten"
    TORN = "torn"
    PARTED = "parted"  # a copy's own history, cut back to its master's (`replica_directory.cut`)


def witness_name(directory: str, synced_end: int) -> str:
    """The file whose name records how far a log was synced."""
    return f"{directory}/{synced_end:020d}{_WITNESS}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a recovery report."""

    log: str
    verdict: DamageVerdict
    damage: Damage
    aside: str | None = None  # the file that keeps the cut bytes


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of the table above for all damage of a log."""

    synced_end: int
    damages: list[Damage]  # as found, in order
    rotten: list[Damage]  # the part of each that lies below the synced end
    cut_at: int | None  # from here on the tail is torn; None: it is whole
    why: str = ""  # what is wrong there


def judge(synced_end: int, damages: list[Damage]) -> Judgement:
    """Separate rotten from torn damage by the synced end."""
    rotten = [
        Damage(each.start, min(each.end, synced_end), each.why, each.header)
        for each in damages
        if each.start < synced_end
    ]
    torn = next((each for each in damages if each.end > synced_end), None)
    if torn is None:
        return Judgement(synced_end, damages, rotten, None)
    return Judgement(synced_end, damages, rotten, max(torn.start, synced_end), torn.why)


def _is_stale(found: Record | Damage) -> bool:
    return isinstance(found, Damage) and found.why == STALE


@dataclass(slots=True)
class LogWalk:
    """Reads one log and changes nothing. Recovery acts on the result, `survey` reports it."""

    disk: Disk
    directory: str
    log_id: int
    first_base: int = 0  # retention has deleted everything before it
    vouched_end: int = 0  # the checkpoint's committed end
    believed_end: int | None = None  # a replica is catching up: records may name synced ends only up to here
    sizes: dict[int, int] = field(default_factory=dict)  # by base, empty files left out
    at: int = 0  # the base of the segment that is being read

    def bases(self) -> list[int]:
        return [base for base in segment.bases(self.disk, self.directory) if base >= self.first_base]

    def measure(self) -> None:
        self.sizes = {}
        for base in self.bases():
            with self.open(base) as file:
                if file.size:  # an empty file is a segment that was never begun, or one whose bytes are missing
                    self.sizes[base] = file.size

    def open(self, base: int) -> closing[File]:
        return closing(self.disk.open(segment.file_name(self.directory, base)))

    def look(self, start: int, epoch: int, take: Callable[[Record], None]) -> Judgement:
        """Read everything from `start` on. Pass records before the first damage to `take` at once. Later records wait
        for the judgement: see `behind`."""
        self.vouched_end = synced_end = max(self.vouched_end, self.believed_end or 0, *self.witnessed())
        damages: list[Damage] = []
        for found in self.walk(start, epoch):
            if self.believed_end is None and found.header is not None and not _is_stale(found):
                synced_end = max(synced_end, found.header.synced_end)  # a sound header counts, whatever its body is
            if isinstance(found, Damage):
                damages.append(found)
            elif not damages:
                take(found)
        return judge(synced_end, damages)

    def witnessed(self) -> list[int]:
        """Synced ends that an earlier recovery wrote down; 0 is among them."""
        names = (name for name in self.disk.listing(self.directory) if name.endswith(_WITNESS))
        return [0, *(int(stem) for name in names if (stem := name.removesuffix(_WITNESS)).isdigit())]

    def behind(self, judgement: Judgement, epoch: int) -> Iterator[Record | Damage]:
        """Second pass: the intact records between rotten spans, and the spans themselves, in order, up to the cut.
        `epoch` is that of the last record before the first damage."""
        if not judgement.damages:
            return
        for found in self.walk(judgement.damages[0].start, epoch):
            begin = found.start if isinstance(found, Damage) else found.header.position
            if judgement.cut_at is not None and begin >= judgement.cut_at:
                break
            if isinstance(found, Damage) and judgement.cut_at is not None:
                yield replace(found, end=min(found.end, judgement.cut_at))  # as the next start will find it
            else:
                yield found

    def walk(self, start: int, epoch: int) -> Iterator[Record | Damage]:
        """All records and damaged spans from `start` on, without a gap."""
        position = self._reach(start)
        bases = list(self.sizes)
        for base, following in zip_longest(bases, bases[1:]):
            if following is not None and following <= position:
                continue
            if base > position:
                yield Damage(position, base, MISSING)
            for found in self._walk_segment(base, max(position, base), epoch, following):
                if isinstance(found, Record):
                    epoch = found.header.epoch
                    position = found.header.end
                else:
                    position = found.end
                yield found
            position = max(position, base + min(segment.HEADER_BYTES, self.sizes[base]))
        if position < self.vouched_end:
            yield Damage(position, self.vouched_end, MISSING)

    def _reach(self, start: int) -> int:
        """Where reading begins: at `start`, or earlier if the log ends before that."""
        below = [base for base in self.sizes if base <= start]
        return min(start, below[-1] + self.sizes[below[-1]]) if below else self.first_base

    def _walk_segment(self, base: int, start: int, epoch: int, limit: int | None) -> Iterator[Record | Damage]:
        self.at = base
        measured_end = base + self.sizes[base]  # an owner may append meanwhile: both passes must see the same bytes
        limit = measured_end if limit is None else min(limit, measured_end)
        with self.open(base) as file:
            if start == base:
                damage = segment.check_segment_header(file, base, self.log_id)
                if damage is not None:
                    yield damage
                start = base + segment.HEADER_BYTES if damage is None else damage.end
            yield from SegmentScan(file, base, start, self.log_id, epoch=epoch, limit=limit)


@dataclass(slots=True)
class LogRecovery(LogWalk):
    """Recovers one log: reads it, applies its records, cuts its torn tail."""

    start: int = 0  # the checkpoint's views have all records before it
    epoch: int = 0
    newest_ms: dict[int, int] = field(default_factory=dict)  # by segment: append time of its last record
    first_ms: dict[int, int] = field(default_factory=dict)  # append time of its first, where known or a step back
    apply: Callable[[Record], None] = lambda _: None
    on_rot: Callable[[Damage], None] = lambda _: None
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> LogState:
        """Apply the table; return what is left of the log."""
        return self.settle(self.examine())

    def examine(self) -> Judgement:
        """Read the log and apply all records to serve. The log itself is not changed."""
        self.measure()
        self._check_chain()
        judgement = self.look(self.start, self.epoch, self._take)
        for each in judgement.rotten:
            self._note_rot(each)
        for found in self.behind(judgement, self.epoch):
            if isinstance(found, Record):
                self._take(found)
            elif found.end > self.start:  # else the checkpoint's views know what was there
                self.on_rot(found)
        return judgement

    def settle(self, judgement: Judgement) -> LogState:
        """Cut the torn tail, sync the unsynced part, return what is left of the log."""
        if judgement.cut_at is not None:
            if judgement.rotten:
                self.disk.publish(witness_name(self.directory, judgement.synced_end), [])
            self.findings += self.cut(judgement.cut_at, judgement.why, DamageVerdict.TORN)
        state = self._state(judgement.synced_end)
        for each in state.segments:
            if each.end > judgement.synced_end:
                with self.open(each.base) as file:
                    self.disk.sync(file, max(judgement.synced_end - each.base, 0))
        return state

    def _check_chain(self) -> None:
        """Check that each segment that the checkpoint covers ends where the next begins. They are not read."""
        position = self.first_base
        for base, size in self.sizes.items():
            if base > self.start:
                break
            if base > position:
                self._note_rot(Damage(position, base, MISSING))
            position = base + size

    def _take(self, found: Record) -> None:
        self.epoch = found.header.epoch
        if self.at not in self.newest_ms or found.header.position == self.at + segment.HEADER_BYTES:
            self.first_ms[self.at] = found.header.appended_ms
        self.newest_ms[self.at] = found.header.appended_ms
        self.apply(found)

    def _note_rot(self, damage: Damage) -> None:
        self.findings.append(Finding(self.directory, DamageVerdict.ROTTEN, damage))

    def cut(self, cut_at: int, why: str, verdict: DamageVerdict) -> list[Finding]:
        """Copy everything from `cut_at` on to `aside/`, then truncate; the last segment first."""
        findings: list[Finding] = []
        for base, size in reversed(self.sizes.items()):
            offset = max(cut_at - base, 0)
            if size <= offset:
                continue
            with self.open(base) as file:
                aside = self._keep_aside(base + offset, file.read(offset, size - offset))
                damage = Damage(base + offset, base + size, why)
                findings.append(Finding(self.directory, verdict, damage, aside))
                self.disk.truncate(file, offset)
        return findings

    def _keep_aside(self, position: int, tail: bytes) -> str:
        """The name gives position and checksum: the same cut made twice is one file, another cut is another."""
        name = f"{ASIDE}/{self.directory}-{position:020d}-{checksum(tail):08x}.cut"
        self.disk.publish(name, [tail])
        return name

    def _state(self, synced_end: int) -> LogState:
        """The segments that are left. Empty ones at the log's end are removed: they begin again later, and then open
        with what every segment opens with."""
        self.measure()
        while self.sizes and (last := max(self.sizes)) >= synced_end and self.sizes[last] <= segment.HEADER_BYTES:
            del self.sizes[last]
        segments = self._segments()
        end = max(segments[-1].end if segments else self.first_base, synced_end)
        for base in self.bases():
            if base >= end:
                self.disk.remove(segment.file_name(self.directory, base))
        newest_ms = segments[-1].newest_ms if segments else max(self.newest_ms.values(), default=0)
        return LogState(self.log_id, segments, end, self.epoch, newest_ms)

    def _segments(self) -> list[Segment]:
        segments = [Segment(base, base + size) for base, size in self.sizes.items()]
        for earlier, later in pairwise(segments):
            earlier.end = min(earlier.end, later.base)
        newest_ms = max(self.newest_ms.values(), default=0)
        for each in reversed(segments):  # a segment whose records have all rotted counts as old as the next one
            each.newest_ms = newest_ms = self.newest_ms.get(each.base, newest_ms)
        for earlier, later in pairwise(segments):
            first_ms = self.first_ms.get(later.base, later.newest_ms)
            later.set_back_ms = first_ms if first_ms < earlier.newest_ms else 0
        return segments
