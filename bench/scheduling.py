"""The cost of an actor's turn: dispatch and handle with 1, 70 and 10,000 actors, beside a plain queue of callbacks.

    python -m bench.scheduling            tables
    python -m bench.scheduling --json     the same figures for a program

The first table is the scheduler alone: requests that do nothing, on a loop that only keeps callbacks. "One each" makes
every request a slice of its own, the dearest case; with twenty each the slice is shared. The yardstick is a deque of
(processor, request) that is filled and emptied. The second table is the question of how many slices a turn of the loop
should run: one, or as many as fit into a slice's time, on real loops with requests of 5 µs. Rounds are interleaved, and
the median is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fairway.runtime.clock import RealClock
from fairway.scheduling import Actor, Expiry, Scheduler, SchedulerOptions, TurnResult

ACTORS = (1, 70, 10_000)
EACH = (1, 20)
ROUNDS = 9
ROUND_REQUESTS = 20_000
BUSY_NS = 5_000  # a pull that finds a little
TURN_SLICES = (1, SchedulerOptions().turn_slices_max)


class Request:
    __slots__ = ()
    deadline_ns = 1 << 62
    wait_until_ns = 0
    is_cancelled = False
    account = None


class Idle:
    """A processor that does nothing."""

    def process(self, request: Request, actor: Actor) -> TurnResult:
        return TurnResult.DONE

    def expire(self, request: Request, expiry: Expiry) -> None:
        raise AssertionError(expiry)

    def fail(self, request: Request, error: Exception) -> None:
        raise error


class Busy(Idle):
    """A processor that takes 5 µs, and says when a number of requests is done."""

    def __init__(self) -> None:
        self.left = 0
        self.all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def expect(self, count: int) -> None:
        self.left = count
        self.all_done = asyncio.get_running_loop().create_future()

    def process(self, request: Request, actor: Actor) -> TurnResult:
        end_ns = time.monotonic_ns() + BUSY_NS
        while time.monotonic_ns() < end_ns:
            pass
        self.left -= 1
        if not self.left:
            self.all_done.set_result(None)
        return TurnResult.DONE


class Callbacks:
    """A loop that keeps callbacks until it is drained; its timers never ring."""

    def __init__(self) -> None:
        self._ready: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self._ready.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Callbacks:
        return self

    def cancel(self) -> None:
        pass

    def drain(self) -> None:
        while self._ready:
            self._ready.popleft()()


class Alone:
    """The scheduler on a loop of nothing; and the plain queue that it is measured against."""

    def __init__(self, actors: int, each: int) -> None:
        self._loop = Callbacks()
        self._scheduler = Scheduler(RealClock(), self._loop)
        self._keys = [("subject", f"group-{number}") for number in range(actors)]
        self._each = each
        self._rounds = max(1, ROUND_REQUESTS // (actors * each))
        self._requests = self._rounds * actors * each
        self._request, self._processor = Request(), Idle()
        self.round()

    def round(self) -> tuple[float, float]:
        """Nanoseconds per request: to dispatch it, and to handle it."""
        dispatch_ns = handle_ns = 0
        for _ in range(self._rounds):
            started_ns = time.perf_counter_ns()
            for _ in range(self._each):
                for key in self._keys:
                    self._scheduler.dispatch(key, self._request, self._processor)
            between_ns = time.perf_counter_ns()
            self._loop.drain()
            dispatch_ns += between_ns - started_ns
            handle_ns += time.perf_counter_ns() - between_ns
        return dispatch_ns / self._requests, handle_ns / self._requests

    def plain_round(self) -> float:
        """Nanoseconds per request through a deque."""
        queue: deque[tuple[Idle, Request]] = deque()
        actor = next(iter(self._scheduler))
        started_ns = time.perf_counter_ns()
        for _ in range(self._requests):
            queue.append((self._processor, self._request))
        while queue:
            processor, request = queue.popleft()
            processor.process(request, actor)
        return (time.perf_counter_ns() - started_ns) / self._requests


def measure_alone(rounds: int) -> list[dict[str, Any]]:
    shapes = [(actors, each) for actors in ACTORS for each in EACH]
    alone = {shape: Alone(*shape) for shape in shapes}
    samples: dict[tuple[int, int], list[tuple[float, float, float]]] = {shape: [] for shape in shapes}
    for _ in range(rounds):
        for shape in shapes:
            samples[shape].append((*alone[shape].round(), alone[shape].plain_round()))
    rows = []
    for (actors, each), found in samples.items():
        dispatch_ns, handle_ns, plain_ns = (statistics.median(column) for column in zip(*found, strict=True))
        both_ns = dispatch_ns + handle_ns
        row: dict[str, Any] = {"actors": actors, "requests_each": each}
        row |= {"dispatch_us": round(dispatch_ns / 1e3, 2), "handle_us": round(handle_ns / 1e3, 2)}
        row |= {"requests_per_s": round(1e9 / both_ns), "times_plain_queue": round(both_ns / plain_ns, 1)}
        rows.append(row)
    return rows


async def busy_round(actors: int, turn_slices_max: int) -> float:
    """Microseconds per request of 5 µs, one per actor, on the running loop."""
    loop = asyncio.get_running_loop()
    scheduler = Scheduler(RealClock(), loop, SchedulerOptions(turn_slices_max=turn_slices_max))
    processor, request = Busy(), Request()
    repeats = max(1, 5_000 // actors)
    started_ns = time.perf_counter_ns()
    for _ in range(repeats):
        processor.expect(actors)
        for key in range(actors):
            scheduler.dispatch(key, request, processor)
        await processor.all_done
    elapsed_ns = time.perf_counter_ns() - started_ns
    scheduler.close()
    return elapsed_ns / repeats / actors / 1e3


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        return found
    return found | {"uvloop": uvloop.new_event_loop}


def measure_turns(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, make_loop in loops().items():
        for actors in (70, 1_000):
            times: dict[int, list[float]] = {slices: [] for slices in TURN_SLICES}
            for _ in range(rounds):
                for slices, found in times.items():
                    with asyncio.Runner(loop_factory=make_loop) as runner:
                        found.append(runner.run(busy_round(actors, slices)))
            one_us, many_us = (statistics.median(found) for found in times.values())
            row: dict[str, Any] = {"loop": name, "actors": actors, "one_us": round(one_us, 2)}
            rows.append(row | {"many_us": round(many_us, 2), "ratio": round(one_us / many_us, 2)})
    return rows


def actor_bytes() -> int:
    """What an idle actor weighs, its key not counted."""
    keys = list(range(10_000))
    tracemalloc.start()
    loop = Callbacks()
    scheduler = Scheduler(RealClock(), loop)
    for key in keys:
        scheduler.dispatch(key, Request(), Idle())
    loop.drain()
    size_bytes = tracemalloc.get_traced_memory()[0] // len(keys)
    tracemalloc.stop()
    return size_bytes


def show(alone: list[dict[str, Any]], turns: list[dict[str, Any]], size_bytes: int) -> None:
    table = Table("actors", "requests each", "dispatch µs", "handle µs", "requests/s", "times a plain queue")
    table.title = "the scheduler alone"
    for row in alone:
        costs = (f"{row['dispatch_us']:.2f}", f"{row['handle_us']:.2f}", f"{row['requests_per_s']:,}")
        table.add_row(f"{row['actors']:,}", str(row["requests_each"]), *costs, str(row["times_plain_queue"]))
    Console().print(table)
    table = Table("loop", "actors", "one slice per turn, µs", "as many as fit, µs", "ratio")
    table.title = "a request of 5 µs, one per actor"
    for row in turns:
        table.add_row(row["loop"], f"{row['actors']:,}", *(str(row[name]) for name in ("one_us", "many_us", "ratio")))
    Console().print(table)
    print(f"an idle actor weighs {size_bytes:,} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what an actor's turn costs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    alone, turns, size_bytes = measure_alone(options.rounds), measure_turns(options.rounds), actor_bytes()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"machine": machine, "alone": alone, "turns": turns, "actor_bytes": size_bytes}))
        return 0
    show(alone, turns, size_bytes)
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
