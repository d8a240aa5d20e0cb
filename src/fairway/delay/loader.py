"""Buckets into rows, and rows into the wheel. A message is in exactly one of the two at each step.

**Buckets into rows**, once, after a start: near buckets first, a few thousand messages at a time, while messages are
scheduled and sent. The race to win: a message is put into a bucket that is being loaded. The rule is a position: what
lies below the bucket's end *as it was opened* is loaded from the file, what is appended later has its row already. No
record is both, none is neither.

**Rows into the wheel**, every hour: the wheel's end moves on first, then a sweep adds the rows below it, a slice at a
time. Whatever gets its place or a new due time meanwhile is compared with the end that has moved already, and a flag in
the row says whether it is in the wheel: again, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fairway.delay import piece
from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import HOUR_MS
from fairway.delay.ledger import Ledger
from fairway.delay.rows import Rows, State
from fairway.delay.wheel import RowNumbers, Wheel
from fairway.errors import RemoteProtocolError
from fairway.storage.log import Damaged
from fairway.storage.record import Record
from fairway.storage.scan import Damage

_SWEEP_ROWS = 500_000  # about 2 ms


class Loader:
    """Reads every bucket once."""

    def __init__(
        self,
        files: list[BucketFile],
        rows: Rows,
        ledger: Ledger,
        on_home: Callable[[RowNumbers], None],
        on_damage: Callable[[Damaged], None],
        messages_per_step: int,
    ) -> None:
        nearest_last = sorted(files, key=lambda each: each.span.start_ms, reverse=True)
        self._todo = [(each, each.end) for each in nearest_last]
        self._rows = rows
        self._ledger = ledger
        self._on_home = on_home
        self._on_damage = on_damage
        self._messages_per_step = messages_per_step
        self._current: tuple[BucketFile, Iterator[Record | Damage]] | None = None

    @property
    def is_done(self) -> bool:
        return not self._todo and self._current is None

    def step(self) -> None:
        """Go on a little. To be called again until `is_done`."""
        loaded = 0
        while loaded < self._messages_per_step and not self.is_done:
            if self._current is None:
                file, end = self._todo.pop()
                self._current = file, iter(file.scan(end))
            file, records = self._current
            found = next(records, None)
            if found is None:
                self._current = None
            elif isinstance(found, Damage):
                self._on_damage(Damaged(found.start, found.why))
            else:
                loaded += self._load(file, found)

    def _load(self, file: BucketFile, found: Record) -> int:
        try:
            opened = piece.unpack(found)
        except RemoteProtocolError as error:
            self._on_damage(Damaged(found.header.position, str(error)))
            return 0
        self._rows.names[opened.subject_id] = opened.subject
        rows = self._rows.add(opened.subject_id, opened.sequences, piece.index_of(opened.data))
        self._rows.put(rows, file.number, found.header.position)
        self._rows.become(rows, self._ledger.states(opened.subject_id, opened.sequences))
        if self._ledger.due_ms:
            self._put_off(rows)
        self._on_home(rows)
        return len(rows)

    def _put_off(self, rows: RowNumbers) -> None:
        for row in rows.tolist():
            name = int(self._rows.subject_id[row]), int(self._rows.sequence[row])
            due_ms = self._ledger.due_ms.get(name)
            if due_ms is not None:
                self._rows.due_ms[row] = due_ms
                self._rows.is_rescheduled[row] = True


class Sweeper:
    """Keeps the wheel filled with the hour at hand and the next one."""

    def __init__(self, rows: Rows, wheel: Wheel, now_ms: int) -> None:
        self._rows = rows
        self._wheel = wheel
        self._end_ms = _end_ms(now_ms)
        self._at = 0
        self._until = 0

    def step(self, now_ms: int) -> None:
        """Go on a little. To be called every tick."""
        if _end_ms(now_ms) > self._end_ms:
            self._end_ms = _end_ms(now_ms)
            self._at, self._until = 0, self._rows.end
        if self._at < self._until:
            end = min(self._at + _SWEEP_ROWS, self._until)
            self.home(np.arange(self._at, end))
            self._at = end

    @property
    def is_sweeping(self) -> bool:
        return self._at < self._until

    def home(self, rows: RowNumbers) -> None:
        """These rows have a place or a new due time: into the wheel, if it is near."""
        table = self._rows
        is_wanted = (
            (table.due_ms[rows] < self._end_ms)
            & (table.state[rows] == State.PENDING)
            & (table.file[rows] != 0)
            & ~table.in_wheel[rows]
        )
        chosen = rows[is_wanted]
        table.in_wheel[chosen] = True
        self._wheel.add(chosen, table.due_ms[chosen])


def _end_ms(now_ms: int) -> int:
    return now_ms - now_ms % HOUR_MS + 2 * HOUR_MS
