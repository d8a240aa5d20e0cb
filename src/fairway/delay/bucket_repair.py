"""Repairs a record of a bucket that the disk has damaged, from what the message log still has. Nothing is guessed.

A piece holds messages that were in the message log first, and the log keeps them for a while. So the body of the
damaged record is made again, in the ways in which a piece can be made, until one has the checksum that the record's
header names: that one is the lost body, byte for byte, and it is written where it was. A header with a single flipped
bit is put right first; what it says is believed only if the checksum of the body agrees, too.

Where no body fits (the log has let go of the messages, or the log has rotted as well) the damage stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from fairway import batch
from fairway.batch import checksum
from fairway.delay import piece
from fairway.delay.bucket_file import BucketFile, file_name
from fairway.delay.buckets import Span
from fairway.delay.letters import Letters
from fairway.delay.piece import Sequences
from fairway.delay.sheet import Sheet
from fairway.errors import FairwayError, RemoteProtocolError, StorageFault
from fairway.storage import record
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import BadRecord, Header, Kind

log = logging.getLogger("fairway.delay")

_BATCHES_MAX = 256  # that are looked at for one piece
_OF_SPLIT = (1, 0)  # producer and first sequence of a piece that a split has written


class BucketRepair:
    """Repairs records of all buckets of one delay server; counts those that it has repaired. The log tells of each."""

    def __init__(self, messages: MessageLog) -> None:
        self.repaired = 0
        self._messages = messages

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
        _log_outcome(file, position, header, is_repaired=is_repaired)
        return is_repaired

    def _repair(self, file: BucketFile, header: Header) -> bool:
        on_disk = file.read_raw(header.body_at, header.body_bytes)
        bodies = self._bodies(header, on_disk, file.span) if header.kind == Kind.SCHEDULE else ()
        for body in chain((on_disk,), bodies):
            if len(body) == header.body_bytes and checksum(body) == header.body_crc:
                file.write_over(header.position, record.pack_header(header, file.log_id) + body)
                return True
        return False

    def _bodies(self, header: Header, on_disk: bytes, span: Span) -> Iterator[bytes]:
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

    def _due_in(self, header: Header, span: Span) -> Sequences | None:
        """The next messages from the first one on that are due in the stretch of the bucket, as many as it held."""
        log, found, count = self._messages, list[Sequences](), 0
        for entry in islice(
            log.views.entries.entries(header.subject_id, header.first_sequence, log.log.end), _BATCHES_MAX
        ):
            for each in log.read_entries(header.subject_id, [entry]):
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
            found += log.read_entries(subject_id, [entry])
            if not found or not found[-1].entry.first_sequence <= sequence < found[-1].entry.end_sequence:
                return None
        return found


def _log_outcome(file: BucketFile, position: int, header: Header | None, *, is_repaired: bool) -> None:
    name = file_name(file.number)
    if is_repaired:
        log.warning("%s: the record at %d was damaged, and is repaired: replace the disk", name, position)
    elif header is not None and header.kind != Kind.SCHEDULE:
        log.warning(
            "%s: the catalogue at %d is damaged, and its records are read instead: replace the disk", name, position
        )
    else:
        what = "an unknown number of messages is" if header is None else f"{header.count} messages are"
        log.error(
            "%s: the record at %d is damaged, and the message log does not have all of it any more: %s lost. Replace "
            "the disk, and restore them from a copy of the directory",
            name, position, what,
        )  # fmt: skip


def header_in(raw: bytes, position: int, log_id: int) -> Header | None:
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
    letters, due_ms = Letters(is_copying=is_of_split), list[np.ndarray]()
    for each in batches:
        first, end = each.entry.first_sequence, each.entry.end_sequence
        chosen = (sequences[(sequences >= first) & (sequences < end)] - np.uint64(first)).astype(np.int64)
        letters.take(Sheet(each.data), chosen)
        due_ms.append(piece.index_of(each.data).due_ms[chosen])
    header = batch.peek(batches[0].data)
    producer_id, first_sequence = _OF_SPLIT if is_of_split else (header.producer_id, header.first_sequence)
    return letters.encode(producer_id, first_sequence, np.concatenate(due_ms))
