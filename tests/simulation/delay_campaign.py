"""Thousands of simulated histories of copies of a delay server: the part `delay`.

python -m tests.simulation.campaign --part delay --seeds 2000
python -m tests.simulation.campaign --part delay --first-seed 17 --seeds 1           replays seed 17
python -m tests.simulation.campaign --part delay --bug send-what-is-not-committed    must be caught
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from tests.simulation import delay_history, delay_planted, tallying
from tests.simulation.copies_history import Outcome
from tests.simulation.tallying import Tally

SEEDS = 1_000


def run_one(seed: int, *, bug: str | None = None) -> Outcome:
    """One seed, with or without a planted bug."""
    plant: AbstractContextManager[None] = delay_planted.BUGS[bug].plant() if bug is not None else nullcontext()
    with plant:
        return delay_history.run(seed)


def run(options: Namespace) -> Tally:
    return tallying.of_copies("delay", partial(run_one, bug=options.bug), SEEDS, options)
