"""Arrow columns into the bytes of a batch: `batch.encode` for those who have arrays, with no Python per row but for the
hashes of keys. The same rows give the same bytes, always: that is what makes the sink idempotent."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairway import limits
from fairway.batch import layout
from fairway.batch.arrays import padded
from fairway.batch.checksum import checksum
from fairway.batch.hashing import key_hashes_of, tag_filter_of
from fairway.errors import Misuse
from fairway.spark import ids

_MS: Final = 1_000  # Spark's times are in microseconds


class Encoder:
    """Puts one batch together, in the order of the format."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._columns: list[bytes] = []
        self._section: list[bytes] = []
        self._flags = self._tag_filter = 0
        self._created_ms = 0

    def encode(self, *, producer_id: int, first_sequence: int, created_ms: int) -> bytes:
        """The bytes; `created_ms` where no column says it."""
        self._created_ms = created_ms
        self._payload()
        if self._has("key"):
            self._key()
        if self._has("due_at"):
            self._flags |= layout.DUE
            self._section.append(_times_ms(self._rows.column("due_at")).tobytes())
        if self._has("id"):
            self._flags |= layout.IDS
            self._section.append(ids.parse_column(self._rows.column("id")).tobytes())
        if self._has("tags"):
            self._tags()
        if self._has("headers"):
            self._headers()
        if self._has("created_at"):
            self._created_at()
        return self._sealed(producer_id, first_sequence)

    def _has(self, name: str) -> bool:
        """Whether there is such a column, and it says anything."""
        if name not in self._rows.schema.names:
            return False
        column = self._rows.column(name)
        return bool(column.null_count < len(column))

    def _sealed(self, producer_id: int, first_sequence: int) -> bytes:
        raw_length = sum(map(len, self._columns))
        if raw_length > limits.BATCH_RAW_BYTES_MAX:
            raise Misuse(f"a row of {raw_length} bytes: a message has at most {limits.BATCH_RAW_BYTES_MAX}")
        size = layout.HEADER_BYTES + sum(map(len, self._section)) + raw_length
        head = layout.HEADER.pack(
            layout.MAGIC, 0, layout.VERSION, layout.HEADER_BYTES, 0, self._rows.num_rows, self._flags, 0, size,
            raw_length, raw_length, 0, 0, 0, producer_id, first_sequence, self._created_ms, self._tag_filter,
        )  # fmt: skip
        rest = b"".join([head[layout.PREFIX_BYTES :], *self._section, *self._columns])
        return layout.PREFIX.pack(layout.MAGIC, checksum(rest)) + rest

    # --- columns -----------------------------------------------------------------------------------------------------

    def _add(self, data: bytes) -> None:
        self._columns.append(data)
        if len(data) % 8:
            self._columns.append(bytes(padded(len(data)) - len(data)))

    def _strings(self, array: pa.Array, what: str, bytes_max: int) -> None:
        """Offsets and data of a column without nulls."""
        offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset)
        longest = int(np.diff(offsets).max()) if len(array) else 0
        if longest > bytes_max:
            raise Misuse(f"column {what}: at most {bytes_max} bytes each, and one has {longest}")
        first, last = int(offsets[0]), int(offsets[-1])
        self._add((offsets - offsets[0]).astype(np.int32).tobytes())
        data = array.buffers()[2]
        self._add(data.slice(first, last - first).to_pybytes() if data is not None and last > first else b"")

    def _lengths(self, lengths: Any, what: str, items_max: int) -> None:
        """Offsets of a list column."""
        longest = int(lengths.max())
        if longest > items_max:
            raise Misuse(f"column {what}: a message has at most {items_max}, and one has {longest}")
        self._add(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32).tobytes())

    def _payload(self) -> None:
        payload = self._rows.column("payload")
        if payload.null_count:
            raise Misuse("column payload has a null: every message has a payload; filter them out, or coalesce to ''")
        self._strings(payload.cast(pa.binary()), "payload", limits.BATCH_RAW_BYTES_MAX)

    def _key(self) -> None:
        self._flags |= layout.KEYS
        keys = self._rows.column("key")
        valid = np.asarray(keys.is_valid())
        bits = np.packbits(valid, bitorder="little").tobytes()
        filled = pc.fill_null(keys.cast(pa.string()), "")
        self._add(bits)
        self._strings(filled, "key", limits.KEY_BYTES_MAX)
        hashes = key_hashes_of(filled.cast(pa.binary()).to_pylist(), int.from_bytes(bits, "little"))
        self._section.append(hashes)

    def _tags(self) -> None:
        self._flags |= layout.TAGS
        tags = self._rows.column("tags")
        items = tags.flatten().cast(pa.string())
        if items.null_count:
            raise Misuse("column tags holds a null: leave it out of the array")
        self._lengths(np.asarray(pc.fill_null(pc.list_value_length(tags), 0)), "tags", limits.BATCH_TAGS_MAX)
        self._strings(items, "tags", limits.TAG_BYTES_MAX)
        self._tag_filter = tag_filter_of(pc.unique(items).cast(pa.binary()).to_pylist())

    def _headers(self) -> None:
        self._flags |= layout.HEADERS
        headers = self._rows.column("headers")
        offsets = np.frombuffer(headers.buffers()[1], np.int32, len(headers) + 1, 4 * headers.offset)
        first, last = int(offsets[0]), int(offsets[-1])
        names = headers.keys.slice(first, last - first).cast(pa.string())
        values = headers.items.slice(first, last - first).cast(pa.string())
        if values.null_count:
            raise Misuse("column headers holds a null value: a header is text; leave it out of the map")
        self._lengths(np.diff(offsets), "headers", limits.HEADERS_MAX)
        self._strings(names, "headers", limits.BATCH_RAW_BYTES_MAX)
        self._strings(values, "headers", limits.BATCH_RAW_BYTES_MAX)

    def _created_at(self) -> None:
        times = _times_ms(self._rows.column("created_at"))
        self._created_ms = int(times.min())
        deltas = times - self._created_ms
        if deltas.any():
            self._flags |= layout.CREATED
            self._columns.append(deltas.tobytes())


def _times_ms(column: pa.Array) -> Any:
    if column.null_count:
        raise Misuse("a column of times has nulls beside times: give every row a time, or leave the column out")
    times = np.asarray(column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())) // _MS
    if int(times.min()) < 0 or int(times.max()) > layout.TIME_MS_MAX:
        raise Misuse("a column of times holds one outside the years 1970 to 9999")
    return times.astype(np.int64)
