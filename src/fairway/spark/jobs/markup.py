"""Makes HTML and SVG from values, and escapes all text.

Text becomes markup in `escaped` alone, which `tag` calls for every child and attribute. So a name that a user chose (a
subject, a group, a key) is never more than text on a page. The result is well-formed XML, too.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

Attribute = str | int | float | None

_VOID: Final = frozenset({"br", "col", "hr", "meta"})  # HTML allows no end tag for these, and needs one for all others
# What XML may not contain, even escaped: most control characters, surrogates, and two non-characters.
_UNSPEAKABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as markup that shows it literally."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNSPEAKABLE.sub("\ufffd", text)))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """An element. `class_` is the attribute class, `text_anchor` is text-anchor; None leaves an attribute out."""
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
