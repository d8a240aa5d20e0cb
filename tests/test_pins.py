"""What is installed is what was chosen: exact versions with hashes, ranges with an end, and nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tidy.source import ROOT

FILES = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+) \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def read(path: Path) -> dict[str, str]:
    """The version of each name; every line is accounted for."""
    found: dict[str, str] = {}
    lines = iter(line for line in path.read_text().splitlines() if not line.startswith("#"))
    assert next(lines) == "--require-hashes"
    for line in lines:
        pin = PIN.fullmatch(line)
        assert pin, f"{path.name}: {line!r} is no exact version"
        name = canonicalize_name(pin[1])
        assert name not in found, f"{path.name}: {name} twice"
        found[name] = pin[2]
        for hashed in lines:
            one = HASH.fullmatch(hashed)
            assert one, f"{path.name}: {name}: {hashed!r} is no hash"
            if not one[1]:
                break
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_pin_is_an_exact_version_with_hashes(path: Path) -> None:
    assert read(path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("x>=1 \\\n    --hash=sha256:" + "0" * 64, "no exact version"),
        ("x==1", "no exact version"),
        ("x==1 \\\n    --hash=md5:" + "0" * 32, "no hash"),
        ("x @ https://example.org/x.whl \\", "no exact version"),
    ],
)
def test_a_planted_line_is_found(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "planted.txt").write_text(f"--require-hashes\n{line}\n")
    with pytest.raises(AssertionError, match=sentence):
        read(tmp_path / "planted.txt")


def ranges() -> dict[str, list[Requirement]]:
    """What users install, by extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(each) for each in listed] for extra, listed in groups.items()}


def test_every_range_of_a_user_has_a_beginning_and_an_end() -> None:
    for extra, listed in ranges().items():
        for each in listed:
            operators = {specifier.operator for specifier in each.specifier}
            assert extra == "dev" or operators == {">=", "<"}, f"{each} of extra {extra!r}"


def test_what_is_tested_is_in_the_ranges() -> None:
    pins = read(ROOT / "requirements" / "dev.txt")
    for listed in ranges().values():
        for each in listed:
            if each.name != "fairway":
                assert each.specifier.contains(pins[canonicalize_name(each.name)]), str(each)


def test_nothing_is_installed_without_hashes() -> None:
    for name in (".ci/venv", ".ci/audit", ".ci/docs", "bench/peers/install.py"):
        text = (ROOT / name).read_text()
        assert "--require-hashes" in text
        assert "--no-build-isolation" in text, "the tools of a build would be fetched without hashes"
    lines = [line for line in (ROOT / ".ci" / "venv").read_text().splitlines() if line.strip().startswith("install --")]
    assert [line for line in lines if "--require-hashes" not in line] == ["install --no-deps --editable ."]


# --- make audit -------------------------------------------------------------------------------------------------------


def audit() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("audit", str(ROOT / ".ci" / "audit"))
    spec = importlib.util.spec_from_loader("audit", loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(made)
    finally:
        sys.dont_write_bytecode = before
    return made


SOUND = {"name": "sound", "version": "1", "vulns": []}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}
FLAWED = {"name": "flawed", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}


def test_an_audit_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    judge = audit().judge
    assert judge({"dev.txt": [SOUND]}) == 0
    assert judge({"dev.txt": [SOUND, FLAWED]}) == 1
    assert "requirements/dev.txt: flawed 1: X-1, mended in 2\n" in capsys.readouterr().out


def test_an_audit_does_not_take_what_it_cannot_look_up_for_sound(capsys: pytest.CaptureFixture[str]) -> None:
    made = audit()
    assert made.judge({"dev.txt": [SOUND, UNKNOWN]}) == 3
    said = capsys.readouterr()
    assert "nothing is known: unknown\n" in said.err
    assert "1 pins without a known vulnerability, 0 with one" in said.out
    with pytest.raises(made.Unreachable, match="knows none of the pins"):
        made.judge({"dev.txt": [UNKNOWN], "pip.txt": [UNKNOWN]})


def test_an_audit_without_a_network_says_so_in_a_sentence(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    command = [sys.executable, str(ROOT / ".ci" / "audit")]
    nothing = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=nothing, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("audit: pip-audit cannot be installed from the package index (")
    assert done.stderr.endswith("nothing is known about the pins; try again where there is a network\n")
    assert done.stderr.count("\n") == 1
