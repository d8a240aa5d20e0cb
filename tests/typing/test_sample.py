"""What a user's type checker says of a user's program, with the user's settings and none of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLE = Path(__file__).with_name("sample_user.py")
MISTAKES = (
    'app.listener("order.changed", group="hotel", prefetch=3)\n',
    'on_change(b"not a message")\n',
    "fairway.connect(20880)\n",
)
_TIMEOUT_S = 300  # a cold cache on a busy machine; usually a few seconds

Checker = Callable[[Path], subprocess.CompletedProcess[str]]


def mypy(program: Path) -> subprocess.CompletedProcess[str]:
    return _run(program, "mypy", "--strict", "--config-file=", "--cache-dir=cache", program.name)


def pyright(program: Path) -> subprocess.CompletedProcess[str]:
    settings = {"typeCheckingMode": "strict", "include": [program.name]}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    return _run(program, "pyright", "--pythonpath", sys.executable)


def _run(program: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},  # it would ask the package index for a newer one
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The sample in a directory of its own, where no configuration of ours is found."""
    return Path(shutil.copy(SAMPLE, tmp_path / "program.py"))


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_program_passes_strictly_and_its_mistakes_do_not(program: Path, checker: Checker) -> None:
    judged = checker(program)
    assert judged.returncode == 0, judged.stdout + judged.stderr

    text = program.read_text(encoding="utf-8")
    program.write_text(text + "\n\n" + "".join(MISTAKES), encoding="utf-8")
    first = text.count("\n") + 3
    judged = checker(program)
    assert judged.returncode == 1, judged.stdout + judged.stderr
    for line, mistake in enumerate(MISTAKES, first):
        assert f"program.py:{line}:" in judged.stdout, f"nothing is wrong with {mistake}{judged.stdout}"
