"""Markdown for the pages that scripts write: tables, wrapped paragraphs, text that is no HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

NOTE = "<!-- written by docs/reference.py -->"


def escaped(text: str) -> str:
    """Text in which `<` begins no HTML. Code keeps it as it is."""
    return re.sub(
        r"`[^`]*`|^ {4}.*$|<", lambda found: "&lt;" if found[0] == "<" else found[0], text, flags=re.MULTILINE
    )


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return re.sub(r"\s*\n\s*", " ", escaped(text.strip())).replace("|", r"\|")


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def joined(parts: list[str]) -> str:
    """A page; what is one line of words is wrapped."""
    shown = [paragraph(each) if re.match(r"[\w*`\[]", each) and "\n" not in each else each for each in parts]
    return "\n\n".join(each.strip("\n") for each in shown if each) + "\n"


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(each)} |" for each in rows)])
