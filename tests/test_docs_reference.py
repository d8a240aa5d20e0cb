"""The generated pages of docs/reference are what `docs/reference.py` writes today."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

reference: ModuleType = importlib.import_module("docs.reference")
pages: ModuleType = importlib.import_module("docs.pages")


@pytest.mark.parametrize("name", list(reference.PAGES))
def test_each_page_is_what_the_script_writes(name: str) -> None:
    committed = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert committed == reference.PAGES[name](), "run: .venv/bin/python -m docs.reference"


def test_every_page_of_the_script_says_so_and_no_other_page_does() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in reference.FOLDER.rglob("*.md")}
    marked = {path.relative_to(reference.FOLDER).as_posix() for path, text in texts.items() if pages.NOTE in text}
    assert marked | {"configuration.md"} == set(reference.PAGES)


def test_every_error_and_every_code_has_a_remedy() -> None:
    assert {each.__name__ for each in reference.error_types()} == set(reference.REMEDIES)
    assert {each.name for each in reference.errors.Code} == set(reference.CODE_REMEDIES)


def test_a_page_of_metrics_is_read_with_its_labels() -> None:
    found: dict[str, Any] = {}
    page = (
        "# HELP fairway_a_total Things.\n# TYPE fairway_a_total counter\nfairway_a_total 0\n"
        "# HELP fairway_b_seconds Waits.\n# TYPE fairway_b_seconds histogram\n"
        'fairway_b_seconds_bucket{log="x",le="1"} 2\n'
    )
    reference.read("broker", page, found)
    reference.read("meta", page, found)
    assert [(each.name, each.kind, each.labels, each.servers) for each in found.values()] == [
        ("fairway_a_total", "counter", [], ["broker", "meta"]),
        ("fairway_b_seconds", "histogram", ["log"], ["broker", "meta"]),
    ]


def test_html_in_words_is_escaped_and_code_stays() -> None:
    assert pages.cell("a <b> `c <d>` | e") == r"a &lt;b> `c <d>` \| e"
