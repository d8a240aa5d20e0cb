"""The views of the message log, kept in step: subjects, consume log, dedupe window.

Every record of the log passes through `apply`, once, in order, whether it was just appended or is read again after a
restart. That is the whole of it: there is no second way by which a view changes.
"""

from __future__ import annotations

from functools import partial

from fairway import batch
from fairway.storage import scan, segment
from fairway.storage.consume_log import ConsumeLog
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.index_file import ENTRY
from fairway.storage.record import HEADER_BYTES, Record, RecordHeader, RecordKind
from fairway.storage.scan import Damage, SegmentScan
from fairway.storage.subjects import SubjectState, SubjectTable
from fairway.world.disk import Disk


class Views:
    """What can be rebuilt from the message log."""

    def __init__(self, subjects: SubjectTable, entries: ConsumeLog, dedupe: DedupeWindow) -> None:
        self.subjects = subjects
        self.entries = entries
        self.dedupe = dedupe
        dedupe.is_gone = lambda subject_id: subject_id not in subjects

    def apply(self, record: Record) -> None:
        """Take in a record of the log."""
        header = record.header
        if header.kind == RecordKind.DATA:
            self.note_batch(header, batch.peek(record.body))
        elif header.kind == RecordKind.SUBJECT:
            self.subjects.restate(record.body, header.position)
        elif header.kind == RecordKind.STREAM:
            self.dedupe.state(record.body, header.subject_id, header.position)
        elif header.kind == RecordKind.REMOVED:
            self.subjects.take_removal(record.body, header.end)

    def note_batch(self, header: RecordHeader, of: batch.BatchHeader) -> None:
        """Take in a DATA record whose batch header is known already."""
        subject_id, first_sequence = header.subject_id, header.first_sequence
        self.entries.append_packed(subject_id, packed_entry(header, of))
        subject = self.subjects.advance(subject_id, first_sequence + header.count)
        if subject.is_deduped:
            self.dedupe.note(of, subject_id, first_sequence, header.end, header.appended_ms)

    def note_rot(self, damage: Damage) -> None:
        self.subjects.skip_lost(damage)

    def settle(self, settled_end: int) -> list[SubjectState]:
        """Let go of the subjects whose removal can no longer be undone, and of all that is known about them."""
        gone = self.subjects.settle(settled_end)
        for each in gone:
            self.entries.drop(each.id)
        return gone

    def drop_unknown(self) -> None:
        """An index has entries of every batch in its segment, those of removed subjects included."""
        self.entries.keep_only(self.subjects)

    def cut(self, position: int) -> None:
        """Undo everything from `position` on: it was never committed."""
        self.subjects.cut(position)
        self.dedupe.cut(position, partial(self.entries.first_places_from, position))
        for subject_id, first_sequence in self.entries.first_sequences_from(position).items():
            if subject_id in self.subjects:
                self.subjects.rewind(subject_id, first_sequence)
        self.entries.cut(position)


def packed_entry(header: RecordHeader, of: batch.BatchHeader) -> bytes:
    """The consume log's entry for a DATA record: an `Entry`, packed without being made."""
    return ENTRY.pack(
        header.first_sequence,
        header.count,
        HEADER_BYTES + header.body_bytes,
        header.position,
        header.appended_ms,
        of.tag_filter,
        of.producer_id,
        of.first_sequence,
        0,
    )


def entries_of_segment(disk: Disk, directory: str, log_id: int, base: int) -> dict[int, bytes]:
    """The consume log's entries for one segment, read from the segment itself."""
    entries: dict[int, bytearray] = {}
    file = disk.open(segment.file_name(directory, base))
    try:
        damage = scan.check_segment_header(file, base, log_id)
        start = base + segment.HEADER_BYTES if damage is None else damage.end
        for found in SegmentScan(file, base, start, log_id):
            if isinstance(found, Record) and found.header.kind == RecordKind.DATA:
                entry = packed_entry(found.header, batch.peek(found.body))
                entries.setdefault(found.header.subject_id, bytearray()).extend(entry)
    finally:
        file.close()
    return {subject_id: bytes(data) for subject_id, data in entries.items()}
