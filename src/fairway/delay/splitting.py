"""A bucket's live messages into other buckets: when a month is cut into days or a day into hours, and when a bucket
whose time has passed still holds messages that were put off.

The old bucket takes no more messages from the start. Its live messages are written to private buckets, a few pieces at
a time so that nothing else waits, and one manifest switches. Whatever happens to a message meanwhile (cancelled, sent,
put off) happens to its row, which is one and the same all along. A crash before the switch leaves the old bucket as it
was, and the private ones unnamed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import Span
from fairway.delay.moving import cut, spans_of
from fairway.delay.rows import Rows, State
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers
from fairway.errors import FairwayError
from fairway.storage.log import Damaged


class Split:
    """One bucket on its way into others."""

    def __init__(
        self,
        log: ScheduleLog,
        rows: Rows,
        file: BucketFile,
        on_damage: Callable[[Damaged], None],
        messages_per_step: int,
    ) -> None:
        self.file = file
        self.is_done = False
        self._log = log
        self._rows = rows
        self._on_damage = on_damage
        self._messages_per_step = messages_per_step
        self._children: dict[Span, BucketFile] = {}
        self._todo: RowNumbers | None = None
        self._left = 0  # pieces that are not yet synced
        log.retire(file)

    def step(self, now_ms: int, moved_end: int) -> None:
        """Go on a little. To be called again until `is_done`."""
        if self._todo is None:
            if self.file.synced_end == self.file.end:  # what was on its way into it has a row with a place
                self._todo = live_rows(self._rows, self.file)
        elif len(self._todo):
            self._copy(now_ms)
        elif self._left == 0 and self.file.source_end <= moved_end and not self.is_done:
            self.is_done = True
            self._log.switch([self.file], list(self._children.values()), self._forget)

    def _copy(self, now_ms: int) -> None:
        if self._todo is None:
            return
        copied = 0
        while len(self._todo) and copied < self._messages_per_step:
            position = self._rows.position[self._todo[0]]
            end = int(np.searchsorted(self._rows.position[self._todo], position, side="right"))
            chosen, self._todo = self._todo[:end], self._todo[end:]
            copied += len(chosen)
            chosen = chosen[is_live(self._rows, chosen)]
            if len(chosen):
                self._copy_piece(int(position), chosen, now_ms)

    def _copy_piece(self, position: int, chosen: RowNumbers, now_ms: int) -> None:
        rows = self._rows
        try:
            piece, opened = self._log.read(self.file.number, position)
        except Damaged as damaged:
            rows.become(chosen, State.LOST)
            self._on_damage(damaged)
            return
        due_ms = np.zeros(len(opened), np.int64)
        due_ms[rows.index[chosen]] = rows.due_ms[chosen]
        for span, which in spans_of(rows.due_ms[chosen], now_ms):
            part = chosen[which]
            child = self._children.get(span)
            if child is None:
                child = self._children[span] = self._log.create(span, of_split=True)
            data = cut(opened, rows.index[part].astype(np.int64), due_ms)
            at = child.append(piece.subject, piece.subject_id, rows.sequence[part], data, now_ms)
            self._left += 1
            child.when_durable(child.end, self._arrival(part, child, at))

    def _arrival(self, part: RowNumbers, child: BucketFile, position: int) -> Callable[[FairwayError | None], None]:
        def arrived(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._left -= 1
                self._rows.put(part, child.number, position)

        return arrived

    def _forget(self) -> None:
        self._rows.free(self._rows.of_file(self.file.number))


def is_live(rows: Rows, chosen: RowNumbers) -> NDArray[np.bool_]:
    """Whose data is still needed: to be sent, or sent again."""
    return np.isin(rows.state[chosen], (State.PENDING, State.INTENDED))


def live_rows(rows: Rows, file: BucketFile) -> RowNumbers:
    """The live rows of a bucket, in the order of their places."""
    found = rows.of_file(file.number)
    found = found[is_live(rows, found)]
    return found[np.lexsort((rows.index[found], rows.position[found]))]
