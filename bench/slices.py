"""How long a slice should be: what a group with few pulls in flight gets beside one with many, and what a pull waits.

    python -m bench.slices            a table
    python -m bench.slices --json     the same figures for a program

On virtual time, with costs drawn from a seed: the same figures on every machine. Group `large` has 100 pulls in flight,
`small` a few; both are backlogged. Handling a pull takes the loop 0.05 to 0.15 ms, and the next one of that consumer
comes 0.2 to 0.6 ms after its answer: what bench.fairness sees on loopback. Fair is a half. `wait` is how long the pulls
of a third group wait, which asks 250 times a second, while the other two are busy. On this loop, as on asyncio's own, a
turn that is due goes before what has just arrived.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fairway.runtime.clock import SimClock
from fairway.runtime.rng import SeededRng
from fairway.scheduling import Actor, Expiry, Scheduler, SchedulerOptions, TurnResult
from fairway.scheduling.virtual_time import CREDIT_NS, VirtualTime
from fairway.simulation.loop import SimLoop

SLICES_NS = (100_000, 200_000, 500_000, 1_000_000, 2_000_000)
IN_FLIGHT = (1, 2, 4, 8, 16)
CREDITS_NS = (0, CREDIT_NS)
LARGE = 100
RUN_S = 2.0
COST_S = 100e-6
AWAY_S = 400e-6
PACE_S = 4e-3


@dataclass(eq=False, slots=True)
class _Pull:
    group: str
    cost_s: float
    asked_ns: int  # of a pull whose wait is measured
    deadline_ns: int = 1 << 62
    wait_until_ns: int = 0
    is_cancelled: bool = False
    account: None = None


class _Stage:
    """One run: a scheduler, and consumers that ask again when they are answered."""

    def __init__(self, slice_ns: int, credit_ns: int) -> None:
        self._rng = SeededRng(1)
        self._loop = SimLoop(self._rng.child("loop"))
        options = SchedulerOptions(slice_ns=slice_ns)
        order = VirtualTime(credit_ns=credit_ns)
        self._scheduler = Scheduler(SimClock(self._loop.now_ns), self._loop, options, order)
        self.waits_ms: list[float] = []

    def run(self, small: int) -> float:
        """The share of `small` in the time that the two had."""
        for group, pulls in (("large", LARGE), ("small", small)):
            for _ in range(pulls):
                self._ask(group)
        self._ask_at_pace(0)
        self._loop.call_later(RUN_S, self._loop.stop)
        self._loop.run_forever()
        served = {key: actor.served_ns for key in ("large", "small") if (actor := self._scheduler.find(key))}
        return served["small"] / sum(served.values())

    def _ask(self, group: str, asked_ns: int = 0) -> None:
        self._scheduler.dispatch(group, _Pull(group, COST_S * self._about_one(), asked_ns), self)

    def _ask_at_pace(self, due_ns: int) -> None:
        """A pull that comes while the loop is busy waits from then on, though nobody has seen it yet."""
        self._ask("paced", due_ns)
        next_ns = due_ns + round(PACE_S * self._about_one() * 1e9)
        self._loop.call_later(max(next_ns - self._loop.now_ns(), 0) / 1e9, self._ask_at_pace, next_ns)

    def _about_one(self) -> float:
        return 0.5 + self._rng.uniform()

    def process(self, request: _Pull, _actor: Actor) -> TurnResult:
        if request.group == "paced":
            self.waits_ms.append((self._loop.now_ns() - request.asked_ns) / 1e6)
        else:
            self._loop.call_later(AWAY_S * self._about_one(), self._ask, request.group)
        self._loop.spend(round(request.cost_s * 1e9))
        return TurnResult.DONE

    def expire(self, request: _Pull, expiry: Expiry) -> None:
        raise AssertionError(f"a pull of {request.group} ended as {expiry.value}")

    def fail(self, request: _Pull, error: Exception) -> None:
        raise error


def measure(slice_ns: int, credit_ns: int) -> dict[str, Any]:
    shares = {}
    waits_ms: list[float] = []
    for small in IN_FLIGHT:
        stage = _Stage(slice_ns, credit_ns)
        shares[small] = round(stage.run(small), 3)
        waits_ms += stage.waits_ms
    waits_ms.sort()
    return {
        "slice_ms": slice_ns / 1e6,
        "credit_ms": credit_ns / 1e6,
        "shares": shares,
        "wait_p50_ms": waits_ms[len(waits_ms) // 2],
        "wait_p99_ms": waits_ms[len(waits_ms) * 99 // 100],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    title = "share of the loop's time by pulls in flight, beside a group with 100; a half is fair"
    table = Table("slice ms", "credit ms", *map(str, IN_FLIGHT), "wait p50 ms", "wait p99 ms", title=title)
    for row in rows:
        shares = [f"{row['shares'][small]:.2f}" for small in IN_FLIGHT]
        waits = [f"{row[name]:.2f}" for name in ("wait_p50_ms", "wait_p99_ms")]
        table.add_row(f"{row['slice_ms']:g}", f"{row['credit_ms']:g}", *shares, *waits)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the length of a slice against pulls in flight, on virtual time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [measure(slice_ns, credit_ns) for credit_ns in CREDITS_NS for slice_ns in SLICES_NS]
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
