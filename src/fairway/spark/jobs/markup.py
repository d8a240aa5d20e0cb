"""HTML and SVG made of values. Text becomes markup in `tag` alone, and is escaped there, so that nothing a user has
named (a subject, a group, a key) can be anything but text on a page. What comes out is well-formed XML, too."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

Attribute = str | int | float | None

_VOID: Final = frozenset({"br", "col", "hr", "meta"})  # a browser takes no end for these, and wants one for all others
# What no XML may contain, escaped or not: most control characters, halves of pairs, two that are no characters.
_UNSPEAKABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as it is, whatever is in it."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNSPEAKABLE.sub("\ufffd", text)))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """An element. `class_` is the attribute class, `text_anchor` is text-anchor; one that is None is left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}/>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Several parts, one after the other."""
    return Markup("".join(map(escaped, parts)))


def _value(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
