"""Stretches of time, in UTC: hours near, days farther out, months beyond. A pure plan.

Each stretch has one bucket, and about a hundred buckets hold two years, whatever is scheduled: a month is cut into days
when its first one is near, a day into hours. A stretch only ever becomes finer: what belongs to a day now belongs to an
hour of that very day later, never the other way round. UTC has no summer time, so no hour is missing or there twice.

    month   begins at least DAYS_AHEAD_MS from now      at most 24 + 1 of them in two years
    day     begins at least HOURS_AHEAD_MS from now     the rest of this month, and the next one in its last days
    hour    all the rest: today and tomorrow            at most 48, and those of the past that are not yet done with
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway.errors import Code, Refused

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
HOURS_AHEAD_MS = DAY_MS
DAYS_AHEAD_MS = 8 * DAY_MS


class Grain(enum.IntEnum):
    """How long a stretch is."""

    HOUR = 1
    DAY = 2
    MONTH = 3


class TimeRange(NamedTuple):
    """One stretch of time, its end not included."""

    grain: Grain
    start_ms: int
    end_ms: int


def span_of(due_ms: int, now_ms: int) -> TimeRange:
    """Where a message with that due time is put at that time. What is past due is put where now is."""
    at_ms = max(due_ms, now_ms)
    month = _month(at_ms)
    if month.start_ms >= now_ms + DAYS_AHEAD_MS:
        return month
    day = _floor(at_ms, Grain.DAY, DAY_MS)
    if day.start_ms >= now_ms + HOURS_AHEAD_MS:
        return day
    return _floor(at_ms, Grain.HOUR, HOUR_MS)


class Calendar:
    """The stretches from now on, one behind the other: for many due times at once.

    Which ones there are changes only with the hour: every stretch begins with one, and is cut a whole number of days
    before it begins."""

    def __init__(self) -> None:
        self._hour_ms = -1
        self._spans: list[TimeRange] = []
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)

    def sort(self, due_ms: NDArray[np.int64], now_ms: int) -> list[tuple[TimeRange, NDArray[np.int64]]]:
        """The stretches that those due times lie in, each with the indices of its messages."""
        at_ms = np.maximum(due_ms, now_ms)
        self._turn(now_ms, int(at_ms.max()))
        which = np.searchsorted(self._starts, at_ms, side="right") - 1
        if bool((which == which[0]).all()):
            return [(self._spans[int(which[0])], np.arange(len(which)))]
        order = np.argsort(which, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(which[order])) + 1)
        return [(self._spans[int(which[part[0]])], part) for part in parts]

    def _turn(self, now_ms: int, until_ms: int) -> None:
        hour_ms = now_ms - now_ms % HOUR_MS
        if hour_ms != self._hour_ms:
            self._hour_ms = hour_ms
            self._spans = [span_of(now_ms, now_ms)]
        elif self._spans[-1].end_ms > until_ms:
            return
        while self._spans[-1].end_ms <= until_ms:
            self._spans.append(span_of(self._spans[-1].end_ms, now_ms))
        self._starts = np.array([each.start_ms for each in self._spans], np.int64)


def is_to_split(span: TimeRange, now_ms: int) -> bool:
    """Whether messages of that stretch belong to finer ones by now. One that is past stays as it is."""
    return span.end_ms > now_ms and span_of(span.start_ms, now_ms).grain < span.grain


def check_horizon(due_ms: int, now_ms: int, horizon_ms: int) -> None:
    """`Refused` for what lies too far ahead: it is never shortened in silence."""
    if due_ms > now_ms + horizon_ms:
        days = horizon_ms // DAY_MS
        raise Refused(Code.BAD_REQUEST, f"due at {_say(due_ms)}: at most {days} days ahead are allowed")


def _say(at_ms: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).isoformat()


def _floor(at_ms: int, grain: Grain, length_ms: int) -> TimeRange:
    start_ms = at_ms - at_ms % length_ms
    return TimeRange(grain, start_ms, start_ms + length_ms)


def _month(at_ms: int) -> TimeRange:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    first = datetime(at.year, at.month, 1, tzinfo=UTC)
    start_ms = int(first.timestamp()) * 1_000
    if (at.year, at.month) == (9999, 12):  # the month behind it cannot be said
        return TimeRange(Grain.MONTH, start_ms, start_ms + 31 * DAY_MS)
    following = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    return TimeRange(Grain.MONTH, start_ms, int(following.timestamp()) * 1_000)
