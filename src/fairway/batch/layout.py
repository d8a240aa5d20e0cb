"""The layout of a batch, byte by byte (docs/internals/formats.md has the same as tables).

    header      80 bytes, what the broker needs to know of the batch as a whole
    section     never compressed, because the broker reads it: key hashes, due times, explicit ids
    body        the columns in Arrow's own layout, as they are or as one zstd frame

All numbers are little-endian. Every part begins at a multiple of 8 and is padded with zeros to the next. There is no
directory of buffers, because each buffer's length follows from the count and from the last offset of the buffer before
it. So there is exactly one way to read a batch, and no directory can contradict the buffers.

The first 8 bytes are magic and CRC, so that the CRC is one pass over the rest. A flag that must be understood names a
column: a reader that does not know the column cannot find the next one. A flag that may be ignored can only announce
more header, which such a reader skips by the header length.

`key_hashes`, `due_times_ms` and `explicit_ids` read the section without opening the body. Each takes a checked batch
and its header, and returns a view over the same memory, or None if the batch does not carry that part.

A core install of the client has no numpy, so no function of the format may need it. `numpy_for` gives numpy if it is
installed and pays. It is imported on first use, because the import takes longer than encoding ten thousand batches.
"""

from __future__ import annotations

import enum
import functools
import struct
import sys
from types import ModuleType
from typing import Final, Literal

import msgspec

from fairway import limits
from fairway.errors import RemoteProtocolError, invariant
from fairway.runtime.buffers import Bytes

invariant(
    sys.byteorder == "little", "Fairway stores little-endian arrays as they are and needs a little-endian machine"
)

MAGIC: Final = b"FWYB"
VERSION: Final = 1

# magic, crc | version, header length, codec, count | must, may | size, body length | raw length, producer epoch
# | schema id, encryption key id | producer id | first sequence | created ms | tag filter
HEADER: Final = struct.Struct("<4sI HHHH II II II II Q Q q Q")
HEADER_BYTES: Final = HEADER.size
HEADER_BYTES_MAX: Final = 512  # room for decades of additions, and a bound on a hostile length
_FLAGS_AT: Final = 16  # the lowest byte of the flags that must be understood
_RAW_LENGTH_AT: Final = 32
_RAW_LENGTH: Final = struct.Struct("<I")
PREFIX: Final = struct.Struct("<4sI")  # magic and crc, which the crc does not cover
PREFIX_BYTES: Final = PREFIX.size

# Flags that must be understood: the parts that the batch has.
KEYS: Final = 1  # key hashes in the section, keys in the body
DUE: Final = 2  # due times in the section
IDS: Final = 4  # explicit ids in the section
TAGS: Final = 8  # tags in the body
HEADERS: Final = 16  # headers in the body
CREATED: Final = 32  # created-at deltas in the body
FLAGS_KNOWN: Final = KEYS | DUE | IDS | TAGS | HEADERS | CREATED

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
_SEQUENCE_SAFE: Final = U64_MAX - limits.BATCH_MESSAGES_MAX  # no batch that begins here runs past 2**64
# 9999-12-31T23:59:59.999Z, the last instant that datetime, Spark and every database can hold.
TIME_MS_MAX: Final = 253_402_300_799_999

ID_BYTES: Final = 16
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# Four bytes of zstd (a run-length block) make at most 128 KiB, so a claim beyond that ratio is false.
ZSTD_RATIO_MAX: Final = 128 * 1024 // 4


# 64 items: below it a list is faster than an ndarray (1 against 5 µs for 16 offsets), above it slower (23 against 3 µs
# for 1,000).
NUMPY_FROM_ITEMS = 64


@functools.cache
def numpy_or_none() -> ModuleType | None:
    """numpy, or None if it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def numpy_for(items: int) -> ModuleType | None:
    """numpy, if it is installed and pays for that many items."""
    return numpy_or_none() if items >= NUMPY_FROM_ITEMS else None


def byte_view(data: Bytes) -> memoryview:
    """A flat view of the bytes, whatever type holds them."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


PADDING: Final = [bytes(-length % 8) for length in range(8)]  # to append to a buffer, by its length modulo 8


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & -8


class Codec(enum.IntEnum):
    """How the body is compressed."""

    NONE = 0
    ZSTD = 1


_CODECS: Final = tuple(Codec)


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of a batch."""

    crc: int
    header_length: int
    codec: Codec
    count: int
    flags: int  # flags that must be understood
    hints: int  # flags that may be ignored
    size: int  # bytes of the whole batch
    body_length: int  # bytes of the columns as stored, without padding
    raw_length: int  # bytes of the columns before compression
    producer_epoch: int
    schema_id: int
    producer_id: int
    first_sequence: int  # of the first message, in the producer's stream
    created_ms: int
    tag_filter: int

    @property
    def has_keys(self) -> bool:
        return bool(self.flags & KEYS)

    @property
    def has_due(self) -> bool:
        return bool(self.flags & DUE)

    @property
    def has_ids(self) -> bool:
        return bool(self.flags & IDS)


def is_delayed(view: Bytes) -> bool:
    """Whether a batch has due times; for bytes that were not checked yet."""
    return len(view) >= HEADER_BYTES and bool(view[_FLAGS_AT] & DUE)


def raw_length(view: Bytes) -> int:
    """The length of the columns before compression, of a batch that was checked before."""
    length: int = _RAW_LENGTH.unpack_from(view, _RAW_LENGTH_AT)[0]
    return length


def section_bytes(flags: int, count: int) -> int:
    """Length of the section that is never compressed."""
    per_message = (8 if flags & KEYS else 0) + (8 if flags & DUE else 0) + (ID_BYTES if flags & IDS else 0)
    return per_message * count


def peek(view: Bytes) -> BatchHeader:
    """Parse the header and check that its fields agree; the bytes behind it are not read.

    For a batch that was verified before, or whose size must be known: `view` may end with the header.
    """
    if len(view) < HEADER_BYTES:
        raise RemoteProtocolError(f"a batch has a header of at least {HEADER_BYTES} bytes; here are {len(view)}")
    (
        magic, crc, version, header_length, codec, count, flags, hints, size, body_length, raw_length, producer_epoch,
        schema_id, encryption_key_id, producer_id, first_sequence, created_ms, tag_filter,
    ) = HEADER.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a batch: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise RemoteProtocolError(f"batch format version {version}: this program reads version {VERSION}; upgrade it")
    if flags & ~FLAGS_KNOWN:
        raise RemoteProtocolError(
            f"batch flags {flags & ~FLAGS_KNOWN:#x} must be understood and are not; upgrade this program"
        )
    if encryption_key_id:
        raise RemoteProtocolError(
            f"batch encrypted with key {encryption_key_id}: this program does not know encryption"
        )
    if codec >= len(_CODECS):
        raise RemoteProtocolError(f"unknown batch codec {codec}")
    header = BatchHeader(
        crc, header_length, _CODECS[codec], count, flags, hints, size, body_length, raw_length, producer_epoch,
        schema_id, producer_id, first_sequence, created_ms, tag_filter,
    )  # fmt: skip
    is_plain = (  # nearly every batch is plain; the exact checks of the others cost a microsecond
        header_length == HEADER_BYTES
        and not codec
        and not flags
        and not tag_filter
        and body_length == raw_length <= limits.BATCH_RAW_BYTES_MAX
        and size == HEADER_BYTES + body_length
        and not body_length % 8
        and 0 < count <= limits.BATCH_MESSAGES_MAX
        and producer_id
        and first_sequence <= _SEQUENCE_SAFE
        and 0 <= created_ms <= TIME_MS_MAX
    )
    if not is_plain:
        _check_values(header)
        _check_lengths(header)
    return header


def _check_values(header: BatchHeader) -> None:
    if not 1 <= header.count <= limits.BATCH_MESSAGES_MAX:
        raise RemoteProtocolError(f"batch of {header.count} messages: 1 to {limits.BATCH_MESSAGES_MAX} are allowed")
    if not header.producer_id:
        raise RemoteProtocolError("batch of producer 0: that id names nobody")
    if header.first_sequence > U64_MAX - header.count + 1:
        raise RemoteProtocolError(
            f"batch of {header.count} messages from sequence {header.first_sequence} runs past 2**64"
        )
    if not 0 <= header.created_ms <= TIME_MS_MAX:
        raise RemoteProtocolError(f"batch created at {header.created_ms} ms: outside the years 1970 to 9999")
    if header.tag_filter and not header.flags & TAGS:
        raise RemoteProtocolError("batch with a tag filter but no tags")


def _check_lengths(header: BatchHeader) -> None:
    length = header.header_length
    if length != HEADER_BYTES and (not header.hints or length % 8 or not HEADER_BYTES < length <= HEADER_BYTES_MAX):
        raise RemoteProtocolError(f"batch header of {length} bytes with flags {header.hints:#x}")
    if header.raw_length > limits.BATCH_RAW_BYTES_MAX or header.raw_length % 8:
        raise RemoteProtocolError(
            f"batch columns of {header.raw_length} bytes: a multiple of 8 up to 64 MiB is allowed"
        )
    if header.codec is Codec.NONE:
        if header.body_length != header.raw_length:
            raise RemoteProtocolError(f"plain body of {header.body_length} bytes for columns of {header.raw_length}")
    elif not header.body_length < header.raw_length <= header.body_length * ZSTD_RATIO_MAX:
        raise RemoteProtocolError(f"no zstd frame of {header.body_length} bytes holds {header.raw_length} bytes")
    size = length + section_bytes(header.flags, header.count) + padded(header.body_length)
    if header.size != size:
        raise RemoteProtocolError(f"batch says it has {header.size} bytes, its parts add up to {size}")


def key_hashes(view: Bytes, header: BatchHeader) -> memoryview | None:
    """One u64 per message; 0 without a key."""
    return _part(view, header, KEYS, 8, "Q")


def due_times_ms(view: Bytes, header: BatchHeader) -> memoryview | None:
    """One i64 per message; 0: due at once."""
    return _part(view, header, DUE, 8, "q")


def explicit_ids(view: Bytes, header: BatchHeader) -> memoryview | None:
    """Two u64 per message: producer id and sequence; both 0 without an explicit id."""
    return _part(view, header, IDS, ID_BYTES, "Q")


def _part(view: Bytes, header: BatchHeader, flag: int, item_bytes: int, form: Literal["Q", "q"]) -> memoryview | None:
    if not header.flags & flag:
        return None
    # The parts are in the order of their flags, so smaller flags come before this one.
    start = header.header_length + section_bytes(header.flags & (flag - 1), header.count)
    return byte_view(view)[start : start + item_bytes * header.count].cast(form)
