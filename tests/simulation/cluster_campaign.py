"""Thousands of simulated histories of a group of copies with its registry and its clients: the part `cluster`.

python -m tests.simulation.campaign --part cluster --seeds 2000
python -m tests.simulation.campaign --part cluster --first-seed 17 --seeds 1           replays seed 17
python -m tests.simulation.campaign --part cluster --bug elect-a-lagging-replica       must be caught
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tests.simulation import cluster_history, cluster_planted, seeds
from tests.simulation.cluster_history import Outcome
from tests.simulation.tallying import Tally

SEEDS = 1_000


def run_one(seed: int, *, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = cluster_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return cluster_history.run(seed)


def run(options: Namespace) -> Tally:
    """All seeds, or those that the time allows."""
    report = Tally("reigns", "incidents")
    wanted = SEEDS if options.seeds is None else options.seeds
    for outcome in seeds.watched(
        "cluster histories",
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
    return report.replays("cluster", flags)


def show(report: Tally) -> None:
    report.show("cluster")


def as_json(report: Tally) -> dict[str, Any]:
    return report.as_json()
