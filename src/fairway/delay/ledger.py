"""What the dispatch log says of messages whose rows are not loaded yet: ranges of sequences, by subject."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import Sequences
from fairway.delay.rows import State

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # first sequence, count


class Ledger:
    """Made at a start, asked by whoever makes rows of buckets, then forgotten."""

    def __init__(self) -> None:
        self._done: dict[int, list[tuple[int, int, State]]] = {}  # by subject: first, end, state
        self._sorted: dict[int, NDArray[np.uint64]] = {}
        self.due_ms: dict[tuple[int, int], int] = {}  # by subject and sequence

    def note(self, subject_id: int, ranges: Ranges, state: State) -> None:
        self._done.setdefault(subject_id, []).extend((first, first + count, state) for first, count in ranges)
        self._sorted.pop(subject_id, None)

    def note_due(self, subject_id: int, ranges: Ranges, due_ms: int) -> None:
        for first, count in ranges:
            for sequence in range(first, first + count):
                self.due_ms[subject_id, sequence] = due_ms

    def states(self, subject_id: int, sequences: Sequences) -> NDArray[np.uint8]:
        """What has become of each of those messages."""
        states = np.full(len(sequences), State.PENDING, np.uint8)
        if subject_id not in self._done:
            return states
        table = self._sorted.get(subject_id)
        if table is None:  # the ranges of one subject do not overlap: no message is both cancelled and intended
            table = self._sorted[subject_id] = np.array(sorted(self._done[subject_id]), np.uint64)
        at = np.searchsorted(table[:, 0], sequences, side="right").astype(np.int64) - 1
        is_in = (at >= 0) & (sequences < table[at, 1])
        states[is_in] = table[at[is_in], 2].astype(np.uint8)
        return states
