"""What was sent or cancelled is remembered for a while, so that `cancel` can say so, and then forgotten.

A row that is done with stays for an hour, but no more than a million of them stay: at 20,000 messages a second that is
the last minute. Then it is freed, and its place in its bucket is marked with one bit (`gone`), which goes into the
pictures of the dispatch log: a start must not send it again. With the bucket the bits go.

A row is freed only once a manifest on disk covers its message: else a start would move it again, and find no row that
says what has become of it. And not while its bucket is split: its place is about to change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fairway import limits
from fairway.delay.buckets import HOUR_MS
from fairway.delay.dispatch_log import DispatchLog
from fairway.delay.rows import Rows, RowState, spot_of
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers

KEEP_MS = HOUR_MS
_LOT_ROWS = 8_192  # freed at a time


class _ForgottenLot(NamedTuple):
    done_ms: int
    messages_end: int  # of what was taken from the message log by then
    rows: RowNumbers


class Memory:
    """Rows that are done with, the oldest first."""

    def __init__(
        self, rows: Rows, log: ScheduleLog, journal: DispatchLog, messages_end: Callable[[], int], rows_max: int
    ) -> None:
        self._rows = rows
        self._log = log
        self._journal = journal
        self._messages_end = messages_end
        self._rows_max = rows_max
        self._lots: deque[_ForgottenLot] = deque()
        self.count = 0

    def begin(self, now_ms: int) -> None:
        """Every row is there: those that are done with by now have been so for who knows how long."""
        self._lots.clear()
        self.count = 0
        for state in (RowState.DISPATCHED, RowState.CANCELLED):
            self.note(self._rows.in_state(state), now_ms)

    def note(self, rows: RowNumbers, now_ms: int) -> None:
        """These have been sent or cancelled."""
        if len(rows):
            self._lots.append(_ForgottenLot(now_ms, self._messages_end(), rows))
            self.count += len(rows)

    def step(self, now_ms: int) -> None:
        """Forget some of what is too much or too old. To be called every tick."""
        taken: list[RowNumbers] = []
        count = 0
        while self._lots and count < _LOT_ROWS and self._is_surplus(self._lots[0], now_ms):
            if self._lots[0].messages_end > self._log.stated_end:
                self._log.state(self._lots[0].messages_end)
                break
            taken.append(self._lots[0].rows)
            count += len(taken[-1])
            self.count -= len(self._lots.popleft().rows)
        if taken:
            self._forget(np.concatenate(taken), now_ms)

    def _is_surplus(self, oldest: _ForgottenLot, now_ms: int) -> bool:
        return self.count > self._rows_max + min(_LOT_ROWS, self._rows_max) or now_ms - oldest.done_ms > KEEP_MS

    def _forget(self, rows: RowNumbers, now_ms: int) -> None:
        table = self._rows
        rows = np.unique(rows)  # a row that was freed with its bucket may be another message's by now, and here twice
        rows = rows[np.isin(table.state[rows], (RowState.DISPATCHED, RowState.CANCELLED))]
        files = np.array([each.number for each in self._log if each.is_listed and not each.is_retired], np.uint32)
        is_settled = np.isin(table.file[rows], files)
        self.note(rows[~is_settled], now_ms)
        rows = rows[is_settled]
        spots = table.spots(rows)
        order = np.argsort(spots, kind="stable")
        rows, spots = rows[order], spots[order]
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(spots)) + 1) if len(rows) else ():
            file, position = spot_of(int(spots[part[0]]))
            bits = np.zeros(limits.BATCH_MESSAGES_MAX, np.bool_)
            bits[table.index[rows[part]]] = True
            pieces = self._journal.gone.setdefault(file, {})
            mask = int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
            pieces[position] = pieces.get(position, 0) | mask
        table.free(rows)
