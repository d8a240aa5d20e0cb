"""From the message log into buckets: each durable batch is cut by due time, and each part goes to its bucket.

A message is known (has a row, can be cancelled) from the moment its batch is durable; it is *home* when its bucket has
it, synced; and it counts as moved when the manifest names that bucket. `moved_end` is the position in the message log
below which everything is moved: what a start need not move again, and what the message log may forget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fairway import batch
from fairway.batch import Batch
from fairway.delay import piece
from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import HOUR_MS, Span, span_of
from fairway.delay.letters import Letters
from fairway.delay.piece import Sequences
from fairway.delay.rows import Rows
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers, Times
from fairway.errors import FairwayError
from fairway.names import Subject


@dataclass(slots=True)
class _Move:
    """A stretch of the message log that ends at `end`, and how many of its parts are not moved yet."""

    end: int
    left: int = 0


@dataclass(slots=True)
class _Part:
    """What goes to one bucket."""

    span: Span
    rows: RowNumbers
    data: bytes


class Mover:
    """Puts messages into buckets, and knows how far it is."""

    def __init__(self, rows: Rows, young: dict[int, bytes], on_home: Callable[[RowNumbers], None]) -> None:
        self.moved_end = 0
        self.unmoved_bytes = 0
        self._rows = rows
        self._young = young
        self._on_home = on_home
        self._moves: deque[_Move] = deque()
        self._of_unlisted: dict[int, list[_Move]] = {}
        self._token = 0
        self._tail: _Move | None = None

    def begin_tail(self, moved_end: int, messages_end: int) -> None:
        """A start: what an earlier life left between the two is still to be moved, and comes first."""
        self.moved_end = moved_end
        if messages_end > moved_end:
            self._tail = _Move(messages_end, 1)
            self._moves.append(self._tail)

    def end_tail(self) -> None:
        """All of it has been taken."""
        if self._tail is not None:
            tail, self._tail = self._tail, None
            self._moved(tail)

    def take(
        self,
        log: ScheduleLog,
        subject: Subject,
        subject_id: int,
        first_sequence: int,
        data: bytes,
        end: int,
        now_ms: int,
        keep: NDArray[np.bool_] | None = None,
    ) -> RowNumbers:
        """Make rows of a batch that is durable, and put it on its way; `keep`: it is of the tail, and only those
        messages are missing."""
        count = batch.peek(data).count
        sequences = np.arange(first_sequence, first_sequence + count, dtype=np.uint64)
        index = piece.index_of(data)
        if keep is not None and not keep.all():
            chosen = np.flatnonzero(keep)
            if not len(chosen):
                return chosen
            data = cut(batch.decode(data), chosen, index.due_ms)
            sequences, index = sequences[chosen], index.only(chosen)
        rows = self._rows.add(subject_id, sequences, index)
        move = self._tail if keep is not None else None
        if move is None:
            move = _Move(end)
            self._moves.append(move)
        for part in self._parts(rows, data, now_ms):
            move.left += 1
            self._append(log, part, subject, subject_id, move, end, now_ms)
        return rows

    def _parts(self, rows: RowNumbers, data: bytes, now_ms: int) -> list[_Part]:
        due_ms = self._rows.due_ms[rows]
        spans = spans_of(due_ms, now_ms)
        if len(spans) == 1:
            return [_Part(spans[0][0], rows, data)]
        opened = batch.decode(data)
        return [_Part(span, rows[chosen], cut(opened, chosen, due_ms)) for span, chosen in spans]

    def _append(
        self, log: ScheduleLog, part: _Part, subject: Subject, subject_id: int, move: _Move, end: int, now_ms: int
    ) -> None:
        rows, file = part.rows, log.file_for(part.span)
        self._token += 1
        token = self._token
        self._rows.put(rows, 0, token)
        self._young[token] = part.data
        self.unmoved_bytes += len(part.data)
        sequences: Sequences = self._rows.sequence[rows]
        position = file.append(subject, subject_id, sequences, part.data, now_ms)
        file.source_end = max(file.source_end, end)

        def home(outcome: FairwayError | None) -> None:
            if outcome is not None:
                return  # the store is poisoned: nothing is answered any more
            del self._young[token]
            self.unmoved_bytes -= len(part.data)
            self._rows.put(rows, file.number, position)
            if file.is_listed:
                self._moved(move)
            else:
                self._of_unlisted.setdefault(file.number, []).append(move)
            self._on_home(rows)

        file.when_durable(file.end, home)

    def listed(self, file: BucketFile) -> None:
        """The manifest names the bucket now."""
        for move in self._of_unlisted.pop(file.number, []):
            self._moved(move)

    def _moved(self, move: _Move) -> None:
        move.left -= 1
        while self._moves and self._moves[0].left == 0:
            self.moved_end = self._moves.popleft().end


def spans_of(due_ms: Times, now_ms: int) -> list[tuple[Span, NDArray[np.int64]]]:
    """The stretches of time that those due times lie in, each with the indices of its messages."""
    hours, which = np.unique(np.maximum(due_ms, now_ms) // HOUR_MS, return_inverse=True)
    spans: dict[Span, list[int]] = {}
    for number, hour in enumerate(hours.tolist()):
        spans.setdefault(span_of(max(hour * HOUR_MS, now_ms), now_ms), []).append(number)
    if len(spans) == 1:
        return [(next(iter(spans)), np.arange(len(due_ms)))]
    return [(span, np.flatnonzero(np.isin(which, numbers))) for span, numbers in spans.items()]


def cut(of: Batch, chosen: NDArray[np.int64], due_ms: Times) -> bytes:
    """Some messages of a batch as a batch of their own, with these due times; they keep their ids."""
    letters = Letters()
    letters.take(of, chosen.tolist())
    return letters.encode(of.header.producer_id, of.header.first_sequence, due_ms[chosen].tolist())
