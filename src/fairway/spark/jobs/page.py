"""Makes a report as one HTML file, which needs nothing from elsewhere, runs no script, and works offline.

The page follows the reader's light or dark mode. It has sections, in which sentences, figures, tables and plots
(`plots`) stand in the order they were added. Its HTML is in `templates`; every text is escaped (`markup`).

    page = HtmlPage("Balances of orders", "fairway://127.0.0.1:20880, the last hour")
    page.figures(Figure("Sent", "12,345"), Figure("Missing", "0", "every message is accounted for", FigureStatus.GOOD))
    section = page.section("Lag", "Stored, and not yet acked.")
    section.plot(plots.lines("Lag of each group over time.", [Series("billing", points)], unit="messages"))
    section.table(["group", Column("lag"), Column("wait", SECONDS)], [["billing", 17, 0.25]], "Lag now.")
    section.text("The delay server says nothing of that.")
    section.terms("What the columns count", {"lag": "messages that are stored, and not yet acked"})
    section.warn("Three messages are missing.")
    page.write("report.html")

A cell is a text, a number (written as its column's quantity), a time or None (a dash).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from fairway.errors import Misuse
from fairway.spark.jobs import plots
from fairway.spark.jobs.markup import Markup, fill
from fairway.spark.jobs.plots import COUNT, Plot, Quantity

ROWS_MAX: Final = 500  # of a table; a browser could show more than a reader can read
Cell = str | float | datetime | None


class FigureStatus(Enum):
    """Whether a figure is good, bad or neither."""

    PLAIN = ""
    GOOD = "good"
    BAD = "bad"


class Figure(NamedTuple):
    """A number that the reader should see first."""

    name: str
    value: str
    note: str = ""
    state: FigureStatus = FigureStatus.PLAIN


class Column(NamedTuple):
    """A column of numbers, aligned to the right."""

    name: str
    quantity: Quantity = COUNT


class IdColumn(NamedTuple):
    """A column of identifiers for copying: each on one line, in a monospaced font."""

    name: str


Head = str | Column | IdColumn


class Section:
    """A part of a page under a heading."""

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._parts: list[Markup] = []
        if lead:
            self.text(lead)

    def text(self, sentence: str) -> None:
        self._parts.append(fill("text", text=sentence))

    def heading(self, title: str) -> None:
        """A heading within the section."""
        self._parts.append(fill("heading", text=title))

    def terms(self, summary: str, meanings: Mapping[str, str]) -> None:
        """A list of terms and their meanings, which the reader can open."""
        terms = [fill("term", name=name, meaning=meaning) for name, meaning in meanings.items()]
        self._parts.append(fill("terms", summary=summary, terms=terms))

    def warn(self, sentence: str) -> None:
        """A sentence that the reader should not miss."""
        self._parts.append(fill("warning", text=sentence))

    def figures(self, *figures: Figure) -> None:
        self._parts.append(fill("figures", figures=map(_figure, figures)))

    def table(
        self,
        head: Sequence[Head],
        rows: Iterable[Sequence[Cell]],
        caption: str = "",
        rows_max: int = ROWS_MAX,
    ) -> None:
        """Rows under a head. If there are more than `rows_max` rows, the first are shown, and the caption says so."""
        found = list(islice(rows, rows_max + 1))
        if len(found) > rows_max:
            caption = f"{caption} Only the first {rows_max:,} rows are shown.".lstrip()
        if not found:
            self._parts.append(fill("empty", text=f"{caption} None.".lstrip()))
            return
        self._parts.append(
            fill(
                "table",
                label=caption or self.title,
                caption=fill("caption", text=caption) if caption else "",
                head=[
                    fill("head", kind=_side(each), name=each if isinstance(each, str) else each.name) for each in head
                ],
                rows=[fill("row", cells=map(_cell, head, row)) for row in found[:rows_max]],
            )
        )

    def plot(self, plot: Plot) -> None:
        self._parts.append(plot.html())

    def html(self, anchor: str) -> Markup:
        if not self.title:
            return fill("opening", anchor=anchor, parts=self._parts)
        return fill("section", anchor=anchor, title=self.title, parts=self._parts)


class HtmlPage:
    """A report as one HTML page."""

    def __init__(self, title: str, about: str = "") -> None:
        self._title = title
        self._about = about
        self._opening = Section("")
        self._sections: list[Section] = []

    def section(self, title: str, lead: str = "") -> Section:
        """A new section, below the others; `lead` is its first sentence."""
        self._sections.append(Section(title, lead))
        return self._sections[-1]

    def figures(self, *figures: Figure) -> None:
        """Figures at the top of the page."""
        self._opening.figures(*figures)

    def text(self, sentence: str) -> None:
        self._opening.text(sentence)

    def warn(self, sentence: str) -> None:
        self._opening.warn(sentence)

    def html(self) -> str:
        """The whole file."""
        links = [fill("link", anchor=f"s{number}", title=each.title) for number, each in enumerate(self._sections)]
        return fill(
            "page",
            title=self._title,
            about=fill("about", text=self._about) if self._about else "",
            opening=self._opening.html("opening"),
            contents=fill("contents", links=links) if len(links) >= 3 else "",
            sections=[each.html(f"s{number}") for number, each in enumerate(self._sections)],
        )

    def write(self, path: str) -> None:
        """Write the page to a local file, replacing an existing one."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise Misuse(f"the page cannot be written to {path}: {error.strerror or error}") from error


def _figure(figure: Figure) -> Markup:
    note = fill("figure-note", text=figure.note) if figure.note else ""
    return fill("figure", state=figure.state.value, name=figure.name, value=figure.value, note=note)


def _side(column: Head) -> str:
    return "number" if isinstance(column, Column) else ""


def _cell(column: Head, value: Cell) -> Markup:
    if value is None:
        return fill("cell", kind=_side(column), text="–")
    if isinstance(value, datetime):
        return fill("cell", kind="whole", text=plots.moment(value))
    if isinstance(value, str):
        return fill("cell", kind="whole id" if isinstance(column, IdColumn) else _side(column), text=value)
    quantity = column.quantity if isinstance(column, Column) else COUNT
    return fill("cell", kind=_side(column), text=quantity.shown(value))
