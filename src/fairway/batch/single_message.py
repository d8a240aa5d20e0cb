"""Fast paths for a batch of one message: the same bytes and the same checks as `encode` and `check`.

An outbox sends a row at a time, and a program that waits for each receipt sends a message at a time. Such a batch is
one message, with or without a key and an id. The general `encode` and `check` each cost 12 µs of Python, because they
work on whole columns. These paths take a quarter and a third of that (bench/batch).

Fast paths: on anything unusual they return None or False, and the general code decides and finds the error.
"""

from __future__ import annotations

import struct
from typing import Final

from fairway import limits
from fairway.batch import layout
from fairway.batch.checksum import checksum, hash_of
from fairway.batch.identity import MessageId
from fairway.batch.layout import PADDING, BatchHeader, Codec, padded
from fairway.runtime.buffers import Bytes

_HEAD: Final = struct.Struct("<HHHH II II II II Q Q q Q")  # `layout.HEADER` behind its prefix
_SECTION: Final = struct.Struct("<Q")
_ID: Final = struct.Struct("<QQ")
_OFFSETS: Final = struct.Struct("<ii")
_IS_THERE: Final = bytes([1, *bytes(7)])  # the validity of one key
_PAYLOAD_BYTES_MAX: Final = 64 * limits.KIB  # a larger payload is worth the general code, which copies it once


def encode(
    payload: bytes, key: str | None, id: MessageId | None, producer_id: int, first_sequence: int, created_ms: int
) -> bytes | None:
    """The batch of one message; None: the general code must encode it."""
    if type(payload) is not bytes or len(payload) > _PAYLOAD_BYTES_MAX:
        return None
    if not (
        0 < producer_id <= layout.U64_MAX
        and 0 <= first_sequence <= layout.U64_MAX
        and 0 <= created_ms <= layout.TIME_MS_MAX
    ):
        return None
    flags, section, column = 0, b"", b""
    if key is not None:
        if type(key) is not str or not key.isascii() or len(key) > limits.KEY_BYTES_MAX:
            return None
        data = key.encode()
        flags, section = layout.KEYS, _SECTION.pack(hash_of(data))
        column = b"".join((_IS_THERE, _OFFSETS.pack(0, len(data)), data, PADDING[len(data) % 8]))
    if id is not None:
        if not (0 < id[0] <= layout.U64_MAX and 0 <= id[1] <= layout.U64_MAX):
            return None
        flags, section = flags | layout.IDS, section + _ID.pack(*id)
    raw_length = 8 + padded(len(payload)) + len(column)
    head = _HEAD.pack(
        layout.VERSION, layout.HEADER_BYTES, Codec.NONE, 1, flags, 0, layout.HEADER_BYTES + len(section) + raw_length,
        raw_length, raw_length, 0, 0, 0, producer_id, first_sequence, created_ms, 0,
    )  # fmt: skip
    rest = b"".join((head, section, _OFFSETS.pack(0, len(payload)), payload, PADDING[len(payload) % 8], column))
    return layout.PREFIX.pack(layout.MAGIC, checksum(rest)) + rest


def is_sound(view: Bytes, header: BatchHeader) -> bool:
    """Whether a batch of one message is sound in every byte. False: the general code decides."""
    flags = header.flags
    if flags & ~(layout.KEYS | layout.IDS) or header.codec or type(view) is not bytes or len(view) != header.size:
        return False
    start = header.header_length + layout.section_bytes(flags, 1)
    if flags & layout.IDS:
        producer_id, sequence = _ID.unpack_from(view, start - layout.ID_BYTES)
        if sequence and not producer_id:
            return False
    at = _string_end(view, start, limits.BATCH_RAW_BYTES_MAX)
    if at and flags & layout.KEYS:
        key_at, validity = at + 16, view[at : at + 8]
        at = _string_end(view, at + 8, limits.KEY_BYTES_MAX)
        if not at or validity != _IS_THERE:
            return False
        key = view[key_at : key_at + int.from_bytes(view[key_at - 4 : key_at], "little")]
        if not key.isascii() or _SECTION.unpack_from(view, header.header_length)[0] != hash_of(key):
            return False
    return at == start + header.body_length == len(view) and checksum(view[layout.PREFIX_BYTES :]) == header.crc


def _string_end(view: bytes, at: int, size_max: int) -> int:
    """The end of a column of one string that begins at `at`, with its offsets and its padding; 0: not valid."""
    if at + 8 > len(view):
        return 0
    first, last = _OFFSETS.unpack_from(view, at)
    end = at + 8 + last
    if first or not 0 <= last <= size_max or padded(end) > len(view):
        return 0
    return 0 if view[end : padded(end)].strip(b"\0") else padded(end)
