"""No sentence has more than 40 words: in the pages of docs/, and in docstrings and comments of the product.

The count is a blunt instrument, and 40 is far above the 25 words that CONTRIBUTING asks for. Code, tables of names
and the pages of decisions, which keep their text, do not count. Generated pages repeat docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

WORDS_MAX = 40
_LEFT_OUT = ("docs/internals/adr/", "docs/reference/api/")
_END = re.compile(r"(?<=[.!?])[\"')*_`]*\s+(?=[\"'(`*_\[]*[A-Z0-9`])")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_COLUMNS = re.compile(r"\S {3,}\S")  # a name and what it is, in columns
_TARGET = re.compile(r"\]\([^)]*\)")  # the address of a link is no word


def long_sentences(text: str) -> list[str]:
    """The sentences of plain paragraphs, list items and cells of tables that have too many words."""
    found = []
    for paragraph in _paragraphs(text):
        for sentence in _END.split(_TARGET.sub("]", paragraph)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > WORDS_MAX:
                found.append(f"{len(words)} words: {sentence}")
    return found


def _paragraphs(text: str) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for line in [*text.split("\n"), ""]:
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_table = line.startswith("|")
        is_outside = is_code or is_fence or is_table or not line.strip() or bool(_COLUMNS.search(line))
        is_outside |= line.startswith(("#", "<!--")) or (line.startswith("    ") and not paragraph)
        if paragraph and (is_outside or _ITEM.match(line)):
            yield " ".join(paragraph)
            paragraph = []
        if is_table:
            yield from line.strip("|").split("|")
        elif not is_outside:
            paragraph.append(line.strip())


def _python(source: str) -> Iterator[str]:
    """Docstrings and comments. Whole lines of comments that follow one another are one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    text: list[str] = []
    last = 0  # the line of the last comment that has its line to itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_alone = not token.line[:column].strip()
            if not is_alone or line != last + 1:
                yield "\n".join(text)
                text = []
            text.append(token.string.lstrip("#: "))
            last = line if is_alone else 0
    yield "\n".join(text)


PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
COUNTED = [page for page in PAGES if not page.relative_to(ROOT).as_posix().startswith(_LEFT_OUT)]


@pytest.mark.parametrize("page", COUNTED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_have_no_long_sentence(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


def test_the_product_has_no_long_sentence() -> None:
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        texts = _python(path.read_text(encoding="utf-8"))
        if sentences := [sentence for text in texts for sentence in long_sentences(text)]:
            found[path.relative_to(ROOT).as_posix()] = sentences
    assert found == {}


def test_a_planted_long_sentence_is_found() -> None:
    long = "word " * 41 + "end."
    short = "word " * 30 + "end."
    assert len(long_sentences(f"{short} {long} {short}")) == 1
    assert len(long_sentences(f"- {short}\n- {long}\n")) == 1
    assert len(long_sentences(f"| {short} | {long} |\n")) == 1
    assert long_sentences(f"```text\n{long}\n```\n\n    {long}\n") == []
    source = f'"""{long}"""\n# {short}\n# {long}\nx = 1  # {short}\n'
    assert sum(len(long_sentences(text)) for text in _python(source)) == 2
