"""Batches written by hand from the tables of docs/internals/formats.md, sound or not; only the CRC is always right."""

from __future__ import annotations

import struct
from typing import Any

from fairway.batch import checksum

KEYS, DUE, IDS, TAGS, HEADERS, CREATED = 1, 2, 4, 8, 16, 32


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def ints(*values: int) -> bytes:
    """A buffer of int32."""
    return pad(struct.pack(f"<{len(values)}i", *values))


def longs(*values: int) -> bytes:
    """A buffer of int64."""
    return struct.pack(f"<{len(values)}q", *values)


def strings(*items: bytes) -> bytes:
    """Offsets and data."""
    offsets = [sum(map(len, items[:index])) for index in range(len(items) + 1)]
    return ints(*offsets) + pad(b"".join(items))


def seal(data: bytes | bytearray) -> bytes:
    """The same bytes with the right CRC."""
    return bytes(data[:4]) + struct.pack("<I", checksum(bytes(data[8:]))) + bytes(data[8:])


def forge(body: bytes, *, count: int = 1, flags: int = 0, section: bytes = b"", **fields: Any) -> bytes:
    """A batch around this body. A field of the header that is named says what it is told to say."""
    size = 80 + len(section) + len(pad(body))
    values: dict[str, Any] = {
        "magic": b"FWYB", "crc": 0, "version": 1, "header_length": 80, "codec": 0, "count": count,
        "flags": flags, "hints": 0, "size": size, "body_length": len(body), "raw_length": len(body),
        "producer_epoch": 0, "schema_id": 0, "encryption_key_id": 0,
        "producer_id": 7, "first_sequence": 1, "created_ms": 1_700_000_000_000, "tag_filter": 0,
    }  # fmt: skip
    values |= fields
    return seal(struct.pack("<4sIHHHHIIIIIIIIQQqQ", *values.values()) + section + pad(body))
