"""Bucket record: messages of one subject whose due times lie in the bucket's span; and the salvage of a damaged record.

The body of a record has three parts:

    name        of the subject, so that a bucket can be read without the message log
    sequences   of the messages, in the delay server's message log; left out if they are consecutive
    batch       the messages. Due times, key hashes and ids are in a section that is never compressed

A batch that belongs into one bucket as a whole goes there unopened, byte for byte. numpy reads the index of a record
from the section, without touching a message.

`fairway.delay.schedule.repair` restores a damaged record byte for byte, and needs all of its messages for that. If the
message log has only some of them, no checksum covers the result. So salvage must prove that each message belonged to
the record, at the same index. A message without proof counts as lost, because a wrong message would be delivered twice.
A proof comes from:

    the record's rows     a catalogue with a valid checksum named the messages: proof enough
    a run of sequences    the header, with a valid checksum, has the first sequence and the count. The body must have
                          the layout of a run
    a list of sequences   the list lies in the damaged body. A message counts as proven if the body also has its id, at
                          the same index

A salvaged record has as many messages as the old one, with an empty message in place of each missing one. So the rows
of the others stay valid, and so does what the dispatch log says about indices in the record.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway import batch, limits
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer, Numbers, section_of
from fairway.errors import BadName, Refused, RemoteProtocolError, invariant
from fairway.names import Subject
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import Record, RecordHeader, padded

Sequences: TypeAlias = NDArray[np.uint64]

_FIXED = struct.Struct("<HHI")  # length of the name, flags, zero
_LISTED = 1  # flag: every sequence is listed


class BucketRecord(NamedTuple):
    """One record of a bucket, opened."""

    subject: Subject
    subject_id: int
    sequences: Sequences
    data: bytes  # the batch


class BucketIndex(NamedTuple):
    """Due times, key hashes and ids of messages, without opening their batch."""

    due_ms: NDArray[np.int64]  # 0: at once
    key: NDArray[np.uint64]  # hash; 0: none
    id_high: NDArray[np.uint64]
    id_low: NDArray[np.uint64]

    def only(self, chosen: NDArray[np.int64]) -> BucketIndex:
        return BucketIndex(self.due_ms[chosen], self.key[chosen], self.id_high[chosen], self.id_low[chosen])


def pack(subject: Subject, sequences: Sequences, data: bytes) -> bytes:
    """The body of a SCHEDULE record. Its header has the subject id, first sequence and count."""
    invariant(len(sequences) <= limits.BATCH_MESSAGES_MAX, "a piece that is written can be read again")
    name = subject.encode()
    is_run = len(sequences) == 1 or bool((np.diff(sequences) == 1).all())
    listed = b"" if is_run else sequences.astype("<u8").tobytes()
    return padded(_FIXED.pack(len(name), 0 if is_run else _LISTED, 0) + name) + listed + data


def unpack(record: Record) -> BucketRecord:
    """Open a record whose checksums hold. `RemoteProtocolError` if the body breaks its format all the same."""
    body, count, first = record.body, record.header.count, record.header.first_sequence
    try:
        length, flags, _ = _FIXED.unpack_from(body)
        subject = Subject.parse_any(body[_FIXED.size : _FIXED.size + length].decode())
    except (struct.error, UnicodeDecodeError, BadName) as error:
        raise RemoteProtocolError(f"a piece cannot be read: {error}") from error
    if flags & ~_LISTED:
        raise RemoteProtocolError(f"piece flags {flags:#x} must be understood and are not; upgrade this program")
    at = _FIXED.size + length + -(_FIXED.size + length) % 8
    if flags & _LISTED:
        if len(body) < at + 8 * count:
            raise RemoteProtocolError("the sequences of a piece are cut short")
        sequences = np.frombuffer(body, "<u8", count, at)
        at += 8 * count
    else:
        sequences = np.arange(first, first + count, dtype=np.uint64)
    data = body[at:]
    if batch.peek(data).count != count:
        raise RemoteProtocolError(f"a piece of {count} messages holds a batch of {batch.peek(data).count}")
    return BucketRecord(subject, record.header.subject_id, sequences, data)


def listed_in(body: bytes, count: int) -> Sequences | None:
    """The sequences that a body lists, which may be damaged; None if it lists none."""
    if len(body) < _FIXED.size:
        return None
    length, flags, _ = _FIXED.unpack_from(body)
    at = _FIXED.size + length + -(_FIXED.size + length) % 8
    if not flags & _LISTED or len(body) < at + 8 * count:
        return None
    sequences = np.frombuffer(body, "<u8", count, at)
    return sequences if bool((np.diff(sequences.astype(np.float64)) > 0).all()) else None


class Layout(NamedTuple):
    """Where the parts of a body lie."""

    is_listed: bool
    batch_at: int


def layout_in(body: bytes, subject: Subject, count: int) -> Layout | None:
    """The layout of a body that may be damaged; None if the damage hides the layout.

    One flag tells a list from a run, and the flag itself may be damaged. So the header of the batch must lie where the
    layout has it, and fit the body. If the header fits nowhere, it is damaged. Then everything before the batch must be
    that of a run: of a list, nothing could be proven without the batch."""
    name = subject.encode()
    before_run = padded(_FIXED.pack(len(name), 0, 0) + name)
    run, listed = Layout(False, len(before_run)), Layout(True, len(before_run) + 8 * count)
    fitting = [each for each in (run, listed) if _fits(body, each, count)]
    if not fitting and body.startswith(before_run):
        return run
    return fitting[0] if len(fitting) == 1 else None


def _fits(body: bytes, layout: Layout, count: int) -> bool:
    try:
        header = batch.peek(body[layout.batch_at :])
    except RemoteProtocolError:
        return False
    return header.count == count and header.size == len(body) - layout.batch_at


def index_of(data: bytes) -> BucketIndex:
    """The index of a batch that was checked."""
    return BucketIndex(*section_of(data, batch.peek(data)))


_NOBODY = 1  # producer id for batches in which every message has its own explicit id


class Claim(NamedTuple):
    """Which messages a damaged record held, as far as known."""

    sequences: Sequences  # by index
    is_known: NDArray[np.bool_]  # by index
    ids: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None  # as the body has them; None: no need to compare


class Salvage(NamedTuple):
    """The messages of a damaged record that the message log still has."""

    piece: BucketRecord
    is_there: NDArray[np.bool_]  # by index
    messages_from: int  # the lowest position in the message log that a message was read from
    is_awaited: bool  # another copy may have more of them


def claim_of(header: RecordHeader, body: bytes, subject: Subject) -> Claim | None:
    """The claim that a damaged body itself proves; None: nothing is proven."""
    count = header.count
    layout = layout_in(body, subject, count)
    if layout is None:
        return None
    if not layout.is_listed:
        run = np.arange(header.first_sequence, header.first_sequence + count, dtype=np.uint64)
        return Claim(run, np.ones(count, np.bool_))
    index = index_of(body[layout.batch_at :])
    listed = np.frombuffer(body, "<u8", count, layout.batch_at - 8 * count)
    return Claim(listed, np.ones(count, np.bool_), (index.id_high, index.id_low))


def salvage(messages: MessageLog, header: RecordHeader, subject: Subject, claim: Claim) -> Salvage | None:
    """Collect the messages of a claim; None if the message log has none of them."""
    found = _Collection(header.count)
    subject_id, log = header.subject_id, messages
    known = np.flatnonzero(claim.is_known)
    order = known[np.argsort(claim.sequences[known], kind="stable")]
    ordered, at = claim.sequences[order], 0
    while at < len(ordered):
        sequence = int(ordered[at])
        entry = next(log.views.entries.entries(subject_id, sequence, log.log.end), None)
        if entry is None:
            break
        if entry.first_sequence > sequence:  # the log dropped the message, or its index lost it
            at = int(np.searchsorted(ordered, np.uint64(entry.first_sequence)))
            continue
        end = max(int(np.searchsorted(ordered, np.uint64(entry.end_sequence))), at + 1)
        try:
            for stored in log.read_entries(subject_id, [entry]):
                found.add(stored, order[at:end], claim)
        except Refused:  # raised by a master whose replicas may have what it lost
            found.is_awaited = True
        at = end
    if not found.batches:
        return None
    data = found.encode(header.appended_ms)
    return Salvage(
        BucketRecord(subject, subject_id, claim.sequences, data),
        found.owner >= 0,
        found.messages_from,
        found.is_awaited,
    )


class _Collection:
    """Batches of the message log, and where in them each message of a record is."""

    def __init__(self, count: int) -> None:
        self.batches: list[StoredBatch] = []
        self.owner: Numbers = np.full(count, -1, np.int64)  # by index in the record: number of its batch; -1: missing
        self.places: Numbers = np.zeros(count, np.int64)  # by index in the record: the index in its batch
        self.messages_from = 0
        self.is_awaited = False

    def add(self, stored: StoredBatch, indices: Numbers, claim: Claim) -> None:
        places = (claim.sequences[indices] - np.uint64(stored.entry.first_sequence)).astype(np.int64)
        if claim.ids is not None:
            index, (high, low) = index_of(stored.data), claim.ids
            is_proven = (index.id_high[places] == high[indices]) & (index.id_low[places] == low[indices])
            indices, places = indices[is_proven], places[is_proven]
        if len(indices):
            position = stored.entry.position
            self.messages_from = min(self.messages_from, position) if self.batches else position
            self.owner[indices], self.places[indices] = len(self.batches), places
            self.batches.append(stored)

    def encode(self, created_ms: int) -> bytes:
        """A batch of all messages, with an empty one in place of each missing one."""
        count = len(self.owner)
        sheets = [BatchArrays(each.data) for each in self.batches]
        empty = BatchArrays(batch.encode([b""] * count, producer_id=_NOBODY, first_sequence=0, created_ms=created_ms))
        composer, due_ms = BatchComposer(is_copying=True), np.zeros(count, np.int64)
        for part in np.split(np.arange(count), np.flatnonzero(np.diff(self.owner)) + 1):
            owner, places = int(self.owner[part[0]]), self.places[part]
            if owner < 0:
                composer.take(empty, part)
            else:
                composer.take(sheets[owner], places)
                due_ms[part] = sheets[owner].due_ms[places]
        return composer.encode(_NOBODY, 0, due_ms)
