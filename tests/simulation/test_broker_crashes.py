"""Simulated histories of a broker among its clients: 60 of them, and the proof that they prove something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import broker_campaign, broker_history, broker_planted, campaign
from tests.simulation.broker_history import End
from tests.simulation.tallying import Tally

ROOT = Path(__file__).parents[2]
SEEDS = 60
CHUNK = 6
EVENTFUL = (0, 2, 15, 57, 62)  # all together: others have less in them


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_contradicts_the_model(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = broker_history.run(seed)
        assert not outcome.breaches, f"seed {seed}: {outcome.breaches[0]}"
        assert outcome.lives >= 4


def test_the_histories_are_eventful() -> None:
    """Every way to end a life occurs, every reason to hand out a message again, and all that only some have."""
    report = Tally("lives", "ends of lives")
    for seed in EVENTFUL:
        outcome = broker_campaign.run_one(seed)
        report.add(outcome, outcome.lives, outcome.ends)
    assert report.befallen.keys() == {each.value for each in End} | {"last stop"}
    assert report.reasons.keys() == {"retry", "release", "left", "forgot", "lease", "crash", "seek"}
    assert {name for name, count in report.events.items() if count} == {
        "buried",
        "lossy cuts",
        "lost by retention",
        "pause",
        "pictures",
        "redriven",
        "seek",
    }
    assert report.acknowledged > 1_000
    assert report.acked > report.acknowledged


@pytest.mark.parametrize("name", sorted(broker_planted.BUGS))
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = broker_planted.BUGS[name]
    for seed in bug.seeds:
        outcome = broker_campaign.run_one(seed, bug=name)
        if bug.caught_by & {breach.promise for breach in outcome.breaches}:
            return
    pytest.fail(f"not caught: {bug.sentence}")


# --- replay ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_history() -> None:
    assert broker_history.run(3) == broker_history.run(3)


def test_the_trace_does_not_depend_on_pythons_hash_seed() -> None:
    hashes = {json.loads(run_campaign(hash_seed))["broker"]["trace_hash"] for hash_seed in ("0", "77")}
    assert hashes == {broker_history.run(5).trace_hash}


def run_campaign(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.simulation.campaign", "--part", "broker", "--json"]
    command += ["--seeds", "1", "--first-seed", "5"]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_a_failure_names_its_seed_and_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--seeds", "1", "--bug", "wake-up-lost", "--processes", "1"]) == campaign.FAILED
    printed = capsys.readouterr().out
    command = "python -m tests.simulation.campaign --part broker --first-seed 0 --seeds 1 --bug wake-up-lost"
    assert f"replay: {command}" in printed
    assert "phantom 0" in printed
