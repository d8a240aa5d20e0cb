"""The door refuses whatever could be read in two ways, or lead a reader out of bounds, though its CRC is right."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import zstandard

from fairway.batch import Codec, MessageId, check, decode, encode, key_hash, layout, peek, tag_mask
from fairway.errors import RemoteProtocolError
from tests.unit.batch.forge import CREATED, DUE, HEADERS, IDS, KEYS, TAGS, forge, ints, longs, pad, seal, strings

IDENTITY: dict[str, Any] = {"producer_id": 7, "first_sequence": 1, "created_ms": 1_700_000_000_000}
ONE = strings(b"x")  # the payload column of one message


def refusal(data: bytes, door: Callable[[bytes], object] = check) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        door(data)
    if door is not peek:
        with pytest.raises(RemoteProtocolError):
            decode(data)
    return str(caught.value)


def hashes(*keys: str | None) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *(0 if key is None else key_hash(key) for key in keys))


def test_forged_batch_is_what_encode_writes() -> None:
    assert forge(strings(b"x", b"", b"yz"), count=3) == encode([b"x", b"", b"yz"], **IDENTITY)
    body = (
        strings(b"x", b"y")
        + pad(b"\x01") + strings(b"k", b"")
        + ints(0, 1, 3) + strings(b"s", b"t", b"u")
        + ints(0, 0, 1) + strings(b"n") + strings(b"v")
        + longs(1, 2)
    )  # fmt: skip
    section = hashes("k", None) + longs(3, 4) + longs(0, 0, 5, 6)
    flags = KEYS | DUE | IDS | TAGS | HEADERS | CREATED
    tag_filter = tag_mask("s") | tag_mask("t") | tag_mask("u")
    assert forge(body, count=2, flags=flags, section=section, tag_filter=tag_filter) == encode(
        [b"x", b"y"],
        **IDENTITY,
        keys=["k", None],
        tags=[["s"], ["t", "u"]],
        headers=[{}, {"n": "v"}],
        created_deltas_ms=[1, 2],
        due_ms=[3, 4],
        ids=[None, MessageId(5, 6)],
    )


@pytest.mark.parametrize("key", [None, "", "k", "o-42-42", "ключ-日本", "x" * 300])
@pytest.mark.parametrize("id", [None, MessageId(5, 6)])
@pytest.mark.parametrize("payload", [b"", b"seven b", b"eight by", b"x" * 100])
def test_one_message_passes_by_the_short_way_if_and_only_if_it_does_by_the_long_one(
    key: str | None, id: MessageId | None, payload: bytes
) -> None:
    """Whatever byte is another, under a CRC that is right."""
    data = encode([payload], **IDENTITY, keys=None if key is None else [key], ids=None if id is None else [id])
    assert _passes(data, check)
    for at in range(8, len(data)):
        for bits in (0x01, 0x80, 0xFF):
            other = bytearray(data)
            other[at] ^= bits
            sealed = seal(other)
            assert _passes(sealed, check) == _passes(sealed, lambda each: check(memoryview(each))), f"byte {at}"


def _passes(data: bytes, door: Callable[[bytes], object]) -> bool:
    try:
        door(data)
    except RemoteProtocolError:
        return False
    return True


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    data = encode([b"one", b"two"], **IDENTITY, keys=["a", None], tags=[["t"], []])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        refusal(bytes(damaged))
    for length in range(len(data)):
        refusal(data[:length])
    assert "bytes in" in refusal(data + bytes(8))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"magic": b"PK\3\4"}, "not a batch"),
        ({"version": 2}, "format version 2: this program reads version 1"),
        ({"version": 0}, "format version 0"),
        ({"flags": 64}, "flags 0x40 must be understood"),
        ({"encryption_key_id": 5}, "encrypted with key 5"),
        ({"codec": 2}, "unknown batch codec 2"),
        ({"count": 0}, "batch of 0 messages"),
        ({"count": 4_097}, "batch of 4097 messages"),
        ({"producer_id": 0}, "producer 0"),
        ({"first_sequence": 2**64 - 1, "count": 2}, "runs past"),
        ({"created_ms": -1}, "outside the years"),
        ({"created_ms": 253_402_300_800_000}, "outside the years"),
        ({"tag_filter": 1}, "filter but no tags"),
        ({"header_length": 72}, "header of 72 bytes"),
        ({"header_length": 88}, "header of 88 bytes"),
        ({"header_length": 84, "hints": 1}, "header of 84 bytes"),
        ({"header_length": 520, "hints": 1}, "header of 520 bytes"),
        ({"raw_length": 2**26 + 8}, "up to 64 MiB"),
        ({"raw_length": 20}, "a multiple of 8"),
        ({"raw_length": 32}, "plain body of 16 bytes for columns of 32"),
        ({"codec": 1}, "no zstd frame of 16 bytes holds 16"),
        ({"codec": 1, "raw_length": 16 * 2**15 + 8}, "no zstd frame of 16 bytes holds"),
        ({"size": 104}, "says it has 104 bytes, its parts add up to 96"),
        ({"flags": DUE}, "its parts add up to 104"),
    ],
)
def test_header_that_contradicts_itself_is_refused(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(forge(ONE, **fields), peek)
    refusal(forge(ONE, **fields))


def test_flag_that_may_be_ignored_is_ignored_with_its_header() -> None:
    assert check(forge(ONE, hints=0x8000_0000)).hints == 0x8000_0000
    known = forge(ONE, hints=1, header_length=88, size=80 + 8 + len(ONE))
    assert decode(seal(known[:80] + b"whatever" + known[80:])).payloads == [b"x"]


@pytest.mark.parametrize("numpy_from", [1, 1 << 40], ids=["numpy", "plain"])
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "payloads of 8 bytes at 0 in columns of 0"),
        (ints(1, 1) + pad(b"x"), "offsets do not begin at 0"),
        (ints(0, -1), "decrease"),
        (ints(0, 9) + pad(b"x"), "payloads of 9 bytes at 8 in columns of 16"),
        (ints(0, 2**31 - 1) + pad(b"x"), "at most 67108864"),
        (ints(0, 1) + b"x" + b"\x01" * 7, "padding is not zero"),
        (ONE + bytes(8), "columns of 16 bytes in a body of 24"),
    ],
)
def test_payload_offsets_out_of_bounds_are_refused(
    body: bytes, sentence: str, numpy_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "NUMPY_FROM_ITEMS", numpy_from)
    assert sentence in refusal(forge(body))


@pytest.mark.parametrize("count", [3, 100])
def test_offsets_whose_difference_wraps_are_refused(count: int) -> None:
    offsets = [0, 2**31 - 1, -(2**31), *[0] * (count - 2)]
    assert "decrease" in refusal(forge(ints(*offsets), count=count))


def test_padding_of_offsets_and_of_the_body_is_zero() -> None:
    assert "padding" in refusal(forge(struct.pack("<4i", 0, 1, 2, 9) + pad(b"xy"), count=2))
    packed = encode([b"x"] * 60, **IDENTITY, codec=Codec.ZSTD)
    assert peek(packed).body_length % 8, "this test needs a frame that is padded"
    assert "last padding" in refusal(seal(packed[:-1] + b"\x01"))


@pytest.mark.parametrize(
    ("column", "hashed", "sentence"),
    [
        (pad(b"\x01") + strings(b"\xff"), hashes("k"), "not UTF-8"),
        (pad(b"\x01") + strings(b"\xed\xa0\x80"), hashes("k"), "not UTF-8"),
        (pad(b"\x03") + strings(b"k"), hashes("k"), "bits past the last message"),
        (pad(b"\x00") + strings(b"k"), hashes(None), "absent but has bytes"),
        (pad(b"\x01") + strings(b"k"), hashes("other"), "key hashes"),
        (pad(b"\x01") + strings(b"k"), hashes(None), "key hashes"),
        (pad(b"\x00") + strings(b""), hashes(""), "key hashes"),
        (pad(b"\x01") + strings(b"k" * 1_025), hashes("k" * 1_025), "at most 1024"),
        (pad(b"\x01"), hashes("k"), "keys of 8 bytes"),
    ],
)
def test_bad_keys_are_refused(column: bytes, hashed: bytes, sentence: str) -> None:
    assert sentence in refusal(forge(ONE + column, flags=KEYS, section=hashed))


@pytest.mark.parametrize("count", [2, 100])
def test_text_cut_inside_a_character_is_refused(count: int) -> None:
    """As a whole the column is UTF-8; the first item ends after half of its first character."""
    lists = ints(*range(count + 1))
    halves = ints(0, 1, *[2] * (count - 1)) + pad("ü".encode())
    assert "cut inside" in refusal(forge(strings(*[b""] * count) + lists + halves, count=count, flags=TAGS))


@pytest.mark.parametrize(
    ("column", "tag_filter", "sentence"),
    [
        (ints(0, 1) + strings(b"t"), 0, "tag filter"),
        (ints(0, 1) + strings(b"t"), 2**64 - 1, "tag filter"),
        (ints(0, 1) + strings(b"\xff"), tag_mask("t"), "not UTF-8"),
        (ints(0, 17) + strings(*[b"t"] * 17), tag_mask("t"), "at most 16"),
        (ints(0, 1) + strings(b"t" * 129), tag_mask("t" * 129), "at most 128"),
        (ints(0, 2) + ints(0, 1), tag_mask("t"), "tags of 12 bytes"),
        (ints(0, -1), 0, "tag lists"),
    ],
)
def test_bad_tags_are_refused(column: bytes, tag_filter: int, sentence: str) -> None:
    assert sentence in refusal(forge(ONE + column, flags=TAGS, tag_filter=tag_filter))


@pytest.mark.parametrize(
    ("lists", "names", "sentence"),
    [
        ((0, 2, 2), (b"a", b"a"), "twice"),
        ((0, 1, 3), (b"a", b"a", b"a"), "twice"),
        ((0, 2, 4), (b"a", b"a", b"a", b"a"), "twice"),
        ((0, 1, 1), (b"\x80",), "header names that are not UTF-8"),
        ((0, 65, 65), tuple(b"%d" % index for index in range(65)), "at most 64"),
    ],
)
def test_bad_headers_are_refused(lists: tuple[int, ...], names: tuple[bytes, ...], sentence: str) -> None:
    column = ints(*lists) + strings(*names) + strings(*[b"v"] * len(names))
    assert sentence in refusal(forge(strings(b"x", b"y") + column, count=2, flags=HEADERS))


def test_header_name_may_return_in_the_next_message() -> None:
    column = ints(0, 1, 2) + strings(b"a", b"a") + strings(b"1", b"2")
    assert decode(forge(strings(b"", b"") + column, count=2, flags=HEADERS)).header_maps() == [{"a": "1"}, {"a": "2"}]


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize(
    ("flag", "numbers", "sentence"),
    [
        (DUE, (-1,), "due times outside"),
        (DUE, (2**63 - 1,), "due times outside"),
        (IDS, (0, 1), "a sequence but no producer"),
        (CREATED, (2**63 - 1,), "created-at times outside"),
        (CREATED, (-1_700_000_000_001,), "created-at times outside"),
    ],
)
def test_numbers_out_of_range_are_refused(flag: int, numbers: tuple[int, ...], sentence: str, count: int) -> None:
    part = longs(*[0] * len(numbers) * (count - 1), *numbers)
    payloads = strings(*[b""] * count)
    section, body = (b"", payloads + part) if flag == CREATED else (part, payloads)
    assert sentence in refusal(forge(body, count=count, flags=flag, section=section))


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


COLUMN = strings(*[b"x"] * 60)


@pytest.mark.parametrize(
    ("body", "raw_length", "sentence"),
    [
        (frame(COLUMN, write_content_size=False), len(COLUMN), "zstd frame of"),
        (frame(COLUMN), len(COLUMN) + 8, "zstd frame of"),
        (frame(COLUMN) + b"more", len(COLUMN), "damaged zstd frame"),
        (frame(COLUMN) + frame(b""), len(COLUMN), "damaged zstd frame"),
        (frame(COLUMN)[:-3], len(COLUMN), "damaged zstd frame"),
        (struct.pack("<II", 0x184D2A50, 200) + bytes(92), 200, "not a zstd frame"),
        (bytes(40), len(COLUMN), "not a zstd frame"),
    ],
)
def test_bad_compression_is_refused(body: bytes, raw_length: int, sentence: str) -> None:
    assert sentence in refusal(forge(body, count=60, codec=1, raw_length=raw_length))


def test_sound_compression_is_read() -> None:
    for options in ({"level": 19}, {"write_checksum": True}, {"level": -5}):
        body = frame(COLUMN, **options)
        assert decode(forge(body, count=60, codec=1, raw_length=len(COLUMN))).payloads == [b"x"] * 60


def peak_bytes(data: bytes) -> int:
    """The most that `check` allocates at a time."""
    tracemalloc.start()
    try:
        with suppress(RemoteProtocolError):
            check(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bomb_costs_no_more_than_its_frame_could_hold() -> None:
    bomb = forge(frame(bytes(2**26)), codec=1, raw_length=2**26)
    assert "columns of" in refusal(bomb)
    assert len(bomb) < 8_192
    assert peak_bytes(bomb) < 2**26 + 256 * 1024


def test_claim_that_no_frame_could_keep_costs_nothing() -> None:
    claim = forge(frame(bytes(2**26))[:96], codec=1, raw_length=2**26)
    assert "no zstd frame of 96 bytes holds" in refusal(claim)
    assert peak_bytes(claim) < 256 * 1024


def test_wide_text_is_checked_in_pieces() -> None:
    """One wide character would make a str of the whole column four times as large as the column."""
    value = "a" * (3 * 2**20) + "😀"
    data = encode([b""], **IDENTITY, headers=[{"h": value}])
    assert peak_bytes(data) < 8 * 2**20
    assert decode(data).headers(0) == {"h": value}
    cut = ONE + ints(0, 1) + strings(b"h") + strings(b"a" * 2**21 + "😀".encode()[:3])
    assert "not UTF-8" in refusal(forge(cut, flags=HEADERS))
