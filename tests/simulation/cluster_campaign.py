"""Thousands of simulated histories of a group of copies with its registry and its clients: the part `cluster`.

python -m tests.simulation.campaign --part cluster --seeds 2000
python -m tests.simulation.campaign --part cluster --first-seed 17 --seeds 1           replays seed 17
python -m tests.simulation.campaign --part cluster --bug elect-a-lagging-replica       must be caught
python -m tests.simulation.campaign --planted                                          every bug, until it is caught
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from tests.simulation import cluster_history, cluster_planted, seeds, tallying
from tests.simulation.copies_history import Outcome
from tests.simulation.tallying import Tally

SEEDS = 2_000
SEEDS_TO_CATCH = 200  # a planted bug, at most


@dataclass(frozen=True)
class Catch:
    """When drawn histories found a planted bug."""

    bug: str
    histories: int  # that it took
    seed: int | None  # of the one that shows it; None: none of so many does
    breach: str = ""


def run_one(seed: int, *, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = cluster_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return cluster_history.run(seed)


def hunt(bug: str, seeds: range) -> Catch:
    """One history after the other, until one shows the bug."""
    for number, seed in enumerate(seeds, 1):
        breaches = run_one(seed, bug=bug).breaches
        for breach in breaches:
            if breach.promise in cluster_planted.BUGS[bug].caught_by:
                return Catch(bug, number, seed, breach.promise.name.lower())
    return Catch(bug, len(seeds), None)


def hunt_all(options: Namespace) -> list[Catch]:
    """All planted bugs, or the one that is asked for."""
    names = sorted(cluster_planted.BUGS) if options.bug is None else [options.bug]
    within = range(options.first_seed, options.first_seed + (options.seeds or SEEDS_TO_CATCH))
    work = partial(_hunt_nth, names, within)
    found = seeds.watched(
        "planted bugs", work, range(len(names)), processes=options.processes, minutes=None, quiet=options.json
    )
    return list(found)


def _hunt_nth(names: list[str], within: range, number: int) -> Catch:
    return hunt(names[number], within)


def show_catches(catches: list[Catch]) -> None:
    print("| planted | what is wrong | histories | seed | found as |\n|---|---|---|---|---|")
    for each in catches:
        seed = "none" if each.seed is None else f"{each.seed}"
        print(f"| {each.bug} | {cluster_planted.BUGS[each.bug].sentence} | {each.histories} | {seed} | {each.breach} |")


def run(options: Namespace) -> Tally:
    return tallying.of_copies("cluster", partial(run_one, bug=options.bug), SEEDS, options)
