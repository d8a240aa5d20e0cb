"""Feed connections with what no sane peer sends: any bytes are events or a RemoteProtocolError, nothing else.

    python -m tests.hostile.frame_fuzz --inputs 500000 --seed 1

Inputs are conversations of a few sound frames with a few things wrong: bits, header fields, control messages, pieces
cut out, doubled or taken from others. A CRC would refuse most of them at once, so it is made right again in four of
five. Each input goes through a reader whole, in random pieces, and in such pieces gathered in buffers, as large frames
are; all three must agree. It also goes into a client or a server in some state, which must go on or end with a last
word. On samples: memory stays in proportion to what arrived.
"""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

from fairway import limits
from fairway.batch import checksum, encode
from fairway.errors import RemoteProtocolError
from fairway.protocol import (
    Connection,
    ConnectionOptions,
    ControlMessage,
    FrameReader,
    Role,
    Verb,
    Why,
    codec,
    frames,
    messages,
)
from tests.golden.frames import ANSWERED, ASKED, BATCH, CASES, encoded
from tests.hostile import fuzzing

MEMORY_EVERY = 200  # inputs
MEMORY_BASE_BYTES = 256 * 1024  # error messages, events, lists that grow by steps
MEMORY_PER_BYTE = 64  # a Span of three bytes on the wire costs Python about 100

PREFIX = struct.Struct("<IHBBQII")
# offset and struct format of every header field
FIELDS = {
    "length": (0, "I"), "verb": (4, "H"), "flags": (6, "B"), "version": (7, "B"), "correlation": (8, "Q"),
    "control_length": (16, "I"), "crc": (20, "I"),
}  # fmt: skip
NASTY = (
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    23,
    24,
    25,
    31,
    32,
    255,
    256,
    4_096,
    2**16 - 1,
    2**20,
    2**26,
    2**31,
    2**32 - 8,
    2**63,
)
OPCODES = (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xCB, 0xCF, 0xD3, 0xDB, 0xDC, 0xDD, 0xDF)

Mutation = Callable[[random.Random, bytearray, list[bytes]], None]


@dataclass
class Report:
    """What happened, in counts; the last three must be zero."""

    inputs: int = 0
    frames: int = 0
    events: int = 0
    lived: int = 0
    ended: int = 0
    memory_measured: int = 0
    peak_share_of_allowed: float = 0.0
    other_exceptions: int = 0
    disagreements: int = 0
    over_allocations: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.other_exceptions or self.disagreements or self.over_allocations)


@dataclass(frozen=True)
class Corpus:
    """Sound frames: what a server may hear, what a client may hear that has asked for everything, and all of them."""

    to_server: list[bytes]
    to_client: list[bytes]
    every: list[bytes]


REQUESTS = [message for message in ASKED if codec.REQUESTS[type(message)] >= messages.FIRST_REQUEST_VERB]
CORRELATIONS = {codec.REQUESTS[type(message)]: number for number, message in enumerate(REQUESTS, 1)}


def seeds() -> Corpus:
    """One sound frame of every kind, some with large and with many batches."""
    large = encode([b"x" * 20_000], producer_id=1, first_sequence=0, created_ms=0)
    small = encode([b""], producer_id=1, first_sequence=0, created_ms=0)
    answers: list[tuple[Verb, ControlMessage]] = [each for each in ANSWERED if each[0] in CORRELATIONS]
    answers.append((Verb.PULL, messages.Pulled(1, [], [messages.AttachedBatch(0, 0)] * 5)))
    spans = [messages.SequenceRange(number, 1) for number in range(200)]
    settle = messages.SettleAll("s", "g", "c", [messages.Settle(messages.Settlement.ACK, 0, 1, spans)], 0)
    to_server = [
        _frame(codec.REQUESTS[type(message)], 0, 1 << 20, message, batch)
        for message in (*REQUESTS, settle)
        for batch in (small, large)
    ]
    to_client = [
        _frame(verb, frames.RESPONSE, CORRELATIONS[verb], answer, batch)
        for verb, answer in answers
        for batch in (small, large)
    ]
    return Corpus(to_server, to_client, [*to_server, *to_client, *map(encoded, CASES)])


def _frame(verb: Verb, flags: int, correlation: int, message: ControlMessage, batch: bytes) -> bytes:
    attachments = [batch] * codec.attachments_of(message)
    return b"".join(frames.write(verb, flags, 1, correlation, codec.encode(message), attachments))


def _flip_bits(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    for _flip in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)


def _set_field(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at, form = FIELDS[rng.choice(list(FIELDS))]
    if len(data) >= PREFIX.size:
        (old,) = struct.unpack_from("<" + form, data, at)
        value = rng.choice((old + 1, old - 1, old + 8, old - 8, old ^ 1 << rng.randrange(32), rng.choice(NASTY)))
        struct.pack_into("<" + form, data, at, value & (1 << 8 * struct.calcsize("<" + form)) - 1)


def _set_opcode(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(PREFIX.size, len(data)) if len(data) > PREFIX.size else 0
    data[at] = rng.choice(OPCODES)


def _set_byte(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xC3, 0xED, 0xF4, 0xFF, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    del data[rng.randrange(1, len(data) + 1) :]


def _cut_words(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(0, len(data), 8)
    del data[at : at + 8 * rng.randrange(1, 4)]


def _insert(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randrange(0, len(data), rng.choice((1, 8)))
    data[at:at] = rng.choice((bytes(8), rng.randbytes(8), data[at : at + 8], b"\x91" * 2_000))


def _splice(rng: random.Random, data: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others)
    at, length = rng.randrange(len(data)) & -8, rng.choice((4, 8, 24, len(other)))
    data[at : at + length] = other[at : at + length]


MUTATIONS: list[Mutation] = [
    _flip_bits, _set_field, _set_field, _set_opcode, _set_opcode, _set_byte, _cut, _cut_words, _insert, _splice,
]  # fmt: skip


def _make_right(data: bytearray) -> None:
    """The CRC fits again: what is wrong lies deeper."""
    control_bytes = struct.unpack_from("<I", data, 16)[0]
    padded = data[24 : 24 + (min(control_bytes, len(data)) + 7 & -8)]
    struct.pack_into("<I", data, 20, checksum(bytes(data[:20] + padded)))


def conversation(rng: random.Random, corpus: Corpus, role: Role) -> list[bytearray]:
    """A few sound frames; mostly such as belong to one another."""
    pool = corpus.to_server if role is Role.SERVER else corpus.to_client
    if rng.random() < 0.2:
        pool = corpus.every
    parts = [bytearray(data) for data in rng.sample(pool, rng.choice((1, 1, 2, 4)))]
    for number, data in enumerate(parts, 1):
        if pool is corpus.to_server:
            struct.pack_into("<Q", data, 8, number)
            _make_right(data)
    return parts


def mutant(rng: random.Random, corpus: Corpus, role: Role) -> bytes:
    """One hostile conversation."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    parts = conversation(rng, corpus, role)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        data = rng.choice(parts)
        if data:
            rng.choice(MUTATIONS)(rng, data, corpus.every)
            if len(data) >= PREFIX.size and rng.random() < 0.8:
                if rng.random() < 0.7:
                    struct.pack_into("<I", data, 0, len(data))
                _make_right(data)
    return b"".join(parts)


def chunks(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces of any size."""
    step = rng.choice((1, 3, 24, 100, 1_000, 70_000))
    step = max(step, len(data) // 200)
    found, at = [], 0
    while at < len(data):
        size = rng.randrange(1, step + 1)
        found.append(data[at : at + size])
        at += size
    return found


def read(
    pieces: list[bytes],
    version: int,
    reader: type[FrameReader],
    buffer_from_bytes: int = limits.FRAME_BUFFER_FROM_BYTES,
) -> tuple[list[tuple[int, int, int, bytes, list[bytes]]], str, int]:
    """Frames, the sentence that ended them, and what is left over."""
    reading = reader(frame_bytes_max=limits.FRAME_BYTES_MAX, version=version, buffer_from_bytes=buffer_from_bytes)
    found = []
    try:
        for piece in pieces:
            reading.feed(piece)
            for frame in reading.frames():
                attachments = [bytes(each) for each in frame.attachments]
                found.append((frame.verb, frame.flags, frame.correlation, frame.control, attachments))
    except RemoteProtocolError as error:
        return found, str(error), 0
    return found, "", reading.buffered_bytes


def connection(rng: random.Random, role: Role) -> Connection:
    """A client that has asked for everything, or a server; now and then still greeting, or leaving."""
    client, server = Connection(Role.CLIENT, 0), Connection(Role.SERVER, 0, ConnectionOptions(requests_max=100))
    us = client if role is Role.CLIENT else server
    if rng.random() < 0.1:
        return us
    server.feed(b"".join(client.take()), 0)
    client.feed(b"".join(server.take()), 0)
    if role is Role.CLIENT:
        for message in REQUESTS:
            client.request(message, [BATCH] * codec.attachments_of(message))
    if rng.random() < 0.2:
        us.drain("enough")
    us.take()
    return us


def _try_one(rng: random.Random, data: bytes, role: Role, report: Report, reader: type[FrameReader]) -> None:
    pieces = chunks(rng, data)
    whole = read([data], 1, reader)
    if whole != read(pieces, 1, reader):
        raise AssertionError("whole and in pieces it reads differently")
    if whole != read(pieces, 1, reader, buffer_from_bytes=0):
        raise AssertionError("whole and from a buffer it reads differently")
    report.frames += len(whole[0])
    us = connection(rng, role)
    for piece in pieces:
        report.events += len(us.feed(piece, 0))
    said = b"".join(us.take())
    if us.closed is None:
        report.lived += 1
        return
    report.ended += 1
    if us.closed.why is Why.BROKEN and (us.closed.error is None or not said):
        raise AssertionError("it ended without a word")


def _promise(rng: random.Random) -> bytes:
    """The beginning of a frame that says it will be large."""
    size = rng.randrange(limits.MIB, limits.FRAME_BYTES_MAX) & -8
    return PREFIX.pack(size, 16, 0, 1, 1 << 30, rng.choice((1, limits.CONTROL_BYTES_MAX)), 0) + bytes(100)


def _measure_memory(rng: random.Random, data: bytes, role: Role, report: Report, reader: type[FrameReader]) -> None:
    pieces = chunks(rng, data + _promise(rng))
    us = connection(rng, role)
    tracemalloc.start()
    try:
        for piece in pieces:
            us.feed(piece, 0)
        read(pieces, 1, reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    report.memory_measured += 1
    allowed = MEMORY_BASE_BYTES + MEMORY_PER_BYTE * len(data)
    report.peak_share_of_allowed = max(report.peak_share_of_allowed, round(peak / allowed, 3))
    if peak > allowed:
        report.over_allocations += 1
        report.examples.append(f"{peak} bytes for {data.hex()}")


def run(
    inputs: int,
    seed: int,
    tick: Callable[[int], object] = lambda _done: None,
    reader: type[FrameReader] = FrameReader,
) -> Report:
    """Try that many inputs; the same seed makes the same ones."""
    rng, corpus, report = random.Random(seed), seeds(), Report()
    for _ in range(inputs):
        role = rng.choice(list(Role))
        data = mutant(rng, corpus, role)
        report.inputs += 1
        try:
            _try_one(rng, data, role, report, reader)
            if report.inputs % MEMORY_EVERY == 0:
                _measure_memory(rng, data, role, report, reader)
        except AssertionError as error:
            report.disagreements += 1
            report.examples.append(f"{error}: {data.hex()}")
        except Exception as error:  # that none other arrives here is what is being tested
            report.other_exceptions += 1
            report.examples.append(f"{error!r}: {data.hex()}")
        if report.inputs % MEMORY_EVERY == 0:
            tick(report.inputs)
    return report


if __name__ == "__main__":
    sys.exit(fuzzing.main("mutated frames", "mutated frames: each is events or a RemoteProtocolError", 500_000, run))
