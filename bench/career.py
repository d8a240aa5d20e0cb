"""Careers: how soon the next candidate leads when a leader stops, and when it is killed; beside kazoo's own recipe.

    python -m bench.career            a table
    python -m bench.career --json     the same figures for a program

Two candidates in processes of their own, on a real ZooKeeper of one server, with sessions of 1.5 s. In each round the
one that rules gets SIGTERM or SIGKILL, and the time is taken until the other one has begun its first piece of work.
Then the first one stands in line again. Fairway's careers and kazoo's `Election`, which is the same recipe without
inauguration, hand-over, token or regard for suspended sessions, by turns.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import fairway
from bench.presenting import Rows, present
from fairway.runtime.process import Child
from tests.support.zookeeper import ensemble

ROUNDS = 15
SESSION_MS = 1_500
WAIT_S = 60.0
WAYS = ("fairway", "kazoo")
ENDS = ("told to go", "killed")


# --- a candidate -----------------------------------------------------------------------------------------------------


def _say() -> None:
    print(time.monotonic_ns(), flush=True)


class Clerk(fairway.Career):
    name = "clerk"

    def inaugurate(self) -> None:
        self._has_said = False

    def execute(self, token: int) -> bool:
        if not self._has_said:
            _say()
            self._has_said = True
        time.sleep(0.005)
        return True


def stand_for_kazoo(hosts: str, path: str) -> None:
    from kazoo.client import KazooClient

    asked: list[int] = []
    client = KazooClient(hosts, timeout=SESSION_MS / 1e3)
    client.start()

    def rule() -> None:
        _say()
        while not asked:
            time.sleep(0.005)

    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    client.Election(path).run(rule)
    client.stop()


def stand(way: str, hosts: str, path: str) -> None:
    if way == "kazoo":
        stand_for_kazoo(hosts, path)
    else:
        fairway.elect(Clerk(), zookeeper=hosts, path=path, session_ms=SESSION_MS)


# --- the rounds ------------------------------------------------------------------------------------------------------


class Pair:
    """A leader, and one that waits."""

    def __init__(self, way: str, hosts: str) -> None:
        self._orders = ("bench.career", "--stand", way, hosts, f"/bench/{way}")
        self._leader, self._next = Child(*self._orders), Child(*self._orders)
        if not self._rules(self._leader, 2.0):
            self._leader, self._next = self._next, self._leader
            self._rules(self._leader, WAIT_S)

    def _rules(self, child: Child, timeout_s: float) -> int:
        """When it began, or 0."""
        try:
            return int(child.line(timeout_s=timeout_s) or 0)
        except fairway.FairwayError:
            return 0

    def round(self, end: str) -> float:
        """Milliseconds without a leader."""
        time.sleep(SESSION_MS / 1e3 / 2)  # the other one is in line by now, and watches
        started_ns = time.monotonic_ns()
        if end == "killed":
            self._leader.kill()
        else:
            self._leader.terminate()
        began_ns = self._rules(self._next, WAIT_S)
        self._leader.__exit__(None, None, None)
        self._leader, self._next = self._next, Child(*self._orders)
        return (began_ns - started_ns) / 1e6

    def close(self) -> None:
        for child in (self._leader, self._next):
            child.__exit__(None, None, None)


def measure(rounds: int) -> Rows:
    found: dict[tuple[str, str], list[float]] = {(way, end): [] for way in WAYS for end in ENDS}
    with ensemble() as zookeeper:
        pairs = {way: Pair(way, zookeeper.hosts) for way in WAYS}
        try:
            for _ in range(rounds):
                for (way, end), samples in found.items():
                    samples.append(pairs[way].round(end))
        finally:
            for pair in pairs.values():
                pair.close()
    return [row(way, end, samples) for (way, end), samples in found.items()]


def row(way: str, end: str, samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "way": way,
        "leader": end,
        "p50_ms": round(statistics.median(ordered), 1),
        "p99_ms": round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)], 1),
        "p50_sessions": round(statistics.median(ordered) / SESSION_MS, 2),
    }


def show(rows: Rows) -> None:
    table = Table("election", "leader", "p50 ms", "p99 ms", "p50 in sessions", title="until another one is at work")
    for each in rows:
        figures = (f"{each['p50_ms']:,.0f}", f"{each['p99_ms']:,.0f}", f"{each['p50_sessions']:.2f}")
        table.add_row(each["way"], each["leader"], *figures)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--stand"]:
        stand(*arguments[1:])
        return 0
    return present(argv, "careers: how soon another one rules", ROUNDS, measure, show)


if __name__ == "__main__":
    sys.exit(main())
