"""The piece: what a record of a bucket holds. Messages of one subject whose due times lie in the bucket.

    name        of the subject: a bucket explains itself, whatever becomes of the message log
    sequences   of the messages, in the delay's message log; left out where they follow on one another
    batch       the messages; their due times, key hashes and ids stand in its section, which is never compressed

A batch that belongs into one bucket as a whole goes there unopened, byte for byte. The index of a piece is read from
the section with numpy: no message is touched.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway import batch, limits
from fairway.delay.sheet import section_of
from fairway.errors import BadName, RemoteProtocolError, invariant
from fairway.names import Subject
from fairway.storage.record import Record, padded

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
    """What there is to know of messages without opening their batch."""

    due_ms: NDArray[np.int64]  # 0: at once
    key: NDArray[np.uint64]  # hash; 0: none
    id_high: NDArray[np.uint64]
    id_low: NDArray[np.uint64]

    def only(self, chosen: NDArray[np.int64]) -> BucketIndex:
        return BucketIndex(self.due_ms[chosen], self.key[chosen], self.id_high[chosen], self.id_low[chosen])


def pack(subject: Subject, sequences: Sequences, data: bytes) -> bytes:
    """The body of a SCHEDULE record; its header has subject id, first sequence and count."""
    invariant(len(sequences) <= limits.BATCH_MESSAGES_MAX, "a piece that is written can be read again")
    name = subject.encode()
    is_run = len(sequences) == 1 or bool((np.diff(sequences) == 1).all())
    listed = b"" if is_run else sequences.astype("<u8").tobytes()
    return padded(_FIXED.pack(len(name), 0 if is_run else _LISTED, 0) + name) + listed + data


def unpack(record: Record) -> BucketRecord:
    """The piece in a record whose checksums hold; `RemoteProtocolError` where it breaks its format all the same."""
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
    """The sequences that a body lists, which may be damaged; None where it lists none."""
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
    """The layout of a body that may be damaged; None where the damage hides the layout.

    One flag tells a list from a run, and may be what is damaged. So the header of the batch must lie where the layout
    has it, and fit the body. If it does so nowhere, the damage is there, and all before it must be that of a run: of a
    list nothing could be proven without the batch."""
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
