"""A run is `seed → trace hash`: in this process, in the next, and under any PYTHONHASHSEED."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import busy

ROOT = Path(__file__).parents[2]
HASH_SEEDS = ("0", "1", "12345")


def hash_in_another_process(hash_seed: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.simulation.busy", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    assert busy.run(seed) == busy.run(seed)


def test_every_seed_gives_a_run_of_its_own() -> None:
    assert len({busy.run(seed)[1] for seed in range(10)}) == 10


def test_the_scenario_is_busy_enough_to_prove_anything() -> None:
    echoed, _ = busy.run(1)
    assert echoed > 10_000


def test_the_hash_does_not_depend_on_pythons_hash_seed() -> None:
    hashes = {hash_in_another_process(hash_seed, "7") for hash_seed in HASH_SEEDS}
    assert hashes == {busy.run(7)[1]}


def test_the_instrument_sees_code_that_iterates_a_set() -> None:
    assert len({hash_in_another_process(hash_seed, "7", "--planted") for hash_seed in HASH_SEEDS}) > 1
