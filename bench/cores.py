"""Cores: one broker process alone, and one and two behind one meta server and one URL; rate and processor time of each.

    python -m bench.cores                     a table, about six minutes
    python -m bench.cores --quick             one short round
    python -m bench.cores --brokers 1 2 4     these numbers of broker processes
    python -m bench.cores --clients 2         so many client processes at once
    python -m bench.cores --json              the same figures for a program

Each broker is a group of its own without replicas, and every subject is on all of them. The loads are those of
`bench.peers`, by its drivers. The set-ups take turns within a round; ratios to the broker alone are taken round by
round; shown are medians. A broker is one thread of Python, so more than one core takes more than one of them, if
brokers and clients together have that many cores. `cores` says how many they had.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.cluster_groups import Alone, OneHost
from bench.peers.driving import Result, Task
from bench.peers.rounds import drive
from bench.presenting import short

ALONE = "alone"
BROKERS = (1, 2)
CONNECTIONS = 100
WORKLOADS = (f"many_connections {CONNECTIONS}", "one_at_a_time 1000", "produce_many", "consume_batches")

Setup = Alone | OneHost


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int
    seconds: float
    warm_s: float


FULL = Scale(5, 3.0, 0.5)
QUICK = Scale(1, 1.0, 0.2)
TINY = Scale(1, 0.1, 0.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one set-up under one load: per second, per message, and as parts of a core."""

    messages_per_s: float
    brokers_us: float
    clients_us: float
    brokers_cores: float
    clients_cores: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Sample:
        """Of clients that worked at the same time. Each of them has seen what the brokers used meanwhile."""
        messages = sum(result.messages for result in results)
        elapsed_s = statistics.mean(result.elapsed_s for result in results)
        brokers_s = statistics.mean(result.server_cpu_s for result in results)
        clients_s = sum(result.client_cpu_s for result in results)
        per_us = 1e6 / max(messages, 1)
        return cls(
            messages / elapsed_s, brokers_s * per_us, clients_s * per_us, brokers_s / elapsed_s, clients_s / elapsed_s
        )


FIGURES = tuple(Sample.__dataclass_fields__)


def play(setup: Setup, workload: str, turn: int, scale: Scale, clients: int) -> Sample:
    task = Task(workload.partition(" ")[0], setup.url, f"cores.{turn}", scale.seconds, scale.warm_s)
    task = replace(task, connections=CONNECTIONS, server_pids=setup.pids)
    python = Path(sys.executable)
    if workload == "consume_batches":  # of what `produce_many` stores first
        stored = drive(python, "fairway_client", [replace(task, workload="produce_many")] * clients)
        task = replace(task, count=sum(result.messages for result in stored) // clients)
    return Sample.of(drive(python, "fairway_client", [task] * clients))


def measure(scale: Scale, brokers: Sequence[int], clients: int, folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By workload and set-up."""
    with ExitStack() as running:
        setups: dict[str, Setup] = {ALONE: Alone(folder)}
        running.callback(setups[ALONE].close)
        for number in brokers:
            name = f"{number} behind a meta server"
            setups[name] = OneHost(folder, number)
            running.callback(setups[name].close)
        found: dict[str, dict[str, list[Sample]]] = {load: {name: [] for name in setups} for load in WORKLOADS}
        turn = 0
        for number in range(scale.rounds):
            for workload, by_setup in found.items():
                for name in list(setups)[:: -1 if number % 2 else 1]:
                    print(f"  round {number + 1} of {scale.rounds}: {workload}, {name}", file=sys.stderr, flush=True)
                    by_setup[name].append(play(setups[name], workload, turn, scale, clients))
                    turn += 1
    return {
        load: {name: _row(samples, by_setup[ALONE]) for name, samples in by_setup.items()}
        for load, by_setup in found.items()
    }


def _row(samples: Sequence[Sample], alone: Sequence[Sample]) -> dict[str, Any]:
    pairs = zip(samples, alone, strict=True)
    ratios = [ours.messages_per_s / max(theirs.messages_per_s, 1e-9) for ours, theirs in pairs]
    figures = {name: statistics.median(getattr(sample, name) for sample in samples) for name in FIGURES}
    return figures | {"ratio": statistics.median(ratios), "ratios": [round(ratio, 2) for ratio in ratios]}


def show(loads: dict[str, dict[str, dict[str, Any]]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "messages/s", "÷ alone", "brokers µs", "cores", "clients µs", "cores"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for load, rows in loads.items():
        table.add_row(f"[bold]{load}")
        for name, row in rows.items():
            cells = [short(row[key]) for key in ("messages_per_s", "ratio", "brokers_us")]
            cells += [f"{row['brokers_cores']:.2f}", short(row["clients_us"]), f"{row['clients_cores']:.2f}"]
            table.add_row(f"  {name}", *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cores", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--brokers", type=int, nargs="+", default=list(BROKERS), metavar="N")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="client processes at once")
    parser.add_argument("--directory", help="where the data goes; the default is the system's temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    scale = TINY if options.tiny else QUICK if options.quick else FULL
    scale = replace(scale, rounds=options.rounds or scale.rounds)
    with tempfile.TemporaryDirectory(prefix="cores-", dir=options.directory, ignore_cleanup_errors=True) as name:
        loads = measure(scale, options.brokers, options.clients, Path(name))
    told = machine.describe(Path(options.directory or tempfile.gettempdir()))
    if options.json:
        print(json.dumps({"machine": told, "workloads": loads}))
    else:
        show(loads, Console(width=max(100, Console().width)))
        print(f"Medians of {scale.rounds} rounds of {scale.seconds:g} s. {told}. {machine.QUIET}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
