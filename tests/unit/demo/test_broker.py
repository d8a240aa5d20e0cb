"""What `make run` shows is true, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.source import ROOT
from tests.unit.cli.directories import make, tree

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"}
WAIT_S = 120


def _start(*arguments: str, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "fairway", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
    )


def _run(*arguments: str, temporary: Path) -> tuple[int, str, str]:
    with _start(*arguments, temporary=temporary) as demo:
        out, said = demo.communicate(timeout=WAIT_S)
    return demo.returncode, out, said


def _broker_of(demo: subprocess.Popen[str]) -> int:
    """The process that the demonstration invites one to kill."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if found := re.search(r"kill -9 (\d+)", line):
            return int(found[1])
    raise AssertionError("no broker was named")


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_survives_the_death_of_its_broker_and_ends_by_itself(tmp_path: Path) -> None:
    with _start("--seconds", "6", temporary=tmp_path) as demo:
        first = _broker_of(demo)
        os.kill(first, signal.SIGKILL)
        out, said = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, said) == (0, "")
    reborn = re.search(r"the broker was gone; it is process (\d+) now", out)
    assert reborn
    assert _is_gone(first)
    assert _is_gone(int(reborn[1]))
    for words in ("billing", "mailer", "fraud", "the broker died once", "0 lost on the way to billing"):
        assert words in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_summary(tmp_path: Path, number: int) -> None:
    with _start("--data", str(tmp_path / "kept"), temporary=tmp_path) as demo:
        broker = _broker_of(demo)
        demo.send_signal(number)
        out, said = demo.communicate(timeout=WAIT_S)
    assert (demo.returncode, said) == (0, "")
    assert "0 lost on the way to billing" in out
    assert _is_gone(broker)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# --- the log alone ----------------------------------------------------------------------------------------------------


def test_the_log_loses_nothing_and_cleans_up(tmp_path: Path) -> None:
    status, out, said = _run("log", temporary=tmp_path)
    assert (status, said) == (0, "")
    for words in ("lost 0, phantom 0", "rotten", "0 of them wrong", "fairway inspect", "order.changed"):
        assert words in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["data", "data/identity"])
def test_the_log_refuses_a_directory_with_something_in_it(tmp_path: Path, where: str) -> None:
    make(tmp_path / "data", batches=1)
    before = tree(tmp_path)
    status, _, said = _run("log", "--data", str(tmp_path / where), temporary=tmp_path)
    assert status == 2
    assert said.startswith("fairway demo log: ")
    assert "is not empty" in said
    assert tree(tmp_path) == before
