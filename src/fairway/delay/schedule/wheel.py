"""Timing wheel: the rows of the current and the next hour, in order of due time; and the sweep that fills it.

Rows come in and go out as arrays. A run is sorted once, `due` cuts off its front with a binary search, and runs of
similar size are merged, so that there are never more than a few dozen. The wheel has no slots and no moving hand: each
call of `due` compares due times with the given time. So a clock that goes back only makes rows wait, and no row is ever
skipped. (`fairway.runtime.clock.Timekeeper` deals with a clock that leaps forward.) `next_ms` is rounded up to the tick
of 10 ms, so a row is at most one tick late, and rows of one tick go out together.

A row is on the wheel at most once. The caller of `cancel` knows the row's due time, so the wheel finds the row in a few
steps.

`Sweeper` moves the end of the wheel on every hour, then adds the rows below that end, a slice at a time. A row that
gets its place or a new due time meanwhile is compared with the new end. A flag in the row says whether it is on the
wheel, so each row is there once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.delay.schedule.manifest import HOUR_MS
from fairway.delay.schedule.pending_rows import RowNumbers, Rows, RowState, joined

TICK_MS = 10
_GONE = -1
_SWEEP_ROWS = 500_000  # about 2 ms
_NOTHING_NEAR_MS = -(1 << 63)

DueTimes: TypeAlias = NDArray[np.int64]


class _SortedRun:
    """Rows sorted by due time, from `at` on."""

    __slots__ = ("at", "due_ms", "rows")

    def __init__(self, rows: RowNumbers, due_ms: DueTimes) -> None:
        order = np.argsort(due_ms, kind="stable")
        self.rows = rows[order]
        self.due_ms = due_ms[order]
        self.at = 0

    def __len__(self) -> int:
        return len(self.rows) - self.at

    def take(self, now_ms: int) -> RowNumbers:
        end = int(np.searchsorted(self.due_ms, now_ms, side="right"))
        taken = self.rows[self.at : max(end, self.at)]
        self.at = max(end, self.at)
        return taken

    def between(self, start_ms: int, end_ms: int) -> RowNumbers:
        first, end = np.searchsorted(self.due_ms, (start_ms, end_ms)).tolist()
        return self.rows[max(first, self.at) : max(end, self.at)]

    def cancel(self, row: int, due_ms: int) -> bool:
        left = max(int(np.searchsorted(self.due_ms, due_ms, side="left")), self.at)
        right = int(np.searchsorted(self.due_ms, due_ms, side="right"))
        found = np.flatnonzero(self.rows[left:right] == row)
        self.rows[left + found] = _GONE
        return len(found) > 0

    def skip_gone(self) -> None:
        while self.at < len(self.rows) and self.rows[self.at] == _GONE:
            self.at += 1


class Wheel:
    """Rows by due time."""

    def __init__(self) -> None:
        self._runs: list[_SortedRun] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: RowNumbers, due_ms: DueTimes) -> None:
        """Add rows. Each row comes once, and is not on the wheel already."""
        if not len(rows):
            return
        self._count += len(rows)
        self._runs.append(_SortedRun(rows, due_ms))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            later, earlier = self._runs.pop(), self._runs.pop()
            merged = [(run.rows[run.at :], run.due_ms[run.at :]) for run in (earlier, later)]
            self._runs.append(_SortedRun(*(np.concatenate(columns) for columns in zip(*merged, strict=True))))

    def cancel(self, row: int, due_ms: int) -> bool:
        """Take a row off. False if it is not here under that time."""
        found = any(run.cancel(row, due_ms) for run in self._runs)
        self._count -= found
        return found

    def due(self, now_ms: int) -> RowNumbers:
        """Take off the rows that are due by now."""
        taken = [run.take(now_ms) for run in self._runs]
        self._runs = [run for run in self._runs if len(run)]
        rows = _without_gone(taken)
        self._count -= len(rows)
        return rows

    def between(self, start_ms: int, end_ms: int) -> RowNumbers:
        """The rows due in [`start_ms`, `end_ms`). They stay on the wheel."""
        return _without_gone([run.between(start_ms, end_ms) for run in self._runs])

    def next_ms(self) -> int | None:
        """The tick at which the next row is due; None if there is none."""
        for run in self._runs:
            run.skip_gone()
        self._runs = [run for run in self._runs if len(run)]
        if not self._runs:
            return None
        first = min(int(run.due_ms[run.at]) for run in self._runs)
        return -(-first // TICK_MS) * TICK_MS


def _without_gone(parts: list[RowNumbers]) -> RowNumbers:
    rows = joined(parts)
    left: RowNumbers = rows[rows != _GONE]
    return left


class Sweeper:
    """Keeps the wheel filled with this hour and the next. In a replica the wheel stays empty until the first step as
    master."""

    def __init__(self, rows: Rows, wheel: Wheel, now_ms: int | None) -> None:
        """`now_ms` None: no row is near before the first step."""
        self._rows = rows
        self._wheel = wheel
        self._end_ms = _NOTHING_NEAR_MS if now_ms is None else _end_ms(now_ms)
        self._at = 0
        self._until = 0

    def step(self, now_ms: int) -> None:
        """Go on a little. The engine calls this in every turn."""
        if _end_ms(now_ms) > self._end_ms:
            self._end_ms = _end_ms(now_ms)
            self._at, self._until = 0, self._rows.end
        if self._at < self._until:
            end = min(self._at + _SWEEP_ROWS, self._until)
            is_near = self._rows.due_ms[self._at : end] < self._end_ms
            self.home(self._at + np.flatnonzero(is_near & (self._rows.state[self._at : end] == RowState.PENDING)))
            self._at = end

    @property
    def is_sweeping(self) -> bool:
        return self._at < self._until

    def home(self, rows: RowNumbers) -> None:
        """These rows have a place or a new due time: put those that are near onto the wheel."""
        table = self._rows
        is_wanted = (
            (table.due_ms[rows] < self._end_ms)
            & (table.state[rows] == RowState.PENDING)
            & (table.file[rows] != 0)
            & ~table.in_wheel[rows]
        )
        chosen = rows[is_wanted]
        table.in_wheel[chosen] = True
        self._wheel.add(chosen, table.due_ms[chosen])


def _end_ms(now_ms: int) -> int:
    return now_ms - now_ms % HOUR_MS + 2 * HOUR_MS
