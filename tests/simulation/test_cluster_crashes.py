"""Simulated histories of a group of copies: a handful of them, and the proof that they prove something."""

from __future__ import annotations

import pytest

from tests.simulation import campaign, cluster_campaign, cluster_history, cluster_steps
from tests.simulation.cluster_planted import BUGS
from tests.simulation.cluster_trouble import Incident
from tests.simulation.tallying import Tally

SEEDS = range(8)


def test_nothing_contradicts_the_model_in_eventful_histories() -> None:
    report = Tally("reigns", "incidents")
    for seed in SEEDS:
        outcome = cluster_history.run(seed)
        report.add(outcome, outcome.reigns, outcome.incidents)
    assert report.clean, report.examples
    assert report.staged > 2 * len(SEEDS), "masters change"
    assert report.acknowledged > 100 * len(SEEDS)
    assert report.events["scanned"] > report.acknowledged
    assert len(report.befallen) > len(Incident) / 2


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
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_caught_by_drawn_histories(name: str) -> None:
    caught = cluster_campaign.hunt(name, range(cluster_campaign.SEEDS_TO_CATCH))
    assert caught.seed is not None, f"not caught: {BUGS[name].sentence}"


def test_the_campaign_tells_how_soon_a_planted_bug_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--planted", "--bug", "answer-before-the-replica", "--seeds", "20", "--processes", "1"]
    assert campaign.main(asked) == 0
    assert "| answer-before-the-replica | answered when the master has synced it |" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_history() -> None:
    assert cluster_history.run(11) == cluster_history.run(11)
