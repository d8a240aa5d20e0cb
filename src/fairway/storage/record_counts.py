"""Counts of what a log holds, made record by record during a walk. For `survey`; nothing is changed.

Every record that recovery would serve passes through `take`, once, in order. A record whose checksums hold but whose
content breaks its format is kept as `invalid`: no disk does that, so an operator should know.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from fairway import batch
from fairway.errors import RemoteProtocolError
from fairway.storage import action_log, dedupe, segment
from fairway.storage.message_log import packed_entry
from fairway.storage.record import Record, RecordHeader, RecordKind
from fairway.storage.recovery import Judgement, LogWalk
from fairway.storage.segment import Damage
from fairway.storage.subjects import SubjectTable
from fairway.storage.survey_report import GroupReport, LogReport, RecordReport, SegmentReport, SubjectReport

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
