"""The cost of a group's state machine: pull, ack, retry of a range, with little and with much in flight.

    python -m bench.groups            a table
    python -m bench.groups --json     the same figures for a program

Each case is measured with 1,000 and with 99,000 ranges in flight and 10 M messages behind the cursor; rounds are
interleaved and the ratio of the medians must stay near 1. Time is the processor's, since nothing here waits. A pull or
an ack is a decision and the application of its events; writing them down is the action log's affair.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.presenting import present
from fairway.groups import GroupConfig, GroupDecision, GroupOutcome, GroupStateMachine, Handout, SettleVerdict
from fairway.names import ConsumerName

IN_FLIGHT = (1_000, 99_000)
BEHIND = 10_000_000
CONSUMERS = 100
LOT_MESSAGES = (1, 100, 1_000)
ROUNDS = 9
CALLS = 900  # per round; with 99,000 in flight there is room for 1,000 more
NOW_MS = 1_700_000_000_000


class Stage:
    """A group with so many ranges in flight, and consumers that take turns."""

    def __init__(self, in_flight: int, lot_messages: int) -> None:
        self.lot_messages = lot_messages
        self.group = GroupStateMachine()
        self._apply(self.group.configure(0, GroupConfig(), now_ms=NOW_MS))
        self._apply(self.group.seek(BEHIND, now_ms=NOW_MS))
        self.names = [ConsumerName.parse(f"consumer-{number}") for number in range(CONSUMERS)]
        self.arrived = [0] * CONSUMERS
        for name in self.names:
            self._apply(self.group.join(name, version=0, arrived=0, resume_at=0, now_ns=0, now_ms=NOW_MS))
        for turn in range(in_flight):
            self.pull(turn)

    def _apply(self, decision: GroupDecision) -> None:
        for event in decision.events:
            self.group.apply(event, 0)

    def pull(self, turn: int) -> Handout:
        who = turn % CONSUMERS
        decision = self.group.pull(
            self.names[who],
            arrived=self.arrived[who],
            messages_max=self.lot_messages,
            fresh=(self.group.cursor, 100_000),
            now_ns=0,
            now_ms=NOW_MS,
        )
        self._apply(decision)
        self.arrived[who] = decision.number
        return decision.lots[0]

    def settle(self, turn: int, verdict: SettleVerdict, lot: Handout) -> None:
        name = self.names[turn % CONSUMERS]
        decision = self.group.settle(name, verdict, lot.first, lot.attempt, lot.ranges, now_ms=NOW_MS, after_ms=0)
        if decision.outcome is not GroupOutcome.DONE or decision.stale:
            raise RuntimeError(f"the bench is wrong: {decision}")
        self._apply(decision)


def nanoseconds(call: Callable[[int], object]) -> float:
    """Of processor time, per call."""
    started = time.thread_time_ns()
    for turn in range(CALLS):
        call(turn)
    return (time.thread_time_ns() - started) / CALLS


def one_round(stage: Stage) -> dict[str, float]:
    """Pulls, retries of what was pulled, pulls of that again, acks: afterwards as much is in flight as before."""
    lots: list[Handout] = []
    figures = {"pull": nanoseconds(lambda turn: lots.append(stage.pull(turn)))}
    figures["retry"] = nanoseconds(lambda turn: stage.settle(turn, SettleVerdict.RETRY, lots[turn]))
    lots.clear()
    figures["pull again"] = nanoseconds(lambda turn: lots.append(stage.pull(turn)))
    figures["ack"] = nanoseconds(lambda turn: stage.settle(turn, SettleVerdict.ACK, lots[turn]))
    return figures


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for lot_messages in LOT_MESSAGES:
        stages = {in_flight: Stage(in_flight, lot_messages) for in_flight in IN_FLIGHT}
        gc.collect()
        found: dict[int, list[dict[str, float]]] = {in_flight: [] for in_flight in IN_FLIGHT}
        for _ in range(rounds):
            for in_flight, stage in stages.items():
                found[in_flight].append(one_round(stage))
        for what in found[IN_FLIGHT[0]][0]:
            few, many = (statistics.median(each[what] for each in found[in_flight]) for in_flight in IN_FLIGHT)
            row: dict[str, Any] = {"lot": lot_messages, "what": what, "us": round(few / 1e3, 2)}
            row |= {"us_much": round(many / 1e3, 2), "ratio": round(many / few, 2), "per_s_much": round(1e9 / many)}
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    few, many = (f"µs at {in_flight:,}" for in_flight in IN_FLIGHT)
    table = Table("lot of", "what", few, many, "ratio", "/s", "messages/s", title="the law of a group")
    for row in rows:
        rates = f"{row['per_s_much']:,}", f"{row['per_s_much'] * row['lot']:,}"
        table.add_row(f"{row['lot']:,}", row["what"], f"{row['us']}", f"{row['us_much']}", f"{row['ratio']}", *rates)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return present(argv, "what a pull and an ack cost, with little and with much in flight", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
