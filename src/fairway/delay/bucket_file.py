"""One bucket on disk: a segment of its own (base 0, its own log id) whose records are pieces and their catalogues.

It is written through a flusher like every log, but all buckets lie in one directory, so that one thread of the disk
serves them all. It never rolls: a bucket is one file, whatever is in it. A full disk undoes what found no room, tells
those who wait for it, and changes nothing else: they have it still, and come again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fairway.batch import checksum
from fairway.delay import piece
from fairway.delay.buckets import TimeRange
from fairway.delay.catalogue import Draft
from fairway.delay.manifest import DIRECTORY, BucketEntry
from fairway.delay.piece import BucketIndex, BucketRecord, Sequences
from fairway.errors import RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.storage import record, scan, segment
from fairway.storage.flusher import Defer, Flusher, OnDurable
from fairway.storage.log import Damaged
from fairway.storage.record import BadRecord, Record, RecordKind
from fairway.storage.recovery import DamageVerdict, Finding, judge
from fairway.storage.scan import Damage, SegmentScan
from fairway.world.clock import Clock
from fairway.world.disk import Disk, ReadCompletion


def file_name(number: int) -> str:
    return segment.file_name(DIRECTORY, number)


class BucketFile:
    """An open bucket. `is_listed`: the manifest on disk names it. `source_end`: the message log up to here is in it."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        bucket: BucketEntry,
        *,
        defer: Defer,
        poison: Callable[[StorageFault], None],
        catalogue_messages: int,
    ) -> None:
        self.number = bucket.number
        self.log_id = bucket.log_id
        self.span: TimeRange = bucket.span
        self.end = bucket.synced_end
        self.is_listed = False
        self.is_of_split = False  # not to be listed before the split is done
        self.is_retired = False  # takes no more pieces
        self._is_whole = bucket.synced_end == 0  # every piece of it is in a catalogue or was noted
        self.source_end = 0
        self._draft: Draft | None = Draft()  # None: given up in this life
        self._catalogues = [(bucket.catalogue_at, 0)] if bucket.catalogue_at else []  # position, end
        self._catalogued_end = segment.HEADER_BYTES
        self._catalogue_messages = catalogue_messages
        self._poison = poison
        self._disk = disk
        self._file = disk.open(file_name(bucket.number), create=True)
        self._flusher = Flusher(disk, clock, self.end, defer=defer, on_full=self._undone, on_progress=self._progressed)
        self._begin()

    def _begin(self) -> None:
        if self.end == 0:
            self._flusher.add(self._file, segment.pack_header(self.log_id, 0, 0))
            self.end = segment.HEADER_BYTES

    @property
    def synced_end(self) -> int:
        return self._flusher.synced_end

    @property
    def catalogue_at(self) -> int:
        """Where the newest catalogue that is synced lies; 0: there is none."""
        return next((at for at, end in reversed(self._catalogues) if end <= self.synced_end), 0)

    def append(
        self, subject: Subject, subject_id: int, sequences: Sequences, data: bytes, index: BucketIndex, now_ms: int
    ) -> int:
        """Gather a piece; its position. It is durable once `when_durable(self.end)` says so."""
        self._begin()
        self.catalogue(now_ms, self._catalogue_messages)
        body = piece.pack(subject, sequences, data)
        position = self._add(RecordKind.SCHEDULE, subject_id, int(sequences[0]), len(sequences), body, now_ms)
        self.note(position, subject, subject_id, sequences, index)
        return position

    def catalogue(self, now_ms: int, messages_min: int) -> None:
        """Gather a catalogue of the pieces that are in none, if they have so many messages."""
        draft = self._draft
        if draft is None or not self._is_whole or draft.messages < max(messages_min, 1):
            return
        previous_at = self._catalogues[-1][0] if self._catalogues else 0
        body = draft.pack(previous_at, self._catalogued_end)
        position = self._add(RecordKind.CATALOGUE, 0, 0, draft.messages, body, now_ms)
        self._catalogues = [*self._catalogues[-1:], (position, self.end)]
        self._catalogued_end = self.end
        self._draft = Draft()

    def note(self, position: int, subject: Subject, subject_id: int, sequences: Sequences, index: BucketIndex) -> None:
        """A piece that is in no catalogue."""
        if self._draft is not None:
            self._draft.add(position, subject, subject_id, sequences, index)

    def loaded(self, catalogued_end: int) -> None:
        """All that an earlier life left is known: what lies behind `catalogued_end` was noted."""
        self._is_whole = True
        self._catalogued_end = catalogued_end

    def give_up_catalogue(self) -> None:
        """Something in it is damaged: every start reads it, and says so."""
        self._draft = None

    def _add(self, kind: RecordKind, subject_id: int, first_sequence: int, count: int, body: bytes, now_ms: int) -> int:
        position = self.end
        head = record.pack(
            kind,
            subject_id,
            self.log_id,
            position,
            self._flusher.synced_end,
            0,
            first_sequence,
            now_ms,
            count,
            len(body),
            checksum(body),
        )
        self._flusher.add(self._file, head, body)
        self.end = position + len(head) + len(body)
        return position

    def when_durable(self, position: int, outcome: OnDurable) -> None:
        self._flusher.when_durable(position, outcome)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, position: int) -> BucketRecord:
        """The piece at a position, verified; `Damaged` if it is not intact."""
        return self.parse(self.read_record(position), 0, position)

    def read_record(self, position: int) -> bytes:
        """The bytes of one record, as far as they are there."""
        head = self._file.read(position, record.HEADER_BYTES)
        return head + self._file.read(position + record.HEADER_BYTES, self.body_bytes(head, 0, position))

    def read_raw(self, position: int, size: int) -> bytes:
        """Bytes as they are, damaged or not."""
        return self._file.read(position, size)

    def write_over(self, position: int, data: bytes) -> None:
        """Put back what the disk has damaged, durably."""
        self._disk.repair(self._file, position, data)

    def body_bytes(self, data: bytes, offset: int, position: int) -> int:
        try:
            return record.parse_header(data, offset, position, self.log_id).body_bytes
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad

    def parse(self, data: bytes, offset: int, position: int) -> BucketRecord:
        """The piece at an offset of bytes that were read from this bucket; `Damaged` if it is not intact."""
        try:
            return piece.unpack(self.parse_record(data, offset, position))
        except RemoteProtocolError as bad:
            raise Damaged(position, str(bad)) from bad

    def parse_record(self, data: bytes, offset: int, position: int) -> Record:
        try:
            header = record.parse_header(data, offset, position, self.log_id)
            body_at = offset + record.HEADER_BYTES
            body = data[body_at : body_at + header.body_bytes]
            record.check_body(header, body)
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad
        return Record(header, body)

    def fetch(self, position: int, size: int, done: ReadCompletion) -> None:
        """Bytes of the bucket, off the loop."""
        self._disk.fetch(self._file, position, size, done)

    def scan(self, start: int, limit: int) -> SegmentScan:
        """All records from `start` to `limit`, read as they are asked for."""
        return SegmentScan(self._file, 0, start, self.log_id, limit=limit)

    def entry(self) -> BucketEntry:
        """For the manifest."""
        grain, start_ms, end_ms = self.span
        return BucketEntry(self.number, self.log_id, grain, start_ms, end_ms, self.synced_end, self.catalogue_at)

    def abandon(self, fault: StorageFault) -> None:
        """Write nothing more, and tell those who wait for it."""
        self._flusher.poison(fault)

    def close(self) -> None:
        self._file.close()

    def _undone(self, position: int) -> None:
        """A full disk: whoever waits for something behind `position` is told next."""
        self.end = position
        if any(at >= position for at, _ in self._catalogues):  # with it went the draft that it was made of
            self._catalogues = [each for each in self._catalogues if each[0] < position]
            self._draft = None
        if self._draft is not None:
            self._draft.cut(position)

    def _progressed(self) -> None:
        if self._flusher.fault is not None:
            self._poison(self._flusher.fault)


def recover(disk: Disk, bucket: BucketEntry) -> tuple[BucketEntry, list[Finding]]:
    """Cut what a crash has torn, sync what is left, and say where the bucket ends. What lies below its synced end in
    the manifest is not read here: the loader reports what has rotted there."""
    file = disk.open(file_name(bucket.number), create=True)
    findings: list[Finding] = []
    try:
        start = max(bucket.synced_end, segment.HEADER_BYTES)
        synced_end, damages = bucket.synced_end, list[Damage]()
        if file.size < bucket.synced_end:
            findings.append(_rot(bucket, Damage(file.size, bucket.synced_end, "missing")))
        elif bucket.synced_end == 0 and scan.check_segment_header(file, 0, bucket.log_id) is not None:
            damages.append(Damage(0, file.size, "unreadable header"))
        for found in SegmentScan(file, 0, start, bucket.log_id):
            if isinstance(found, Damage):
                damages.append(found)
            if found.header is not None:
                synced_end = max(synced_end, found.header.synced_end)
        judgement = judge(synced_end, damages)
        findings += [_rot(bucket, each) for each in judgement.rotten]
        if judgement.cut_at is not None and judgement.cut_at < file.size:
            disk.truncate(file, judgement.cut_at)  # nothing was answered on its behalf: the message log still has it
        disk.sync(file, min(synced_end, file.size))
        end = file.size
    finally:
        file.close()
    return msgspec.structs.replace(bucket, synced_end=end), findings


def _rot(bucket: BucketEntry, damage: Damage) -> Finding:
    return Finding(file_name(bucket.number), DamageVerdict.ROTTEN, damage)
