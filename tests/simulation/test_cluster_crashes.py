"""Simulated histories of a group of copies: a handful of them, and the proof that they prove something."""

from __future__ import annotations

import pytest

from tests.simulation import cluster_campaign, cluster_history, cluster_steps
from tests.simulation.cluster_planted import BUGS

SEEDS = (0, 2, 11, 13)

_BY_SEED = sorted(name for name, bug in BUGS.items() if bug.seeds)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_contradicts_the_model(seed: int) -> None:
    outcome = cluster_history.run(seed)
    assert not outcome.breaches, f"seed {seed}: {outcome.breaches[0]}"
    assert outcome.acknowledged > 100


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_loses_what_was_acknowledged(name: str) -> None:
    bug = BUGS[name]
    assert not cluster_steps.lost(bug.step, bug.copies), "without the bug nothing is"
    with bug.plant():
        assert _is_caught(bug.step, bug.copies), bug.sentence


def _is_caught(step: cluster_steps.Step, copies: int) -> bool:
    """By a loss, or because the copies never come together again."""
    try:
        return bool(cluster_steps.lost(step, copies))
    except AssertionError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("name", _BY_SEED)
def test_a_planted_bug_is_caught_by_a_drawn_history(name: str) -> None:
    bug = BUGS[name]
    found = [breach.promise for seed in bug.seeds for breach in cluster_campaign.run_one(seed, bug=name).breaches]
    assert bug.caught_by & set(found), f"not caught: {bug.sentence}"


def test_the_same_seed_gives_the_same_history() -> None:
    assert cluster_history.run(11) == cluster_history.run(11)
