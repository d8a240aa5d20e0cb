"""The report of a survey of a data directory, and the tallies that count for it what a log holds.

The report is plain values, in the shape that `fairway inspect --json` prints.

The shape is a promise to programs. A field may be added; none changes its meaning or goes away without a new `shape`
number. Positions count bytes of a log. Times are milliseconds since 1970. Ids of directories and logs are 16
hexadecimal digits, because a JSON number cannot hold 64 bits everywhere. `docs/how-to/operations.md` explains the
report to operators.

Every record that recovery would serve passes through a tally's `take`, once, in order. A record whose checksums hold
but whose content breaks its format is kept as `invalid`: no disk does that, so an operator should know.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from fairway import batch
from fairway.errors import RemoteProtocolError
from fairway.storage import action_log, dedupe, segment
from fairway.storage.message_log import packed_entry
from fairway.storage.record import Record, RecordHeader, RecordKind
from fairway.storage.recovery import Judgement, LogWalk
from fairway.storage.segment import Damage
from fairway.storage.subjects import SubjectTable

SHAPE = 1

ROTTEN = "rotten"  # below the synced end: the disk has lost what it once had
TORN = "torn"  # above the synced end: a crash left an unfinished tail, which the next start cuts and keeps aside
INVALID = "invalid"  # the checksums hold, but the content breaks its format: no disk does that


class SegmentReport(msgspec.Struct):
    """One file of a log. The fields about records are None where it holds no record."""

    file: str
    base: int
    end: int
    records: int = 0
    first_appended_ms: int | None = None
    last_appended_ms: int | None = None
    first_epoch: int | None = None
    last_epoch: int | None = None
    index: str | None = None  # sound, none (not due yet), missing, stale, unreadable, lying; None in the action log


class LogReport(msgspec.Struct):
    """One log. Records from a torn tail on are not counted: the next start cuts them off."""

    id: str
    first_base: int
    end: int
    synced_end: int
    records: dict[str, int] = {}  # by kind
    segments: list[SegmentReport] = []


class SubjectReport(msgspec.Struct):
    """One subject. `first_sequence` is that of the oldest stored batch; None if there is no batch."""

    id: int
    name: str
    next_sequence: int = 0
    first_sequence: int | None = None
    batches: int = 0
    messages: int = 0
    bytes: int = 0


class GroupReport(msgspec.Struct):
    """One group, as far as the action log knows it."""

    id: int
    first_ms: int
    last_ms: int
    actions: dict[str, int] = {}  # by kind
    subjects: list[int] = []


class CheckpointReport(msgspec.Struct):
    """One checkpoint; the ends are how far it covers each log."""

    file: str
    why_unreadable: str | None = None
    epoch: int | None = None
    messages_end: int | None = None
    actions_end: int | None = None


class DamageReport(msgspec.Struct):
    """A damaged span of a log. Subject, sequence and count are known where the record's header survived."""

    log: str
    file: str
    start: int
    end: int
    verdict: str
    why: str
    is_known: bool = False  # a checkpoint lists it already
    subject: str | None = None
    first_sequence: int | None = None
    messages: int | None = None


class FlawReport(msgspec.Struct):
    """A file beside the logs that is not as it should be. No message is lost with it."""

    file: str
    why: str
    remedy: str


class RecordReport(msgspec.Struct):
    """One record of a log."""

    log: str
    position: int
    bytes: int
    kind: str
    epoch: int
    synced_end: int
    appended_ms: int
    count: int
    subject: str | None = None
    first_sequence: int | None = None


class AsideReport(msgspec.Struct):
    """A file in `aside/`: a tail that was cut off, or a segment of a replica that was reset."""

    file: str
    bytes: int


class DirectorySurvey(msgspec.Struct):
    """The whole report."""

    shape: int
    format_version: int
    directory_id: str | None  # None: the identity is lost, the next start makes a new one
    owner: int | None  # the process that uses the directory; 0 if that process did not give its id
    is_verified: bool  # batches were opened and views compared, not only checksums
    is_sound: bool
    bytes_read: int
    messages: LogReport
    actions: LogReport
    subjects: list[SubjectReport] = []
    groups: list[GroupReport] = []
    checkpoints: list[CheckpointReport] = []
    damages: list[DamageReport] = []
    flaws: list[FlawReport] = []
    aside: list[AsideReport] = []
    remarks: list[str] = []  # worth knowing, nothing wrong
    records: list[RecordReport] = []  # the newest ones, as many as were asked for
    delay: DirectorySurvey | None = None  # of the delay server inside, in the folder `delay`


Entries: TypeAlias = Mapping[int, bytes | bytearray]  # of the consume log, by subject, for one segment


class LogTally:
    """Counts what every log has: segments and records."""

    def __init__(self, walk: LogWalk, records_max: int) -> None:
        self.invalid: list[Damage] = []
        self.newest: deque[RecordReport] = deque(maxlen=records_max)
        self._walk = walk
        self._epoch = 0
        self._kinds: Counter[str] = Counter()
        self._segments: dict[int, SegmentReport] = {}
        for base, size in walk.sizes.items():
            for earlier in self._segments.values():
                earlier.end = min(earlier.end, base)
            self._segments[base] = SegmentReport(segment.file_name(walk.directory, base), base, base + size)

    def run(self) -> Judgement:
        """Walk over the whole log."""
        judgement = self._walk.look(self._walk.first_base, 0, self.take)
        self.judged(judgement)
        for found in self._walk.behind(judgement, self._epoch):
            if isinstance(found, Record):
                self.take(found)
        self.finish()
        return judgement

    def take(self, record: Record) -> None:
        """Count one record."""
        header = record.header
        self._epoch = header.epoch
        self._kinds[RecordKind(header.kind).name] += 1
        self._note_in_segment(self._segments[self._walk.at], header)
        if self.newest.maxlen:
            self.newest.append(_record_report(self._walk.directory, header))
        try:
            self.read(record)
        except RemoteProtocolError as error:
            self.invalid.append(Damage(header.position, header.end, str(error), header))

    def read(self, record: Record) -> None:
        """Parse the record's content; `RemoteProtocolError` where it breaks its format."""

    def judged(self, judgement: Judgement) -> None:
        """The first pass is over: later records lie behind the first damage."""

    def finish(self) -> None:
        """The last record has been taken."""

    def report(self, judgement: Judgement) -> LogReport:
        segments = [each for each in self._segments.values() if _is_left(each, judgement.cut_at)]
        end = max(segments[-1].end if segments else self._walk.first_base, judgement.synced_end)
        return LogReport(
            f"{self._walk.log_id:016x}", self._walk.first_base, end, judgement.synced_end, dict(self._kinds), segments
        )

    def _note_in_segment(self, of: SegmentReport, header: RecordHeader) -> None:
        of.records += 1
        if of.first_appended_ms is None:
            of.first_appended_ms = header.appended_ms
            of.first_epoch = header.epoch
        of.last_appended_ms = header.appended_ms
        of.last_epoch = header.epoch


def _is_left(of: SegmentReport, cut_at: int | None) -> bool:
    """Whether anything of the segment is left after the cut at `cut_at`; lowers its end to the cut."""
    if cut_at is not None:
        of.end = min(of.end, cut_at)
    return of.end > of.base


def _record_report(log: str, header: RecordHeader) -> RecordReport:
    subject = str(header.subject_id) if header.subject_id else None  # the survey puts the name in its place
    return RecordReport(
        log,
        header.position,
        header.end - header.position,
        RecordKind(header.kind).name,
        header.epoch,
        header.synced_end,
        header.appended_ms,
        header.count,
        subject,
        header.first_sequence if header.kind == RecordKind.DATA else None,
    )


class MessageTally(LogTally):
    """Counts subjects; with `is_deep`, opens every batch and gathers the entries that the indexes should have."""

    def __init__(
        self,
        walk: LogWalk,
        records_max: int,
        *,
        is_deep: bool,
        check_batch: Callable[[RecordHeader], None],
        check_index: Callable[[SegmentReport, Entries | None, list[Damage]], None],
    ) -> None:
        super().__init__(walk, records_max)
        self.table = SubjectTable()
        self.subjects: dict[int, SubjectReport] = {}
        self._is_deep = is_deep
        self._check_batch = check_batch
        self._check_index = check_index
        self._unchecked = deque(self._segments.values())
        self._entries: dict[int, bytearray] = {}
        self._lost: list[Damage] = []

    def take(self, record: Record) -> None:
        while self._unchecked[0].base < self._walk.at:
            self._close_segment()
        super().take(record)

    def read(self, record: Record) -> None:
        if record.header.kind == RecordKind.DATA:
            self._note_batch(record.header)
            self._read_batch(record)
        elif record.header.kind == RecordKind.SUBJECT:
            self.table.restate(record.body, record.header.position)
        elif record.header.kind == RecordKind.STREAM:
            dedupe.unpack_statement(record.body)
        elif record.header.kind == RecordKind.REMOVED:
            self.table.take_removal(record.body, record.header.end)
            for removed in self.table.settle(record.header.end):
                self.subjects.pop(removed.id, None)

    def judged(self, judgement: Judgement) -> None:
        self._lost = judgement.damages
        if judgement.cut_at is not None:
            for each in self._unchecked:
                each.end = min(each.end, judgement.cut_at)

    def finish(self) -> None:
        while self._unchecked:
            self._close_segment()

    def _close_segment(self) -> None:
        entries = self._entries if self._is_deep else None
        self._check_index(self._unchecked.popleft(), entries, self._lost + self.invalid)
        self._entries = {}

    def _note_batch(self, header: RecordHeader) -> None:
        of = self.subjects.get(header.subject_id)
        if of is None:
            of = self.subjects[header.subject_id] = SubjectReport(header.subject_id, "")
            of.first_sequence = header.first_sequence
        of.batches += 1
        of.messages += header.count
        of.bytes += header.end - header.position
        used_to, of.next_sequence = of.next_sequence, header.first_sequence + header.count
        self.table.advance(header.subject_id, of.next_sequence)
        self._check_batch(header)
        if header.first_sequence < used_to:
            raise RemoteProtocolError(f"sequence {header.first_sequence} is used a second time")

    def _read_batch(self, record: Record) -> None:
        of = batch.peek(record.body)
        if of.count != record.header.count:
            raise RemoteProtocolError(f"a batch of {of.count} messages in a record of {record.header.count}")
        if self._is_deep:
            entry = packed_entry(record.header, of)
            self._entries.setdefault(record.header.subject_id, bytearray()).extend(entry)
            batch.check(record.body)


class ActionTally(LogTally):
    """Counts actions by group."""

    def __init__(self, walk: LogWalk, records_max: int) -> None:
        super().__init__(walk, records_max)
        self.groups: dict[int, GroupReport] = {}

    def read(self, record: Record) -> None:
        if record.header.kind == RecordKind.ACTIONS:
            for action in action_log.unpack(record.body):
                self._note(action)

    def _note(self, action: action_log.Action) -> None:
        group_id, subject_id, event = action
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = GroupReport(group_id, event.time_ms, event.time_ms)
        group.last_ms = max(group.last_ms, event.time_ms)
        group.actions[event.kind.name] = group.actions.get(event.kind.name, 0) + 1
        if subject_id and subject_id not in group.subjects:
            group.subjects.append(subject_id)
