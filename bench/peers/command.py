"""The command line of `bench.peers`: what to measure, progress, tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, peers
from bench.peers import figures, install, plot, report, rounds
from bench.peers.contenders import TITLES, chosen


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.install:
        install.install_all()
    contenders = chosen(options.only)
    plan = rounds.Plan(options.rounds, options.seconds, options.warm, tuple(options.workloads), options.dir)
    steps = options.rounds * sum(
        1 + len(wanted) for each in contenders if (wanted := set(each.workloads) & set(options.workloads))
    )
    bar = Progress(
        TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn(), console=Console(file=sys.stderr)
    )
    load_before = os.getloadavg()[0]  # of others: none of ours runs yet
    with bar as progress:
        at = progress.add_task("peers", total=steps)

        def step(what: str) -> None:
            progress.update(at, description=what, advance=1)

        collected = rounds.run(plan, contenders, step)
    summary = figures.summary(collected) | {
        "machine": machine.describe(Path(options.dir or tempfile.gettempdir())),
        "load_before": load_before,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    _tell(summary, options)
    return 0 if summary["workloads"] else 1


def _tell(summary: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        report.show(summary, Console(width=max(100, Console().width)))
    if options.plot and summary["workloads"]:
        plot.draw(summary, options.plot)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(peers.__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="fetch servers and clients that are missing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these contenders, by how they begin")
    parser.add_argument("--workloads", nargs="+", default=list(TITLES), choices=list(TITLES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--warm", type=float, default=0.5, help="seconds of load before each measurement")
    parser.add_argument("--quick", action="store_true", help="one round of half a second: does it run?")
    parser.add_argument("--dir", help="where servers keep their data: on the disk that is meant")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.seconds, options.warm = 1, 0.5, 0.1
    return options
