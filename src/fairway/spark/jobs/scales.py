"""How values are written, and where an axis is marked: at round numbers, few enough to be read.

    COUNT     what is whole: messages, bytes, 12.3 k        RATE       the same, with fractions
    SHARE     parts of one, as per cent                     SECONDS    times that pass, 1.5 min

Times on a page are in UTC, whatever the machine thinks.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

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
_CHAR_PX: Final = 7.2  # of a letter 12 pixels high, in a wide face; what an axis leaves room for
_WIDE_PX: Final = 12.0


class AxisMark(NamedTuple):
    """A place on an axis, and what stands there."""

    at: float
    label: str


class Unit(NamedTuple):
    """One of the units of a quantity."""

    name: str
    size: float
    least: float  # values from here on are written in it


@dataclass(frozen=True)
class Quantity:
    """What an axis measures."""

    units: tuple[Unit, ...]  # from large to small
    is_whole: bool = False  # it has no fractions

    def unit(self, value: float) -> Unit:
        return next((each for each in self.units if abs(value) >= each.least), self.units[-1])

    def shown(self, value: float) -> str:
        """Short: three digits that count."""
        return _in(self.unit(value), value)

    def told(self, value: float) -> str:
        """For whoever points at it: what is counted is told to the last one."""
        return f"{value:,.0f}" if self.is_whole else self.shown(value)

    def marks(self, least: float, most: float, count: int = 5) -> list[AxisMark]:
        """From below the least to above the most value, in one unit, and always at zero."""
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
    """The same, of seconds since 1970."""
    return moment(datetime.fromtimestamp(at_s, UTC))


def span(begin_s: float, end_s: float) -> str:
    """From when to when, in words; seconds are since 1970."""
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
    """A stretch of time that people reckon in, and at least so long."""
    return next((each for each in _STEPS_S if each >= least_s), _STEPS_S[-1])


def width_px(text: str) -> float:
    """About how wide a text is, at 12 pixels."""
    return sum(_WIDE_PX if unicodedata.east_asian_width(each) in "WF" else _CHAR_PX for each in text)


def cut(text: str, px: float) -> str:
    """A text that is no wider than that; what is left out shows as …"""
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
    """Three digits, without an exponent and without zeros that say nothing."""
    if value == 0 or not math.isfinite(value):
        return f"{abs(value):g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(places, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and at least so much."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))
