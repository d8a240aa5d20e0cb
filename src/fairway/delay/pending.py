"""What is pending: cancel, reschedule, list, count, histogram.

A message is found by the id it was born with, or by its business key within its subject. (A key is looked for by its
64-bit hash: two keys that differ in less than 64 bits in a row never share one, others by chance once in 10^19 pairs.)
Cancel and reschedule are decided at once, at the serial point that intents pass, and each answer is true when it is
given and stays true once the dispatch log is synced to `end`:

    CANCELLED             it is pending no longer, and never will be sent
    RESCHEDULED           it has the new due time
    ALREADY_DISPATCHED    an intent names it: it is on its way, or was sent
    UNKNOWN               not here: never scheduled, or sent or cancelled so long ago that it is forgotten (an hour, or
                          a million messages; see `forgetting`)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.dispatch_log import DispatchEvent, DispatchLog, EventKind, by_subject, ranges_of
from fairway.delay.rows import RowLocation, Rows, RowState
from fairway.delay.sheet import BatchArrays
from fairway.delay.wheel import RowNumbers


class CancelOutcome(enum.Enum):
    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    ALREADY_DISPATCHED = "already_dispatched"
    UNKNOWN = "unknown"


class PendingDecision(NamedTuple):
    """The answer, how many messages it changed, and where the dispatch log must be synced before it is given."""

    answer: CancelOutcome
    messages: int
    end: int


class Filter(NamedTuple):
    """Which pending messages are meant; None: any."""

    subject_id: int | None = None
    key_prefix: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None  # not included


class Waiting(NamedTuple):
    """One pending message, for people."""

    id: MessageId
    subject_id: int
    key: str | None
    due_ms: int
    size_bytes: int = 0  # of its payload


class PendingMessages:
    """Answers questions about rows, and decides about them. Every row must be loaded."""

    def __init__(
        self,
        rows: Rows,
        journal: DispatchLog,
        *,
        open_at: Callable[[RowLocation], BatchArrays | None],
        take_off: Callable[[int], None],
        put_on: Callable[[RowNumbers], None],
        on_done: Callable[[RowNumbers], None],
    ) -> None:
        self.cancelled = 0  # messages, in this life
        self.rescheduled = 0
        self._rows = rows
        self._journal = journal
        self._open_at = open_at
        self._take_off = take_off
        self._put_on = put_on
        self._on_done = on_done

    # --- deciding ----------------------------------------------------------------------------------------------------

    def cancel(self, rows: RowNumbers) -> PendingDecision:
        """Never send these, as far as they are pending."""
        chosen = self._pending(rows)
        if not len(chosen):
            return self._too_late(rows)
        end = self._append(EventKind.CANCEL, chosen, 0)
        for row in chosen[self._rows.in_wheel[chosen]].tolist():
            self._take_off(row)
        self._rows.become(chosen, RowState.CANCELLED)
        self.cancelled += len(chosen)
        self._on_done(chosen)
        return PendingDecision(CancelOutcome.CANCELLED, len(chosen), end)

    def reschedule(self, rows: RowNumbers, due_ms: int) -> PendingDecision:
        """Send these at another time, as far as they are pending."""
        chosen = self._pending(rows)
        if not len(chosen):
            return self._too_late(rows)
        end = self._append(EventKind.RESCHEDULE, chosen, due_ms)
        for row in chosen[self._rows.in_wheel[chosen]].tolist():
            self._take_off(row)
        self._rows.due_ms[chosen] = due_ms
        self._rows.is_rescheduled[chosen] = True
        self.rescheduled += len(chosen)
        self._put_on(chosen)
        return PendingDecision(CancelOutcome.RESCHEDULED, len(chosen), end)

    def by_id(self, message_id: MessageId) -> RowNumbers:
        """The rows of a message. One that was sent twice under one id has two."""
        table, end = self._rows, self._rows.end
        found = table.where(table.id_low[:end] == message_id.sequence)
        is_it = (table.id_high[found] == message_id.producer_id) & (table.state[found] != RowState.FREE)
        return _chosen(found, is_it)

    def by_key(self, subject_id: int, key: str) -> RowNumbers:
        table, end = self._rows, self._rows.end
        found = table.where(table.key[:end] == batch.key_hash(key))
        is_it = (table.subject_id[found] == subject_id) & (table.state[found] != RowState.FREE)
        return _chosen(found, is_it)

    def _pending(self, rows: RowNumbers) -> RowNumbers:
        return _chosen(rows, self._rows.state[rows] == RowState.PENDING)

    def _too_late(self, rows: RowNumbers) -> PendingDecision:
        """Nothing changes, but the answer holds once what it rests on is synced."""
        states = set(self._rows.state[rows].tolist())
        if states & {RowState.INTENDED, RowState.DISPATCHED}:
            answer = CancelOutcome.ALREADY_DISPATCHED
        else:
            answer = CancelOutcome.CANCELLED if RowState.CANCELLED in states else CancelOutcome.UNKNOWN
        return PendingDecision(answer, 0, self._journal.end)

    def _append(self, kind: EventKind, chosen: RowNumbers, time_ms: int) -> int:
        table = self._rows
        events = [
            DispatchEvent(kind, subject_id, ranges_of(table.sequence[rows]), time_ms=time_ms)
            for subject_id, rows in by_subject(table, chosen)
        ]
        return self._journal.append(events)

    # --- looking -----------------------------------------------------------------------------------------------------

    def count(self, which: Filter) -> int:
        return len(self._chosen(which))

    def list(self, which: Filter, limit: int) -> list[Waiting]:
        """The first ones by due time."""
        rows = self._chosen(which)
        rows = rows[np.lexsort((self._rows.sequence[rows], self._rows.due_ms[rows]))][:limit]
        return [self._waiting(row) for row in rows.tolist()]

    def histogram(self, which: Filter, width_ms: int) -> dict[int, int]:
        """How many are due in each stretch of that width, by its start; empty stretches are left out."""
        due_ms = self._rows.due_ms[self._chosen(which)]
        starts, counts = np.unique(due_ms // width_ms, return_counts=True)
        return dict(zip((starts * width_ms).tolist(), counts.tolist(), strict=True))

    def _chosen(self, which: Filter) -> RowNumbers:
        table, end = self._rows, self._rows.end
        mask: NDArray[np.bool_] = table.state[:end] == RowState.PENDING
        if which.subject_id is not None:
            mask &= table.subject_id[:end] == which.subject_id
        if which.from_ms is not None:
            mask &= table.due_ms[:end] >= which.from_ms
        if which.to_ms is not None:
            mask &= table.due_ms[:end] < which.to_ms
        if which.key_prefix is not None:
            mask &= table.key[:end] != 0
        rows = table.where(mask)
        return rows if which.key_prefix is None else self._with_prefix(rows, which.key_prefix)

    def _with_prefix(self, rows: RowNumbers, prefix: str) -> RowNumbers:
        """In the order of their places, so that each piece is opened once."""
        ordered = rows[np.lexsort((self._rows.position[rows], self._rows.file[rows]))]
        keys = [self._key(row) for row in ordered.tolist()]
        return ordered[[key is not None and key.startswith(prefix) for key in keys]]

    def _key(self, row: int) -> str | None:
        place = self._rows.place(row)
        opened = self._open_at(place)
        return None if opened is None else opened.key(place.at)

    def _waiting(self, row: int) -> Waiting:
        table = self._rows
        message_id = MessageId(int(table.id_high[row]), int(table.id_low[row]))
        return Waiting(message_id, int(table.subject_id[row]), self._key(row), int(table.due_ms[row]))


def _chosen(rows: RowNumbers, mask: NDArray[np.bool_]) -> RowNumbers:
    return rows[mask]
