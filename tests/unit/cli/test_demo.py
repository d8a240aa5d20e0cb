"""`make run` does what it says, cleans up, and never touches what it did not make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.source import ROOT
from tests.unit.cli.directories import make, tree

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"}


def _run(*arguments: str, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairway.cli.demo", *arguments]
    environment = ENVIRONMENT if temporary is None else {**ENVIRONMENT, "TMPDIR": str(temporary)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_demo_loses_nothing_and_cleans_up(tmp_path: Path) -> None:
    done = _run(temporary=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("lost 0, phantom 0", "rotten", "0 of them wrong", "fairway inspect", "order.changed"):
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


def test_demo_keeps_a_directory_that_was_named(tmp_path: Path) -> None:
    done = _run("--data", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept" / "identity").is_file()


@pytest.mark.parametrize("where", ["data", "data/identity"])
def test_demo_refuses_a_directory_with_something_in_it(tmp_path: Path, where: str) -> None:
    make(tmp_path / "data", batches=1)
    before = tree(tmp_path)
    done = _run("--data", str(tmp_path / where))
    assert done.returncode == 1
    assert done.stderr.startswith("fairway demo: ")
    assert "is not empty" in done.stderr
    assert tree(tmp_path) == before
