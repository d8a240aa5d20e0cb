"""Thousands of simulated histories: `make sim`. Four parts: the storage engine alone, a broker with its clients, a
group of copies with its registry and its clients, and copies of a delay server with those who schedule.

    python -m tests.simulation.campaign --part storage                  one part; all without it
    python -m tests.simulation.campaign --seeds 5000
    python -m tests.simulation.campaign --first-seed 17 --seeds 1       replays seed 17
    python -m tests.simulation.campaign --damage                        lets every disk rot in the end
    python -m tests.simulation.campaign --no-sync                       must show losses: the proof of the instrument
    python -m tests.simulation.campaign --bug answer-before-sync        must be caught, as every bug in `planted`
    python -m tests.simulation.campaign --planted                       how soon each bug of the cluster is caught

Exit status: 0 if nothing contradicts the model, 4 if anything does; with `--planted`, 4 if a bug is not caught.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tests.simulation import (
    broker_campaign,
    broker_planted,
    cluster_campaign,
    cluster_planted,
    delay_campaign,
    delay_planted,
    history,
    planted,
)
from tests.simulation import seeds as many
from tests.simulation.history import Outcome
from tests.simulation.seeds import PROCESSES
from tests.simulation.truth import Invariant

SEEDS = 4_000
FAILED = 4
EXAMPLES_MAX = 10
_PLANTED = {
    "storage": {*planted.BUGS},
    "broker": {*broker_planted.BUGS},
    "cluster": {*cluster_planted.BUGS},
    "delay": {*delay_planted.BUGS},
}
_SEEDS = f"{SEEDS}, {broker_campaign.SEEDS}, {cluster_campaign.SEEDS} and {delay_campaign.SEEDS}"


@dataclass
class Report:
    """The counts over many seeds."""

    seeds: int = 0
    lives: int = 0
    acknowledged: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    violations: Counter[Invariant] = field(default_factory=Counter)
    examples: list[tuple[int, str]] = field(default_factory=list)  # seed, what was wrong
    trace_hash: str = ""  # over the traces of all seeds; of one seed, its own

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.lives += outcome.lives
        self.acknowledged += outcome.acknowledged
        self.ends.update(outcome.ends)
        self.trace_hash = outcome.trace_hash if self.seeds == 1 else _joined(self.trace_hash, outcome.trace_hash)
        self.violations.update(each.invariant for each in outcome.violations)
        if outcome.violations:
            self.examples.append((outcome.seed, str(outcome.violations[0])))

    @property
    def clean(self) -> bool:
        return not self.violations

    def counts(self) -> dict[str, int]:
        """Lost, phantom, corrupt and rotten are always named; the others where there are any."""
        always = (Invariant.LOST, Invariant.PHANTOM, Invariant.CORRUPT, Invariant.ROTTEN)
        others = [each for each in Invariant if each not in always and self.violations[each]]
        found = {each.name.lower(): self.violations[each] for each in (*always, *others)}
        return {"seeds": self.seeds, "lives": self.lives, "acknowledged": self.acknowledged, **found}


def _joined(one: str, other: str) -> str:
    return hashlib.blake2b((one + other).encode(), digest_size=16).hexdigest()


def run_one(seed: int, *, syncing: bool = True, damaged: bool = False, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return history.run(seed, syncing=syncing, damaged=damaged)


def outcomes(
    seeds: Iterable[int],
    *,
    syncing: bool = True,
    damaged: bool = False,
    bug: str | None = None,
    processes: int = PROCESSES,
) -> Iterator[Outcome]:
    """The outcome of every seed, in order."""
    yield from many.outcomes(partial(run_one, syncing=syncing, damaged=damaged, bug=bug), seeds, processes)


def replay_command(seed: int, options: argparse.Namespace) -> str:
    given: dict[str, Any] = {
        "--no-sync": options.no_sync,
        "--damage": options.damage,
        f"--bug {options.bug}": options.bug,
    }
    extras = "".join(f" {option}" for option, is_given in given.items() if is_given)
    return f"python -m tests.simulation.campaign --part storage --first-seed {seed} --seeds 1{extras}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="simulated crashes: nothing acknowledged is lost, whatever happens")
    parser.add_argument(
        "--part",
        choices=["storage", "broker", "cluster", "delay"],
        help="only this one; a bug's or a mode's own if given",
    )
    parser.add_argument("--seeds", type=int, help=f"of each part; by itself {_SEEDS}")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-sync", action="store_true", help="the disk only pretends to sync: losses must show")
    parser.add_argument("--damage", action="store_true", help="every disk rots in the end, not only one in three")
    parser.add_argument(
        "--bug",
        choices=sorted({*planted.BUGS, *broker_planted.BUGS, *cluster_planted.BUGS, *delay_planted.BUGS}),
        help="plant this bug: it must be caught",
    )
    parser.add_argument(
        "--planted",
        action="store_true",
        help=f"plant every bug of the cluster, or --bug, and say how many histories show it; of --seeds, by itself "
        f"{cluster_campaign.SEEDS_TO_CATCH}",
    )
    parser.add_argument("--policies", action="store_true", help="brokers with groups that keep an order, or coalesce")
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever is left")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, without a progress bar")
    options = parser.parse_args(argv)
    if options.planted and options.bug is not None and options.bug not in _PLANTED["cluster"]:
        parser.error(f"--planted is for bugs of the cluster: --bug {options.bug} without it shows that one")
    return options


def run(options: argparse.Namespace) -> Report:
    """All seeds, or those that the time allows."""
    report = Report()
    wanted = SEEDS if options.seeds is None else options.seeds
    for outcome in many.watched(
        "storage histories",
        partial(run_one, syncing=not options.no_sync, damaged=options.damage, bug=options.bug),
        range(options.first_seed, options.first_seed + wanted),
        processes=options.processes,
        minutes=options.minutes,
        quiet=options.json,
    ):
        report.add(outcome)
    return report


def wants(options: argparse.Namespace, part: str) -> bool:
    """Whether a part is to be run: the one that was asked for, or that a bug or a mode belongs to, else all."""
    if options.part is not None:
        return bool(options.part == part)
    if options.bug is not None:
        return options.bug in _PLANTED[part]
    return part == "storage" or not (options.no_sync or options.damage)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.planted:
        return show_planted(options)
    told: dict[str, Any] = {}
    is_clean = True
    if wants(options, "storage"):
        report = run(options)
        failures = [
            {"seed": seed, "violation": sentence, "replay": replay_command(seed, options)}
            for seed, sentence in report.examples[:EXAMPLES_MAX]
        ]
        ends = dict(sorted(report.ends.items()))
        told |= {**report.counts(), "trace_hash": report.trace_hash, "ends": ends, "failures": failures}
        is_clean = report.clean
        if not options.json:
            show(report, failures)
    if wants(options, "broker"):
        broker = broker_campaign.run(options)
        failures = broker_campaign.examples(broker, options)
        told["broker"] = broker_campaign.as_json(broker) | {"failures": failures}
        is_clean = is_clean and broker.clean
        if not options.json:
            broker_campaign.show(broker)
            show_failures(failures)
    for part, campaign in (("cluster", cluster_campaign), ("delay", delay_campaign)):
        if wants(options, part):
            copies = campaign.run(options)
            failures = copies.replays(part, f" --bug {options.bug}" if options.bug else "")
            told[part] = copies.as_json() | {"failures": failures}
            is_clean = is_clean and copies.clean
            if not options.json:
                copies.show(part)
                show_failures(failures)
    if options.json:
        print(json.dumps(told))
    return 0 if is_clean else FAILED


def show_planted(options: argparse.Namespace) -> int:
    catches = cluster_campaign.hunt_all(options)
    if options.json:
        print(json.dumps([asdict(each) for each in catches]))
    else:
        cluster_campaign.show_catches(catches)
    return 0 if all(each.seed is not None for each in catches) else FAILED


def show(report: Report, failures: list[dict[str, Any]]) -> None:
    print(", ".join(f"{name} {count:,}" for name, count in report.counts().items()))
    print("ends of lives: " + ", ".join(f"{name} {count:,}" for name, count in sorted(report.ends.items())))
    show_failures(failures)


def show_failures(failures: list[dict[str, Any]]) -> None:
    for each in failures:
        print(f"seed {each['seed']}: {each['violation']}\n  replay: {each['replay']}")


if __name__ == "__main__":
    sys.exit(main())
