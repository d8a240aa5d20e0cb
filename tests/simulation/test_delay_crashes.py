"""Simulated histories of copies of a delay server: a handful of them, and the proof that they prove something."""

from __future__ import annotations

import pytest

from tests.simulation import delay_campaign, delay_history
from tests.simulation.delay_planted import BUGS

SEEDS = (2, 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_contradicts_the_model(seed: int) -> None:
    outcome = delay_history.run(seed)
    assert not outcome.breaches, f"seed {seed}: {outcome.breaches[0]}"
    assert outcome.delivered > 20
    assert outcome.counts["snapshots"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 40))
def test_nothing_contradicts_the_model_in_more_of_them(seed: int) -> None:
    outcome = delay_history.run(seed)
    assert not outcome.breaches, f"seed {seed}: {outcome.breaches[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    found = [breach.promise for seed in bug.seeds for breach in delay_campaign.run_one(seed, bug=name).breaches]
    assert bug.caught_by & set(found), f"not caught: {bug.sentence}"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_history() -> None:
    assert delay_history.run(5) == delay_history.run(5)
