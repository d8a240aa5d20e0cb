"""The cost of a frame: read, write, decode, a whole request on the server, beside the least that could be done.

    python -m bench.protocol            a table
    python -m bench.protocol --json     the same figures for a program

A chunk holds 100 frames, as it arrives from a client with many requests in flight. The yardstick for reading is to cut
the chunk at its length fields and look at nothing. For writing it is to join a header and a control message. For a
request on the server it is to read and to write a frame without a connection. Rounds are interleaved and the median is
shown.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.batch import Call, medians
from bench.presenting import present
from fairway import limits
from fairway.batch import encode
from fairway.protocol import Connection, FrameReader, RequestReceived, Role, codec, frames
from fairway.protocol.messages import Produce, Produced, Pull, SequenceRange, Settle, SettleAll, Settlement

FRAMES = 100
ROUNDS = 9
SHAPES = ((1, 100), (100, 100), (1_000, 100))

_LENGTH = struct.Struct("<I")
_PREFIX = struct.Struct("<IHBBQII")

PRODUCE = Produce("order.changed")
PRODUCED = Produced(4_200, 100, 1_700_000_000_000, False, 1)
PULL = Pull("order.changed", "billing", "billing-1", 1_000, 262_144, 30_000, 7)
SETTLE = SettleAll(
    "order.changed", "billing", "billing-1", [Settle(Settlement.ACK, 4_200, 1, [SequenceRange(4_200, 100)])], 7
)


def cut(chunk: bytes) -> list[bytes]:
    """The yardstick of reading."""
    found, at = [], 0
    while at < len(chunk):
        (size,) = _LENGTH.unpack_from(chunk, at)
        found.append(chunk[at : at + size])
        at += size
    return found


def read(reader: FrameReader, chunk: bytes) -> int:
    reader.feed(chunk)
    count = 0
    while reader.next_frame() is not None:
        count += 1
    return count


def in_pieces(reader: FrameReader, chunk: bytes, piece_bytes: int) -> None:
    for at in range(0, len(chunk), piece_bytes):
        read(reader, chunk[at : at + piece_bytes])


def join(control: bytes, batch: bytes) -> list[bytes]:
    """The yardstick of writing."""
    return [_PREFIX.pack(len(batch), 16, 0, 1, 7, len(control), 0) + control, batch]


def server() -> Connection:
    client, opened = Connection(Role.CLIENT, 0), Connection(Role.SERVER, 0)
    opened.feed(b"".join(client.take()), 0)
    opened.take()
    return opened


def serve(opened: Connection, chunk: bytes) -> None:
    """The work of a broker on a chunk of requests, apart from the requests themselves."""
    for event in opened.feed(chunk, 0):
        if isinstance(event, RequestReceived):
            opened.respond(event.correlation, PRODUCED)
    opened.take()


def calls_for(messages: int, payload_bytes: int) -> dict[str, tuple[Call, int]]:
    """Name: what to call, and how many frames that is."""
    batch = encode([b"x" * payload_bytes] * messages, producer_id=7, first_sequence=0, created_ms=0)
    control = codec.encode(PRODUCE)
    parts = [frames.write(16, 0, 1, correlation, control, [batch]) for correlation in range(1, FRAMES + 1)]
    chunk = b"".join(part for each in parts for part in each)
    reader = FrameReader(frame_bytes_max=limits.FRAME_BYTES_MAX, version=1)
    opened = server()
    return {
        "cut": (lambda: cut(chunk), FRAMES),
        "read": (lambda: read(reader, chunk), FRAMES),
        "read, in pieces of 64 KiB": (lambda: in_pieces(reader, chunk, 65_536), FRAMES),
        "join": (lambda: join(control, batch), 1),
        "write": (lambda: frames.write(16, 0, 1, 7, control, [batch]), 1),
        "request on the server": (lambda: serve(opened, chunk), FRAMES),
    }


def control_calls() -> dict[str, tuple[Call, int]]:
    calls: dict[str, tuple[Call, int]] = {}
    for message in (PRODUCE, PULL, SETTLE):
        verb, control = codec.REQUESTS[type(message)], codec.encode(message)
        calls[f"encode {verb.name}"] = (lambda message=message: codec.encode(message), 1)  # type: ignore[misc]
        calls[f"decode {verb.name}"] = (
            lambda verb=verb, control=control: codec.decode_request(verb, control),  # type: ignore[misc]
            1,
        )
    return calls


YARDSTICKS = {"read": "cut", "read, in pieces of 64 KiB": "cut", "write": "join"}


def rows_of(calls: dict[str, tuple[Call, int]], shape: str, rounds: int) -> list[dict[str, Any]]:
    times = medians({name: call for name, (call, _) in calls.items()}, rounds)
    ns = {name: times[name] / count for name, (_, count) in calls.items()}
    return [
        {
            "shape": shape,
            "what": name,
            "us": round(each / 1e3, 2),
            "per_s": round(1e9 / each),
            "ratio": round(each / ns[YARDSTICKS[name]], 2) if name in YARDSTICKS else None,
        }
        for name, each in ns.items()
    ]


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = rows_of(control_calls(), "control message", rounds)
    for messages, payload_bytes in SHAPES:
        rows += rows_of(calls_for(messages, payload_bytes), f"{messages} × {payload_bytes} B", rounds)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("frame of", "what", "µs per frame", "frames/s", "times the yardstick", title="the protocol")
    for row in rows:
        ratio = f"{row['ratio']} × {YARDSTICKS[row['what']]}" if row["ratio"] else ""
        table.add_row(row["shape"], row["what"], f"{row['us']:,.2f}", f"{row['per_s']:,}", ratio)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what a frame costs, beside the least that could be done", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
