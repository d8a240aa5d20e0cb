"""Simulated crashes of the storage engine: 200 histories, the proof that they prove something, and their replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage.open_store import open_directory
from tests.simulation import campaign, checks, history, planted
from tests.simulation.history import End, History
from tests.simulation.truth import Invariant

ROOT = Path(__file__).parents[2]
SEEDS = 200
CHUNK = 20


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_nothing_contradicts_the_model(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = history.run(seed)
        assert not outcome.violations, f"seed {seed}: {outcome.violations[0]}"
        assert outcome.lives >= 5


def test_the_histories_are_eventful() -> None:
    """Every way to end a life occurs, and enough is acknowledged to be lost."""
    report = campaign.Report()
    for outcome in campaign.outcomes(range(25), processes=1):
        report.add(outcome)
    assert report.ends.keys() == {each.value for each in End} | {"damage"}
    assert report.acknowledged > 2_000


def test_without_syncing_there_are_losses() -> None:
    outcomes = campaign.outcomes(range(20), syncing=False, processes=1)
    assert sum(each.invariant is Invariant.LOST for outcome in outcomes for each in outcome.violations) > 20


@pytest.mark.parametrize("name", sorted(planted.BUGS))
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = planted.BUGS[name]
    outcomes = campaign.outcomes(range(bug.seeds), damaged=bug.damaged, bug=name, processes=1)
    assert any(each.invariant is bug.caught_by for outcome in outcomes for each in outcome.violations)


# --- recovery, killed at every operation -----------------------------------------------------------------------------


def crashed_disk(seed: int) -> SimDisk:
    """What some lives and a power cut left."""
    with Simulation(seed) as world:
        past = History(world)
        world.run(past.live_on([End.KILL, End.CLOSE, End.POWER_CUT]))
    assert not past.truth.violations
    return past.disk


def recovered(disk: SimDisk) -> tuple[object, checks.Picture]:
    opened = open_directory(disk, SeededRng("recovery"))
    return checks.logs_of(opened), checks.picture(opened.views)


@pytest.mark.parametrize("by_power_cut", [True, False])
@pytest.mark.parametrize("without_views", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_recovery_killed_at_every_operation_arrives_at_the_same_state(
    seed: int, without_views: bool, by_power_cut: bool
) -> None:
    directories = checks.LOGS if without_views else (*checks.LOGS, *checks.DERIVED)
    left = crashed_disk(seed)
    expected = recovered(checks.copy_of(left, directories))
    for operation in range(1, 1_000):
        disk = checks.copy_of(left, directories)
        disk.crash_after(operation)
        try:
            recovered(disk)
        except SimulatedPowerCut:
            assert recovered(disk.crash() if by_power_cut else disk.crash_process()) == expected, operation
        else:
            assert operation > 1
            return
    pytest.fail("recovery does not come to an end")


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 11])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert history.run(seed) == history.run(seed)


def test_every_seed_gives_a_history_of_its_own() -> None:
    assert len({history.run(seed).trace_hash for seed in range(5)}) == 5


def test_the_trace_does_not_depend_on_pythons_hash_seed() -> None:
    hashes = {json.loads(run_campaign(hash_seed, "--first-seed", "5"))["trace_hash"] for hash_seed in ("0", "77")}
    assert hashes == {history.run(5).trace_hash}


def run_campaign(hash_seed: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "tests.simulation.campaign",
        "--part",
        "storage",
        "--json",
        "--seeds",
        "1",
        *arguments,
    ]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_a_failure_names_its_seed_and_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = "answer-before-sync"
    assert campaign.main(["--seeds", "8", "--bug", bug, "--processes", "1"]) == campaign.FAILED
    printed = capsys.readouterr().out
    assert f"replay: python -m tests.simulation.campaign --part storage --first-seed 0 --seeds 1 --bug {bug}" in printed
    assert "acknowledged" in printed
    assert "phantom 0" in printed
