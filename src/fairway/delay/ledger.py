"""What the dispatch log says of messages whose rows are not loaded yet, by subject, as sorted arrays."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import Sequences
from fairway.delay.rows import State

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # first sequence, count
_Table: TypeAlias = NDArray[np.uint64]


class Ledger:
    """Made at a start, asked by whoever makes rows of buckets, then forgotten."""

    def __init__(self) -> None:
        self._done: dict[int, list[_Table]] = {}  # by subject: first, end, state
        self._due: dict[int, list[_Table]] = {}  # by subject: sequence, due time
        self._gone: dict[tuple[int, int], int] = {}
        self._sorted: dict[int, _Table] = {}
        self._sorted_due: dict[int, _Table] = {}

    @property
    def subjects(self) -> set[int]:
        """Those it knows anything of."""
        return {*self._done, *self._due}

    def note(self, subject_id: int, ranges: Ranges, state: State) -> None:
        """These messages are in that state."""
        if ranges:
            table = np.array(ranges, np.uint64)
            states = np.full(len(table), state, np.uint64)
            rows = np.stack((table[:, 0], table[:, 0] + table[:, 1], states))
            self._done.setdefault(subject_id, []).append(rows)
            self._sorted.pop(subject_id, None)

    def note_due(self, subject_id: int, ranges: Ranges, due_ms: int) -> None:
        """These messages have another due time, from now on."""
        sequences = np.concatenate([np.arange(first, first + count, dtype=np.uint64) for first, count in ranges])
        self._note_dues(subject_id, sequences, np.full(len(sequences), due_ms, np.uint64))

    def note_dues(self, subject_id: int, pairs: Ranges) -> None:
        """The same, with a due time each."""
        table = np.array(pairs, np.uint64)
        self._note_dues(subject_id, table[:, 0], table[:, 1])

    def _note_dues(self, subject_id: int, sequences: _Table, due_ms: _Table) -> None:
        self._due.setdefault(subject_id, []).append(np.stack((sequences, due_ms)))
        self._sorted_due.pop(subject_id, None)

    def note_gone(self, file: int, position: int, mask: int) -> None:
        """The messages of a piece whose bits are set are done with and forgotten."""
        self._gone[file, position] = mask

    def gone(self, file: int, position: int, count: int) -> NDArray[np.bool_] | None:
        """Which messages of a piece are; None: none of them."""
        mask = self._gone.get((file, position))
        if mask is None:
            return None
        bits = np.frombuffer(mask.to_bytes(-(-max(count, mask.bit_length()) // 8), "little"), np.uint8)
        return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)

    def states(self, subject_id: int, sequences: Sequences) -> NDArray[np.uint8]:
        """What has become of each of those messages."""
        states = np.full(len(sequences), State.PENDING, np.uint8)
        if subject_id not in self._done:
            return states
        table = self._sorted.get(subject_id)
        if table is None:  # the ranges of one subject do not overlap: no message is both cancelled and intended
            joined = np.concatenate(self._done[subject_id], axis=1)
            table = self._sorted[subject_id] = joined[:, np.argsort(joined[0], kind="stable")]
            self._done[subject_id] = [table]
        at = np.searchsorted(table[0], sequences, side="right") - 1
        is_in = (at >= 0) & (sequences < table[1][at])
        states[is_in] = table[2][at[is_in]].astype(np.uint8)
        return states

    def dues(self, subject_id: int, sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of those messages (their indices) have another due time, and which one."""
        if subject_id not in self._due:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        table = self._sorted_due.get(subject_id)
        if table is None:
            joined = np.concatenate(self._due[subject_id], axis=1)
            table = self._sorted_due[subject_id] = joined[:, np.argsort(joined[0], kind="stable")]
            self._due[subject_id] = [table]
        at = np.searchsorted(table[0], sequences, side="right") - 1  # the newest of those with one sequence
        is_in = np.flatnonzero((at >= 0) & (table[0][at] == sequences))
        return is_in, table[1][at[is_in]].astype(np.int64)
