"""The cost of a batch: encode, check, decode, to_arrow, beside the least that could be done with the same messages.

    python -m bench.batch            a table
    python -m bench.batch --json     the same figures for a program

The yardsticks for encode are `b"".join` of the payloads, and a walk over them in Python that only asks for their
lengths; for check, the CRC of the same bytes; for decode, slicing the joined payloads at known offsets. Rounds are
interleaved and the median is shown, so that a noisy neighbour hits all alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.presenting import present
from fairway.batch import MessageId, check, checksum, decode, encode, peek

SHAPES = ((1, 100), (100, 100), (1_000, 100))
ROUNDS = 9
ROUND_NS = 20_000_000  # long enough that the clock and the loop around the call vanish

Call = Callable[[], object]


def nanoseconds(call: Call, budget_ns: int = ROUND_NS) -> float:
    """One round: how long a call takes, from as many calls as fit the budget."""
    started = time.perf_counter_ns()
    call()
    calls = max(1, budget_ns // max(1, time.perf_counter_ns() - started))
    started = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - started) / calls


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Nanoseconds per call: the median of interleaved rounds."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(nanoseconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


def everything(count: int) -> dict[str, Any]:
    """All columns, as a careful application fills them."""
    return {
        "keys": [f"order-{i}" for i in range(count)],
        "tags": [["paid", "web"] for _ in range(count)],
        "headers": [{"trace": f"{i:032x}", "origin": "shop"} for i in range(count)],
        "created_deltas_ms": list(range(count)),
        "due_ms": [1_800_000_000_000 + i for i in range(count)],
        "ids": [MessageId(9, i) for i in range(count)],
    }


def calls_for(count: int, payload_bytes: int) -> dict[str, Call]:
    payloads = [bytes([i & 255]) * payload_bytes for i in range(count)]
    identity: dict[str, Any] = {"producer_id": 7, "first_sequence": 1, "created_ms": 1_700_000_000_000}
    columns = everything(count)
    named = {name: columns[name] for name in ("keys", "ids")}
    longer = named | {"created_deltas_ms": [0] * count}  # which says nothing, but is not the short way of one message
    plain = encode(payloads, **identity)
    full, of_ids = encode(payloads, **identity, **columns), encode(payloads, **identity, **named)
    blob = b"".join(payloads)
    offsets = list(range(0, len(blob) + 1, payload_bytes))
    calls: dict[str, Call] = {
        "join": lambda: b"".join(payloads),
        "walk": lambda: [len(payload) for payload in payloads],
        "encode": lambda: encode(payloads, **identity),
        "crc": lambda: checksum(plain),
        "peek": lambda: peek(plain),
        "check": lambda: check(plain),
        "slice": lambda: [blob[start:end] for start, end in pairwise(offsets)],
        "decode": lambda: decode(plain),
        "encode, keys and ids": lambda: encode(payloads, **identity, **named),
        "the same, the long way": lambda: encode(payloads, **identity, **longer),
        "check, keys and ids": lambda: check(of_ids),
        "check, the long way": lambda: check(memoryview(of_ids)),
        "encode, all columns": lambda: encode(payloads, **identity, **columns),
        "check, all columns": lambda: check(full),
        "decode, all columns": lambda: decode(full),
    }
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return calls
    opened, opened_full = decode(plain), decode(full)
    return calls | {"to_arrow": opened.to_arrow, "to_arrow, all columns": opened_full.to_arrow}


YARDSTICKS = {
    "encode": ("join", "walk"),
    "check": ("crc",),
    "decode": ("slice",),
    "encode, keys and ids": ("the same, the long way",),
    "check, keys and ids": ("check, the long way",),
}


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for count, payload_bytes in SHAPES:
        figures = medians(calls_for(count, payload_bytes), rounds)
        for name, ns in figures.items():
            row: dict[str, Any] = {"messages": count, "payload_bytes": payload_bytes, "what": name}
            row |= {"us": round(ns / 1e3, 2), "messages_per_s": round(count * 1e9 / ns)}
            row["ratios"] = {against: round(ns / figures[against], 2) for against in YARDSTICKS.get(name, ())}
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("messages", "what", "µs per batch", "messages/s", "times the yardstick", title="the batch")
    for row in rows:
        ratio = ", ".join(f"{ratio} × {against}" for against, ratio in row["ratios"].items())
        shape = f"{row['messages']} × {row['payload_bytes']} B"
        table.add_row(shape, row["what"], f"{row['us']:,.2f}", f"{row['messages_per_s']:,}", ratio)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what a batch costs, beside the least that could be done", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
