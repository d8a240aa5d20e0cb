"""Thousands of simulated histories of copies of a delay server: the part `delay`.

python -m tests.simulation.campaign --part delay --seeds 2000
python -m tests.simulation.campaign --part delay --first-seed 17 --seeds 1           replays seed 17
python -m tests.simulation.campaign --part delay --bug send-what-is-not-committed    must be caught
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tests.simulation import delay_history, delay_planted, seeds
from tests.simulation.cluster_history import Outcome
from tests.simulation.tallying import Tally

SEEDS = 1_000


def run_one(seed: int, *, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = delay_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return delay_history.run(seed)


def run(options: Namespace) -> Tally:
    """All seeds, or those that the time allows."""
    report = Tally("reigns", "incidents")
    wanted = SEEDS if options.seeds is None else options.seeds
    for outcome in seeds.watched(
        "delay histories",
        partial(run_one, bug=options.bug),
        range(options.first_seed, options.first_seed + wanted),
        processes=options.processes,
        minutes=options.minutes,
        quiet=options.json,
    ):
        report.add(outcome, outcome.reigns, outcome.incidents)
    return report


def examples(report: Tally, options: Namespace) -> list[dict[str, Any]]:
    flags = f" --bug {options.bug}" if options.bug else ""
    return report.replays("delay", flags)


def show(report: Tally) -> None:
    report.show("delay")


def as_json(report: Tally) -> dict[str, Any]:
    return report.as_json()
