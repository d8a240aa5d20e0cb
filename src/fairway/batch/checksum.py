"""CRC-32C (Castagnoli), which SSE 4.2 and ARMv8 compute in hardware: the one checksum of the project, and two hashes.

**Checksum.** The C function takes read-only bytes or an ndarray, but no memoryview and no bytearray. So bytes go
straight through, a small view is copied, and a large view is passed through numpy. The result of one call may start the
next: the CRC of two parts in a row is the CRC of their concatenation.

The hashes are pure functions of the format, the same for ever and in every language: tag → mask, key → hash.

**Tag filter.** A Bloom filter of 64 bits: three bits per tag, taken from the CRC-32C of its UTF-8 bytes. A batch's
filter is the OR over its tags. So a batch with `filter & mask != mask` has no message with that tag, and is skipped
unread. Three bits are near the best choice for 8 to 16 different tags in a batch.

**Key hash.** CRC-32C in the low half and CRC-32 (zlib's) in the high half. Both polynomials run at memory speed and are
easy to get in every language, so the broker can verify the hashes. The hash does not resist a sender that wants a
collision, and need not: whoever may send to a subject may as well send under the key itself. 0 means "no key". A key
whose hash comes out as 0 (the empty key does) has the hash 1.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

import google_crc32c

from fairway.batch.layout import numpy_or_none
from fairway.runtime.buffers import Bytes

# 16 KiB: below it a copy costs less than an ndarray (0.5 against 0.7 µs for 4 KiB), above it more (5 against 4 µs for
# 64 KiB).
_LEND_FROM_BYTES = 16 * 1024
# 256 KiB: the C function holds the interpreter lock, 5 ms for 63 MiB, and so stops other threads, an event loop among
# them. So the check of a large batch takes a part at a time, 0.02 ms.
_PART_BYTES = 256 * 1024


# For callers that have bytes and count tenths of a microsecond.
checksum_of_bytes: Callable[[bytes], int] = google_crc32c.value


def checksum(data: Bytes, start: int = 0) -> int:
    """CRC-32C of `data`, continued from `start`."""
    if type(data) is bytes:
        return google_crc32c.extend(start, data)  # type: ignore[no-any-return]
    numpy = numpy_or_none() if len(data) >= _LEND_FROM_BYTES else None
    # The pure Python form of the library does integer arithmetic on its input, which wraps in an ndarray.
    if numpy is None or google_crc32c.implementation != "c":
        return google_crc32c.extend(start, bytes(data))  # type: ignore[no-any-return]
    array = numpy.frombuffer(data, numpy.uint8)
    for at in range(0, len(array), _PART_BYTES):
        start = google_crc32c.extend(start, array[at : at + _PART_BYTES])
    return start


NO_KEY = 0
_ZERO_IS = 1


@functools.lru_cache(maxsize=4_096)  # tags are few and return in every batch
def tag_mask_of(tag: bytes) -> int:
    """The bits that one tag sets, from its UTF-8 bytes."""
    crc: int = google_crc32c.value(tag)
    return 1 << (crc & 63) | 1 << (crc >> 6 & 63) | 1 << (crc >> 12 & 63)


def tag_mask(tag: str) -> int:
    """The bits that one tag sets in a tag filter."""
    return tag_mask_of(tag.encode())


def tag_filter_of(tags: Iterable[bytes]) -> int:
    """The filter of a batch with these tags."""
    bits = 0
    for tag in set(tags):
        bits |= tag_mask_of(tag)
    return bits


def may_hold(tag_filter: int, mask: int) -> bool:
    """False: no message of the batch has the tag (or all of the tags) of that mask. True: read the batch to know."""
    return tag_filter & mask == mask


def key_hash(key: str) -> int:
    """The hash of one key."""
    return hash_of(key.encode())


def hash_of(key: bytes) -> int:
    """The hash of one key, from its UTF-8 bytes."""
    low: int = google_crc32c.value(key)
    return zlib.crc32(key) << 32 | low or _ZERO_IS


def key_hashes_of(keys: Sequence[bytes], validity: int) -> bytes:
    """The hashes of all keys, u64 each, little-endian.

    Bit i of `validity` is set if message i has a key; a message without a key is given as b"".
    """
    halves = array("I", bytes(8 * len(keys)))
    halves[::2] = array("I", map(google_crc32c.value, keys))
    halves[1::2] = array("I", map(zlib.crc32, keys))
    hashes = array("Q", halves.tobytes())
    if hashes.count(NO_KEY) + validity.bit_count() != len(keys):  # the hash of an existing key came out as 0
        for index, value in enumerate(hashes):
            if value == NO_KEY and validity >> index & 1:
                hashes[index] = _ZERO_IS
    return hashes.tobytes()
