"""Makes a report as one HTML file, which needs nothing from elsewhere, runs no script, and works offline.

The page follows the reader's light or dark mode. It has sections, in which sentences, figures, tables and plots
(`plots`) stand in the order they were added. Every text is escaped (`markup`).

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
from fairway.spark.jobs.markup import Markup, joined, tag
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
        self._parts.append(tag("p", sentence))

    def heading(self, title: str) -> None:
        """A heading within the section."""
        self._parts.append(tag("h3", title))

    def terms(self, summary: str, meanings: Mapping[str, str]) -> None:
        """A list of terms and their meanings, which the reader can open."""
        listed = [part for term, meaning in meanings.items() for part in (tag("dt", term), tag("dd", meaning))]
        self._parts.append(tag("details", tag("summary", summary), tag("dl", *listed, class_="terms")))

    def warn(self, sentence: str) -> None:
        """A sentence that the reader should not miss."""
        self._parts.append(tag("p", sentence, class_="warn", role="note"))

    def figures(self, *figures: Figure) -> None:
        self._parts.append(tag("dl", *map(_figure, figures), class_="figures"))

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
            self._parts.append(tag("p", f"{caption} None.".lstrip(), class_="empty"))
            return
        names = [tag("th", _name(each), scope="col", class_=_side(each)) for each in head]
        body = [
            tag("tr", *(_cell(each, value) for each, value in zip(head, row, strict=True))) for row in found[:rows_max]
        ]
        about = tag("caption", caption) if caption else Markup()
        table = tag("table", about, tag("thead", tag("tr", *names)), tag("tbody", *body))
        self._parts.append(
            tag("div", table, class_="wide", tabindex=0, role="region", aria_label=caption or self.title)
        )

    def plot(self, plot: Plot) -> None:
        self._parts.append(plot.html())

    def html(self, anchor: str) -> Markup:
        heading = tag("h2", self.title, id=f"{anchor}-title") if self.title else Markup()
        return tag(
            "section", heading, *self._parts, id=anchor, aria_labelledby=f"{anchor}-title" if self.title else None
        )


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
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", self._title),
            tag("style", Markup(_STYLE)),
        )
        about = tag("p", self._about, class_="about") if self._about else Markup()
        sections = [each.html(f"s{number}") for number, each in enumerate(self._sections)]
        header = tag("header", tag("h1", self._title), about)
        main = tag("main", self._opening.html("opening"), self._contents(), *sections)
        return f"<!DOCTYPE html>\n{tag('html', head, tag('body', header, main), lang='en')}\n"

    def write(self, path: str) -> None:
        """Write the page to a local file, replacing an existing one."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise Misuse(f"the page cannot be written to {path}: {error.strerror or error}") from error

    def _contents(self) -> Markup:
        if len(self._sections) < 3:
            return Markup()
        links = [tag("li", tag("a", each.title, href=f"#s{number}")) for number, each in enumerate(self._sections)]
        return tag("nav", tag("ul", *links), aria_label="Sections")


def _figure(figure: Figure) -> Markup:
    note = tag("dd", figure.note, class_="note") if figure.note else Markup()
    return tag(
        "div",
        tag("dt", figure.name),
        tag("dd", figure.value, class_="value"),
        note,
        class_=f"figure {figure.state.value}".rstrip(),
    )


def _name(column: Head) -> str:
    return column if isinstance(column, str) else column.name


def _side(column: Head) -> str | None:
    return "number" if isinstance(column, Column) else None


def _cell(column: Head, value: Cell) -> Markup:
    if value is None:
        return tag("td", "–", class_=_side(column))
    if isinstance(value, datetime):
        return tag("td", plots.moment(value), class_="whole")
    if isinstance(value, str):
        return tag("td", value, class_="whole id" if isinstance(column, IdColumn) else _side(column))
    text = column.quantity.shown(value) if isinstance(column, Column) else COUNT.shown(value)
    return tag("td", text, class_=_side(column))


def _palette(colors: Sequence[str]) -> str:
    return "".join(f"--c{number}:{color};" for number, color in enumerate(colors))


# Eight colours that most readers with colour vision deficiency can distinguish, too, in this order of neighbours.
_LIGHT: Final = _palette(
    ("#2a78d6", "#d95f1e", "#14936a", "#8a4fc0", "#c28400", "#c93a5b", "#4c8c1c", "#5d6b7a")
)  # fmt: skip
_DARK: Final = _palette(
    ("#5a9ff0", "#f08a4b", "#3cbf94", "#b48be6", "#dba939", "#ee7590", "#8fc45a", "#9fb0c2")
)  # fmt: skip

_STYLE: Final = joined(
    (
        Markup(
            ":root{color-scheme:light dark;--ground:#fff;--card:#f5f7f9;--ink:#1a2026;--soft:#56616d;--rule:#dde3e9;"
            f"--good:#14793f;--bad:#b3261e;{_LIGHT}}}\n"
            "@media (prefers-color-scheme:dark){:root{--ground:#14181c;--card:#1d2329;--ink:#e6eaee;--soft:#9aa7b4;"
            f"--rule:#333c45;--good:#5cc98a;--bad:#ff8a80;{_DARK}}}}}\n"
        ),
        Markup("".join(f".c{number}{{--c:var(--c{number})}}" for number in range(8))),
        Markup(
            """
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:68rem;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:0}
h2{font-size:1.25rem;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
h1,h2,h3,dt,dd,li,figcaption,p{overflow-wrap:anywhere}
p{margin:.5rem 0;max-width:46rem}
a{color:inherit}
.about,.note,.empty,caption{color:var(--soft)}
.about{margin-top:.25rem}
.warn{border-left:4px solid var(--bad);padding:.4rem .8rem;background:var(--card)}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:1rem 0 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.75rem;margin:1rem 0}
.figure{background:var(--card);border-radius:8px;padding:.7rem .9rem}
.figure dt{color:var(--soft);font-size:.85rem}
.figure dd{margin:0}
.figure .value{font-size:1.6rem;line-height:1.3;font-weight:600;font-variant-numeric:tabular-nums}
.figure .note{font-size:.85rem}
.good .value{color:var(--good)}
.bad .value{color:var(--bad)}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;width:100%}
caption{text-align:left;padding-bottom:.4rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--rule);
max-width:14rem;overflow-wrap:break-word}
th{color:var(--soft);font-weight:500;font-size:.85rem;vertical-align:bottom}
.whole{white-space:nowrap}
.id{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.9em}
details{margin:.5rem 0;color:var(--soft)}
summary{cursor:pointer}
.terms{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.5rem 0}
.terms dt{color:var(--ink)}
.terms dd{margin:0}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
figure{margin:1.5rem 0;overflow-x:auto}
figcaption{font-weight:500;margin-bottom:.4rem}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;list-style:none;padding:0;margin:0 0 .4rem;font-size:.85rem}
.swatch{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em;background:var(--c)}
figure .note{font-size:.85rem}
svg{display:block;width:100%;min-width:34rem;height:auto;font-size:12px;fill:var(--soft)}
svg .value{fill:var(--ink)}
.grid{stroke:var(--rule);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.bar,.dot{fill:var(--c)}
.hit{fill:transparent}
.hint{opacity:0;pointer-events:none}
g:hover>.hint{opacity:1}
g:hover>.hit{fill:var(--soft);fill-opacity:.1}
@media print{body{max-width:none}figure,tr{break-inside:avoid}}
"""
        ),
    )
)
