"""Every command that a page or a docstring names exists. (`test_docs` runs those in console blocks.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from fairway.__main__ import app
from tests.tidy.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "src").rglob("*.py"))
NAMES_OF_BENCHES = frozenset({"memory"})  # `fairway memory` in a table of peers is a durability
_NAMED = re.compile(r"`fairway ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)")


def unknown_verbs(text: str) -> list[str]:
    """Commands in inline code that the command line does not have."""
    named = [each for each in _NAMED.findall(text) if each not in NAMES_OF_BENCHES]
    return [each for each in named if not _exists(each.split())]


def _exists(words: list[str]) -> bool:
    found = get_command(app)
    for word in words:
        verbs = getattr(found, "commands", None)
        if verbs is None or not verbs:
            return True  # what follows upon a verb is its argument
        if word not in verbs:
            return getattr(found, "invoke_without_command", False)
        found = verbs[word]
    return True


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_named_exists(path: Path) -> None:
    assert unknown_verbs(path.read_text()) == []


def test_a_command_that_does_not_exist_is_found() -> None:
    assert unknown_verbs("`fairway replay` and `fairway up --data d`, `fairway pipeline replay`") == ["replay"]
    assert unknown_verbs("`fairway dead bury orders`") == ["dead bury orders"]
