"""Thousands of simulated histories of a broker and its clients: the part `broker` of `make sim`.

python -m tests.simulation.campaign --part broker --seeds 5000
python -m tests.simulation.campaign --part broker --first-seed 17 --seeds 1       replays seed 17
python -m tests.simulation.campaign --part broker --bug expiry-acks               must be caught
python -m tests.simulation.campaign --part broker --policies                      with groups that keep an order
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tests.simulation import broker_history, broker_planted, seeds
from tests.simulation.broker_history import Outcome
from tests.simulation.tallying import Tally

SEEDS = 2_000


def run_one(seed: int, *, bug: str | None = None, has_policies: bool = False) -> Outcome:
    """One seed, with or without a planted bug."""
    has_policies = has_policies or (bug is not None and broker_planted.BUGS[bug].has_policies)
    plant: AbstractContextManager[None] = broker_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return broker_history.run(seed, has_policies=has_policies)


def run(options: Namespace) -> Tally:
    """All seeds, or those that the time allows."""
    report = Tally("lives", "ends of lives")
    wanted = SEEDS if options.seeds is None else options.seeds
    for outcome in seeds.watched(
        "broker histories",
        partial(run_one, bug=options.bug, has_policies=options.policies),
        range(options.first_seed, options.first_seed + wanted),
        processes=options.processes,
        minutes=options.minutes,
        quiet=options.json,
    ):
        report.add(outcome, outcome.lives, outcome.ends)
    return report


def examples(report: Tally, options: Namespace) -> list[dict[str, Any]]:
    flags = f" --bug {options.bug}" if options.bug else " --policies" if options.policies else ""
    return report.replays("broker", flags)


def show(report: Tally) -> None:
    report.show("broker")


def as_json(report: Tally) -> dict[str, Any]:
    return report.as_json()
