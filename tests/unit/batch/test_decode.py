"""What goes in comes out: by index, by column, with everything or nothing, from any kind of buffer."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fairway.batch import (
    BatchHeader,
    Codec,
    MessageId,
    check,
    decode,
    encode,
    explicit_ids,
    key_hash,
    key_hashes,
    layout,
    peek,
)
from fairway.batch import due_times_ms as due_section
from fairway.batch.checksum import checksum

IDENTITY: dict[str, Any] = {"producer_id": 7, "first_sequence": 100, "created_ms": 1_700_000_000_000}
PAYLOADS = [b"one", b"", b"\xff\x00three"]
COLUMNS: dict[str, Any] = {
    "keys": ["order-1", None, "заказ"],
    "tags": [["paid", "größe"], [], ["paid"]],
    "headers": [{"trace": "a1", "ort": "Köln"}, {}, {"trace": ""}],
    "created_deltas_ms": [0, -5, 1_000],
    "due_ms": [0, 1_800_000_000_000, 0],
    "ids": [None, MessageId(2**64 - 1, 2**64 - 1), None],
}


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("times", [1, 40])
def test_everything_comes_back(codec: Codec, kind: Any, times: int) -> None:
    columns = {name: values * times for name, values in COLUMNS.items()}
    batch = decode(kind(encode(PAYLOADS * times, **IDENTITY, **columns, codec=codec)))
    assert batch.payloads == PAYLOADS * times
    assert batch.keys() == columns["keys"]
    assert batch.tag_lists() == columns["tags"]
    assert batch.header_maps() == columns["headers"]
    assert batch.due_times_ms() == columns["due_ms"]
    assert batch.created_times_ms() == [1_700_000_000_000 + delta for delta in columns["created_deltas_ms"]]
    assert batch.ids()[:3] == [MessageId(7, 100), MessageId(2**64 - 1, 2**64 - 1), MessageId(7, 102)]
    for index in range(len(batch)):
        assert batch.key(index) == batch.keys()[index]
        assert batch.tags(index) == batch.tag_lists()[index]
        assert batch.headers(index) == batch.header_maps()[index]
        assert batch.due_ms(index) == batch.due_times_ms()[index]
        assert batch.created_ms(index) == batch.created_times_ms()[index]
        assert batch.id(index) == batch.ids()[index]


def test_absent_columns_have_their_defaults() -> None:
    batch = decode(encode([b"a", b"b"], **IDENTITY))
    assert len(batch) == 2
    assert batch.keys() == [None, None] == [batch.key(0), batch.key(1)]
    assert batch.tag_lists() == [[], []] == [batch.tags(0), batch.tags(1)]
    assert batch.header_maps() == [{}, {}] == [batch.headers(0), batch.headers(1)]
    assert batch.due_times_ms() == [0, 0] == [batch.due_ms(0), batch.due_ms(1)]
    assert batch.created_times_ms() == [1_700_000_000_000] * 2 == [batch.created_ms(0), batch.created_ms(1)]
    assert batch.ids() == [MessageId(7, 100), MessageId(7, 101)] == [batch.id(0), batch.id(1)]


def test_index_outside_the_batch_is_an_index_error() -> None:
    batch = decode(encode([b"a"], **IDENTITY, **{name: values[:1] for name, values in COLUMNS.items()}))
    for read in (batch.key, batch.tags, batch.headers, batch.id, batch.created_ms, batch.due_ms):
        for index in (-1, 1):
            with pytest.raises(IndexError, match="of a batch of 1"):
                read(index)


def test_header_says_what_was_given() -> None:
    data = encode(PAYLOADS, **IDENTITY, producer_epoch=3, schema_id=9, ids=COLUMNS["ids"])
    header = check(data)
    assert header == peek(data) == peek(data[:80]) == decode(data).header
    assert (header.count, header.size, header.codec) == (3, len(data), Codec.NONE)
    assert (header.producer_id, header.producer_epoch, header.first_sequence) == (7, 3, 100)
    assert (header.created_ms, header.schema_id, header.tag_filter) == (1_700_000_000_000, 9, 0)
    assert (header.has_ids, header.has_keys, header.has_due) == (True, False, False)
    assert header.crc == checksum(data[8:])
    with pytest.raises(AttributeError):
        header.count = 4  # type: ignore[misc]
    assert not hasattr(header, "__dict__")
    assert isinstance(header, BatchHeader)


def test_section_is_read_without_the_body() -> None:
    data = encode(
        PAYLOADS * 40, **IDENTITY, **{name: values * 40 for name, values in COLUMNS.items()}, codec=Codec.ZSTD
    )
    header = peek(data)
    assert header.codec is Codec.ZSTD
    hashes, due, ids = key_hashes(data, header), due_section(data, header), explicit_ids(data, header)
    assert hashes is not None
    assert due is not None
    assert ids is not None
    assert hashes.tolist() == [key_hash("order-1"), 0, key_hash("заказ")] * 40
    assert due.tolist() == COLUMNS["due_ms"] * 40
    assert ids.tolist() == [0, 0, 2**64 - 1, 2**64 - 1, 0, 0] * 40


def test_section_that_is_absent_is_none() -> None:
    data = encode(PAYLOADS, **IDENTITY)
    assert key_hashes(data, peek(data)) is due_section(data, peek(data)) is explicit_ids(data, peek(data)) is None


def test_empty_key_is_not_an_absent_key() -> None:
    batch = decode(encode([b"a", b"b"], **IDENTITY, keys=["", None]))
    assert batch.keys() == ["", None]


def test_core_install_without_numpy_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("numpy", "pyarrow"):
        monkeypatch.setitem(sys.modules, extra, None)  # importing it raises ImportError
    layout.numpy_or_none.cache_clear()
    try:
        assert layout.numpy_or_none() is None
        columns = {name: values * 40 for name, values in COLUMNS.items()}
        data = encode(PAYLOADS * 40, **IDENTITY, **columns)
        assert decode(memoryview(data)).keys() == columns["keys"]
        large = encode([bytes(100_000)], **IDENTITY)
        assert decode(memoryview(large)).payloads == [bytes(100_000)]
    finally:
        layout.numpy_or_none.cache_clear()
