"""Message ids as text, and the bytes of batches, made from Arrow columns with numpy.

`text_column` writes a million message ids as `batch.identity` writes one. 26 characters are 13 pairs of 10 bits. Within
one stream most pairs are the same for all rows, so each of those is filled in as one value; only the last two or three
are computed per row.

`Encoder` makes the bytes of a batch as `batch.encode` does, without Python per row except for the hashes of keys. The
same rows always give the same bytes: the sink is idempotent because of that.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairway import limits
from fairway.batch import MessageId, layout
from fairway.batch.checksum import checksum, key_hashes_of, tag_filter_of
from fairway.batch.identity import TEXT_CHARS
from fairway.batch.layout import padded
from fairway.errors import Misuse

_DIGITS: Final = np.array([ord(str(MessageId(0, value))[-1]) for value in range(32)], np.uint8)
_PAIRS: Final = np.stack([np.repeat(_DIGITS, 32), np.tile(_DIGITS, 32)], axis=1).reshape(-1).view(np.uint16)
_HIGH_SHIFTS: Final = (56, 46, 36, 26, 16, 6)  # pairs that lie in the producer id alone
_LOW_SHIFTS: Final = (50, 40, 30, 20, 10, 0)  # pairs that lie in the sequence alone
_VALUES: Final = np.full(256, 255, np.uint8)
_VALUES[_DIGITS] = np.arange(32, dtype=np.uint8)
_TEN_BITS: Final = np.uint64(1023)


def text_column(producers: Any, sequences: Any) -> pa.Array:
    """The ids of messages, given as two arrays of 64-bit numbers."""
    count = len(sequences)
    pairs = np.empty((count, 13), np.uint16)
    high, low = _Numbers(producers), _Numbers(sequences)
    for place, shift in enumerate(_HIGH_SHIFTS):
        pairs[:, place] = high.pair(shift)
    mixed = (low.values >> np.uint64(60)) | ((high.values & np.uint64(63)) << np.uint64(4))
    pairs[:, 6] = _Numbers(mixed).pair(0)
    for place, shift in enumerate(_LOW_SHIFTS, 7):
        pairs[:, place] = low.pair(shift)
    offsets = np.arange(0, TEXT_CHARS * (count + 1), TEXT_CHARS, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(pairs)])


class _Numbers:
    """64-bit numbers, with their least and greatest."""

    def __init__(self, values: Any) -> None:
        self.values = values.astype(np.uint64, copy=False)
        self._least, self._most = int(self.values.min()), int(self.values.max())

    def pair(self, shift: int) -> Any:
        """Two characters for every row; one value if all rows have the same."""
        if self._least >> shift == self._most >> shift:
            return _PAIRS[self._least >> shift & 1023]
        return _PAIRS[((self.values >> np.uint64(shift)) & _TEN_BITS).astype(np.intp)]


def parse_column(texts: pa.Array) -> Any:
    """Ids as pairs of numbers, as a batch holds them: an array of shape (rows, 2)."""
    if texts.null_count:
        raise Misuse("column id has a null: give every row an id, or leave out the option keepIds")
    joined = "".join(texts.to_pylist()).encode()
    if len(joined) != TEXT_CHARS * len(texts):
        raise Misuse(f"column id holds something else than message ids of {TEXT_CHARS} characters")
    values = _VALUES[np.frombuffer(joined, np.uint8)].reshape(-1, TEXT_CHARS).astype(np.uint64)
    if (values > 31).any() or (values[:, 0] > 7).any():
        raise Misuse("column id holds something that is not a message id in Crockford's base 32")
    low = np.zeros(len(texts), np.uint64)
    high = np.zeros(len(texts), np.uint64)
    for place in range(TEXT_CHARS):
        high = (high << np.uint64(5)) | (low >> np.uint64(59))
        low = (low << np.uint64(5)) | values[:, place]
    return np.stack([high, low], axis=1)


_MS: Final = 1_000  # Spark's times are in microseconds


class Encoder:
    """Makes one batch, in the order of the format."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._columns: list[bytes] = []
        self._section: list[bytes] = []
        self._flags = self._tag_filter = 0
        self._created_ms = 0

    def encode(self, *, producer_id: int, first_sequence: int, created_ms: int) -> bytes:
        """The bytes of the batch; `created_ms` is used if no column gives a time."""
        self._created_ms = created_ms
        self._payload()
        if self._has("key"):
            self._key()
        if self._has("due_at"):
            self._flags |= layout.DUE
            self._section.append(_times_ms(self._rows.column("due_at")).tobytes())
        if self._has("id"):
            self._flags |= layout.IDS
            self._section.append(parse_column(self._rows.column("id")).tobytes())
        for name, write in (("tags", self._tags), ("headers", self._headers), ("created_at", self._created_at)):
            if self._has(name):
                write()
        return self._sealed(producer_id, first_sequence)

    def _has(self, name: str) -> bool:
        """Whether there is such a column with at least one value."""
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
