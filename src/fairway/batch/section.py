"""The part of a batch that is never compressed: what the broker reads without opening the body.

Each function takes a batch that was checked and its header, and returns a view over the same memory, or None where the
batch does not carry that part.
"""

from __future__ import annotations

from typing import Literal

from fairway.batch import layout
from fairway.batch.arrays import byte_view
from fairway.batch.layout import BatchHeader
from fairway.world.buffers import Bytes


def key_hashes(view: Bytes, header: BatchHeader) -> memoryview | None:
    """One u64 per message; 0 where it has no key."""
    return _part(view, header, layout.KEYS, 8, "Q")


def due_times_ms(view: Bytes, header: BatchHeader) -> memoryview | None:
    """One i64 per message; 0 where it is due at once."""
    return _part(view, header, layout.DUE, 8, "q")


def explicit_ids(view: Bytes, header: BatchHeader) -> memoryview | None:
    """Two u64 per message: producer id and sequence; both 0 where it has no explicit id."""
    return _part(view, header, layout.IDS, layout.ID_BYTES, "Q")


def _part(view: Bytes, header: BatchHeader, flag: int, item_bytes: int, form: Literal["Q", "q"]) -> memoryview | None:
    if not header.flags & flag:
        return None
    # The parts stand in the order of their flags, so those before this one are the ones with smaller flags.
    start = header.header_length + layout.section_bytes(header.flags & (flag - 1), header.count)
    return byte_view(view)[start : start + item_bytes * header.count].cast(form)
