"""Arrow reads the batch where it lies: every buffer but the computed column points into the input's memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow
import pytest

from fairway.batch import Codec, decode, encode

IDENTITY: dict[str, Any] = {"producer_id": 7, "first_sequence": 1, "created_ms": 1_700_000_000_123}
COLUMNS: dict[str, Any] = {
    "keys": ["order-1", None, "заказ"],
    "tags": [["paid", "größe"], [], ["paid"]],
    "headers": [{"trace": "a1", "ort": "Köln"}, {}, {"trace": ""}],
    "created_deltas_ms": [0, -5, 1_000],
}
PAYLOADS = [b"one", b"", b"\xff\x00three"]


def buffers(array: pyarrow.Array) -> list[tuple[int, int]]:
    return [(buffer.address, buffer.address + buffer.size) for buffer in array.buffers() if buffer is not None]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers_lie_in_the_input(kind: Any) -> None:
    data = kind(encode(PAYLOADS, **IDENTITY, **COLUMNS))
    memory = pyarrow.py_buffer(data)
    rows = decode(data).to_arrow()
    found = 0
    for name in ("payload", "key", "tags", "headers"):
        for start, end in buffers(rows.column(name)):
            assert memory.address <= start <= end <= memory.address + memory.size, name
            found += 1
    assert found == 2 + 3 + 3 + 5


def test_rows_outlive_the_batch() -> None:
    rows = decode(bytes(bytearray(encode(PAYLOADS, **IDENTITY, **COLUMNS)))).to_arrow()
    assert rows.column("payload").to_pylist() == PAYLOADS


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("times", [1, 50])
def test_arrow_reads_the_same(codec: Codec, times: int) -> None:
    batch = decode(encode(PAYLOADS * times, **IDENTITY, codec=codec, **{k: v * times for k, v in COLUMNS.items()}))
    rows = batch.to_arrow()
    rows.validate(full=True)
    assert rows.column("payload").to_pylist() == batch.payloads
    assert rows.column("key").to_pylist() == batch.keys()
    assert rows.column("tags").to_pylist() == batch.tag_lists()
    assert [dict(pairs) for pairs in rows.column("headers").to_pylist()] == batch.header_maps()
    created = [datetime.fromtimestamp(ms / 1_000, UTC) for ms in batch.created_times_ms()]
    assert rows.column("created_at").to_pylist() == created


def test_absent_columns_are_null() -> None:
    rows = decode(encode([b"a", b"b"], **IDENTITY)).to_arrow()
    rows.validate(full=True)
    created = datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    empty = {"key": None, "tags": None, "headers": None, "created_at": created}
    assert rows.to_pylist() == [{"payload": b"a"} | empty, {"payload": b"b"} | empty]


def test_schema_is_what_spark_wants_and_always_the_same() -> None:
    schema = decode(encode([b"a"], **IDENTITY)).to_arrow().schema
    assert schema == decode(encode(PAYLOADS, **IDENTITY, **COLUMNS)).to_arrow().schema
    assert schema.names == ["payload", "key", "tags", "headers", "created_at"]
    assert schema.types == [
        pyarrow.binary(),
        pyarrow.string(),
        pyarrow.list_(pyarrow.string()),
        pyarrow.map_(pyarrow.string(), pyarrow.string()),
        pyarrow.timestamp("us", tz="UTC"),
    ]
    assert [field.nullable for field in schema] == [False, True, True, True, False]


def test_times_at_the_end_of_the_range_fit() -> None:
    last_ms = 253_402_300_799_999
    identity = IDENTITY | {"created_ms": last_ms}
    for deltas in (None, [-last_ms]):
        decode(encode([b""], **identity, created_deltas_ms=deltas)).to_arrow().validate(full=True)


def test_batch_at_an_odd_address_is_copied_once_and_read() -> None:
    data = encode(PAYLOADS, **IDENTITY, **COLUMNS)
    rows = decode(memoryview(b"\0" + data)[1:]).to_arrow()
    rows.validate(full=True)
    assert rows.column("key").to_pylist() == COLUMNS["keys"]
    assert all(start % 8 == 0 for start, _ in buffers(rows.column("tags")))
