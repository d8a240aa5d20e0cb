"""A checked batch as an Arrow record batch, over the same memory.

The body of a batch *is* Arrow's layout. So the arrays are slices of one foreign buffer that keeps the batch's bytes
alive. Only `created_at` is computed: the format stores milliseconds since the batch, Spark wants `timestamp[us, UTC]`.
A column that the batch does not carry is null in every row. Message ids and due times are not here: Spark derives them
beside the broker's sequence, from the header and the section.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairway.batch.check import BatchColumns, Strings
from fairway.batch.layout import padded
from fairway.errors import Misuse

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise Misuse("to_arrow() needs pyarrow: pip install 'fairway[arrow]'") from error

if TYPE_CHECKING:
    from pyarrow import Array, Buffer, RecordBatch

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_STRINGS = pa.list_(pa.string())
_MAP = pa.map_(pa.string(), pa.string())
_ENTRIES = pa.struct([_MAP.key_field, _MAP.item_field])

SCHEMA = pa.schema(
    [
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tags", _STRINGS),
        pa.field("headers", _MAP),
        pa.field("created_at", _TIMESTAMP, nullable=False),
    ]
)


def record_batch(columns: BatchColumns) -> RecordBatch:
    """Payload, key, tags, headers and created_at of every message."""
    memory = pa.py_buffer(columns.raw)
    if memory.address % 8:  # a batch at an odd place in a larger buffer: Arrow needs aligned numbers
        memory = pa.py_buffer(bytes(columns.raw))
    arrays = [
        _strings(memory, columns.payloads, pa.binary()),
        _keys(memory, columns),
        _tags(memory, columns),
        _headers(memory, columns),
        _created_at(memory, columns),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _strings(memory: Buffer, strings: Strings, kind: Any, validity: Buffer | None = None) -> Array:
    offsets = memory.slice(strings.offsets_at, 4 * (strings.count + 1))
    data = memory.slice(strings.data_at, strings.data_end - strings.data_at)
    return pa.Array.from_buffers(kind, strings.count, [validity, offsets, data])


def _keys(memory: Buffer, columns: BatchColumns) -> Array:
    if columns.keys is None:
        return pa.nulls(columns.header.count, pa.string())
    validity = memory.slice(columns.validity_at, padded((columns.header.count + 7) // 8))
    return _strings(memory, columns.keys, pa.string(), validity)


def _lists(memory: Buffer, columns: BatchColumns, kind: Any, lists_at: int, items: Array) -> Array:
    count = columns.header.count
    return pa.Array.from_buffers(kind, count, [None, memory.slice(lists_at, 4 * (count + 1))], children=[items])


def _tags(memory: Buffer, columns: BatchColumns) -> Array:
    if columns.tags is None:
        return pa.nulls(columns.header.count, _STRINGS)
    return _lists(memory, columns, _STRINGS, columns.tag_lists_at, _strings(memory, columns.tags, pa.string()))


def _headers(memory: Buffer, columns: BatchColumns) -> Array:
    names, values = columns.names, columns.values
    if names is None or values is None:
        return pa.nulls(columns.header.count, _MAP)
    children = [_strings(memory, names, pa.string()), _strings(memory, values, pa.string())]
    entries = pa.Array.from_buffers(_ENTRIES, names.count, [None], children=children)
    return _lists(memory, columns, _MAP, columns.header_lists_at, entries)


def _created_at(memory: Buffer, columns: BatchColumns) -> Array:
    count, created_ms = columns.header.count, columns.header.created_ms
    if columns.created_at is None:
        return pa.repeat(pa.scalar(created_ms * 1_000, _TIMESTAMP), count)
    deltas_ms = pa.Array.from_buffers(pa.int64(), count, [None, memory.slice(columns.created_at, 8 * count)])
    return pc.multiply(pc.add(deltas_ms, created_ms), 1_000).cast(_TIMESTAMP)
