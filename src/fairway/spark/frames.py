"""Arrow record batches for Spark, made of stored batches without Python per row; the columns of a message.

`MESSAGES` has the columns for Spark; `arrow_schema` gives them to Arrow with the same types and nullability.

A stored batch already holds payload, key, tags, headers and times as Arrow. The other columns (subject, sequence, id,
time of storing) are computed for a whole frame at once. Small batches are concatenated until a frame has `FRAME_ROWS`,
because a frame costs Spark as much as some hundred rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from fairway.batch import HEADER_BYTES, check, layout
from fairway.batch.arrow import SCHEMA, record_batch
from fairway.batch.check import open_columns
from fairway.batch.layout import padded
from fairway.errors import Misuse
from fairway.protocol import Bytes
from fairway.spark import encode

Columns = tuple[tuple[str, bool], ...]  # names, and whether they may be null
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

MESSAGES: Final = StructType(
    [
        StructField("subject", StringType(), False),
        StructField("broker_group", StringType(), False),
        StructField("sequence", LongType(), False),
        StructField("id", StringType(), False),
        StructField("key", StringType(), True),
        StructField("tags", ArrayType(StringType(), True), True),
        StructField("headers", MapType(StringType(), StringType(), True), True),
        StructField("payload", BinaryType(), False),
        StructField("created_at", TimestampType(), False),
        StructField("appended_at", TimestampType(), False),
    ]
)

_ARROW: Final[dict[type[DataType], pa.DataType]] = {
    StringType: pa.string(),
    LongType: pa.int64(),
    IntegerType: pa.int32(),
    BinaryType: pa.binary(),
    TimestampType: TIMESTAMP,
    ArrayType: pa.list_(pa.string()),
    MapType: pa.map_(pa.string(), pa.string()),
}


def messages(*, include_headers: bool) -> StructType:
    return StructType([field for field in MESSAGES.fields if include_headers or field.name != "headers"])


def columns_of(schema: StructType, whole: StructType = MESSAGES, source: str = "fairway") -> Columns:
    """The columns that a reader gives, and whether they may be null: all, or those that the user asked for."""
    known: dict[str, DataType] = {field.name: field.dataType for field in whole.fields}
    for field in schema.fields:
        if field.name not in known:
            raise Misuse(f"format {source} has no column {field.name!r}: there are {', '.join(known)}")
        if field.dataType != known[field.name]:
            raise Misuse(
                f"column {field.name} is {known[field.name].simpleString()}, not {field.dataType.simpleString()}: "
                "read it as it is, and cast it afterwards"
            )
    return tuple((field.name, field.nullable) for field in schema.fields)


def arrow_schema(columns: Columns, whole: StructType = MESSAGES) -> pa.Schema:
    types = {field.name: _ARROW[type(field.dataType)] for field in whole.fields}
    return pa.schema([pa.field(name, types[name], nullable=is_nullable) for name, is_nullable in columns])


def repeated(text: str, rows: int) -> pa.Array:
    """A column with the same text in every row."""
    return pa.repeat(pa.scalar(text, pa.string()), rows)


def times(values_ms: Any, mask: Any = None) -> pa.Array:
    """A column of times, from an array of milliseconds; null where the mask is set."""
    return pa.array(values_ms * 1_000, mask=mask).cast(TIMESTAMP)


FRAME_ROWS: Final = 16_000  # twice as fast as 1,000 for a reader alone: more rows share the Python cost of a frame
FRAME_BYTES: Final = 8 << 20  # ends a frame before `FRAME_ROWS` if messages are large
PLAIN_BYTES: Final = 4 << 10  # smaller batches take a short cut, if they have payloads alone


class RowFilter(NamedTuple):
    """The rows that the reader wants; None: any."""

    keys: tuple[str | None, ...] | None = None
    tags: tuple[str, ...] = ()
    is_keyed: bool = False  # only rows with a key


class _BatchPart(NamedTuple):
    """One batch, or the wanted part of it."""

    arrays: pa.RecordBatch | None  # None: a small batch of payloads alone, all of it in `data`
    data: bytes
    rows: int
    size: int
    first_sequence: int
    producer_id: int
    producer_sequence: int
    appended_ms: int
    created_ms: int
    is_created_unset: bool
    explicit: Any  # ids as pairs of numbers, or None


class Framer:
    """Takes batches of one subject, gives frames."""

    def __init__(self, subject: str, broker_group: str, columns: Columns, row_filter: RowFilter) -> None:
        self._subject = subject
        self._broker_group = broker_group
        self._names = [name for name, _ in columns]
        self._schema = arrow_schema(columns)
        self._row_filter = row_filter
        self._parts: list[_BatchPart] = []
        self._rows = self._size = 0

    def add(self, data: Bytes, first_sequence: int, appended_ms: int, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Add the rows of a batch with sequences from `begin` up to `end`; yields a frame when there is enough."""
        part = _part(data, first_sequence, appended_ms, begin, end)
        if part.rows:
            self._parts.append(part)
            self._rows += part.rows
            self._size += part.size
            if self._rows >= FRAME_ROWS or self._size >= FRAME_BYTES:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The rows that have not made a frame yet."""
        parts, self._parts = self._parts, []
        self._rows = self._size = 0
        if parts:
            frame = self._frame(parts)
            if frame.num_rows:
                yield frame

    def _frame(self, parts: list[_BatchPart]) -> pa.RecordBatch:
        counts = np.array([part.rows for part in parts], np.int64)
        columns = _Derived(self._subject, self._broker_group, parts, counts, int(counts.sum()))
        frame = pa.RecordBatch.from_arrays([columns.column(name) for name in self._names], schema=self._schema)
        # The rows that the row filter lets through.
        keys, tags, is_keyed = self._row_filter
        masks = []
        if keys is not None:
            wanted = pa.array([key for key in keys if key is not None], pa.string())
            is_wanted = pc.is_in(columns.stored("key"), value_set=wanted)
            masks.append(pc.or_(is_wanted, pc.is_null(columns.stored("key"))) if None in keys else is_wanted)
        if tags:
            masks.append(pa.array(_tagged(columns.stored("tags"), tags)))
        if is_keyed:
            masks.append(pc.is_valid(columns.stored("key")))
        return frame.filter(functools.reduce(pc.and_, masks)) if masks else frame


@dataclass(frozen=True)
class _Derived:
    """The columns of one frame."""

    subject: str
    broker_group: str
    parts: list[_BatchPart]
    counts: Any  # of rows, part by part
    rows: int

    def column(self, name: str) -> pa.Array:
        match name:
            case "subject":
                return repeated(self.subject, self.rows)
            case "broker_group":
                return repeated(self.broker_group, self.rows)
            case "sequence":
                return pa.array(self._counted([part.first_sequence for part in self.parts], np.int64))
            case "id":
                return self._ids()
            case "appended_at":
                return self._appended_at()
            case "created_at" if any(part.is_created_unset for part in self.parts):
                unset = np.repeat([part.is_created_unset for part in self.parts], self.counts)
                return pc.if_else(pa.array(unset), self._appended_at(), self.stored(name))
            case _:
                return self.stored(name)

    def stored(self, name: str) -> pa.Array:
        """A column that batches carry."""
        arrays: list[pa.Array] = []
        for is_plain, run in itertools.groupby(self.parts, lambda part: part.arrays is None):
            parts = list(run)
            stored = [part.arrays.column(name) for part in parts if part.arrays is not None]
            arrays += [_plain(name, parts)] if is_plain else stored
        return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)

    def _counted(self, firsts: list[int], kind: Any) -> Any:
        """Numbers that count up from `firsts`, part by part."""
        if len(firsts) == 1:
            return np.arange(firsts[0], firsts[0] + self.rows, dtype=kind)
        before = np.cumsum(self.counts) - self.counts
        bases = np.array(firsts, kind) - before.astype(kind)  # may wrap around; the addition below wraps back
        return np.repeat(bases, self.counts) + np.arange(self.rows, dtype=kind)

    def _appended_at(self) -> pa.Array:
        return times(np.repeat(np.array([part.appended_ms for part in self.parts], np.int64), self.counts))

    def _ids(self) -> pa.Array:
        producers = np.repeat(np.array([part.producer_id for part in self.parts], np.uint64), self.counts)
        sequences = self._counted([part.producer_sequence for part in self.parts], np.uint64)
        at = 0
        for part in self.parts:
            if part.explicit is not None:
                has_own = part.explicit[:, 0] != 0
                producers[at : at + part.rows][has_own] = part.explicit[has_own, 0]
                sequences[at : at + part.rows][has_own] = part.explicit[has_own, 1]
            at += part.rows
        return encode.text_column(producers, sequences)


def _part(data: Bytes, first_sequence: int, appended_ms: int, begin: int, end: int) -> _BatchPart:
    if type(data) is bytes and len(data) < PLAIN_BYTES:
        header = check(data)
        is_bare = not header.flags and not header.codec and header.header_length == HEADER_BYTES
        if is_bare and begin <= first_sequence and first_sequence + header.count <= end:
            return _BatchPart(
                None, data, header.count, header.raw_length, first_sequence, header.producer_id,
                header.first_sequence, appended_ms, header.created_ms, header.created_ms == 0, None,
            )  # fmt: skip
    columns = open_columns(data)
    header = columns.header
    low = max(begin - first_sequence, 0)
    count = min(end - first_sequence, header.count) - low
    arrays = record_batch(columns)
    explicit = None
    if header.has_ids:
        explicit = np.frombuffer(layout.explicit_ids(data, header) or b"", np.uint64).reshape(-1, 2)[low : low + count]
    if count < header.count:
        arrays = arrays.slice(low, max(count, 0))
    return _BatchPart(
        arrays,
        b"",
        max(count, 0),
        header.raw_length * max(count, 0) // header.count,
        first_sequence + low,
        header.producer_id,
        header.first_sequence + low,
        appended_ms,
        header.created_ms,
        header.created_ms == 0 and columns.created_at is None,
        explicit,
    )


def _plain(name: str, parts: list[_BatchPart]) -> pa.Array:
    """A column of many small batches at once: making arrays of each would take six times as long."""
    counts = np.array([part.rows for part in parts], np.int64)
    if name == "created_at":
        return times(np.repeat(np.array([part.created_ms for part in parts], np.int64), counts))
    if name != "payload":
        return pa.nulls(int(counts.sum()), SCHEMA.field(name).type)
    ends = [HEADER_BYTES + 4 * (part.rows + 1) for part in parts]
    offsets = np.frombuffer(
        b"".join([part.data[HEADER_BYTES:end] for part, end in zip(parts, ends, strict=True)]), np.int32
    )
    lasts = (
        np.cumsum(counts + 1) - 1
    )  # the index of each batch's last offset: the step from there to the next batch means nothing
    lengths = np.delete(np.diff(offsets), lasts[:-1])
    starts = [padded(end) for end in ends]
    payloads = [
        part.data[start : start + last]
        for part, start, last in zip(parts, starts, offsets[lasts].tolist(), strict=True)
    ]
    joined = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(joined), pa.py_buffer(b"".join(payloads))]
    )


def _tagged(tags: pa.Array, wanted: tuple[str, ...]) -> Any:
    """For every row, whether it has any of these tags."""
    hits = pc.is_in(tags.flatten(), value_set=pa.array(wanted, pa.string()))
    rows = pc.list_parent_indices(tags).to_numpy(zero_copy_only=False)
    mask = np.zeros(len(tags), bool)
    mask[rows[hits.to_numpy(zero_copy_only=False)]] = True
    return mask
