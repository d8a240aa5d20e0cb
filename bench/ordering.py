"""Order by key: how fast a group is handed messages that keep an order, against one that keeps none.

    python -m bench.ordering            a table
    python -m bench.ordering --json     the same figures for a program

A broker of its own, one consumer that takes handfuls and acks them, a fresh group for every turn, all ways by turns in
every round; the ratios are medians over the rounds. The consumer does nothing with a message, so all that is measured
is handing out and settling. Three streams of 100-byte messages:

    many keys      every message has one of its own: nothing is ever in the way, and order costs what it costs
    some keys      a thousand, at random: a few messages of every lot wait for others, or go out behind them
    few keys       sixteen, in batches of 20: little to do at once, and a run of each key in every response
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

import fairway
from bench.client_rates import broker
from bench.presenting import present

ROUNDS = 5
PAYLOAD = bytes(100)
STREAMS = {"many keys": (100_000, 100_000, 1_000), "some keys": (20_000, 1_000, 500), "few keys": (2_000, 16, 20)}
Order: TypeAlias = Literal["none", "key", "strict"]
ORDERS: tuple[Order, ...] = ("none", "key", "strict")


def fill(client: fairway.Client) -> None:
    rng = random.Random(7)
    for name, (count, keys, size) in STREAMS.items():
        for first in range(0, count, size):
            chosen = [f"k-{number if keys >= count else rng.randrange(keys)}" for number in range(first, first + size)]
            client.send_many(_subject(name), [PAYLOAD] * size, keys=chosen)
    client.flush()


def _subject(stream: str) -> str:
    return stream.replace(" ", ".")


def rate(client: fairway.Client, stream: str, order: Order, turn: int) -> float:
    """Messages per second, from the first pull to the last confirmed ack."""
    count = STREAMS[stream][0]
    with client.consumer(_subject(stream), group=f"{order}-{turn}", order=order) as consumer:
        started = time.perf_counter()
        done = 0
        while done < count:
            found = consumer.take(1_000, timeout=60)
            if not found:
                raise RuntimeError(f"nothing came for a minute, after {done} of {count} messages")
            consumer.ack(found)
            done += len(found)
        consumer.flush()
        return count / (time.perf_counter() - started)


def measure(rounds: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, Order], list[float]] = {(stream, order): [] for stream in STREAMS for order in ORDERS}
    with broker("sync") as (url, _), fairway.connect(url) as client:
        fill(client)
        for turn in range(rounds):
            for (stream, order), rates in found.items():
                rates.append(rate(client, stream, order, turn))
    rows = []
    for stream in STREAMS:
        plain = found[stream, "none"]
        for order in ORDERS:
            ratios = [one / other for one, other in zip(found[stream, order], plain, strict=True)]
            per_s = statistics.median(found[stream, order])
            rows.append(
                {"stream": stream, "order": order, "per_s": round(per_s), "ratio": round(statistics.median(ratios), 3)}
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("stream", "order", "messages/s", "against none", title="a group that keeps an order")
    for row in rows:
        table.add_row(row["stream"], row["order"], f"{row['per_s']:,}", f"{row['ratio']:.3f}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what it costs a group to keep an order", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
