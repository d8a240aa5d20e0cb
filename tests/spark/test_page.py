"""Pages and plots, without a JVM: whatever the values are, a page is well-formed, says them, and stays legible."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import Misuse
from fairway.spark.jobs import plots
from fairway.spark.jobs.markup import Markup, fill
from fairway.spark.jobs.page import Column, Figure, FigureStatus, HtmlPage, IdColumn
from fairway.spark.jobs.plots import COUNT, RATE, SECONDS, SHARE, HistogramBin, Plot, Series

START = datetime(2026, 11, 16, 7, 3, tzinfo=UTC)
TEXT = st.text(max_size=20)
VALUES = st.none() | st.floats(-1e15, 1e15) | st.integers(0, 10**12)


def points(values: list[float | None], step_s: float = 60) -> list[tuple[datetime, float | None]]:
    return [(START + timedelta(seconds=step_s * place), value) for place, value in enumerate(values)]


def drawn(plot: Plot) -> ET.Element:
    return ET.fromstring(plot.html())


def texts(plot: Plot, kind: str = "text") -> list[str]:
    return [each.text or "" for each in drawn(plot).iter(kind)]


class Reader(HTMLParser):
    """A reader as browsers are: notes what is asked for from elsewhere, and every script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links.extend(value or "" for name, value in attrs if name in {"src", "href", "xlink:href"})


# --- pages ------------------------------------------------------------------------------------------------------------


def whole_page(name: str) -> HtmlPage:
    page = HtmlPage(name, name)
    page.figures(Figure(name, name, name), Figure("Missing", "0", state=FigureStatus.GOOD))
    page.warn(name)
    for _ in range(3):
        section = page.section(name, name)
        section.text(name)
        section.heading(name)
        section.terms(name, {name: name})
        section.table([name, IdColumn(name), Column(name, SECONDS)], [[name, name, 0.25], [name, None, None]], name)
        section.plot(plots.bars(name, {name: 1.0}))
        section.plot(plots.lines(name, [Series(name, points([1.0, 2.0])), Series("b", points([2.0, None]))]))
        section.plot(plots.columns(name, [Series(name, points([1.0]))], 60))
    return page


def test_page_stands_alone() -> None:
    page = whole_page("orders").html()
    reader = Reader(page)
    assert "script" not in reader.tags
    assert reader.links == ["#s0", "#s1", "#s2"]  # within the page
    assert not re.search(r"url\(|@import|https?:", page)
    assert "prefers-color-scheme:dark" in page
    svgs = ET.fromstring(page.partition("\n")[2]).iter("svg")
    assert all(each.get("role") == "img" and each.get("aria-label") for each in svgs)


@given(
    st.text(min_size=1, max_size=20)
    | st.sampled_from(["</style><script>alert(1)</script>", '"><b onclick="x">', "\x00\ud800\ufffe", "&lt;"])
)
def test_every_text_is_only_text(name: str) -> None:
    plain = Reader(whole_page("orders").html())
    page = whole_page(name).html()
    ET.fromstring(page.partition("\n")[2])  # well-formed
    assert Reader(page).tags == plain.tags  # nothing that was named has become an element


def test_markup_is_escaped_once() -> None:
    cell = fill("cell", kind='"><b onclick="x', text="a < b & c")
    assert cell == '<td class="&quot;&gt;&lt;b onclick=&quot;x">a &lt; b &amp; c</td>'
    assert fill("row", cells=[cell, Markup("<td/>")]) == f"<tr>{cell}<td/></tr>"
    assert fill("text", text=cell) == f"<p>{cell}</p>"


def test_a_template_is_filled_whole_or_not_at_all() -> None:
    with pytest.raises(KeyError, match="kind"):
        fill("cell", text="1")
    with pytest.raises(KeyError, match="no-such"):
        fill("no-such", text="1")
    assert fill("text", text="$text ${kind} $$") == "<p>$text ${kind} $$</p>", "a value is never a template"


def test_tables_show_cells_as_their_columns_say() -> None:
    page = HtmlPage("t")
    section = page.section("s")
    section.table(
        ["group", Column("lag"), Column("wait", SECONDS), Column("share", SHARE), "since"],
        [["billing", 1_234_567, 90, 0.5, START], ["mail", 17, 0.002, 0.001, None]],
    )
    section.table(["id"], ([str(number)] for number in range(600)), "Missing.")
    section.table(["id"], [], "Late.")
    root = ET.fromstring(page.html().partition("\n")[2])
    cells = [[cell.text for cell in row.iter("td")] for row in root.iter("tr")]
    assert cells[1:3] == [
        ["billing", "1.23 M", "1.5 min", "50 %", "2026-11-16 07:03:00 UTC"],
        ["mail", "17", "2 ms", "0.1 %", "–"],
    ]
    assert len(cells) == 3 + 1 + 500
    assert [each.text for each in root.iter("caption")] == ["Missing. Only the first 500 rows are shown."]
    assert "Late. None." in [each.text for each in root.iter("p")]


def test_page_is_written_or_says_why_not(tmp_path: Path) -> None:
    page = HtmlPage("t")
    page.write(str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html()
    with pytest.raises(Misuse, match="cannot be written to"):
        page.write(str(tmp_path / "none" / "page.html"))


# --- plots ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(TEXT, st.lists(VALUES, max_size=30)), max_size=12), st.sampled_from([COUNT, RATE, SECONDS]))
def test_any_values_can_be_drawn(series: list[tuple[str, list[float | None]]], quantity: plots.Quantity) -> None:
    made = [Series(name, points(values)) for name, values in series]
    above = [Series(name, points([value and abs(value) for value in values])) for name, values in series]
    for plot in (
        plots.lines("c", made, quantity),
        plots.columns("c", above, 60, quantity),
        plots.bars("c", {name: float(len(values)) for name, values in series}, quantity),
        plots.histogram("c", [HistogramBin(0, 1, len(values)) for _, values in series], quantity),
    ):
        for element in drawn(plot).iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                if (number := element.get(name)) is not None and element.tag != "svg":
                    assert -1 <= float(number) <= 2_000, (element.tag, name, number)


def test_nothing_to_draw_is_said() -> None:
    for plot in (
        plots.lines("c", []),
        plots.lines("c", [Series("a", points([None]))]),
        plots.columns("c", [], 60),
        plots.bars("c", {}),
        plots.histogram("c", [HistogramBin(0, 1, 0)], SECONDS),
    ):
        assert "nothing to draw" in "".join(drawn(plot).itertext())


def test_thousands_of_points_stay_small_and_keep_their_peak() -> None:
    values: list[float | None] = [1.0] * 100_000
    values[54_321] = 1_000.0
    plot = plots.lines("c", [Series("a", points(values))], COUNT, "messages")
    assert len(plot.html()) < 200_000
    path = next(each.get("d", "") for each in drawn(plot).iter("path"))
    heights = [float(each.split()[1]) for each in re.split("[ML]", path) if each]
    assert max(heights) - min(heights) > 150  # the peak is as high as the plot
    assert any("a: 1,000" in each for each in texts(plot, "title"))
    merged = plots.columns("c", [Series("a", points([1.0] * 3_000))], 60)
    assert merged.note == "Each bar is 13 windows of 1 min together."
    assert len(list(drawn(merged).iter("rect"))) < 600


def test_a_gap_is_a_gap_and_a_lone_value_a_dot() -> None:
    plot = plots.lines("c", [Series("a", points([1, 2, None, 4, None, 5, 6]))])
    shown = drawn(plot)
    assert len(list(shown.iter("path"))) == 2
    assert len([each for each in shown.iter("circle") if "hint" not in (each.get("class") or "")]) == 1


def test_only_what_can_be_told_apart_is_drawn_and_the_rest_counted() -> None:
    plot = plots.lines("c", [Series(f"g{number}", points([float(number)])) for number in range(12)])
    assert plot.legend == tuple(f"g{number}" for number in range(4, 12))
    assert plot.note == "4 more, with smaller values, are not drawn."
    assert plots.bars("c", {f"n{number}": 1.0 for number in range(50)}).note == "10 more are not drawn."


def test_stacked_bars_stand_on_one_another() -> None:
    plot = plots.columns("c", [Series("a", points([10])), Series("b", points([30]))], 60, COUNT)
    below, above = [each for each in drawn(plot).iter("rect") if "bar" in (each.get("class") or "")]
    top = float(above.get("y", "")) + float(above.get("height", ""))
    assert top == pytest.approx(float(below.get("y", "")), abs=0.1)
    assert float(above.get("height", "")) == pytest.approx(3 * float(below.get("height", "")), rel=0.01)
    assert "2026-11-16 07:03:00 UTC\na: 10\nb: 30" in texts(plot, "title")


def test_marks_never_overlap() -> None:
    for days in (0.001, 0.02, 0.3, 1, 3, 10, 45, 400):
        plot = plots.lines("c", [Series("a", points([1.0, 2.0], days * 86_400))], SECONDS)
        below = sorted(
            (float(each.get("x", "0")), each.text or "")
            for each in drawn(plot).iter("text")
            if each.get("text-anchor") == "middle"
        )
        assert len(below) >= 2, days
        for (left, one), (right, other) in pairwise(below):
            assert right - left > (plots.width_px(one) + plots.width_px(other)) / 2, (days, one, other)


def test_bounds_of_many_buckets_are_thinned() -> None:
    plot = plots.histogram("c", [HistogramBin(2.0**at, 2.0 ** (at + 1), at) for at in range(60)], SECONDS)
    assert len(texts(plot)) < 40
    assert "1 s to 2 s: 0" in texts(plot, "title")


def test_long_names_are_cut_and_told_in_full() -> None:
    name = "a.subject.with.a.name." * 9
    plot = plots.bars("c", {name: 1.0, "請求書" * 30: 2.0})
    assert all(plots.width_px(each) <= 252 for each in texts(plot))
    assert f"{name}: 1" in texts(plot, "title")


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "value", "shown"),
    [
        (COUNT, 0, "0"), (COUNT, 9_999, "9,999"), (COUNT, 12_345, "12.3 k"), (COUNT, 2e9, "2 G"),
        (RATE, 0.25, "0.25"), (RATE, 1234.5, "1,234"), (SHARE, 0.6, "60 %"), (SHARE, 0.0001, "0.01 %"),
        (SECONDS, 0, "0 s"), (SECONDS, 0.0015, "1.5 ms"), (SECONDS, 59, "59 s"), (SECONDS, 90, "1.5 min"),
        (SECONDS, 5_400, "1.5 h"), (SECONDS, 3 * 86_400, "3 d"), (SECONDS, -2, "-2 s"),
    ],
)  # fmt: skip
def test_values_are_written_short(quantity: plots.Quantity, value: float, shown: str) -> None:
    assert quantity.shown(value) == shown


def test_marks_are_round_and_in_one_unit() -> None:
    assert [each.label for each in COUNT.marks(0, 3)] == ["0", "1", "2", "3"]
    assert [each.label for each in COUNT.marks(0, 23_000)] == ["0", "5 k", "10 k", "15 k", "20 k", "25 k"]
    assert [each.label for each in SECONDS.marks(0, 100)] == ["0", "0.5 min", "1 min", "1.5 min", "2 min"]
    assert [each.label for each in RATE.marks(-3, 7)] == ["-4", "-2", "0", "2", "4", "6", "8"]
    assert [each.label for each in COUNT.marks(0, 0)] == ["0", "1"]


def test_times_are_marked_where_people_look_for_them() -> None:
    begin = datetime(2026, 11, 15, 20, 10, tzinfo=UTC).timestamp()
    assert [each.label for each in plots.times(begin, begin + 9 * 3_600)] == ["22:00", "16 Nov", "02:00", "04:00"]
    assert plots.span(begin, begin + 9 * 3_600) == "15 Nov 2026 20:10 – 16 Nov 05:10 UTC"
