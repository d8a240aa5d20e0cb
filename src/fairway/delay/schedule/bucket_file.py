"""Bucket file: one bucket of the schedule log on disk, with its records and their catalogues.

A bucket is a segment of its own (base 0, its own log id). All buckets lie in one directory, so that one disk thread
serves them all. A bucket never rolls: it is one file, whatever its size. If the disk is full, the flusher undoes the
records without room and fails their callbacks; the callers still hold the messages and try again.

A catalogue is a record that lists the bucket's other records without their contents. A start needs the names, ids, key
hashes and due times of all messages, but no contents. So every 8,192 messages the bucket gets a CATALOGUE record over
the records since the last one, and the manifest says where the newest one lies. A start reads the catalogues from the
newest back to the first, and only the bucket records behind the newest one. A catalogue says nothing that the records
do not say: if it is damaged, a start reads the records instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fairway.batch import checksum
from fairway.delay.schedule import bucket_record
from fairway.delay.schedule.bucket_record import BucketIndex, BucketRecord, Sequences
from fairway.delay.schedule.manifest import DIRECTORY, BucketEntry, TimeRange
from fairway.errors import BadName, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.runtime.disk import Disk, ReadCompletion
from fairway.storage import record, segment
from fairway.storage.flusher import Flusher, OnDurable
from fairway.storage.log import Damaged
from fairway.storage.record import BadRecord, Record, RecordKind, padded
from fairway.storage.recovery import DamageVerdict, Finding, judge
from fairway.storage.segment import Damage, SegmentScan

if TYPE_CHECKING:
    from fairway.delay.schedule.log import ScheduleLog

_FIXED = struct.Struct("<IIIIQQ")  # records, subjects, messages, zero, position of the previous one (0: none), start
_NAME = struct.Struct("<IHxx")  # subject id, length of the subject's name
_PIECE = np.dtype([("position", "<u8"), ("subject_id", "<u4"), ("count", "<u4")])
_COLUMNS = 5


class Catalogue(NamedTuple):
    """The bucket records from `start` up to the catalogue itself."""

    previous_at: int
    start: int
    names: dict[int, Subject]
    positions: NDArray[np.uint64]  # of the bucket records
    subject_ids: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    sequences: Sequences  # of the messages, record after record
    columns: BucketIndex


@dataclass(slots=True)
class Draft:
    """The bucket records that are in no catalogue yet."""

    messages: int = 0
    _names: dict[int, Subject] = field(default_factory=dict)
    _pieces: list[tuple[int, int, int]] = field(default_factory=list)
    _columns: list[NDArray[np.uint64]] = field(default_factory=list)

    def add(self, position: int, subject: Subject, subject_id: int, sequences: Sequences, index: BucketIndex) -> None:
        self.messages += len(sequences)
        self._names[subject_id] = subject
        self._pieces.append((position, subject_id, len(sequences)))
        self._columns.append(
            np.stack((sequences, index.due_ms.view(np.uint64), index.key, index.id_high, index.id_low))
        )

    def cut(self, position: int) -> None:
        """Forget the records from there on: a full disk undid them."""
        kept = [number for number, each in enumerate(self._pieces) if each[0] < position]
        self._pieces = [self._pieces[number] for number in kept]
        self._columns = [self._columns[number] for number in kept]
        self.messages = sum(each[2] for each in self._pieces)

    def pack(self, previous_at: int, start: int) -> bytes:
        """The body of a CATALOGUE record."""
        order = sorted(range(len(self._pieces)), key=lambda number: self._pieces[number][0])
        pieces = np.array([self._pieces[number] for number in order], _PIECE)
        names = [padded(_NAME.pack(number, len(name.encode())) + name.encode()) for number, name in self._names.items()]
        columns = np.concatenate([self._columns[number] for number in order], axis=1)
        head = _FIXED.pack(len(pieces), len(names), self.messages, 0, previous_at, start)
        return b"".join([head, *names, pieces.tobytes(), columns.tobytes()])


def unpack(body: bytes) -> Catalogue:
    """Raises `RemoteProtocolError` if the body breaks its format although its checksums hold."""
    try:
        pieces, subjects, messages, _, previous_at, start = _FIXED.unpack_from(body)
        at, names = _FIXED.size, dict[int, Subject]()
        for _ in range(subjects):
            number, length = _NAME.unpack_from(body, at)
            names[number] = Subject.parse_any(body[at + _NAME.size : at + _NAME.size + length].decode())
            at += _NAME.size + length + -(_NAME.size + length) % 8
        table = np.frombuffer(body, _PIECE, pieces, at)
        columns = np.frombuffer(body, "<u8", messages * _COLUMNS, at + table.nbytes).reshape(_COLUMNS, messages)
    except (struct.error, ValueError, BadName) as error:
        raise RemoteProtocolError(f"a catalogue cannot be read: {error}") from error
    if int(table["count"].sum()) != messages:
        raise RemoteProtocolError("a catalogue whose pieces have more or fewer messages than it says")
    index = BucketIndex(columns[1].view(np.int64), columns[2], columns[3], columns[4])
    return Catalogue(
        previous_at, start, names, table["position"], table["subject_id"], table["count"], columns[0], index
    )


def file_name(number: int) -> str:
    return segment.file_name(DIRECTORY, number)


class BucketFile:
    """An open bucket. `is_listed`: the manifest on disk names it. `source_end`: the message log up to here is in it."""

    def __init__(self, of: ScheduleLog, bucket: BucketEntry) -> None:
        self.number = bucket.number
        self.log_id = bucket.log_id
        self.span: TimeRange = bucket.span
        self.end = bucket.synced_end
        self.is_listed = False
        self.is_of_split = False  # not to be listed before the split is done
        self.is_retired = False  # takes no more records
        self._is_whole = bucket.synced_end == 0  # every record is in a catalogue or was noted
        self.source_end = 0
        self._draft: Draft | None = Draft()  # None: no further catalogues in this run
        self._catalogues = [(bucket.catalogue_at, 0)] if bucket.catalogue_at else []  # position, end
        self._catalogued_end = segment.HEADER_BYTES
        self._of = of
        self._disk = disk = of.disk
        self._file = disk.open(file_name(bucket.number), create=True)
        self._flusher = Flusher(
            disk, of.clock, self.end, defer=of.defer, on_full=self._undone, on_progress=self._progressed
        )
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
        """Position of the newest synced catalogue; 0: none."""
        return next((at for at, end in reversed(self._catalogues) if end <= self.synced_end), 0)

    def append(
        self, subject: Subject, subject_id: int, sequences: Sequences, data: bytes, index: BucketIndex, now_ms: int
    ) -> int:
        """Gather a record and return its position. The record is durable once `when_durable(self.end)` says so."""
        self._begin()
        self.catalogue(now_ms, self._of.catalogue_messages)
        body = bucket_record.pack(subject, sequences, data)
        position = self._add(RecordKind.SCHEDULE, subject_id, int(sequences[0]), len(sequences), body, now_ms)
        self.note(position, subject, subject_id, sequences, index)
        return position

    def catalogue(self, now_ms: int, messages_min: int) -> None:
        """Gather a catalogue of the records that are in none, if they have so many messages."""
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
        """Note a record that is in no catalogue."""
        if self._draft is not None:
            self._draft.add(position, subject, subject_id, sequences, index)

    def loaded(self, catalogued_end: int) -> None:
        """Every record from before the start is known: those behind `catalogued_end` were noted."""
        self._is_whole = True
        self._catalogued_end = catalogued_end

    def give_up_catalogue(self) -> None:
        """The bucket has damage: write no more catalogues, so that every start reads the damage and reports it."""
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
        """The record at a position, verified; `Damaged` if it is not intact."""
        return self.parse(self.read_record(position), 0, position)

    def read_record(self, position: int) -> bytes:
        """The bytes of one record, as far as the file has them."""
        head = self._file.read(position, record.HEADER_BYTES)
        return head + self._file.read(position + record.HEADER_BYTES, self.body_bytes(head, 0, position))

    def read_raw(self, position: int, size: int) -> bytes:
        """Bytes as they are, damaged or not."""
        return self._file.read(position, size)

    def write_over(self, position: int, data: bytes) -> None:
        """Write repaired bytes over damaged ones, durably."""
        self._disk.repair(self._file, position, data)

    def body_bytes(self, data: bytes, offset: int, position: int) -> int:
        try:
            return record.parse_header(data, offset, position, self.log_id).body_bytes
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad

    def parse(self, data: bytes, offset: int, position: int) -> BucketRecord:
        """The record at an offset of bytes from this bucket; `Damaged` if it is not intact."""
        try:
            return bucket_record.unpack(self.parse_record(data, offset, position))
        except RemoteProtocolError as bad:
            raise Damaged(position, str(bad)) from bad

    def parse_record(self, data: bytes, offset: int, position: int) -> Record:
        try:
            return record.parse(data, offset, position, self.log_id)
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad

    def fetch(self, position: int, size: int, done: ReadCompletion) -> None:
        """Read bytes of the bucket off the loop."""
        self._disk.fetch(self._file, position, size, done)

    def scan(self, start: int, limit: int) -> SegmentScan:
        """Scan the records from `start` to `limit`, reading on demand."""
        return SegmentScan(self._file, 0, start, self.log_id, limit=limit)

    def entry(self) -> BucketEntry:
        """The bucket's entry for the manifest."""
        grain, start_ms, end_ms = self.span
        return BucketEntry(self.number, self.log_id, grain, start_ms, end_ms, self.synced_end, self.catalogue_at)

    def abandon(self, fault: StorageFault) -> None:
        """Write nothing more, and tell those who wait."""
        self._flusher.poison(fault)

    def close(self) -> None:
        self._file.close()

    def _undone(self, position: int) -> None:
        """The disk is full, and the flusher undid what lies behind `position`. Those who wait for it are told next."""
        self.end = position
        if any(at >= position for at, _ in self._catalogues):  # the draft it was made of is gone, too
            self._catalogues = [each for each in self._catalogues if each[0] < position]
            self._draft = None
        if self._draft is not None:
            self._draft.cut(position)

    def _progressed(self) -> None:
        if self._flusher.fault is not None:
            self._of.on_fault(self._flusher.fault)


def recover(disk: Disk, bucket: BucketEntry) -> tuple[BucketEntry, list[Finding]]:
    """Cut what a crash has torn, sync the rest, and say where the bucket ends. This function does not read below the
    manifest's synced end: the loader reports rot there."""
    file = disk.open(file_name(bucket.number), create=True)
    findings: list[Finding] = []
    try:
        start = max(bucket.synced_end, segment.HEADER_BYTES)
        synced_end, damages = bucket.synced_end, list[Damage]()
        if file.size < bucket.synced_end:
            findings.append(_rot(bucket, Damage(file.size, bucket.synced_end, "missing")))
        elif bucket.synced_end == 0 and segment.check_segment_header(file, 0, bucket.log_id) is not None:
            damages.append(Damage(0, file.size, "unreadable header"))
        for found in SegmentScan(file, 0, start, bucket.log_id):
            if isinstance(found, Damage):
                damages.append(found)
            if found.header is not None:
                synced_end = max(synced_end, found.header.synced_end)
        judgement = judge(synced_end, damages)
        findings += [_rot(bucket, each) for each in judgement.rotten]
        if judgement.cut_at is not None and judgement.cut_at < file.size:
            disk.truncate(file, judgement.cut_at)  # nobody was told that it was durable: the message log still has it
        disk.sync(file, min(synced_end, file.size))
        end = file.size
    finally:
        file.close()
    return msgspec.structs.replace(bucket, synced_end=end), findings


def _rot(bucket: BucketEntry, damage: Damage) -> Finding:
    return Finding(file_name(bucket.number), DamageVerdict.ROTTEN, damage)
