"""Plots as SVG within a page: drawn by hand, since all that is wanted are axes one can read.

    lines        values over time, one line for each series       columns     amounts per window of time, stacked
    bars         one bar for each name                            histogram   how many fell into each bucket

Each takes a caption (a sentence that says what is to be seen) and its values, and gives a `Plot` for `Section.plot`.
Whatever the values are, the plot stays small and legible: no value makes a sentence, many points are thinned so that
every peak stays, long names are cut and shown in full to whoever points at them. Colours and letters are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from fairway.spark.jobs import scales
from fairway.spark.jobs.markup import Markup, joined, tag
from fairway.spark.jobs.scales import COUNT, AxisMark, Quantity

COLORS: Final = 8  # that can be told apart; the page has a class c0, c1 … for each

_WIDTH: Final = 760.0
_HEIGHT: Final = 250.0
_TOP: Final = 26.0  # the unit stands there
_BOTTOM: Final = 46.0  # marks, and from when to when
_RIGHT: Final = 16.0
_COLUMNS_MAX: Final = 240  # windows drawn side by side
_BARS_MAX: Final = 40
_BUCKETS_MAX: Final = 120
_BAR_PX_MAX: Final = 90.0  # a bar alone is not a wall
_ROW: Final = 26.0
_NAME_PX_MAX: Final = 240.0


class Series(NamedTuple):
    """A name, and what was measured when. None: nothing was, and the line has a gap."""

    name: str
    points: Sequence[tuple[datetime, float | None]]


@dataclass(frozen=True)
class HistogramBin:
    """How many values were at least `low` and below `high`; None: no bound there."""

    low: float | None
    high: float | None
    count: float


@dataclass(frozen=True)
class Plot:
    """One drawing with its caption and, for several series, its legend."""

    caption: str
    drawing: Markup
    legend: tuple[str, ...] = ()
    note: str = ""

    def html(self) -> Markup:
        names = [
            tag("li", tag("span", class_=f"swatch c{color}", aria_hidden="true"), name)
            for color, name in enumerate(self.legend)
        ]
        legend = tag("ul", *names, class_="legend") if len(names) > 1 else Markup()
        note = tag("p", self.note, class_="note") if self.note else Markup()
        return tag("figure", tag("figcaption", self.caption), legend, self.drawing, note)


def lines(caption: str, series: Sequence[Series], quantity: Quantity = COUNT, unit: str = "") -> Plot:
    """Values over time."""
    chosen, note = _chosen(series)
    drawn = [[(time.timestamp(), value) for time, value in each.points] for each in chosen]
    seen = [(at, value) for each in drawn for at, value in each if value is not None]
    if not seen:
        return _nothing(caption)
    frame = _PlotFrame.around([at for at, _ in seen], [value for _, value in seen], quantity)
    parts = [frame.drawing(unit)]
    for color, points in enumerate(drawn):
        parts.extend(_line(frame, points, color))
    parts.append(_hints(frame, chosen, drawn, quantity))
    return Plot(caption, _svg(_HEIGHT, _label(caption, chosen, quantity), parts), _names(chosen), note)


def columns(
    caption: str, series: Sequence[Series], window_s: float, quantity: Quantity = COUNT, unit: str = ""
) -> Plot:
    """Amounts per window of time; a point stands for the window that begins there. Several series are stacked."""
    chosen, note = _chosen(series)
    at = [time.timestamp() for each in chosen for time, value in each.points if value is not None]
    if not at:
        return _nothing(caption)
    begin, windows = min(at), round((max(at) - min(at)) / window_s) + 1
    merged = math.ceil(windows / _COLUMNS_MAX)
    width_s = window_s * merged
    if merged > 1:
        note = f"{note} Each bar is {merged} windows of {scales.SECONDS.shown(window_s)} together.".lstrip()
    stacks = _stacks(chosen, begin, width_s)
    tops = [math.fsum(stack.values()) for stack in stacks.values()]
    frame = _PlotFrame.around([begin, begin + width_s * (max(stacks) + 1)], tops, quantity)
    parts = [frame.drawing(unit)]
    parts.extend(
        _column(frame, begin + number * width_s, width_s, stack, chosen, quantity)
        for number, stack in sorted(stacks.items())
    )
    return Plot(caption, _svg(_HEIGHT, _label(caption, chosen, quantity), parts), _names(chosen), note)


def bars(caption: str, values: Mapping[str, float], quantity: Quantity = COUNT) -> Plot:
    """One bar for each name, in the order they are given."""
    if not values:
        return _nothing(caption)
    shown = list(values.items())[:_BARS_MAX]
    left = min(_NAME_PX_MAX, max(scales.width_px(name) for name, _ in shown)) + 12
    room = max(scales.width_px(quantity.shown(value)) for _, value in shown) + 12
    most = max(*(value for _, value in shown), 0.0) or 1.0
    parts = []
    for row, (name, value) in enumerate(shown):
        y, length = row * _ROW, max(value, 0.0) / most * (_WIDTH - left - room)
        parts.append(
            tag(
                "g",
                tag("title", f"{name}: {quantity.told(value)}"),
                tag("rect", class_="hit", x=0, y=y, width=_WIDTH, height=_ROW),
                tag("text", scales.cut(name, _NAME_PX_MAX), x=left - 8, y=y + 17, text_anchor="end"),
                tag("rect", class_="bar c0", x=left, y=y + 5, width=max(length, 1.0), height=_ROW - 10, rx=2),
                tag("text", quantity.shown(value), class_="value", x=left + length + 6, y=y + 17),
            )
        )
    parts.append(tag("line", class_="axis", x1=left, y1=0, x2=left, y2=_ROW * len(shown)))
    more = len(values) - len(shown)
    label = f"{caption} " + ", ".join(f"{name} {quantity.shown(value)}" for name, value in shown[:COLORS])
    return Plot(caption, _svg(_ROW * len(shown), label, parts), note=f"{more} more are not drawn." if more else "")


def histogram(
    caption: str, buckets: Sequence[HistogramBin], quantity: Quantity, counted: Quantity = COUNT, unit: str = ""
) -> Plot:
    """How many values fell into each bucket. Every bucket is as wide as any other, whatever its bounds."""
    if not any(each.count for each in buckets):
        return _nothing(caption)
    shown = buckets[:_BUCKETS_MAX]
    frame = _PlotFrame.around([0.0, float(len(shown))], [each.count for each in shown], counted)
    edges = [quantity.shown(each.low) if each.low is not None else "" for each in shown]
    last = shown[-1].high
    edges.append(quantity.shown(last) if last is not None else "∞")
    parts = [frame.grid(unit), *_edges(frame, edges)]
    for place, bucket in enumerate(shown):
        told = f"{_bounds(bucket, quantity)}: {counted.told(bucket.count)}"
        parts.append(tag("g", tag("title", told), *_block(frame, place, place + 1.0, 0.0, bucket.count, 0)))
    more = len(buckets) - len(shown)
    note = f"{more} more buckets above are not drawn." if more else ""
    total = counted.told(math.fsum(each.count for each in buckets))
    return Plot(caption, _svg(_HEIGHT, f"{caption} {total} in all.", parts), note=note)


# --- what all share -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotFrame:
    """Where a value is, in pixels; and what is drawn behind all values."""

    begin: float
    end: float
    marks: list[AxisMark]
    left: float

    @classmethod
    def around(cls, at: Sequence[float], values: Sequence[float], quantity: Quantity) -> _PlotFrame:
        begin, end = min(at), max(at)
        if begin == end:  # one moment stands in the middle of a minute
            begin, end = begin - scales.MINUTE_S / 2, end + scales.MINUTE_S / 2
        marks = quantity.marks(min(values), max(values))
        return cls(begin, end, marks, max(scales.width_px(each.label) for each in marks) + 14)

    def x(self, at: float) -> float:
        return self.left + (at - self.begin) / (self.end - self.begin) * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0].at, self.marks[-1].at
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def grid(self, unit: str) -> Markup:
        """The marks of the values, and a line for each."""
        parts = [tag("text", unit, class_="unit", x=0, y=12)]
        for each in self.marks:
            y = self.y(each.at)
            line = "axis" if each.at == 0 else "grid"
            parts.append(tag("line", class_=line, x1=self.left, y1=y, x2=_WIDTH - _RIGHT, y2=y))
            parts.append(tag("text", each.label, x=self.left - 8, y=y + 4, text_anchor="end"))
        return joined(parts)

    def drawing(self, unit: str) -> Markup:
        """Both axes, the one below for time."""
        parts = [self.grid(unit), *(self.below(*each) for each in scales.times(self.begin, self.end))]
        told = scales.span(self.begin, self.end)
        parts.append(tag("text", told, class_="unit", x=_WIDTH - _RIGHT, y=_HEIGHT - 6, text_anchor="end"))
        return joined(parts)

    def below(self, at: float, label: str) -> Markup:
        """A mark on the axis below, its text kept within the drawing."""
        x, floor, half = self.x(at), _HEIGHT - _BOTTOM, scales.width_px(label) / 2
        return joined(
            (
                tag("line", class_="axis", x1=x, y1=floor, x2=x, y2=floor + 4),
                tag("text", label, x=min(max(x, half), _WIDTH - half), y=floor + 18, text_anchor="middle"),
            )
        )


def _svg(height: float, label: str, parts: Iterable[Markup]) -> Markup:
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH:g} {height:g}", role="img", aria_label=label)


def _nothing(caption: str) -> Plot:
    return Plot(caption, tag("p", "There is nothing to draw: no values in this time.", class_="empty"))


def _chosen(series: Sequence[Series]) -> tuple[list[Series], str]:
    """As many as can be told apart: those with the largest sums, in the order they came."""
    if len(series) <= COLORS:
        return list(series), ""
    sums = [math.fsum(value for _, value in each.points if value is not None) for each in series]
    largest = sorted(range(len(series)), key=lambda place: -sums[place])[:COLORS]
    left_out = len(series) - COLORS
    return [series[place] for place in sorted(largest)], f"{left_out} more, with smaller values, are not drawn."


def _names(series: Sequence[Series]) -> tuple[str, ...]:
    return tuple(each.name for each in series)


def _label(caption: str, series: Sequence[Series], quantity: Quantity) -> str:
    """What somebody is told who does not see the drawing."""
    peaks = []
    for each in series:
        values = [value for _, value in each.points if value is not None]
        if values:
            peaks.append(f"{each.name}: at most {quantity.shown(max(values))}, {quantity.shown(values[-1])} at the end")
    return f"{caption} {'; '.join(peaks)}."


# --- lines ----------------------------------------------------------------------------------------------------------


def _line(frame: _PlotFrame, points: Sequence[tuple[float, float | None]], color: int) -> Iterator[Markup]:
    """A line for each stretch without a gap; a value that stands alone is a dot."""
    for stretch in _stretches(points):
        thinned = _thinned(stretch, frame)
        if len(thinned) == 1:
            at, value = thinned[0]
            yield tag("circle", class_=f"dot c{color}", cx=frame.x(at), cy=frame.y(value), r=3)
        else:
            path = "L".join(f"{frame.x(at):.1f} {frame.y(value):.1f}" for at, value in thinned)
            yield tag("path", class_=f"line c{color}", d=f"M{path}")


def _stretches(points: Sequence[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    stretch: list[tuple[float, float]] = []
    for at, value in sorted(points, key=lambda each: each[0]):
        if value is not None:
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _thinned(stretch: list[tuple[float, float]], frame: _PlotFrame) -> list[tuple[float, float]]:
    """For every two pixels the first, the least, the largest and the last: looks the same, whatever the number."""
    if len(stretch) <= _WIDTH:
        return stretch
    near: dict[int, list[tuple[float, float]]] = {}
    for point in stretch:
        near.setdefault(int(frame.x(point[0]) / 2), []).append(point)
    kept = []
    for points in near.values():
        least, most = min(points, key=lambda each: each[1]), max(points, key=lambda each: each[1])
        kept.extend(sorted({points[0], least, most, points[-1]}))
    return kept


def _hints(
    frame: _PlotFrame,
    series: Sequence[Series],
    drawn: Sequence[Sequence[tuple[float, float | None]]],
    quantity: Quantity,
) -> Markup:
    """Strips over the drawing that tell the values below them: the largest, where one strip covers several."""
    moments = sorted({at for points in drawn for at, value in points if value is not None})
    strips = min(len(moments) - 1, _COLUMNS_MAX)
    wide = (frame.end - frame.begin) / (strips or 0.5)  # one moment has the whole width
    told: dict[int, dict[int, tuple[float, float]]] = {}
    for color, points in enumerate(drawn):
        for at, value in points:
            if value is None:
                continue
            here = told.setdefault(min(round((at - frame.begin) / wide), strips), {})
            if color not in here or value > here[color][1]:
                here[color] = (at, value)
    return tag("g", *(_hint(frame, place, wide, of, series, quantity) for place, of in sorted(told.items())))


def _hint(
    frame: _PlotFrame,
    place: int,
    wide: float,
    of: Mapping[int, tuple[float, float]],
    series: Sequence[Series],
    quantity: Quantity,
) -> Markup:
    middle = frame.begin + place * wide
    left, right = frame.x(max(middle - wide / 2, frame.begin)), frame.x(min(middle + wide / 2, frame.end))
    when = scales.moment_of(min(at for at, _ in of.values()))
    values = "\n".join(f"{series[color].name}: {quantity.told(value)}" for color, (_, value) in sorted(of.items()))
    height = _HEIGHT - _BOTTOM - _TOP
    return tag(
        "g",
        tag("title", f"{when}\n{values}"),
        tag("rect", class_="hit", x=left, y=_TOP, width=max(right - left, 1.0), height=height),
        *(tag("circle", class_=f"dot hint c{c}", cx=frame.x(at), cy=frame.y(v), r=3) for c, (at, v) in of.items()),
    )


# --- columns and buckets --------------------------------------------------------------------------------------------


def _stacks(series: Sequence[Series], begin: float, width_s: float) -> dict[int, dict[int, float]]:
    """By the number of the bar: what each series adds to it."""
    stacks: dict[int, dict[int, float]] = {}
    for color, each in enumerate(series):
        for time, value in each.points:
            if value is not None:
                stack = stacks.setdefault(int((time.timestamp() - begin) / width_s + 1e-6), {})
                stack[color] = stack.get(color, 0.0) + value
    return stacks


def _column(
    frame: _PlotFrame,
    at: float,
    width_s: float,
    stack: Mapping[int, float],
    series: Sequence[Series],
    quantity: Quantity,
) -> Markup:
    values = "\n".join(f"{series[color].name}: {quantity.told(value)}" for color, value in sorted(stack.items()))
    parts, below = [tag("title", f"{scales.moment_of(at)}\n{values}")], 0.0
    for color, value in sorted(stack.items()):
        parts.extend(_block(frame, at, at + width_s, below, below + value, color))
        below += value
    return tag("g", *parts)


def _block(frame: _PlotFrame, begin: float, end: float, low: float, high: float, color: int) -> Iterator[Markup]:
    """A bar, with a little air beside it where there is room; what is above it answers to the pointer, too."""
    left, right = frame.x(begin), frame.x(end)
    air = 2.0 if right - left > 8 else 0.5 if right - left > 2 else 0.0
    wide, top, bottom = min(right - left - air, _BAR_PX_MAX), frame.y(high), frame.y(low)
    if low == 0:
        yield tag("rect", class_="hit", x=left, y=_TOP, width=right - left, height=_HEIGHT - _BOTTOM - _TOP)
    if high > low:
        at = (left + right - wide) / 2
        yield tag("rect", class_=f"bar c{color}", x=at, y=top, width=wide, height=max(bottom - top, 1.0))


def _edges(frame: _PlotFrame, labels: Sequence[str]) -> Iterator[Markup]:
    """As many of the bounds of buckets as have room."""
    room = (_WIDTH - frame.left - _RIGHT) / max(len(labels) - 1, 1)
    widest = max(scales.width_px(each) for each in labels) + 10
    step = math.ceil(widest / room)
    for place in range(0, len(labels), step):
        yield frame.below(place, labels[place])


def _bounds(bucket: HistogramBin, quantity: Quantity) -> str:
    if bucket.low is None:
        return f"below {quantity.shown(bucket.high)}" if bucket.high is not None else "any"
    if bucket.high is None:
        return f"{quantity.shown(bucket.low)} and more"
    return f"{quantity.shown(bucket.low)} to {quantity.shown(bucket.high)}"
