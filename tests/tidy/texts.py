"""Rules for every text file that git tracks or would track. The patterns are spelled so as not to match themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tidy.source import ROOT, Finding

_LINE_RULES = (
    (re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b"), "a note to self: do it, or open an issue"),
    (re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users)(?=[/\s\"'`),:]|$)"), "a path of one machine"),
    (re.compile(r"py[p]i\.org|python[h]osted\.org|(?:arti[f]actory|[n]exus|devpi)[\w.-]*\.|--(?:extra-)?[i]ndex-url"),
     "the address of a package index"),
)  # fmt: skip
_SKIPPED_FOLDERS = frozenset(
    {".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}
)


@dataclass(frozen=True)
class Text:
    """One text file; `path` is relative to the repository and uses `/`."""

    path: str
    content: str


def load(root: Path = ROOT) -> list[Text]:
    """Every text file; golden files and pictures are not text."""
    found = []
    for path in _files(root):
        data = (root / path).read_bytes()
        if b"\0" not in data and not _is_golden(path):
            found.append(Text(path, data.decode("utf-8")))
    return found


def texts(files: Iterable[Text]) -> Iterator[Finding]:
    """No notes to self, no paths of one machine, no package index; a newline at the end, no tabs in Python."""
    for file in files:
        lines = file.content.split("\n")
        if lines[-1]:
            yield Finding(file.path, len(lines), "no newline at the end")
        for number, line in enumerate(lines, 1):
            if line.endswith("\r"):
                yield Finding(file.path, number, "CR at the end of the line")
            if file.path.endswith(".py") and "\t" in line:
                yield Finding(file.path, number, "tab in Python")
            for pattern, sentence in _LINE_RULES:
                if pattern.search(line):
                    yield Finding(file.path, number, sentence)


def _is_golden(path: str) -> bool:
    return path.startswith("tests/golden/") and not path.endswith((".py", ".md"))


def _files(root: Path) -> list[str]:
    """What git tracks or would track; where git cannot say (an unpacked release, a bare container), what lies there."""
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, check=False, capture_output=True)
        if listing.returncode == 0:
            return sorted(path for path in set(listing.stdout.decode().split("\0")) if path and (root / path).is_file())
    every = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in every if not _SKIPPED_FOLDERS & set(path.parts))
