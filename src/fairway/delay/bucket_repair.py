"""Repairs a record of a bucket that the disk has damaged, from what the message log still has. Nothing is guessed.

A piece holds messages that were in the message log first, and the log keeps them for a while. So the body of the
damaged record is made again, in the ways in which a piece can be made, until one has the checksum that the record's
header names: that one is the lost body, byte for byte, and it is written where it was. A header with a single flipped
bit is put right first; what it says is believed only if the checksum of the body agrees, too.

Where no body fits (the log has let go of the messages, or the log has rotted as well) the damage stays as it is. Then
`bucket_salvage` collects the messages that the log still has. Nothing is written for that: the bucket keeps the damaged
record, and the message log keeps the messages, until the housekeeper has moved all live messages of the bucket to other
buckets. So a crash before that leaves everything as it was, and the next start salvages the same messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from fairway import batch
from fairway.batch import checksum
from fairway.delay import bucket_salvage, piece
from fairway.delay.bucket_file import BucketFile, file_name
from fairway.delay.bucket_salvage import Claim, Salvage
from fairway.delay.buckets import TimeRange
from fairway.delay.ledger import DecisionIndex
from fairway.delay.letters import BatchComposer
from fairway.delay.piece import Sequences
from fairway.delay.rows import Rows, RowState
from fairway.delay.sheet import BatchArrays
from fairway.delay.wheel import RowNumbers
from fairway.errors import FairwayError, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.storage import record
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import BadRecord, RecordHeader, RecordKind

log = logging.getLogger("fairway.delay")

_BATCHES_MAX = 256  # that are looked at for one piece
_OF_SPLIT = (1, 0)  # producer and first sequence of a piece that a split has written


_NOTHING = (1 << 63) - 1  # a position that no log reaches


class Salvaged(NamedTuple):
    """A salvage, and whether there is a loss to report that was not reported before."""

    found: Salvage | None
    is_news: bool


class BucketRepair:
    """Repairs and salvages records of all buckets of one delay server, and counts both. The log tells of each."""

    def __init__(
        self,
        messages: MessageLog,
        rows: Rows,
        ledger: Callable[[], DecisionIndex],
        on_lost: Callable[[RowNumbers], None],
    ) -> None:
        """`ledger`: what is known of messages that have no rows yet. `on_lost`: these rows are `LOST` now."""
        self.repaired = 0
        self.salvaged_messages = 0
        self.lost_messages = 0
        self._messages = messages
        self._rows = rows
        self._ledger = ledger
        self._on_lost = on_lost
        self._told: dict[int, set[int]] = {}  # by bucket: positions of records that the log has told of
        self._kept: dict[int, dict[int, Salvage]] = {}  # by bucket and position: without their contents

    def repair(self, file: BucketFile, position: int) -> bool:
        """Whether the record at a position is as it was."""
        header, is_repaired = None, False
        try:
            header = header_in(file.read_raw(position, record.HEADER_BYTES), position, file.log_id)
            is_repaired = header is not None and header.end <= file.end and self._repair(file, header)
        except StorageFault:
            raise
        except (FairwayError, ValueError):  # of a body that was made of damaged numbers
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
        """What there still is of a record that could not be repaired. Rows of messages that are lost become `LOST`."""
        header = header_in(file.read_raw(position, record.HEADER_BYTES), position, file.log_id)
        if header is not None and header.kind != RecordKind.SCHEDULE:
            return Salvaged(None, is_news=True)  # `repair` has told of the catalogue
        rows = self._rows_at(file.number, position)
        claim, found = None, None
        try:
            claim = None if header is None else self._claim(file, header, rows)
            if header is not None and claim is not None:
                found = bucket_salvage.salvage(self._messages, header, self._name_of(header), claim)
        except StorageFault:
            raise
        except (FairwayError, ValueError):  # of a claim that was made of damaged numbers
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
        """Which messages the record held: its rows say it, or else its body does."""
        if header.subject_id not in self._messages.views.subjects or header.end > file.end:
            return None
        if len(rows):
            sequences, is_known = np.zeros(header.count, np.uint64), np.zeros(header.count, np.bool_)
            at = self._rows.index[rows]
            if int(at.max()) >= header.count:  # a header that was put right wrongly
                return None
            sequences[at], is_known[at] = self._rows.sequence[rows], True
            return Claim(sequences, is_known)
        try:
            record.parse_header(file.read_raw(header.position, record.HEADER_BYTES), 0, header.position, file.log_id)
        except BadRecord:  # a header that was put right is believed only with the checksum of the body
            return None
        return bucket_salvage.claim_of(header, file.read_raw(header.body_at, header.body_bytes), self._name_of(header))

    def _lose(self, rows: RowNumbers, found: Salvage | None, *, is_first: bool) -> int:
        """How many messages of these rows are found to be lost now. Those in an intent stay as they are: they may be
        on their way already."""
        if found is not None:
            rows = rows[~found.is_there[self._rows.index[rows]]]
        pending = rows[self._rows.state[rows] == RowState.PENDING]
        intended = np.count_nonzero(self._rows.state[rows] == RowState.INTENDED)
        self._rows.become(pending, RowState.LOST)
        self._on_lost(pending)
        return len(pending) + (int(intended) if is_first else 0)

    def _owed(self, file: BucketFile, header: RecordHeader, claim: Claim | None, found: Salvage | None) -> int:
        """How many messages of a record without rows are lost: those that are neither there, nor in another record, nor
        done with."""
        if claim is None:
            return header.count
        ledger = self._ledger()
        is_lost = np.isin(ledger.states(header.subject_id, claim.sequences), (RowState.PENDING, RowState.INTENDED))
        if claim.ids is None:  # else a damaged list may name a message of another record
            known = self._rows.find(header.subject_id, claim.sequences)
            is_lost &= ~np.isin(claim.sequences, self._rows.sequence[known])
        gone = ledger.gone(file.number, header.position, header.count)
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
        """The message log must keep what it has from this position on."""
        return min((each.messages_from for kept in self._kept.values() for each in kept.values()), default=_NOTHING)

    def is_to_evacuate(self, file: BucketFile) -> bool:
        """Whether the live messages of a bucket should go to other buckets, because it lacks some that were salvaged.
        Not while another copy may bring the others: a record that is whole again is repaired in its place."""
        kept = self._kept.get(file.number, {})
        for position in [position for position, each in kept.items() if each.is_awaited]:
            if not self.repair(file, position):
                self.salvage(file, position)
        return bool(kept) and not any(each.is_awaited for each in kept.values())

    def forget(self, number: int) -> None:
        """A bucket is deleted."""
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
        """What the record may have held, from the most likely one on."""
        views = self._messages.views
        if header.subject_id not in views.subjects:
            return
        subject = views.subjects.by_id(header.subject_id).name
        run = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
        for sequences in (run, piece.listed_in(on_disk, header.count), self._due_in(header, span)):
            if sequences is None:
                continue
            batches = self._batches(header.subject_id, sequences)
            if batches is None:
                continue
            if len(batches) == 1 and batches[0].entry.count == header.count:
                yield piece.pack(subject, sequences, batches[0].data)  # it went there unopened
            for is_of_split in (False, True):
                yield piece.pack(subject, sequences, _gathered(batches, sequences, is_of_split=is_of_split))

    def _due_in(self, header: RecordHeader, span: TimeRange) -> Sequences | None:
        """The next messages from the first one on that are due in the stretch of the bucket, as many as it held."""
        log, found, count = self._messages, list[Sequences](), 0
        for entry in islice(
            log.views.entries.entries(header.subject_id, header.first_sequence, log.log.end), _BATCHES_MAX
        ):
            for each in self._read(header.subject_id, entry):
                due_ms = piece.index_of(each.data).due_ms
                chosen = np.flatnonzero((due_ms >= span.start_ms) & (due_ms < span.end_ms)).astype(np.uint64)
                sequences = chosen + np.uint64(entry.first_sequence)
                found.append(sequences[sequences >= header.first_sequence])
                count += len(found[-1])
            if count >= header.count:
                return np.concatenate(found)[: header.count]
        return None

    def _batches(self, subject_id: int, sequences: Sequences) -> list[StoredBatch] | None:
        """The batches that hold these messages; None where one is not there any more."""
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
        """One batch; none where it has rotted. Other batches may do: another guess at the body need not have it."""
        try:
            return self._messages.read_entries(subject_id, [entry])
        except Refused:  # by a master whose copies may have it
            return []


def header_in(raw: bytes, position: int, log_id: int) -> RecordHeader | None:
    """The header of a record, with at most one bit put right; None where more is wrong."""
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
    """Messages of several batches, or some of one, as the mover or a split gathers them."""
    letters, due_ms = BatchComposer(is_copying=is_of_split), list[np.ndarray]()
    for each in batches:
        first, end = each.entry.first_sequence, each.entry.end_sequence
        chosen = (sequences[(sequences >= first) & (sequences < end)] - np.uint64(first)).astype(np.int64)
        letters.take(BatchArrays(each.data), chosen)
        due_ms.append(piece.index_of(each.data).due_ms[chosen])
    header = batch.peek(batches[0].data)
    producer_id, first_sequence = _OF_SPLIT if is_of_split else (header.producer_id, header.first_sequence)
    return letters.encode(producer_id, first_sequence, np.concatenate(due_ms))
