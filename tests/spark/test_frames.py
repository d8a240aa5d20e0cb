"""Frames hold what the batches held, message by message, whatever shape the batches had."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway import batch
from fairway.batch import Codec, MessageId
from fairway.spark import encode, frames
from fairway.spark.encode import Encoder
from fairway.spark.frames import Framer, RowFilter

BORN_MS = 1_700_000_000_000
STORED_MS = 1_700_000_000_500
COLUMNS = frames.columns_of(frames.MESSAGES)
NUMBERS = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "payload": st.binary(max_size=20),
            "key": st.none() | TEXT,
            "tags": st.lists(TEXT.filter(bool), max_size=3),
            "headers": st.dictionaries(TEXT, TEXT, max_size=3),
            "created_ms": st.integers(BORN_MS, BORN_MS + 5_000),
        }
    ),
    min_size=1,
    max_size=12,
)


def encoded(messages: list[dict[str, Any]], first: int = 0, codec: Codec = Codec.NONE, born: Any = None) -> bytes:
    created_ms = min(each["created_ms"] for each in messages)
    return batch.encode(
        [each["payload"] for each in messages],
        producer_id=77,
        first_sequence=first,
        created_ms=created_ms,
        keys=[each["key"] for each in messages],
        tags=[each["tags"] for each in messages],
        headers=[each["headers"] for each in messages],
        created_deltas_ms=[each["created_ms"] - created_ms for each in messages],
        ids=born,
        codec=codec,
    )


def framed(framer: Framer, data: bytes, first: int, begin: int = 0, end: int = 1 << 60) -> list[dict[str, Any]]:
    frames = [*framer.add(data, first, STORED_MS, begin, end), *framer.rest()]
    return [row for frame in frames for row in frame.to_pylist()]


@given(MESSAGES, st.sampled_from(list(Codec)), st.integers(0, 2**62))
def test_every_column_of_every_message(messages: list[dict[str, Any]], codec: Codec, first: int) -> None:
    rows = framed(Framer("orders", "default", COLUMNS, RowFilter()), encoded(messages, first, codec), 40)
    assert [row["sequence"] for row in rows] == list(range(40, 40 + len(messages)))
    for index, (row, message) in enumerate(zip(rows, messages, strict=True)):
        assert (row["subject"], row["broker_group"]) == ("orders", "default")
        assert row["id"] == str(MessageId(77, first + index))
        assert (row["payload"], row["key"]) == (message["payload"], message["key"])
        assert list(row["tags"] or []) == message["tags"]
        assert dict(row["headers"] or []) == message["headers"]
        assert row["created_at"].timestamp() * 1_000 == pytest.approx(message["created_ms"])
        assert row["appended_at"] == datetime.fromtimestamp(STORED_MS / 1_000, UTC)


def test_small_batches_are_put_together_and_cut_at_the_ends() -> None:
    framer = Framer("orders", "default", COLUMNS, RowFilter())
    frames: list[pa.RecordBatch] = []
    for first in range(0, 300, 3):
        data = batch.encode([b"%d" % at for at in range(first, first + 3)], producer_id=5, first_sequence=first,
                            created_ms=BORN_MS)  # fmt: skip
        frames += framer.add(data, first, STORED_MS, 100, 200)
    frames += framer.rest()
    assert len(frames) == 1, "a hundred rows are one frame"
    assert [int(row["payload"]) for row in frames[0].to_pylist()] == list(range(100, 200))
    assert frames[0].to_pylist()[7]["id"] == str(MessageId(5, 107))


def test_batches_of_every_kind_in_one_frame() -> None:
    framer = Framer("orders", "default", COLUMNS, RowFilter())
    keyed = {"key": "k", "tags": ["t"], "headers": {}, "created_ms": BORN_MS + 5}
    for at in range(9):
        payload = b"%d" % at
        plain = batch.encode([payload], producer_id=at + 1, first_sequence=at, created_ms=BORN_MS)
        data = encoded([keyed | {"payload": payload}], at) if at % 3 == 1 else plain
        assert list(framer.add(data, at, STORED_MS, 0, 100)) == []
    [frame] = framer.rest()
    found = frame.to_pylist()
    assert [int(row["payload"]) for row in found] == list(range(9))
    assert [row["key"] for row in found] == [None, "k", None] * 3
    assert [row["id"] for row in found[:2]] == [str(MessageId(1, 0)), str(MessageId(77, 1))]
    assert found[1]["created_at"] - found[0]["created_at"] == timedelta(milliseconds=5)


def test_message_keeps_the_id_it_was_born_with() -> None:
    message: dict[str, Any] = {"payload": b"x", "key": None, "tags": [], "headers": {}, "created_ms": BORN_MS}
    data = encoded([message] * 3, 10, born=[None, MessageId(9, 4), None])
    rows = framed(Framer("orders", "default", COLUMNS, RowFilter()), data, 0, begin=1)
    assert [row["id"] for row in rows] == [str(MessageId(9, 4)), str(MessageId(77, 12))]


def test_time_that_nobody_said_is_that_of_storing() -> None:
    data = batch.encode([b"x"], producer_id=1, first_sequence=0, created_ms=0)
    [row] = framed(Framer("orders", "default", COLUMNS, RowFilter()), data, 0)
    assert row["created_at"] == row["appended_at"]


def test_sieve_lets_through_keys_and_tags() -> None:
    message = {"payload": b"x", "headers": {}, "created_ms": BORN_MS}
    messages = [message | {"key": key, "tags": tags} for key, tags in (("a", ["eu"]), ("b", ["eu", "us"]), (None, []))]
    data = encoded(messages)

    def keys(row_filter: RowFilter) -> list[str | None]:
        return [row["key"] for row in framed(Framer("orders", "default", COLUMNS, row_filter), data, 0)]

    assert keys(RowFilter(("a", "c"))) == ["a"]
    assert keys(RowFilter((None,))) == [None]
    assert keys(RowFilter(None, ("us",))) == ["b"]
    assert keys(RowFilter(("a",), ("us",))) == []
    assert keys(RowFilter(is_keyed=True)) == ["a", "b"]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_ids_as_text_and_back(pairs: list[tuple[int, int]]) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.array(pairs, numpy.uint64)
    texts = encode.text_column(array[:, 0], array[:, 1])
    assert texts.to_pylist() == [str(MessageId(*pair)) for pair in pairs]
    assert [tuple(map(int, pair)) for pair in encode.parse_column(texts)] == pairs


@given(MESSAGES, st.integers(0, 5))
def test_sink_writes_the_bytes_that_a_producer_would(messages: list[dict[str, Any]], cut: int) -> None:
    kinds = {
        "payload": pa.binary(),
        "key": pa.string(),
        "tags": pa.list_(pa.string()),
        "headers": pa.map_(pa.string(), pa.string()),
        "created_at": pa.timestamp("us", tz="UTC"),
    }
    full = [{**each, "created_at": datetime.fromtimestamp(each["created_ms"] / 1_000, UTC)} for each in messages]
    arrays = [
        pa.array([list(each[name].items()) if name == "headers" else each[name] for each in full], kind)
        for name, kind in kinds.items()
    ]
    cut = min(cut, len(messages) - 1)
    rows = pa.RecordBatch.from_arrays(arrays, names=list(kinds)).slice(cut)
    data = Encoder(rows).encode(producer_id=77, first_sequence=3, created_ms=0)
    batch.check(data)
    decoded, expected = batch.decode(data), batch.decode(encoded(messages[cut:], 3))
    assert decoded.payloads == expected.payloads
    assert decoded.keys() == expected.keys()
    assert decoded.tag_lists() == expected.tag_lists()
    assert decoded.header_maps() == expected.header_maps()
    assert decoded.created_times_ms() == expected.created_times_ms()
    assert decoded.ids() == expected.ids()
