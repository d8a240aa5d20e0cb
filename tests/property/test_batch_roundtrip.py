"""All values that `encode` accepts come back from `decode`, and Arrow reads the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fairway import limits
from fairway.batch import Batch, Codec, MessageId, check, decode, encode, layout, peek

U64 = st.integers(0, 2**64 - 1)
PRODUCER = st.integers(1, 2**64 - 1)
TIMES_MS = st.integers(0, layout.TIME_MS_MAX)
TEXT = st.text(max_size=20)
KEYS = st.none() | TEXT | st.text("aé😀", max_size=limits.KEY_BYTES_MAX // 4)
TAG_LISTS = st.lists(TEXT | st.text("aé😀", max_size=limits.TAG_BYTES_MAX // 4), max_size=limits.BATCH_TAGS_MAX)
HEADER_MAPS = st.dictionaries(TEXT, TEXT, max_size=8)


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of `encode`, on both sides of the count from which numpy is used."""
    count = draw(st.integers(1, 6) | st.sampled_from([63, 64, 65, 130]))

    def column(values: st.SearchStrategy[Any]) -> Any:
        few = st.lists(values, min_size=1, max_size=6)
        repeated = few.map(lambda items: (items * count)[:count])
        return draw(st.none() | repeated)

    created_ms = draw(TIMES_MS)
    return {
        "payloads": (draw(st.lists(st.binary(max_size=50), min_size=1, max_size=6)) * count)[:count],
        "producer_id": draw(PRODUCER),
        "producer_epoch": draw(st.integers(0, 2**32 - 1)),
        "first_sequence": draw(st.integers(0, 2**64 - count)),
        "created_ms": created_ms,
        "schema_id": draw(st.integers(0, 2**32 - 1)),
        "codec": draw(st.sampled_from(Codec)),
        "keys": column(KEYS),
        "tags": column(TAG_LISTS),
        "headers": column(HEADER_MAPS),
        "created_deltas_ms": column(TIMES_MS.map(lambda time_ms: time_ms - created_ms)),
        "due_ms": column(TIMES_MS),
        "ids": column(st.none() | st.builds(MessageId, PRODUCER, U64)),
    }


def expected_ids(given_: dict[str, Any], count: int) -> list[MessageId]:
    own = [MessageId(given_["producer_id"], given_["first_sequence"] + index) for index in range(count)]
    return [explicit or one for explicit, one in zip(given_["ids"] or [None] * count, own, strict=True)]


def assert_same(batch: Batch, given_: dict[str, Any]) -> None:
    count = len(given_["payloads"])
    assert batch.payloads == given_["payloads"]
    assert batch.keys() == (given_["keys"] or [None] * count)
    assert batch.tag_lists() == (given_["tags"] or [[]] * count)
    assert batch.header_maps() == (given_["headers"] or [{}] * count)
    deltas_ms = given_["created_deltas_ms"] or [0] * count
    assert batch.created_times_ms() == [given_["created_ms"] + delta for delta in deltas_ms]
    assert batch.due_times_ms() == (given_["due_ms"] or [0] * count)
    assert batch.ids() == expected_ids(given_, count)
    for name in ("producer_id", "producer_epoch", "first_sequence", "created_ms", "schema_id"):
        assert getattr(batch.header, name) == given_[name]


@given(arguments())
def test_what_goes_in_comes_out(given_: dict[str, Any]) -> None:
    data = encode(**given_)
    assert len(data) % 8 == 0
    batch = decode(data)
    assert check(data) == peek(data) == batch.header
    assert_same(batch, given_)


@given(arguments())
def test_every_accessor_says_the_same(given_: dict[str, Any]) -> None:
    batch = decode(memoryview(encode(**given_)))
    indexes = range(len(batch))
    assert batch.keys() == [batch.key(index) for index in indexes]
    assert batch.tag_lists() == [batch.tags(index) for index in indexes]
    assert batch.header_maps() == [batch.headers(index) for index in indexes]
    assert batch.ids() == [batch.id(index) for index in indexes]
    assert batch.created_times_ms() == [batch.created_ms(index) for index in indexes]
    assert batch.due_times_ms() == [batch.due_ms(index) for index in indexes]


@given(arguments())
def test_arrow_reads_the_same(given_: dict[str, Any]) -> None:
    batch = decode(encode(**given_))
    rows = batch.to_arrow()
    rows.validate(full=True)
    assert rows.column("payload").to_pylist() == batch.payloads
    assert rows.column("key").to_pylist() == batch.keys()
    assert [tags or [] for tags in rows.column("tags").to_pylist()] == batch.tag_lists()
    assert [dict(pairs or []) for pairs in rows.column("headers").to_pylist()] == batch.header_maps()
    created_us = rows.column("created_at").cast("int64").to_pylist()
    assert created_us == [1_000 * created_ms for created_ms in batch.created_times_ms()]


@given(PRODUCER, U64)
def test_text_form_of_an_id_is_read_back(producer_id: int, sequence: int) -> None:
    one = MessageId(producer_id, sequence)
    assert len(str(one)) == 26
    assert MessageId.parse(str(one)) == MessageId.parse(str(one).lower()) == one
