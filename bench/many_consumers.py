"""Many consumers on one sync client: processor time per message with 2, 10, 50 and 100 of them, drained and steady.

    python -m bench.many_consumers            a table, about three minutes
    python -m bench.many_consumers --quick    one short round
    python -m bench.many_consumers --json     the same figures for a program

One program has one client with so many consumers, a thread for each, which takes and acks. The number of messages is
the same with 2 and with 100 of them, so the cost of one should be. Three ways, by turns in every round:

    subjects    a backlog in as many subjects as there are consumers, drained in handfuls
    group       a backlog in one subject, which the consumers drain as one group
    steady      single messages, so many a second over all subjects, each handled when it comes

Time is the processor's, of the client's whole process and of the broker; joining and leaving are not counted. The
senders of the steady way are a process of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import fairway
from bench import machine
from bench.client_loads import small_senders
from bench.client_rates import broker
from bench.kernel_counters import cpu_s
from bench.presenting import short

CONSUMERS = (2, 10, 50, 100)
FLAT = 1.5  # what a message may cost with the most consumers, of what it costs with the fewest
PAYLOAD = bytes(100)
HANDFUL = 1_000
IDLE_S = 0.5  # a consumer that waits looks so often whether everything has been taken
DRAIN_S_MAX = 120.0
WAYS = ("subjects", "group", "steady")


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int
    messages: int  # of a backlog
    per_s: int  # of the steady way
    seconds: float


FULL = Scale(5, 100_000, 1_000, 2.0)
QUICK = Scale(1, 50_000, 1_000, 1.0)
TINY = Scale(1, 2_000, 200, 0.2)


@dataclass(frozen=True, slots=True)
class Cost:
    """Per message."""

    client_us: float
    broker_us: float
    messages: int


class Crew:
    """Consumers of one client, with a thread each, until so many messages were taken or the time is over."""

    def __init__(self, consumers: Sequence[fairway.Consumer], count: int, seconds: float) -> None:
        self._count = count
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(consumer,)) for consumer in consumers]
        self.taken = 0

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _work(self, consumer: fairway.Consumer) -> None:
        while self.taken < self._count and time.monotonic() < self._end_s:
            messages = consumer.take(HANDFUL, timeout=max(0.0, min(IDLE_S, self._end_s - time.monotonic())))
            if messages:
                consumer.ack(messages)
                with self._lock:
                    self.taken += len(messages)


class Bench:
    """A broker, and backlogs for every way and number of consumers."""

    def __init__(self, url: str, pid: int, scale: Scale, sizes: Sequence[int]) -> None:
        self._url = url
        self._pid = pid
        self._scale = scale
        with fairway.connect(url) as client:
            client.send_many("one", [PAYLOAD] * scale.messages)
            for size in sizes:
                for subject in self._subjects(size):
                    client.send_many(subject, [PAYLOAD] * (scale.messages // size))

    def cost(self, way: str, size: int, turn: int) -> Cost:
        subjects = {
            "subjects": self._subjects(size),
            "group": ["one"] * size,
            "steady": [f"steady.{turn}.{each}" for each in self._subjects(size)],
        }[way]
        group = f"{way}-{size}-{turn}"
        with fairway.connect(self._url) as client, ExitStack() as joined:
            consumers = [joined.enter_context(client.consumer(subject, group=group)) for subject in subjects]
            if way == "steady":
                return self._steady(consumers, subjects)
            crew = Crew(consumers, self._scale.messages // size * size, DRAIN_S_MAX)
            with self._counted() as found:
                crew.run()
                for consumer in consumers:
                    consumer.flush()
        if crew.taken < self._scale.messages // size * size:
            raise RuntimeError(f"{crew.taken} of {self._scale.messages} messages came within {DRAIN_S_MAX:g} s")
        return found(crew.taken)

    def _steady(self, consumers: Sequence[fairway.Consumer], subjects: Sequence[str]) -> Cost:
        with small_senders(self._url, tuple(subjects), self._scale.per_s // len(subjects)) as senders:
            crew = Crew(consumers, sys.maxsize, self._scale.seconds)
            with self._counted() as found:
                senders.tell("work", self._scale.seconds)
                crew.run()
            senders.hear()
        return found(crew.taken)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[int], Cost]]:
        """What was used meanwhile, for each of so many messages."""
        client_s, broker_s = time.process_time(), cpu_s(self._pid)
        spent: list[float] = []
        yield lambda count: Cost(spent[0] / max(count, 1) * 1e6, spent[1] / max(count, 1) * 1e6, count)
        spent += [time.process_time() - client_s, cpu_s(self._pid) - broker_s]

    @staticmethod
    def _subjects(size: int) -> list[str]:
        return [f"orders.{size}.{number}" for number in range(size)]


def measure(scale: Scale, sizes: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """By way, a row for each number of consumers."""
    turns = [(way, size) for way in WAYS for size in sizes]
    found: dict[tuple[str, int], list[Cost]] = {turn: [] for turn in turns}
    with broker("sync") as (url, pid):
        bench = Bench(url, pid, scale, sizes)
        bench.cost("subjects", sizes[0], -1)  # for what is imported when it is first needed
        for number in range(scale.rounds):
            for way, size in turns:
                found[way, size].append(bench.cost(way, size, number))
    return {way: [_row(size, found[way, size], found[way, sizes[0]]) for size in sizes] for way in WAYS}


def _row(size: int, costs: Sequence[Cost], fewest: Sequence[Cost]) -> dict[str, Any]:
    ratios = [many.client_us / max(few.client_us, 1e-9) for many, few in zip(costs, fewest, strict=True)]
    return {
        "consumers": size,
        "client_us": statistics.median(cost.client_us for cost in costs),
        "broker_us": statistics.median(cost.broker_us for cost in costs),
        "ratio": statistics.median(ratios),
    }


def show(ways: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="processor time per message", title_justify="left")
    for column in ("", "consumers", "client µs", "÷ fewest", "broker µs"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("asked")
    for way, rows in ways.items():
        for place, row in enumerate(rows):
            figures = (short(row[name]) for name in ("client_us", "ratio", "broker_us"))
            asked = f"≤ {FLAT}: {'held' if row['ratio'] <= FLAT else 'missed'}" if place else ""
            table.add_row("" if place else way, f"{row['consumers']:,}", *figures, asked)
        table.add_section()
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m bench.many_consumers"
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--consumers", type=int, nargs="+", default=list(CONSUMERS), help="ascending numbers of them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    scale = TINY if options.tiny else QUICK if options.quick else FULL
    ways = measure(replace(scale, rounds=options.rounds or scale.rounds), options.consumers)
    told = machine.describe(Path(tempfile.gettempdir()))
    if options.json:
        print(json.dumps({"machine": told, "ways": ways}))
    else:
        show(ways, Console(width=max(100, Console().width)))
        print(f"{told}. {machine.QUIET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
