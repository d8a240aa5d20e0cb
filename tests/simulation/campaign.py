"""Thousands of simulated histories: `make sim`.

    python -m tests.simulation.campaign --seeds 5000
    python -m tests.simulation.campaign --first-seed 17 --seeds 1       replays seed 17
    python -m tests.simulation.campaign --damage                        lets every disk rot in the end
    python -m tests.simulation.campaign --no-sync                       must show losses: the proof of the instrument
    python -m tests.simulation.campaign --bug answer-before-sync        must be caught, as every bug in `planted`

Exit status: 0 if nothing contradicts the model, 4 if anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.simulation import history, planted
from tests.simulation.history import Outcome
from tests.simulation.truth import Invariant

SEEDS = 4_000
PROCESSES = 2
CHUNK_SEEDS = 8
FAILED = 4
EXAMPLES_MAX = 10


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
    work = partial(run_one, syncing=syncing, damaged=damaged, bug=bug)
    if processes == 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(work, seeds, CHUNK_SEEDS)


def replay_command(seed: int, options: argparse.Namespace) -> str:
    given = {"--no-sync": options.no_sync, "--damage": options.damage, f"--bug {options.bug}": options.bug}
    extras = "".join(f" {option}" for option, is_given in given.items() if is_given)
    return f"python -m tests.simulation.campaign --first-seed {seed} --seeds 1{extras}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="simulated crashes: nothing acknowledged is lost, whatever happens")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-sync", action="store_true", help="the disk only pretends to sync: losses must show")
    parser.add_argument("--damage", action="store_true", help="every disk rots in the end, not only one in three")
    parser.add_argument("--bug", choices=sorted(planted.BUGS), help="plant this bug: it must be caught")
    parser.add_argument("--minutes", type=float, help="stop after so long, whatever is left")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, without a progress bar")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> Report:
    """All seeds, or those that the time allows."""
    report = Report()
    deadline = time.monotonic() + 60 * options.minutes if options.minutes is not None else None
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    columns = (TextColumn("histories"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=options.json) as progress:
        bar = progress.add_task("seeds", total=options.seeds)
        processes = min(options.processes, options.seeds)
        modes = {"syncing": not options.no_sync, "damaged": options.damage, "bug": options.bug}
        for outcome in outcomes(seeds, **modes, processes=processes):
            report.add(outcome)
            progress.advance(bar)
            if deadline is not None and time.monotonic() > deadline:
                break
    return report


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    report = run(options)
    ends = dict(sorted(report.ends.items()))
    examples = [
        {"seed": seed, "violation": sentence, "replay": replay_command(seed, options)}
        for seed, sentence in report.examples[:EXAMPLES_MAX]
    ]
    if options.json:
        print(json.dumps({**report.counts(), "trace_hash": report.trace_hash, "ends": ends, "failures": examples}))
    else:
        print(", ".join(f"{name} {count:,}" for name, count in report.counts().items()))
        print("ends of lives: " + ", ".join(f"{name} {count:,}" for name, count in ends.items()))
        for example in examples:
            print(f"seed {example['seed']}: {example['violation']}\n  replay: {example['replay']}")
    return 0 if report.clean else FAILED


if __name__ == "__main__":
    sys.exit(main())
