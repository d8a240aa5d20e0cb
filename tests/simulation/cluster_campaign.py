"""Thousands of simulated histories of a group of copies with its registry and its clients: the part `cluster`.

python -m tests.simulation.campaign --part cluster --seeds 2000
python -m tests.simulation.campaign --part cluster --first-seed 17 --seeds 1           replays seed 17
python -m tests.simulation.campaign --part cluster --bug elect-a-lagging-replica       must be caught
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.simulation import cluster_history, cluster_planted, seeds
from tests.simulation.broker_truth import Promise
from tests.simulation.cluster_history import Outcome

SEEDS = 1_000
EXAMPLES_MAX = 10
ALWAYS = (Promise.LOST, Promise.PHANTOM, Promise.RENAMED, Promise.ACKED_AGAIN, Promise.DUPLICATE)


@dataclass
class Report:
    """The counts over many seeds."""

    seeds: int = 0
    reigns: int = 0
    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    incidents: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    breaches: Counter[Promise] = field(default_factory=Counter)
    examples: list[tuple[int, str]] = field(default_factory=list)  # seed, what was wrong
    trace_hash: str = ""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.reigns += outcome.reigns
        self.acknowledged += outcome.acknowledged
        self.delivered += outcome.delivered
        self.acked += outcome.acked
        self.incidents.update(outcome.incidents)
        self.reasons.update(outcome.reasons)
        self.events.update(outcome.counts)
        joined = (self.trace_hash + outcome.trace_hash).encode()
        self.trace_hash = outcome.trace_hash if self.seeds == 1 else hashlib.blake2b(joined, digest_size=16).hexdigest()
        self.breaches.update(each.promise for each in outcome.breaches)
        if outcome.breaches:
            self.examples.append((outcome.seed, str(outcome.breaches[0])))

    @property
    def clean(self) -> bool:
        return not self.breaches

    def counts(self) -> dict[str, int]:
        others = [each for each in Promise if each not in ALWAYS and self.breaches[each]]
        found = {each.name.lower(): self.breaches[each] for each in (*ALWAYS, *others)}
        names = ("seeds", "reigns", "acknowledged", "delivered", "acked")
        return {**{name: getattr(self, name) for name in names}, **found}


def run_one(seed: int, *, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = cluster_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return cluster_history.run(seed)


def run(options: Namespace) -> Report:
    """All seeds, or those that the time allows."""
    report = Report()
    wanted = SEEDS if options.seeds is None else options.seeds
    for outcome in seeds.watched(
        "cluster histories",
        partial(run_one, bug=options.bug),
        range(options.first_seed, options.first_seed + wanted),
        processes=options.processes,
        minutes=options.minutes,
        quiet=options.json,
    ):
        report.add(outcome)
    return report


def examples(report: Report, options: Namespace) -> list[dict[str, Any]]:
    bug = f" --bug {options.bug}" if options.bug else ""
    command = "python -m tests.simulation.campaign --part cluster --first-seed {} --seeds 1" + bug
    return [
        {"seed": seed, "violation": sentence, "replay": command.format(seed)}
        for seed, sentence in report.examples[:EXAMPLES_MAX]
    ]


def show(report: Report) -> None:
    print("cluster: " + ", ".join(f"{name} {count:,}" for name, count in report.counts().items()))
    print("incidents: " + ", ".join(f"{name} {count:,}" for name, count in sorted(report.incidents.items())))
    print("beside that: " + ", ".join(f"{name} {count:,}" for name, count in sorted(report.events.items())))
    print("delivered again: " + ", ".join(f"{name} {count:,}" for name, count in sorted(report.reasons.items())))


def as_json(report: Report) -> dict[str, Any]:
    return {
        **report.counts(),
        "trace_hash": report.trace_hash,
        "incidents": dict(sorted(report.incidents.items())),
        "beside_that": dict(sorted(report.events.items())),
        "delivered_again": dict(sorted(report.reasons.items())),
    }
