"""The views of the message log, kept in step: subjects, consume log, dedupe window.

Every record of the log passes through `apply`, once, in order, whether it was just appended or is read again after a
restart. That is the whole of it: there is no second way by which a view changes.
"""

from __future__ import annotations

import msgspec

from fairway import batch
from fairway.storage import scan, segment
from fairway.storage.consume_log import ConsumeLog, Entry
from fairway.storage.dedupe import DedupeWindow, Stored
from fairway.storage.index_file import ENTRY
from fairway.storage.record import Header, Kind, Record
from fairway.storage.scan import Damage, Scan
from fairway.storage.subjects import SubjectTable
from fairway.world.disk import Disk


class Views:
    """What can be rebuilt from the message log."""

    def __init__(self, subjects: SubjectTable, entries: ConsumeLog, dedupe: DedupeWindow) -> None:
        self.subjects = subjects
        self.entries = entries
        self.dedupe = dedupe

    def apply(self, record: Record) -> None:
        """Take in a record of the log."""
        header = record.header
        if header.kind == Kind.DATA:
            self.note_batch(header, batch.peek(record.body))
        elif header.kind == Kind.SUBJECT:
            self.subjects.restate(record.body, header.position)

    def note_batch(self, header: Header, of: batch.Header) -> Stored:
        """Take in a DATA record whose batch header is known already."""
        end = header.end
        self.entries.append(header.subject_id, entry_of(header, of))
        place = (header.first_sequence, end, header.appended_ms)
        stored = Stored(of.first_sequence, of.count, of.crc, *place, of.producer_epoch)
        if not self.subjects.is_internal(header.subject_id):
            self.dedupe.note(of, header.subject_id, stored)
        self.subjects.advance(header.subject_id, header.first_sequence + header.count)
        return stored

    def note_rot(self, damage: Damage) -> None:
        self.subjects.skip_lost(damage)

    def cut(self, position: int) -> None:
        """Undo everything from `position` on: it was never committed."""
        self.subjects.cut(position)
        self.dedupe.cut(position)
        for subject_id, first_sequence in self.entries.first_sequences_from(position).items():
            if subject_id in self.subjects:
                self.subjects.rewind(subject_id, first_sequence)
        self.entries.cut(position)


def entry_of(header: Header, of: batch.Header) -> Entry:
    """The consume log's entry for a DATA record."""
    return Entry(
        header.first_sequence,
        header.count,
        header.end - header.position,
        header.position,
        header.appended_ms,
        of.tag_filter,
        of.producer_id,
        of.first_sequence,
    )


def entries_of_segment(disk: Disk, directory: str, log_id: int, base: int) -> dict[int, bytes]:
    """The consume log's entries for one segment, read from the segment itself."""
    entries: dict[int, bytearray] = {}
    file = disk.open(segment.file_name(directory, base))
    try:
        damage = scan.check_segment_header(file, base, log_id)
        start = base + segment.HEADER_BYTES if damage is None else damage.end
        for found in Scan(file, base, start, log_id):
            if isinstance(found, Record) and found.header.kind == Kind.DATA:
                entry = entry_of(found.header, batch.peek(found.body))
                entries.setdefault(found.header.subject_id, bytearray()).extend(
                    ENTRY.pack(*msgspec.structs.astuple(entry))
                )
    finally:
        file.close()
    return {subject_id: bytes(data) for subject_id, data in entries.items()}
