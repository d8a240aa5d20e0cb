"""`fairway.testing`: what idle time costs. Three idle days beside one idle second, with an app that has joined.

    python -m bench.testing            a table
    python -m bench.testing --json     the same figures for a program

Each round lets one second and three days pass, by turns, on one broker in memory with a joined app; `later` also has a
delayed message pending. Asked: at most 50 ms for three days.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from bench.presenting import Rows, present
from fairway.client.app import App
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker

ROUNDS = 9
ASKED_MS = 50.0
SECOND = timedelta(seconds=1)
DAYS = timedelta(days=3)


def joined(broker: MemoryBroker, *, has_later: bool) -> None:
    app = App(broker.url)

    @app.listener("order.changed", group="mailer")
    def handle(message: Message) -> None:
        """It is done."""

    client = broker.connect()
    client.send("order.changed", b"paid").result()
    if has_later:
        client.send("order.remind", b"pay", after=timedelta(days=700)).result()
    broker.handle(app)


def cost_ms(broker: MemoryBroker, span: timedelta) -> float:
    started_ns = time.perf_counter_ns()
    broker.clock.advance(seconds=span.total_seconds())
    return (time.perf_counter_ns() - started_ns) / 1e6


def measure(rounds: int) -> Rows:
    rows: Rows = []
    for name, has_later in (("joined app", False), ("and a delayed message", True)):
        with MemoryBroker() as broker:
            joined(broker, has_later=has_later)
            found = [(cost_ms(broker, SECOND), cost_ms(broker, DAYS)) for _ in range(rounds)]
        second_ms, days_ms = (statistics.median(each) for each in zip(*found, strict=True))
        rows.append({"what": name, "second_ms": second_ms, "days_ms": days_ms, "ratio": days_ms / second_ms})
    return rows


def show(rows: Rows) -> None:
    table = Table(title=f"idle time in fairway.testing, at most {ASKED_MS:g} ms asked for three days")
    for column in ("with a", "1 s, ms", "3 days, ms", "3 days ÷ 1 s"):
        table.add_column(column, justify="left" if column == "with a" else "right")
    for row in rows:
        table.add_row(row["what"], f"{row['second_ms']:.2f}", f"{row['days_ms']:.2f}", f"{row['ratio']:.1f}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, __doc__ or "", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
