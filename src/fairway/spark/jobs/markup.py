"""Fills the templates of pages and plots, and escapes all text.

The folder `templates` holds the HTML, the SVG and the style of a page:

    page.html     the frame of a page                   page.css      its style
    parts.html    headings, figures, tables             plots.html    drawings, axes, legends

The last two files hold many small templates, each in a `<template>` element with its name as `id`. `fill` puts values
in the place of `$names`, and refuses to leave one empty. Indents and line ends of a template are left out.

Text becomes markup in `escaped` alone, which `fill` calls for every value. So a name that a user chose (a subject, a
group, a key) is never more than text on a page. The result is well-formed XML, too.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from string import Template
from typing import Final

# What XML may not contain, even escaped: most control characters, surrogates, and two non-characters.
_UNSPEAKABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_TEMPLATE: Final = re.compile(r'<template id="(?P<name>[a-z-]+)">(?P<body>.*?)</template>', re.DOTALL)


class Markup(str):
    """Text that is already markup."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Text as markup that shows it literally."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNSPEAKABLE.sub("\ufffd", text)))


def fill(template: str, /, **values: str | float | Iterable[Markup]) -> Markup:
    """The template of that name with these values; several parts are put one after the other."""
    return Markup(_templates()[template].substitute({name: _value(value) for name, value in values.items()}))


def _value(value: str | float | Iterable[Markup]) -> Markup:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, float):
        return Markup(f"{value:.2f}".rstrip("0").rstrip("."))
    return Markup(value) if isinstance(value, int) else Markup("".join(map(escaped, value)))


@functools.cache
def _templates() -> Mapping[str, Template]:
    page = _text_of("page.html").replace("$style", _text_of("page.css"))
    found = {"page": Template(page)}
    for each in _TEMPLATE.finditer(_text_of("parts.html") + _text_of("plots.html")):
        found[each["name"]] = Template("".join(line.strip() for line in each["body"].splitlines()))
    return found


def _text_of(file: str) -> str:
    return resources.files("fairway.spark.jobs").joinpath("templates", file).read_text(encoding="utf-8")
