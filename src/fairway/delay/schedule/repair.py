"""Repair of damaged bucket records from the message log; and the audit of the schedule log for `fairway verify`.

The messages of a bucket record were in the message log first, and the log keeps them for a while. `BucketRepair` makes
the body of a damaged record again, in each way that the delay server makes one, until one has the checksum in the
record's header. That body is the lost one, byte for byte, and is written in its place. A header with a single flipped
bit is corrected first; its fields are believed only if the checksum of the body agrees, too.

If no body fits, because the log dropped the messages or is rotten as well, the damage stays. Then
`bucket_record.salvage` collects the messages that the log still has. It writes nothing: the bucket keeps the damaged
record, and the message log keeps the messages, until maintenance has moved all live messages of the bucket to other
buckets. After a crash before that, the next start salvages the same messages.

The audit reads the manifest, its copy, and every record of every bucket, and changes nothing. It takes no lock. A
running server may delete a bucket or write a manifest meanwhile; then the audit begins again. The audit ignores bytes
behind the end that the manifest states: a server is writing them, or the next start cuts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from fairway import batch
from fairway.batch import checksum
from fairway.delay.schedule import bucket_file, bucket_record, manifest
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer
from fairway.delay.schedule.bucket_file import BucketFile, file_name
from fairway.delay.schedule.bucket_record import Claim, Salvage, Sequences
from fairway.delay.schedule.manifest import BucketEntry, Manifest, TimeRange
from fairway.delay.schedule.pending_rows import DecisionIndex, RowNumbers, Rows, RowState
from fairway.errors import FairwayError, NoSuchFile, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.runtime.disk import Disk
from fairway.storage import record, segment
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import BadRecord, Record, RecordHeader, RecordKind
from fairway.storage.segment import MISSING, Damage, SegmentScan
from fairway.storage.survey_report import INVALID, ROTTEN, DamageReport, FlawReport

_LOOKS_MAX = 5
_MANIFEST_REMEDY = "start the delay server: it goes on with the other one, and writes both anew"


@dataclass(slots=True)
class Audit:
    """What the audit found."""

    damages: list[DamageReport] = field(default_factory=list)
    flaws: list[FlawReport] = field(default_factory=list)
    records: int = 0
    bytes: int = 0


def audit(disk: Disk) -> Audit:
    """Check the schedule log of a delay server. The result is empty if the directory has none."""
    for _ in range(_LOOKS_MAX - 1):
        try:
            return _look(disk, is_last=False)
        except NoSuchFile:  # a running server deleted it meanwhile
            continue
    return _look(disk, is_last=True)


def _look(disk: Disk, *, is_last: bool) -> Audit:
    found = Audit()
    known = _manifest(disk, found)
    for bucket in () if known is None else known.buckets:
        name = bucket_file.file_name(bucket.number)
        try:
            _bucket(disk, name, bucket, found)
        except NoSuchFile:
            if not is_last:
                raise
            found.damages.append(DamageReport("schedule", name, 0, bucket.synced_end, ROTTEN, MISSING))
    return found


def _manifest(disk: Disk, found: Audit) -> Manifest | None:
    first, copy = manifest.read(disk, manifest.NAME), manifest.read(disk, manifest.COPY)
    for name, each in ((manifest.NAME, first), (manifest.COPY, copy)):
        if each is not None and each.manifest is None:
            found.flaws.append(FlawReport(name, each.why, _MANIFEST_REMEDY))
        found.bytes += 0 if each is None else len(each.data)
    if first is None and any(segment.base_of(name) is not None for name in disk.listing(manifest.DIRECTORY)):
        found.flaws.append(FlawReport(manifest.NAME, "it is missing", _MANIFEST_REMEDY))
    return next((each.manifest for each in (first, copy) if each is not None and each.manifest is not None), None)


def _bucket(disk: Disk, name: str, bucket: BucketEntry, found: Audit) -> None:
    file = disk.open(name)
    try:
        found.bytes += min(file.size, bucket.synced_end)
        header = segment.check_segment_header(file, 0, bucket.log_id) if bucket.synced_end else None
        if header is not None:
            found.flaws.append(
                FlawReport(name, f"its header: {header.why}", "none is needed: its records say the same")
            )
        if file.size < bucket.synced_end:
            found.damages.append(DamageReport("schedule", name, file.size, bucket.synced_end, ROTTEN, MISSING))
        for each in SegmentScan(file, 0, segment.HEADER_BYTES, bucket.log_id, limit=bucket.synced_end):
            if isinstance(each, Damage):
                found.damages.append(_damage(name, each))
            else:
                found.records += 1
                _record(name, each, found)
    finally:
        file.close()


def _damage(name: str, damage: Damage) -> DamageReport:
    report = DamageReport("schedule", name, damage.start, damage.end, ROTTEN, damage.why)
    if damage.header is not None and damage.header.kind == RecordKind.SCHEDULE:
        report.first_sequence, report.messages = damage.header.first_sequence, damage.header.count
    return report


def _record(name: str, record: Record, found: Audit) -> None:
    try:
        if record.header.kind == RecordKind.CATALOGUE:
            bucket_file.unpack(record.body)
        else:
            batch.check(bucket_record.unpack(record).data)
    except FairwayError as error:
        header = record.header
        found.damages.append(DamageReport("schedule", name, header.position, header.end, INVALID, str(error)))


log = logging.getLogger("fairway.delay")

_BATCHES_MAX = 256  # checked for one record
_OF_SPLIT = (1, 0)  # producer id and first sequence of a record that a split wrote


_NOTHING = (1 << 63) - 1  # a position that no log reaches


class Salvaged(NamedTuple):
    """A salvage, and whether it reports a loss for the first time."""

    found: Salvage | None
    is_news: bool


class BucketRepair:
    """Repairs and salvages records of all buckets of one delay server. It counts and logs both."""

    def __init__(
        self,
        messages: MessageLog,
        rows: Rows,
        decision_index: Callable[[], DecisionIndex],
        on_lost: Callable[[RowNumbers], None],
    ) -> None:
        """`decision_index`: what is known of messages without rows. `on_lost`: these rows are `LOST` now."""
        self.repaired = 0
        self.salvaged_messages = 0
        self.lost_messages = 0
        self._messages = messages
        self._rows = rows
        self._decision_index = decision_index
        self._on_lost = on_lost
        self._told: dict[int, set[int]] = {}  # by bucket: positions of records that were logged
        self._kept: dict[int, dict[int, Salvage]] = {}  # by bucket and position: without their contents

    def repair(self, file: BucketFile, position: int) -> bool:
        """Repair the record at a position. Return whether it is intact now."""
        header, is_repaired = None, False
        try:
            header = header_in(file.read_raw(position, record.HEADER_BYTES), position, file.log_id)
            is_repaired = header is not None and header.end <= file.end and self._repair(file, header)
        except StorageFault:
            raise
        except (FairwayError, ValueError):  # from a body that was made of damaged numbers
            pass
        self.repaired += is_repaired
        name = file_name(file.number)
        if is_repaired:
            self._kept.get(file.number, {}).pop(position, None)
            log.warning("%s: the record at %d was damaged, and is repaired: replace the disk", name, position)
        elif header is not None and header.kind != RecordKind.SCHEDULE:
            log.warning(
                "%s: the catalogue at %d is damaged, and its records are read instead: replace the disk", name, position
            )
        return is_repaired

    # --- salvage -----------------------------------------------------------------------------------------------------

    def salvage(self, file: BucketFile, position: int) -> Salvaged:
        """Collect what is left of a record that could not be repaired. Rows of lost messages become `LOST`."""
        header = header_in(file.read_raw(position, record.HEADER_BYTES), position, file.log_id)
        if header is not None and header.kind != RecordKind.SCHEDULE:
            return Salvaged(None, is_news=True)  # `repair` has logged the catalogue
        rows = self._rows_at(file.number, position)
        claim, found = None, None
        try:
            claim = None if header is None else self._claim(file, header, rows)
            if header is not None and claim is not None:
                found = bucket_record.salvage(self._messages, header, self._name_of(header), claim)
        except StorageFault:
            raise
        except (FairwayError, ValueError):  # from a claim that was made of damaged numbers
            pass
        if found is not None:
            kept = found._replace(piece=found.piece._replace(data=b""))
            self._kept.setdefault(file.number, {})[position] = kept
        is_first = position not in self._told.setdefault(file.number, set())
        self._told[file.number].add(position)
        if len(rows):
            lost: int | None = self._lose(rows, found, is_first=is_first)
        elif is_first:
            lost = None if header is None else self._owed(file, header, claim, found)
        else:
            lost = 0
        if is_first and found is not None:
            self.salvaged_messages += int(np.count_nonzero(found.is_there))
        if is_first or lost:
            self._tell(file, position, lost, found)
        return Salvaged(found, is_news=lost != 0)

    def _claim(self, file: BucketFile, header: RecordHeader, rows: RowNumbers) -> Claim | None:
        """Which messages the record held, from its rows, or else from its body."""
        if header.subject_id not in self._messages.views.subjects or header.end > file.end:
            return None
        if len(rows):
            sequences, is_known = np.zeros(header.count, np.uint64), np.zeros(header.count, np.bool_)
            at = self._rows.index[rows]
            if int(at.max()) >= header.count:  # a header that was corrected wrongly
                return None
            sequences[at], is_known[at] = self._rows.sequence[rows], True
            return Claim(sequences, is_known)
        try:
            record.parse_header(file.read_raw(header.position, record.HEADER_BYTES), 0, header.position, file.log_id)
        except BadRecord:  # a corrected header is believed only with the checksum of the body
            return None
        return bucket_record.claim_of(header, file.read_raw(header.body_at, header.body_bytes), self._name_of(header))

    def _lose(self, rows: RowNumbers, found: Salvage | None, *, is_first: bool) -> int:
        """Mark pending rows as lost, and return how many messages are newly lost. Rows in an intent keep their state:
        they may be on their way already."""
        if found is not None:
            rows = rows[~found.is_there[self._rows.index[rows]]]
        pending = rows[self._rows.state[rows] == RowState.PENDING]
        intended = np.count_nonzero(self._rows.state[rows] == RowState.INTENDED)
        self._rows.become(pending, RowState.LOST)
        self._on_lost(pending)
        return len(pending) + (int(intended) if is_first else 0)

    def _owed(self, file: BucketFile, header: RecordHeader, claim: Claim | None, found: Salvage | None) -> int:
        """How many messages of a record without rows are lost: those that are not salvaged, not in another record and
        not finished."""
        if claim is None:
            return header.count
        decision_index = self._decision_index()
        is_lost = np.isin(
            decision_index.states(header.subject_id, claim.sequences), (RowState.PENDING, RowState.INTENDED)
        )
        if claim.ids is None:  # else a damaged list may name a message of another record
            known = self._rows.find(header.subject_id, claim.sequences)
            is_lost &= ~np.isin(claim.sequences, self._rows.sequence[known])
        gone = decision_index.gone(file.number, header.position, header.count)
        if gone is not None:
            is_lost &= ~gone
        if found is not None:
            is_lost &= ~found.is_there
        return int(np.count_nonzero(is_lost))

    def _rows_at(self, number: int, position: int) -> RowNumbers:
        rows = self._rows.of_file(number)
        found: RowNumbers = rows[self._rows.position[rows] == position]
        return found

    def _name_of(self, header: RecordHeader) -> Subject:
        return self._messages.views.subjects.by_id(header.subject_id).name

    def _tell(self, file: BucketFile, position: int, lost: int | None, found: Salvage | None) -> None:
        self.lost_messages += lost or 0
        salvaged = 0 if found is None else int(np.count_nonzero(found.is_there))
        has = f"has {salvaged} of its messages" if salvaged else "does not have it any more"
        name = file_name(file.number)
        if lost == 0:
            log.warning(
                "%s: the record at %d is damaged, and the message log %s: nothing is lost, and they go to another "
                "bucket. Replace the disk",
                name, position, has,
            )  # fmt: skip
            return
        what = "an unknown number of messages is" if lost is None else f"{lost} messages are"
        log.error(
            "%s: the record at %d is damaged, and the message log %s: %s lost. Replace the disk, and restore them from "
            "a copy of the directory",
            name, position, has, what,
        )  # fmt: skip

    # --- until the salvaged messages are in another bucket -----------------------------------------------------------

    @property
    def needed_from(self) -> int:
        """The message log must keep everything from this position on."""
        return min((each.messages_from for kept in self._kept.values() for each in kept.values()), default=_NOTHING)

    def is_to_evacuate(self, file: BucketFile) -> bool:
        """Whether to move the live messages of a bucket to other buckets, because some were salvaged. Not while another
        copy may bring missing messages: a record with all its messages is repaired in place."""
        kept = self._kept.get(file.number, {})
        for position in [position for position, each in kept.items() if each.is_awaited]:
            if not self.repair(file, position):
                self.salvage(file, position)
        return bool(kept) and not any(each.is_awaited for each in kept.values())

    def forget(self, number: int) -> None:
        """A bucket was deleted."""
        self._told.pop(number, None)
        self._kept.pop(number, None)

    # --- repair ------------------------------------------------------------------------------------------------------

    def _repair(self, file: BucketFile, header: RecordHeader) -> bool:
        on_disk = file.read_raw(header.body_at, header.body_bytes)
        bodies = self._bodies(header, on_disk, file.span) if header.kind == RecordKind.SCHEDULE else ()
        for body in chain((on_disk,), bodies):
            if len(body) == header.body_bytes and checksum(body) == header.body_crc:
                file.write_over(header.position, record.pack_header(header, file.log_id) + body)
                return True
        return False

    def _bodies(self, header: RecordHeader, on_disk: bytes, span: TimeRange) -> Iterator[bytes]:
        """The bodies that the record may have had, the most likely first."""
        views = self._messages.views
        if header.subject_id not in views.subjects:
            return
        subject = views.subjects.by_id(header.subject_id).name
        run = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
        for sequences in (run, bucket_record.listed_in(on_disk, header.count), self._due_in(header, span)):
            if sequences is None:
                continue
            batches = self._batches(header.subject_id, sequences)
            if batches is None:
                continue
            if len(batches) == 1 and batches[0].entry.count == header.count:
                yield bucket_record.pack(subject, sequences, batches[0].data)  # it went there unopened
            for is_of_split in (False, True):
                yield bucket_record.pack(subject, sequences, _gathered(batches, sequences, is_of_split=is_of_split))

    def _due_in(self, header: RecordHeader, span: TimeRange) -> Sequences | None:
        """The first messages from the header's sequence on that are due in the bucket's span, as many as the record
        held."""
        log, found, count = self._messages, list[Sequences](), 0
        for entry in islice(
            log.views.entries.entries(header.subject_id, header.first_sequence, log.log.end), _BATCHES_MAX
        ):
            for each in self._read(header.subject_id, entry):
                due_ms = bucket_record.index_of(each.data).due_ms
                chosen = np.flatnonzero((due_ms >= span.start_ms) & (due_ms < span.end_ms)).astype(np.uint64)
                sequences = chosen + np.uint64(entry.first_sequence)
                found.append(sequences[sequences >= header.first_sequence])
                count += len(found[-1])
            if count >= header.count:
                return np.concatenate(found)[: header.count]
        return None

    def _batches(self, subject_id: int, sequences: Sequences) -> list[StoredBatch] | None:
        """The batches that hold these messages; None if any is missing."""
        log, found = self._messages, list[StoredBatch]()
        for sequence in sequences.tolist():
            if found and sequence < found[-1].entry.end_sequence:
                continue
            entry = next(log.views.entries.entries(subject_id, sequence, log.log.end), None)
            if entry is None or entry.first_sequence > sequence:
                return None
            found += self._read(subject_id, entry)
            if not found or not found[-1].entry.first_sequence <= sequence < found[-1].entry.end_sequence:
                return None
        return found

    def _read(self, subject_id: int, entry: ConsumeLogEntry) -> list[StoredBatch]:
        """One batch; empty if it is rotten. Another candidate for the body may not need it."""
        try:
            return self._messages.read_entries(subject_id, [entry])
        except Refused:  # raised by a master whose replicas may have it
            return []


def header_in(raw: bytes, position: int, log_id: int) -> RecordHeader | None:
    """The header of a record, with at most one bit corrected; None if more is wrong."""
    try:
        return record.parse_header(raw, 0, position, log_id)
    except BadRecord:
        pass
    for bit in range(8 * len(raw)):
        mended = bytearray(raw)
        mended[bit // 8] ^= 1 << bit % 8
        try:
            return record.parse_header(bytes(mended), 0, position, log_id)
        except (BadRecord, RemoteProtocolError):
            continue
    return None


def _gathered(batches: list[StoredBatch], sequences: Sequences, *, is_of_split: bool) -> bytes:
    """Messages of several batches, or some of one, put together as the appender or a split does."""
    composer, due_ms = BatchComposer(is_copying=is_of_split), list[np.ndarray]()
    for each in batches:
        first, end = each.entry.first_sequence, each.entry.end_sequence
        chosen = (sequences[(sequences >= first) & (sequences < end)] - np.uint64(first)).astype(np.int64)
        composer.take(BatchArrays(each.data), chosen)
        due_ms.append(bucket_record.index_of(each.data).due_ms[chosen])
    header = batch.peek(batches[0].data)
    producer_id, first_sequence = _OF_SPLIT if is_of_split else (header.producer_id, header.first_sequence)
    return composer.encode(producer_id, first_sequence, np.concatenate(due_ms))
