"""What the encoder refuses, in sentences that name the thing and the remedy, and what it leaves out."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from fairway import limits
from fairway.batch import Codec, MessageId, check, decode, encode, layout, peek, reborn, restamp
from fairway.errors import Misuse

IDENTITY: dict[str, Any] = {"producer_id": 7, "first_sequence": 100, "created_ms": 1_700_000_000_000}


def refusal(payloads: Any = (b"x",), **columns: Any) -> str:
    with pytest.raises(Misuse) as caught:
        encode(payloads, **IDENTITY | columns)
    return str(caught.value)


def test_str_payload_names_encode() -> None:
    with pytest.raises(TypeError, match=r"\.encode\(\)"):
        encode([b"x", "text"], **IDENTITY)  # type: ignore[list-item]


def test_payload_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match="not dict: serialise it"):
        encode([{}], **IDENTITY)  # type: ignore[list-item]


def test_other_kinds_of_bytes_are_taken() -> None:
    payloads: Any = [bytearray(b"one"), memoryview(b"two"), b"three"]
    assert decode(encode(payloads, **IDENTITY)).payloads == [b"one", b"two", b"three"]


def test_count_is_bounded() -> None:
    assert "1 to 4096 messages, not 0" in refusal([])
    assert "not 4097; send them as several batches" in refusal([b""] * 4_097)
    assert peek(encode([b""] * 4_096, **IDENTITY)).count == 4_096


def test_columns_of_another_length_are_refused() -> None:
    for name in ("keys", "tags", "headers", "created_deltas_ms", "due_ms", "ids"):
        assert f"0 {name} for 1 payloads" in refusal(**{name: []})


@pytest.mark.parametrize("key", [None, "", "k", "o-42-42", "ключ", "x" * 1_024])
@pytest.mark.parametrize("id", [None, MessageId(5, 6), MessageId(2**64 - 1, 0)])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 65_536, 65_537])
def test_one_message_by_itself_is_written_as_it_would_be_among_others(
    key: str | None, id: MessageId | None, size: int
) -> None:
    """One has a way of its own; a delta of 0 makes it take the other, and says nothing."""
    columns: dict[str, Any] = {"keys": [key], "ids": [id]}
    assert encode([bytes(size)], **IDENTITY, **columns) == encode(
        [bytes(size)], **IDENTITY, **columns, created_deltas_ms=[0]
    )


def test_size_is_bounded() -> None:
    megabyte = bytes(limits.MIB)
    assert "send fewer messages" in refusal([megabyte] * 65)
    assert "send fewer messages" in refusal([megabyte] * 64), "the offsets count too"
    assert "send fewer messages" in refusal([megabyte] * 2_048), "more than an int32 can say"


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ({"producer_id": 0}, "producer_id is 0"),
        ({"producer_id": 2**64}, "producer_id"),
        ({"first_sequence": -1}, "first_sequence"),
        ({"first_sequence": 2**64}, "first_sequence"),
        ({"created_ms": -1}, "created_ms"),
        ({"created_ms": layout.TIME_MS_MAX + 1}, "created_ms"),
        ({"producer_epoch": 2**32}, "producer_epoch"),
        ({"schema_id": -1}, "schema_id"),
        ({"keys": ["k" * 1_025]}, "keys have at most 1024 bytes each in UTF-8; one has 1025"),
        ({"keys": ["ü" * 513]}, "one has 1026"),
        ({"keys": ["\ud800"]}, "lone surrogate"),
        ({"tags": [["t" * 129]]}, "tags have at most 128 bytes"),
        ({"tags": [list("abcdefghijklmnopq")]}, "at most 16 tags; one has 17"),
        ({"headers": [{str(i): "" for i in range(65)}]}, "at most 64 headers; one has 65"),
        ({"due_ms": [-1]}, "due_ms from -1"),
        ({"due_ms": [2**63]}, "due_ms are whole milliseconds"),
        ({"due_ms": [1.5]}, "due_ms are whole milliseconds"),
        ({"created_deltas_ms": [-1_700_000_000_001]}, "created_deltas_ms"),
        ({"ids": [MessageId(0, 1)]}, "names nobody"),
        ({"ids": [MessageId(1, 2**64)]}, "64 bits"),
    ],
)
def test_value_out_of_bounds_is_refused(column: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**column)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ({"keys": [5]}, "keys are str"),
        ({"keys": [0]}, "keys are str"),
        ({"tags": ["paid"]}, "one collection per message"),
        ({"tags": [[1]]}, "tags are str"),
        ({"headers": [["a"]]}, "one mapping per message"),
        ({"headers": [{"a": 1}]}, "header values are str"),
        ({"headers": [{1: "a"}]}, "header names are str"),
    ],
)
def test_value_of_another_type_is_refused(column: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        encode([b"x"], **IDENTITY, **column)


def test_column_that_says_nothing_costs_nothing() -> None:
    silent: dict[str, Any] = {
        "keys": [None, None],
        "tags": [[], None],
        "headers": [{}, None],
        "created_deltas_ms": [0, 0],
        "due_ms": [0, 0],
        "ids": [None, None],
    }
    assert encode([b"a", b"b"], **IDENTITY, **silent) == encode([b"a", b"b"], **IDENTITY)


def test_length_is_a_multiple_of_eight() -> None:
    for length in range(20):
        assert len(encode([b"x" * length], **IDENTITY, keys=["k" * length])) % 8 == 0


def test_body_that_does_not_shrink_is_stored_plain() -> None:
    assert peek(encode([b"x"], **IDENTITY, codec=Codec.ZSTD)).codec is Codec.NONE
    assert peek(encode([b"x"] * 100, **IDENTITY, codec=Codec.ZSTD)).codec is Codec.ZSTD


def opcodes(payloads: list[bytes]) -> int:
    """How many instructions of Python it takes to encode these payloads."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()  # or finalizers of what other tests left would run now, and count
    sys.settrace(trace)
    try:
        encode(payloads, **IDENTITY)
    finally:
        sys.settrace(before)
    return executed


def test_payloads_cost_no_python_per_message() -> None:
    assert opcodes([b"x" * 8] * 4_095) == opcodes([b"x" * 8] * 3) > 100


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"keys": ["a", None, "c"], "tags": [("x",), (), ("y", "z")], "headers": [{"h": "1"}, {}, {}]},
        {"ids": [None, MessageId(9, 4), None], "due_ms": [1_800_000_000_000] * 3},
    ],
)
def test_under_another_number_messages_are_reborn_with_their_ids(columns: Any, codec: Codec) -> None:
    data = encode([b"one", b"", b"three" * 50], **IDENTITY, **columns, codec=codec)
    elsewhere = reborn(data, producer_id=8, first_sequence=0)
    check(elsewhere)
    before, after = decode(data), decode(elsewhere)
    assert (after.header.producer_id, after.header.first_sequence) == (8, 0)
    assert after.payloads == before.payloads
    for index in range(3):
        assert after.id(index) == before.id(index)
        assert (after.key(index), after.tags(index)) == (before.key(index), before.tags(index))
        assert (after.headers(index), after.due_ms(index)) == (before.headers(index), before.due_ms(index))
    assert reborn(elsewhere, producer_id=7, first_sequence=100) == reborn(data, producer_id=7, first_sequence=100)
    assert decode(restamp(data, producer_id=8, first_sequence=0)).id(0) == MessageId(8, 0), "else they would not"
