"""Feed the batch with what no sane producer sends: any bytes are a valid batch or a RemoteProtocolError, nothing else.

    python -m tests.hostile.batch_fuzz --inputs 1000000 --seed 1

Inputs are sound batches with a few things wrong: bits, header fields, offsets, lengths, pieces of other batches. A
CRC would refuse them all at once, so it is made right again in four of five; behind a compressed body the columns are
changed before compression. For every input `check` and `decode` must agree, and what they accept every accessor must
read. On samples: the door with and without numpy agree, Arrow's own full validation passes, what was read can be
written and read again, and memory stays in proportion to the input.
"""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zstandard

from fairway.batch import Batch, BatchHeader, Codec, MessageId, check, checksum, decode, encode, layout, peek
from fairway.errors import RemoteProtocolError
from tests.hostile import fuzzing

ARROW_EVERY = 4  # accepted inputs
REWRITE_EVERY = 4  # accepted inputs
PLAIN_EVERY = 8  # inputs checked once more without numpy
MEMORY_EVERY = 500  # inputs

MEMORY_BASE_BYTES = 256 * 1024  # error messages, lists, a zstd context
MEMORY_PER_BYTE = 32  # a short string costs Python about 50 bytes and the batch at least 4

# offset and struct format of every header field
FIELDS = {
    "magic": (0, "I"), "crc": (4, "I"), "version": (8, "H"), "header_length": (10, "H"), "codec": (12, "H"),
    "count": (14, "H"), "flags": (16, "I"), "hints": (20, "I"), "size": (24, "I"), "body_length": (28, "I"),
    "raw_length": (32, "I"), "producer_epoch": (36, "I"), "schema_id": (40, "I"), "encryption_key_id": (44, "I"),
    "producer_id": (48, "Q"), "first_sequence": (56, "Q"), "created_ms": (64, "Q"), "tag_filter": (72, "Q"),
}  # fmt: skip
SMALL = (0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 4_095, 4_096, 4_097)
NASTY = (*SMALL, 2**16 - 1, 2**26, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)

IDENTITY: dict[str, Any] = {"producer_id": 77, "first_sequence": 5, "created_ms": 1_700_000_000_000}

Mutation = Callable[[random.Random, bytearray, list[bytes]], None]


@dataclass
class Report:
    """What happened, in counts; the last three must be zero."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    arrow_validated: int = 0
    memory_measured: int = 0
    peak_share_of_allowed: float = 0.0
    other_exceptions: int = 0
    disagreements: int = 0
    over_allocations: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.other_exceptions or self.disagreements or self.over_allocations)


def seeds() -> list[bytes]:
    """Sound batches of many shapes, on both sides of the number from which numpy is used."""
    batches: list[bytes] = []
    for count in (1, 2, 3, 7, 8, 9, 40, 64, 100):
        columns: list[dict[str, Any]] = [
            {},
            {"keys": [None if i % 3 == 1 else f"key-{i % 5}" for i in range(count)]},
            {"keys": ["ключ" if i % 2 else "" for i in range(count)]},
            {"tags": [["rot", "grün"][: i % 3] or ["blau"] for i in range(count)]},
            {"headers": [{"trace": f"{i}", "ort": "Köln"} for i in range(count)]},
            {"headers": [{f"h{j}": "x" for j in range(i % 4)} for i in range(count)]},
            {"created_deltas_ms": [i - 3 for i in range(count)]},
            {"due_ms": [1_800_000_000_000 + i for i in range(count)]},
            {"ids": [MessageId(9, i) if i % 2 == 0 else None for i in range(count)]},
        ]
        columns.append({name: values for column in columns for name, values in column.items()})
        payloads = [b"p" * (i % 11) + bytes([i]) for i in range(count)]
        for column in columns:
            batches += [encode(payloads, **IDENTITY, codec=codec, **column) for codec in Codec]
    return batches


def _flip_bits(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    for _flip in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)


def _set_field(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at, form = FIELDS[rng.choice(list(FIELDS))]
    if len(data) >= layout.HEADER_BYTES:
        _set_number(rng, data, at, form)


def _set_number(rng: random.Random, data: bytearray, at: int, form: str) -> None:
    mask = (1 << 8 * struct.calcsize("<" + form)) - 1
    (old,) = struct.unpack_from("<" + form, data, at)
    value = rng.choice((old + 1, old - 1, old + 8, old - 8, old ^ 1 << rng.randrange(32), old * 2, rng.choice(NASTY)))
    struct.pack_into("<" + form, data, at, value & mask)


def _set_body_number(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    if len(data) >= layout.HEADER_BYTES + 8:
        _set_number(rng, data, rng.randrange(layout.HEADER_BYTES, len(data) - 7, 4), rng.choice("IIQ"))


def _swap_numbers(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    if len(data) >= layout.HEADER_BYTES + 8:
        first, second = (rng.randrange(layout.HEADER_BYTES, len(data) - 3, 4) for _side in range(2))
        data[first : first + 4], data[second : second + 4] = data[second : second + 4], data[first : first + 4]


def _set_bytes(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(len(data))
    data[at] = rng.choice((0, 0x7F, 0x80, 0xBF, 0xC3, 0xED, 0xF4, 0xFF))


def _cut(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    del data[rng.randrange(1, len(data) + 1) :]


def _cut_words(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(0, len(data), 8)
    del data[at : at + 8 * rng.randrange(1, 4)]


def _extend(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    data += rng.choice((bytes(8), bytes(1), rng.randbytes(8), rng.randbytes(rng.randrange(1, 64))))


def _insert_words(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(0, len(data), 8)
    data[at:at] = rng.choice((bytes(8), rng.randbytes(8), data[at : at + 8]))


def _splice(rng: random.Random, data: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others)
    at, length = rng.randrange(len(data)) & -4, rng.choice((4, 8, 16, 80, len(other)))
    data[at : at + length] = other[at : at + length]


MUTATIONS: list[Mutation] = [
    _flip_bits, _flip_bits, _set_field, _set_field, _set_body_number, _set_body_number, _swap_numbers, _set_bytes,
    _cut, _cut_words, _extend, _insert_words, _splice,
]  # fmt: skip


def _inside_compression(rng: random.Random, batch: bytes, others: list[bytes]) -> bytearray:
    """Change the columns of a compressed batch, then compress them again; lengths are mostly made right."""
    header = peek(batch)
    start = header.size - layout.padded(header.body_length)
    frame = batch[start : start + header.body_length]
    raw = bytearray(zstandard.ZstdDecompressor().decompress(frame))
    rng.choice((_flip_bits, _set_bytes, _cut_words, _extend, _insert_words))(rng, raw, others)
    content_size = rng.random() < 0.9
    frame = zstandard.ZstdCompressor(level=1, write_content_size=content_size).compress(bytes(raw))
    data = bytearray(batch[:start] + frame + bytes(-len(frame) % 8))
    raw_length = len(raw) if rng.random() < 0.9 else rng.choice(NASTY) & 2**32 - 1
    struct.pack_into("<III", data, 24, len(data), len(frame), raw_length)
    return data


def mutant(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One hostile input."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    batch = rng.choice(corpus)
    if batch[12] == Codec.ZSTD and rng.random() < 0.5:
        data = _inside_compression(rng, batch, corpus)
    else:
        data = bytearray(batch)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if data:
                rng.choice(MUTATIONS)(rng, data, corpus)
    if len(data) >= layout.HEADER_BYTES:
        if rng.random() < 0.3:
            struct.pack_into("<I", data, 24, len(data))
        if rng.random() < 0.8:
            struct.pack_into("<I", data, 4, checksum(data[8:]))
    return bytes(data)


def read_everything(batch: Batch) -> dict[str, Any]:
    """Through every accessor; one by one and all at once must say the same."""
    indexes = range(len(batch))
    content = {
        "keys": batch.keys(),
        "tags": batch.tag_lists(),
        "headers": batch.header_maps(),
        "ids": batch.ids(),
        "created": batch.created_times_ms(),
        "due": batch.due_times_ms(),
    }
    singly = {
        "keys": [batch.key(i) for i in indexes],
        "tags": [batch.tags(i) for i in indexes],
        "headers": [batch.headers(i) for i in indexes],
        "ids": [batch.id(i) for i in indexes],
        "created": [batch.created_ms(i) for i in indexes],
        "due": [batch.due_ms(i) for i in indexes],
    }
    if content != singly or len(batch.payloads) != len(batch):
        raise AssertionError("the accessors of one batch disagree")
    return content | {"payloads": batch.payloads}


def rewrite(batch: Batch, content: dict[str, Any]) -> dict[str, Any]:
    """Encode what was read, and read it again."""
    header = batch.header
    again = encode(
        content["payloads"],
        producer_id=header.producer_id,
        first_sequence=header.first_sequence,
        created_ms=header.created_ms,
        keys=content["keys"],
        tags=content["tags"],
        headers=content["headers"],
        created_deltas_ms=[created - header.created_ms for created in content["created"]],
        due_ms=content["due"],
        ids=content["ids"],
    )
    return read_everything(decode(again))


def verdict(door: Callable[[bytes], object], data: bytes) -> object:
    """What the door says: its result, or None for refused. Any other exception passes."""
    try:
        return door(data)
    except RemoteProtocolError:
        return None


@contextmanager
def without_numpy() -> Iterator[None]:
    usual, layout.NUMPY_FROM_ITEMS = layout.NUMPY_FROM_ITEMS, 1 << 40
    try:
        yield
    finally:
        layout.NUMPY_FROM_ITEMS = usual


def _allowed_bytes(data: bytes) -> int:
    """What one input may make us allocate: in proportion to its bytes, or to what it could honestly decompress to."""
    try:
        raw_length = peek(data).raw_length
    except RemoteProtocolError:
        raw_length = 0
    return MEMORY_BASE_BYTES + MEMORY_PER_BYTE * max(len(data), raw_length)


def _measure_memory(data: bytes, report: Report) -> None:
    tracemalloc.start()
    try:
        verdict(lambda view: read_everything(decode(view)), data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    report.memory_measured += 1
    allowed = _allowed_bytes(data)
    report.peak_share_of_allowed = max(report.peak_share_of_allowed, round(peak / allowed, 3))
    if peak > allowed:
        report.over_allocations += 1
        report.examples.append(f"{peak} bytes for {data.hex()}")


def _try_one(data: bytes, report: Report, has_arrow: bool) -> None:
    header = verdict(check, data)
    batch = verdict(decode, data)
    if report.inputs % PLAIN_EVERY == 0:
        with without_numpy():
            plain = verdict(check, data)
        if plain != header:
            raise AssertionError("with and without numpy the door decides differently")
    if not isinstance(header, BatchHeader) or not isinstance(batch, Batch):
        if header is not batch:
            raise AssertionError("check and decode disagree")
        report.refused += 1
        return
    report.accepted += 1
    content = read_everything(batch)
    if has_arrow and report.accepted % ARROW_EVERY == 0:
        batch.to_arrow().validate(full=True)
        report.arrow_validated += 1
    if report.accepted % REWRITE_EVERY == 0 and rewrite(batch, content) != content:
        raise AssertionError("what was read and written again reads differently")


def run(inputs: int, seed: int, tick: Callable[[int], object] = lambda _done: None) -> Report:
    """Try that many inputs; the same seed makes the same ones."""
    rng, corpus, report = random.Random(seed), seeds(), Report()
    has_arrow = _has_arrow()
    for _ in range(inputs):
        data = mutant(rng, corpus)
        report.inputs += 1
        try:
            _try_one(data, report, has_arrow)
        except AssertionError as error:
            report.disagreements += 1
            report.examples.append(f"{error}: {data.hex()}")
        except Exception as error:  # that none other arrives here is what is being tested
            report.other_exceptions += 1
            report.examples.append(f"{error!r}: {data.hex()}")
        if report.inputs % MEMORY_EVERY == 0:
            _measure_memory(data, report)
            tick(report.inputs)
    return report


def _has_arrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(fuzzing.main("mutated batches", "mutated batches: each is valid or a RemoteProtocolError", 1_000_000, run))
