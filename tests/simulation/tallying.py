"""The sums of many simulated histories: the counts that a campaign of brokers and those of copies have in common."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.simulation import seeds
from tests.simulation.broker_truth import Breach, Promise
from tests.simulation.copies_history import Outcome

EXAMPLES_MAX = 10
ALWAYS = (Promise.LOST, Promise.PHANTOM, Promise.RENAMED, Promise.ACKED_AGAIN, Promise.DUPLICATE)


class History(Protocol):
    """How one history ended."""

    seed: int
    acknowledged: int
    delivered: int
    acked: int
    reasons: Counter[str]
    counts: Counter[str]
    breaches: list[Breach]
    trace_hash: str


@dataclass
class Tally:
    """The counts over many seeds. What a seed consists of, and what befell it, has another name in each campaign."""

    stages: str  # "lives", "reigns"
    happenings: str  # of what `befallen` counts
    seeds: int = 0
    staged: int = 0
    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    befallen: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)  # what happens in some histories only
    breaches: Counter[Promise] = field(default_factory=Counter)
    examples: list[tuple[int, str]] = field(default_factory=list)  # seed, what was wrong
    trace_hash: str = ""

    def add(self, outcome: History, staged: int, befallen: Mapping[str, int]) -> None:
        self.seeds += 1
        self.staged += staged
        self.acknowledged += outcome.acknowledged
        self.delivered += outcome.delivered
        self.acked += outcome.acked
        self.befallen.update(befallen)
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
        sums = {"acknowledged": self.acknowledged, "delivered": self.delivered, "acked": self.acked}
        return {"seeds": self.seeds, self.stages: self.staged, **sums, **found}

    def replays(self, part: str, flags: str) -> list[dict[str, Any]]:
        """What was wrong with the first few, and how to see it again."""
        command = f"python -m tests.simulation.campaign --part {part} --first-seed {{}} --seeds 1{flags}"
        return [
            {"seed": seed, "violation": sentence, "replay": command.format(seed)}
            for seed, sentence in self.examples[:EXAMPLES_MAX]
        ]

    def show(self, part: str) -> None:
        print(f"{part}: " + _listed(self.counts()))
        print(f"{self.happenings}: " + _listed(dict(sorted(self.befallen.items()))))
        print("beside that: " + _listed(dict(sorted(self.events.items()))))
        print("delivered again: " + _listed(dict(sorted(self.reasons.items()))))

    def as_json(self) -> dict[str, Any]:
        return {
            **self.counts(),
            "trace_hash": self.trace_hash,
            self.happenings.partition(" ")[0]: dict(sorted(self.befallen.items())),
            "beside_that": dict(sorted(self.events.items())),
            "delivered_again": dict(sorted(self.reasons.items())),
        }


def of_copies(part: str, run_one: Callable[[int], Outcome], wanted: int, options: Namespace) -> Tally:
    """Of all histories of one group of copies that are asked for, or so many; or of those that the time allows."""
    report = Tally("reigns", "incidents")
    wanted = wanted if options.seeds is None else options.seeds
    for outcome in seeds.watched(
        f"{part} histories",
        run_one,
        range(options.first_seed, options.first_seed + wanted),
        processes=options.processes,
        minutes=options.minutes,
        quiet=options.json,
    ):
        report.add(outcome, outcome.reigns, outcome.incidents)
    return report


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
