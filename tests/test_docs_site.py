"""The navigation of the site names every page of docs/ once, and the site loads nothing from elsewhere.

`make docs` builds the site with `--strict`: a broken link or a warning ends it. These tests need no MkDocs and no YAML.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.tidy.source import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
OUTSIDE = {"internals/adr/0000-template.md"}  # for authors: the page on decisions links to it
PARTS = {"start", "concepts", "how-to", "reference", "internals"}
_PAGE = re.compile(r"^ +- (?:[^:\n]+: )?(?P<page>[\w./-]+\.md)$", re.MULTILINE)


def navigation(config: str) -> Counter[str]:
    """How often `nav` names each page."""
    return Counter(_PAGE.findall(config.split("\nnav:\n", 1)[1]))


def misplaced(config: str, docs: Path) -> dict[str, int]:
    """Pages that `nav` does not name exactly once, and pages in it that do not exist."""
    named = navigation(config)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - OUTSIDE
    return {page: named[page] for page in sorted(pages | set(named)) if named[page] != 1 or page not in pages}


def test_the_navigation_names_every_page_once() -> None:
    assert misplaced(CONFIG, ROOT / "docs") == {}


def test_the_navigation_has_the_five_parts() -> None:
    assert {page.split("/")[0] for page in navigation(CONFIG)} == {*PARTS, "README.md"}


def test_the_site_loads_nothing_from_elsewhere_and_is_strict() -> None:
    assert "http" not in CONFIG
    assert "  font: false" in CONFIG
    assert "iframe-worker.js" in CONFIG, "the plugin `offline` would load one from elsewhere"
    assert "-m mkdocs build --strict" in (ROOT / ".ci" / "docs").read_text(encoding="utf-8")
    checks = re.findall(r"^  (\w+): (\w+)$", CONFIG.split("\nvalidation:\n", 1)[1].split("\n\n")[0], re.MULTILINE)
    assert dict(checks) == dict.fromkeys(
        ("omitted_files", "absolute_links", "unrecognized_links", "not_found", "anchors"), "warn"
    )


def test_planted_faults_are_found(tmp_path: Path) -> None:
    for name in ("once.md", "twice.md", "never.md"):
        (tmp_path / name).write_text("# Page\n", encoding="utf-8")
    config = "x: 1\nnav:\n  - Once: once.md\n  - twice.md\n  - Part:\n      - Twice: twice.md\n      - Gone: gone.md\n"
    assert misplaced(config, tmp_path) == {"gone.md": 1, "never.md": 0, "twice.md": 2}
