"""Every link of the documentation leads somewhere, and every name in it exists.

Checked are relative links with their anchors, files and tests in inline code, modules in inline code, and the pages
that code, messages and the Makefile name. Every page can be reached from the map, `docs/README.md`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.tidy import texts
from tests.tidy.source import ROOT

MAP = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"^(?P<fence>```+).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?(?:\s+\"[^\"]*\")?\)")
_IMAGE = re.compile(r"<(?:img|source)\b[^>]*\b(?:src|srcset)=\"(?P<target>[^\"]+)\"")
_FILE = re.compile(r"`(?P<path>(?:src|tests|bench|docs)/[\w/.-]+\.(?:py|md|svg))(?:::(?P<name>\w+))?`")
_MODULE = re.compile(r"`(?P<dotted>fairway(?:\.[A-Za-z_]\w*)+)`")
_PAGE = re.compile(r"(?<![\w/.-])docs/[\w./-]+\.(?:md|svg)")

# Dotted names in inline code that are no modules: a file, headers of messages, formats of Spark, loggers, a subject.
NO_MODULES = re.compile(r"fairway\.(?:toml|(?:replay|dead)\.\w+|events|delayed|app|outbox|spool|bench)")
# What a disk format says, which is not a page of today.
OTHER_PAGES = {
    "src/fairway/spark/jobs/manifest.py": {"docs/pipeline.md"},  # a part of archive format version 1
}


def prose(text: str) -> str:
    """A page without its blocks of code; its lines keep their numbers."""
    return _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)


def dangling(page: Path) -> list[str]:
    """Links of a page that lead nowhere, and files and tests that it names and that do not exist."""
    text = prose(page.read_text(encoding="utf-8"))
    lost = [found[0] for found in _FILE.finditer(text) if not _is_there(ROOT / found["path"], found["name"])]
    for target, anchor, shown in links(text):
        goal = page.parent / target if target else page
        if not (goal.exists() and _has_anchor(goal, anchor)):
            lost.append(shown)
    return lost


def links(text: str) -> Iterator[tuple[str, str, str]]:
    """Target, anchor and spelling of each relative link and picture."""
    text = re.sub(r"\n +", " ", _CODE.sub("", text))
    for found in _LINK.finditer(text):
        if "://" not in found["target"] and not found["target"].startswith("mailto:"):
            yield unquote(found["target"]), found["anchor"] or "", found[0]
    for found in _IMAGE.finditer(text):
        if "://" not in found["target"]:
            yield found["target"], "", found[0]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; the second of two equal headings ends in -1."""
    made: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.*?)[ #]*$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", plain.lower()).replace(" ", "-")
        found.add(f"{anchor}-{made[anchor]}" if anchor in made else anchor)
        made[anchor] = made.get(anchor, 0) + 1
    return found


def unknown_modules(text: str) -> list[str]:
    """Dotted names in inline code that neither are modules nor stand in modules."""
    named = [found["dotted"] for found in _MODULE.finditer(text) if not NO_MODULES.fullmatch(found["dotted"])]
    return [dotted for dotted in named if not _can_be_resolved(dotted)]


def unknown_pages(path: str, text: str) -> list[str]:
    """Pages of docs/ that a file names and that do not exist."""
    return [
        each for each in _PAGE.findall(text) if each not in OTHER_PAGES.get(path, ()) and not (ROOT / each).exists()
    ]


def unreached(start: Path, pages: list[Path]) -> list[Path]:
    """Pages to which no chain of links leads from that one."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        waiting.extend((page.parent / target).resolve() for target, _, _ in links(prose(page.read_text())) if target)
    return [page for page in pages if page not in seen]


def _is_there(path: Path, name: str | None) -> bool:
    return path.exists() and (name is None or f"def {name}(" in path.read_text(encoding="utf-8"))


def _has_anchor(page: Path, anchor: str) -> bool:
    return not anchor or (page.suffix == ".md" and anchor in anchors(page.read_text(encoding="utf-8")))


def _can_be_resolved(dotted: str) -> bool:
    """A module, or what stands in one, over however many attributes."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return name in getattr(found, "__annotations__", {})
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_is_linked_and_named_is_there(page: Path) -> None:
    assert dangling(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_module_that_is_named_exists(page: Path) -> None:
    if "adr" not in page.parts and page.name != "CHANGELOG.md":  # these speak of their day
        assert unknown_modules(page.read_text(encoding="utf-8")) == []


def test_every_page_that_code_names_exists() -> None:
    named = {file.path: unknown_pages(file.path, file.content) for file in texts.load()}
    named.pop("tests/test_docs_links.py")
    assert {path: lost for path, lost in named.items() if lost} == {}


def test_the_map_leads_to_every_page() -> None:
    assert unreached(MAP, sorted((ROOT / "docs").rglob("*.md"))) == []


def test_the_walk_from_send_to_ack_has_at_most_15_files() -> None:
    text = (ROOT / "docs" / "internals" / "way-of-a-message.md").read_text(encoding="utf-8")
    assert len({found["path"] for found in _FILE.finditer(text)}) <= 15


# --- planted faults are found ----------------------------------------------------------------------------------------


def test_a_planted_broken_link_is_caught(tmp_path: Path) -> None:
    names = (
        "`tests/test_docs_links.py::test_a_planted_broken_link_is_caught` `tests/test_docs.py::test_none` `src/none.py`"
    )
    good = "[here](page.md#a-part) [twice](#a-part-1) [away](https://example.org) `[code](none.md)`"
    bad = '[nor](page.md#none) [nor](none.md) [nor](\n  #a-part-2) ![nor](none.svg) <img src="none.svg">'
    block = "```text\n[block](none.md)\n# No part\n```"
    (tmp_path / "page.md").write_text(
        f"# A part\n\n{names}\n{good}\n{bad}\n\n{block}\n\n## A `part`\n", encoding="utf-8"
    )
    assert dangling(tmp_path / "page.md") == [
        "`tests/test_docs.py::test_none`", "`src/none.py`", "](page.md#none)", "](none.md)", "](none.svg)",
        '<img src="none.svg"',
    ]  # fmt: skip


def test_a_planted_name_is_caught() -> None:
    text = "`fairway.Receipt.sequence` `fairway.storage.flusher` `fairway.world` `fairway.Receipt.none` `fairway.toml`"
    assert unknown_modules(text) == ["fairway.world", "fairway.Receipt.none"]
    assert unknown_pages("src/x.py", "See docs/README.md and docs/none.md.") == ["docs/none.md"]


def test_a_planted_page_without_a_link_to_it_is_caught(tmp_path: Path) -> None:
    pages = [tmp_path / name for name in ("map.md", "first.md", "second.md", "lost.md")]
    for page, text in zip(
        pages, ("[first](first.md)", "[second](second.md#part)", "# Part", "[map](map.md)"), strict=True
    ):
        page.write_text(text, encoding="utf-8")
    assert unreached(pages[0], pages) == [pages[3]]
