"""Draws plots as SVG for a page, and formats quantities and times for axes.

    lines        values over time, one line for each series       columns     amounts per window of time, stacked
    bars         one bar for each name                            histogram   how many values fell into each bucket

Each function takes a caption (a sentence that says what the plot shows) and values, and returns a `Plot` for
`Section.plot`. Any values give a small and legible plot. Without values there is a sentence. Many points are thinned so
that every peak stays. Long names are cut, and shown in full under the pointer. Colours and fonts are the page's.

A `Quantity` says how values are written. Axes are marked at round numbers, few enough to be read.

    COUNT     whole numbers: messages, bytes, 12.3 k        RATE       the same, with fractions
    SHARE     parts of one, as per cent                     SECONDS    durations, 1.5 min

Times on a page are in UTC, whatever the machine's time zone.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from fairway.spark.jobs.markup import Markup, fill

MINUTE_S: Final = 60
HOUR_S: Final = 3_600
DAY_S: Final = 86_400

_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(each * MINUTE_S for each in (1, 2, 5, 10, 15, 30)),
    *(each * HOUR_S for each in (1, 2, 3, 6, 12)),
    *(each * DAY_S for each in (1, 2, 7, 14, 28, 91, 182, 365, 1_825, 3_650)),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CHAR_PX: Final = 7.2  # the width of a letter 12 pixels high in a wide font; axes leave room for it
_WIDE_PX: Final = 12.0


class AxisMark(NamedTuple):
    """A position on an axis, and its label."""

    at: float
    label: str


class Unit(NamedTuple):
    """One of the units of a quantity."""

    name: str
    size: float
    least: float  # values from here on are written in this unit


@dataclass(frozen=True)
class Quantity:
    """What an axis measures."""

    units: tuple[Unit, ...]  # from large to small
    is_whole: bool = False  # without fractions

    def unit(self, value: float) -> Unit:
        return next((each for each in self.units if abs(value) >= each.least), self.units[-1])

    def shown(self, value: float) -> str:
        """The value in short form: three significant digits."""
        return _in(self.unit(value), value)

    def told(self, value: float) -> str:
        """The value for the pointer: counts are exact."""
        return f"{value:,.0f}" if self.is_whole else self.shown(value)

    def marks(self, least: float, most: float, count: int = 5) -> list[AxisMark]:
        """Marks from below the least to above the greatest value, in one unit, and always one at zero."""
        least, most = min(least, 0.0), max(most, 0.0)
        unit = self.unit(max(-least, most))
        step = _round_step((most - least) / unit.size / count) * unit.size
        step = max(step, 1.0) if self.is_whole else step
        first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
        places = [each * step for each in range(first, max(last, first + 1) + 1)]
        return [AxisMark(each, _in(unit, each) if each else "0") for each in places]


_MAGNITUDES: Final = (
    Unit("T", 1e12, 1e12), Unit("G", 1e9, 1e9), Unit("M", 1e6, 1e6), Unit("k", 1e3, 1e4), Unit("", 1, 0)
)  # fmt: skip
COUNT: Final = Quantity(_MAGNITUDES, is_whole=True)
RATE: Final = Quantity(_MAGNITUDES)
SHARE: Final = Quantity((Unit("%", 0.01, 0),))
SECONDS: Final = Quantity(
    (
        Unit("d", DAY_S, 2 * DAY_S), Unit("h", HOUR_S, HOUR_S), Unit("min", MINUTE_S, MINUTE_S), Unit("s", 1, 1),
        Unit("ms", 1e-3, 1e-3), Unit("µs", 1e-6, 1e-6), Unit("s", 1, 0),
    )
)  # fmt: skip


def moment(time: datetime) -> str:
    """A time in full, to the second."""
    there = time.astimezone(UTC)
    return f"{there:%Y-%m-%d %H:%M:%S} UTC"


def moment_of(at_s: float) -> str:
    """`moment` for seconds since 1970."""
    return moment(datetime.fromtimestamp(at_s, UTC))


def span(begin_s: float, end_s: float) -> str:
    """A period in words; its bounds are seconds since 1970."""
    first, last = datetime.fromtimestamp(begin_s, UTC), datetime.fromtimestamp(end_s, UTC)
    if end_s - begin_s >= 7 * DAY_S:
        return f"{_date(first)} {first.year} – {_date(last)} {last.year}, UTC"
    if end_s - begin_s < 10 * MINUTE_S:
        return f"{_date(first)} {first.year}, {first:%H:%M:%S} – {last:%H:%M:%S} UTC"
    if first.date() == last.date():
        return f"{_date(first)} {first.year}, {first:%H:%M} – {last:%H:%M} UTC"
    return f"{_date(first)} {first.year} {first:%H:%M} – {_date(last)} {last:%H:%M} UTC"


def times(begin_s: float, end_s: float, count: int = 8) -> list[AxisMark]:
    """Round times between two; the date stands where a day begins."""
    step = step_s((end_s - begin_s) / count)
    first = math.ceil(begin_s / step)
    return [AxisMark(each * step, _clock(each * step, step)) for each in range(first, math.floor(end_s / step) + 1)]


def step_s(least_s: float) -> int:
    """A round duration of at least that length."""
    return next((each for each in _STEPS_S if each >= least_s), _STEPS_S[-1])


def width_px(text: str) -> float:
    """About how wide a text is, at 12 pixels."""
    return sum(_WIDE_PX if unicodedata.east_asian_width(each) in "WF" else _CHAR_PX for each in text)


def cut(text: str, px: float) -> str:
    """The text, cut to that width; … marks the cut."""
    if width_px(text) <= px:
        return text
    kept = text
    while kept and width_px(kept) > px - _WIDE_PX:
        kept = kept[:-1]
    return f"{kept.rstrip(' .-_')}…"


def _clock(at_s: float, step_s: float) -> str:
    there = datetime.fromtimestamp(at_s, UTC)
    if step_s >= 91 * DAY_S:
        return f"{_MONTHS[there.month - 1]} {there.year}"
    if step_s >= DAY_S or at_s % DAY_S == 0:
        return _date(there)
    return f"{there:%H:%M:%S}" if step_s < MINUTE_S else f"{there:%H:%M}"


def _date(there: datetime) -> str:
    return f"{there.day} {_MONTHS[there.month - 1]}"


def _in(unit: Unit, value: float) -> str:
    return f"{_three(value / unit.size)} {unit.name}".rstrip()


def _three(value: float) -> str:
    """Three digits, without an exponent and without trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{abs(value):g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(places, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and at least that much."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))


COLORS: Final = 8  # that readers can distinguish; the page has a class c0, c1 … for each

_WIDTH: Final = 760.0
_HEIGHT: Final = 250.0
_TOP: Final = 26.0  # room for the unit
_BOTTOM: Final = 46.0  # room for marks, and for the period
_RIGHT: Final = 16.0
_COLUMNS_MAX: Final = 240  # windows drawn side by side
_BARS_MAX: Final = 40
_BUCKETS_MAX: Final = 120
_BAR_PX_MAX: Final = 90.0  # keeps a single bar from filling the plot
_ROW: Final = 26.0
_NAME_PX_MAX: Final = 240.0


class Series(NamedTuple):
    """A name, and values by time. None: nothing was measured, and the line has a gap."""

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
        names = [fill("legend-name", color=color, name=name) for color, name in enumerate(self.legend)]
        return fill(
            "plot",
            caption=self.caption,
            legend=fill("legend", names=names) if len(names) > 1 else "",
            drawing=self.drawing,
            note=fill("note", text=self.note) if self.note else "",
        )


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
        note = f"{note} Each bar is {merged} windows of {SECONDS.shown(window_s)} together.".lstrip()
    stacks: dict[int, dict[int, float]] = {}  # by the number of the bar: what each series adds to it
    for color, each in enumerate(chosen):
        for time, value in each.points:
            if value is not None:
                stack = stacks.setdefault(int((time.timestamp() - begin) / width_s + 1e-6), {})
                stack[color] = stack.get(color, 0.0) + value
    tops = [math.fsum(stack.values()) for stack in stacks.values()]
    frame = _PlotFrame.around([begin, begin + width_s * (max(stacks) + 1)], tops, quantity)
    parts = [frame.drawing(unit)]
    parts.extend(
        _column(frame, begin + number * width_s, width_s, stack, chosen, quantity)
        for number, stack in sorted(stacks.items())
    )
    return Plot(caption, _svg(_HEIGHT, _label(caption, chosen, quantity), parts), _names(chosen), note)


def bars(caption: str, values: Mapping[str, float], quantity: Quantity = COUNT) -> Plot:
    """One bar for each name, in the given order."""
    if not values:
        return _nothing(caption)
    shown = list(values.items())[:_BARS_MAX]
    left = min(_NAME_PX_MAX, max(width_px(name) for name, _ in shown)) + 12
    room = max(width_px(quantity.shown(value)) for _, value in shown) + 12
    most = max(*(value for _, value in shown), 0.0) or 1.0
    parts = []
    for row, (name, value) in enumerate(shown):
        y, length = row * _ROW, max(value, 0.0) / most * (_WIDTH - left - room)
        told, text = f"{name}: {quantity.told(value)}", quantity.shown(value)
        at = {"y": y, "text_y": y + 17, "bar_y": y + 5, "name_x": left - 8, "left": left, "value_x": left + length + 6}
        size = {"width": _WIDTH, "height": _ROW, "bar_width": max(length, 1.0), "bar_height": _ROW - 10}
        parts.append(fill("bar", told=told, name=cut(name, _NAME_PX_MAX), value=text, **at, **size))
    parts.append(fill("bar-axis", x=left, height=_ROW * len(shown)))
    more = len(values) - len(shown)
    label = f"{caption} " + ", ".join(f"{name} {quantity.shown(value)}" for name, value in shown[:COLORS])
    return Plot(caption, _svg(_ROW * len(shown), label, parts), note=f"{more} more are not drawn." if more else "")


def histogram(
    caption: str, buckets: Sequence[HistogramBin], quantity: Quantity, counted: Quantity = COUNT, unit: str = ""
) -> Plot:
    """How many values fell into each bucket. Every bucket is drawn equally wide, whatever its bounds."""
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
        parts.append(_titled(told, _block(frame, place, place + 1.0, 0.0, bucket.count, 0)))
    more = len(buckets) - len(shown)
    note = f"{more} more buckets above are not drawn." if more else ""
    total = counted.told(math.fsum(each.count for each in buckets))
    return Plot(caption, _svg(_HEIGHT, f"{caption} {total} in all.", parts), note=note)


# --- shared by all plots --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotFrame:
    """Maps values to pixels; draws the axes behind the values."""

    begin: float
    end: float
    marks: list[AxisMark]
    left: float

    @classmethod
    def around(cls, at: Sequence[float], values: Sequence[float], quantity: Quantity) -> _PlotFrame:
        begin, end = min(at), max(at)
        if begin == end:  # a single moment is drawn in the middle of a minute
            begin, end = begin - MINUTE_S / 2, end + MINUTE_S / 2
        marks = quantity.marks(min(values), max(values))
        return cls(begin, end, marks, max(width_px(each.label) for each in marks) + 14)

    def x(self, at: float) -> float:
        return self.left + (at - self.begin) / (self.end - self.begin) * (_WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0].at, self.marks[-1].at
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def grid(self, unit: str) -> Markup:
        """The marks of the values, and a line for each."""
        parts = [fill("unit", text=unit)]
        for each in self.marks:
            y, kind = self.y(each.at), "axis" if each.at == 0 else "grid"
            line = {"left": self.left, "right": _WIDTH - _RIGHT, "y": y, "text_x": self.left - 8, "text_y": y + 4}
            parts.append(fill("mark", kind=kind, label=each.label, **line))
        return Markup("".join(parts))

    def drawing(self, unit: str) -> Markup:
        """Both axes, the lower one for time."""
        parts = [self.grid(unit), *(self.below(*each) for each in times(self.begin, self.end))]
        parts.append(fill("period", text=span(self.begin, self.end), x=_WIDTH - _RIGHT, y=_HEIGHT - 6))
        return Markup("".join(parts))

    def below(self, at: float, label: str) -> Markup:
        """A mark on the lower axis, its text kept within the drawing."""
        x, floor, half = self.x(at), _HEIGHT - _BOTTOM, width_px(label) / 2
        text_x = min(max(x, half), _WIDTH - half)
        return fill("mark-below", label=label, x=x, y=floor, tick_y=floor + 4, text_x=text_x, text_y=floor + 18)


def _svg(height: float, label: str, parts: Iterable[Markup]) -> Markup:
    return fill("drawing", width=_WIDTH, height=height, label=label, parts=parts)


def _titled(told: str, parts: Iterable[Markup]) -> Markup:
    """A group of parts, and what the reader is told when the pointer is over it."""
    return fill("group", parts=[fill("title", text=told), *parts])


def _strip(left: float, right: float) -> Markup:
    """An area of the drawing that reacts to the pointer."""
    return fill("hit", x=left, y=_TOP, width=right - left, height=_HEIGHT - _BOTTOM - _TOP)


def _nothing(caption: str) -> Plot:
    return Plot(caption, fill("empty", text="There is nothing to draw: no values in this time."))


def _chosen(series: Sequence[Series]) -> tuple[list[Series], str]:
    """As many series as there are colours: those with the largest sums, in their original order."""
    if len(series) <= COLORS:
        return list(series), ""
    sums = [math.fsum(value for _, value in each.points if value is not None) for each in series]
    largest = sorted(range(len(series)), key=lambda place: -sums[place])[:COLORS]
    left_out = len(series) - COLORS
    return [series[place] for place in sorted(largest)], f"{left_out} more, with smaller values, are not drawn."


def _names(series: Sequence[Series]) -> tuple[str, ...]:
    return tuple(each.name for each in series)


def _label(caption: str, series: Sequence[Series], quantity: Quantity) -> str:
    """A description for readers who cannot see the drawing."""
    peaks = []
    for each in series:
        values = [value for _, value in each.points if value is not None]
        if values:
            peaks.append(f"{each.name}: at most {quantity.shown(max(values))}, {quantity.shown(values[-1])} at the end")
    return f"{caption} {'; '.join(peaks)}."


# --- lines ----------------------------------------------------------------------------------------------------------


def _line(frame: _PlotFrame, points: Sequence[tuple[float, float | None]], color: int) -> Iterator[Markup]:
    """A line for each stretch without a gap; a single value is a dot."""
    for stretch in _stretches(points):
        thinned = _thinned(stretch, frame)
        if len(thinned) == 1:
            at, value = thinned[0]
            yield fill("dot", color=color, x=frame.x(at), y=frame.y(value))
        else:
            path = "L".join(f"{frame.x(at):.1f} {frame.y(value):.1f}" for at, value in thinned)
            yield fill("path", color=color, points=path)


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
    """For every two pixels the first, the least, the greatest and the last point: the plot looks the same."""
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
    """Strips over the drawing that show the values below the pointer: the largest, if a strip covers several."""
    moments = sorted({at for points in drawn for at, value in points if value is not None})
    strips = min(len(moments) - 1, _COLUMNS_MAX)
    wide = (frame.end - frame.begin) / (strips or 0.5)  # a single moment gets the whole width
    told: dict[int, dict[int, tuple[float, float]]] = {}
    for color, points in enumerate(drawn):
        for at, value in points:
            if value is None:
                continue
            here = told.setdefault(min(round((at - frame.begin) / wide), strips), {})
            if color not in here or value > here[color][1]:
                here[color] = (at, value)
    return fill("group", parts=[_hint(frame, place, wide, of, series, quantity) for place, of in sorted(told.items())])


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
    when = moment_of(min(at for at, _ in of.values()))
    values = "\n".join(f"{series[color].name}: {quantity.told(value)}" for color, (_, value) in sorted(of.items()))
    dots = [fill("hint", color=color, x=frame.x(at), y=frame.y(value)) for color, (at, value) in of.items()]
    return _titled(f"{when}\n{values}", [_strip(left, max(right, left + 1)), *dots])


# --- columns and buckets --------------------------------------------------------------------------------------------


def _column(
    frame: _PlotFrame,
    at: float,
    width_s: float,
    stack: Mapping[int, float],
    series: Sequence[Series],
    quantity: Quantity,
) -> Markup:
    values = "\n".join(f"{series[color].name}: {quantity.told(value)}" for color, value in sorted(stack.items()))
    parts, below = list[Markup](), 0.0
    for color, value in sorted(stack.items()):
        parts.extend(_block(frame, at, at + width_s, below, below + value, color))
        below += value
    return _titled(f"{moment_of(at)}\n{values}", parts)


def _block(frame: _PlotFrame, begin: float, end: float, low: float, high: float, color: int) -> Iterator[Markup]:
    """A bar, with a gap beside it if there is room; the area above it also reacts to the pointer."""
    left, right = frame.x(begin), frame.x(end)
    air = 2.0 if right - left > 8 else 0.5 if right - left > 2 else 0.0
    wide, top, bottom = min(right - left - air, _BAR_PX_MAX), frame.y(high), frame.y(low)
    if low == 0:
        yield _strip(left, right)
    if high > low:
        at = (left + right - wide) / 2
        yield fill("block", color=color, x=at, y=top, width=wide, height=max(bottom - top, 1.0))


def _edges(frame: _PlotFrame, labels: Sequence[str]) -> Iterator[Markup]:
    """As many of the bounds of buckets as have room."""
    room = (_WIDTH - frame.left - _RIGHT) / max(len(labels) - 1, 1)
    widest = max(width_px(each) for each in labels) + 10
    step = math.ceil(widest / room)
    for place in range(0, len(labels), step):
        yield frame.below(place, labels[place])


def _bounds(bucket: HistogramBin, quantity: Quantity) -> str:
    if bucket.low is None:
        return f"below {quantity.shown(bucket.high)}" if bucket.high is not None else "any"
    if bucket.high is None:
        return f"{quantity.shown(bucket.low)} and more"
    return f"{quantity.shown(bucket.low)} to {quantity.shown(bucket.high)}"
