"""What the dispatch log says of messages whose rows are not here yet, by subject, as sorted arrays.

At a start that is every message; in a copy that follows, those whose bytes are committed later than what was decided
about them. Where two notes speak of one message, the later one holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import Sequences
from fairway.delay.rows import RowState

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # first sequence, count
_NumberTable: TypeAlias = NDArray[np.uint64]


class DecisionIndex:
    """Asked by whoever makes rows."""

    def __init__(self) -> None:
        self._done: dict[int, list[_NumberTable]] = {}  # by subject: first, end, state
        self._due: dict[int, list[_NumberTable]] = {}  # by subject: sequence, due time
        self._gone: dict[tuple[int, int], int] = {}
        self._sorted: dict[int, _NumberTable] = {}
        self._sorted_due: dict[int, _NumberTable] = {}

    @property
    def subjects(self) -> set[int]:
        """Those it knows anything of."""
        return {*self._done, *self._due}

    def note(self, subject_id: int, ranges: Ranges, state: RowState) -> None:
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

    def _note_dues(self, subject_id: int, sequences: _NumberTable, due_ms: _NumberTable) -> None:
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
        states = np.full(len(sequences), RowState.PENDING, np.uint8)
        if subject_id not in self._done:
            return states
        table = self._sorted.get(subject_id)
        if table is None:
            table = self._sorted[subject_id] = _side_by_side(np.concatenate(self._done[subject_id], axis=1))
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

    # --- a copy that follows -----------------------------------------------------------------------------------------

    def loaded(self) -> None:
        """Every bucket is: what is forgotten in them need not be known any more."""
        self._gone = {}

    def named(self) -> Iterator[tuple[int, Sequences]]:
        """By subject: the messages that it knows anything of, some of them more than once."""
        for subject_id, tables in self._done.items():
            firsts, ends, _ = np.concatenate(tables, axis=1)
            yield subject_id, _spread(firsts, ends - firsts)
        for subject_id, tables in self._due.items():
            yield subject_id, np.concatenate(tables, axis=1)[0]

    def prune(self, subject_id: int, below: int) -> None:
        """The messages of a subject below a sequence have rows, or are done with: forget what is known of them."""
        done = [each[:, each[1] > below] for each in self._done.pop(subject_id, [])]
        due = [each[:, each[0] >= below] for each in self._due.pop(subject_id, [])]
        for notes, tables in ((self._done, done), (self._due, due)):
            left = [each for each in tables if each.shape[1]]
            if left:
                notes[subject_id] = left
        self._sorted.pop(subject_id, None)
        self._sorted_due.pop(subject_id, None)

    def ranges(self, subject_id: int, state: RowState) -> _NumberTable:
        """Of messages in that state: a row for each range, its first sequence and their number."""
        self.states(subject_id, np.zeros(0, np.uint64))
        table = self._sorted.get(subject_id, np.zeros((3, 0), np.uint64))
        chosen = table[:, table[2] == state]
        return np.stack((chosen[0], chosen[1] - chosen[0]), axis=1)

    def due_times(self, subject_id: int) -> _NumberTable:
        """A row for each message that has another due time: its sequence, and that."""
        self.dues(subject_id, np.zeros(0, np.uint64))
        return self._sorted_due.get(subject_id, np.zeros((2, 0), np.uint64)).T


def _spread(firsts: _NumberTable, counts: _NumberTable) -> Sequences:
    """The sequences of ranges, one by one."""
    starts = np.cumsum(counts) - counts
    spread: Sequences = np.repeat(firsts - starts, counts.astype(np.int64))
    spread += np.arange(len(spread), dtype=np.uint64)  # which wraps around, there and back
    return spread


def _side_by_side(noted: _NumberTable) -> _NumberTable:
    """Ranges in the order they were noted in, sorted and without overlaps."""
    table = noted[:, np.argsort(noted[0], kind="stable")]
    is_repeated = (table[0, 1:] == table[0, :-1]) & (table[1, 1:] == table[1, :-1])  # intended, then sent
    table = table[:, np.append(~is_repeated, True)]
    if not np.any(table[1, :-1] > table[0, 1:]):
        return table
    bounds = np.unique(noted[:2])
    states = np.zeros(len(bounds), np.uint64)
    starts, ends = np.searchsorted(bounds, noted[0]), np.searchsorted(bounds, noted[1])
    for start, end, state in zip(starts.tolist(), ends.tolist(), noted[2], strict=True):
        states[start:end] = state
    is_said = np.flatnonzero(states)
    return np.stack((bounds[is_said], bounds[is_said + 1], states[is_said]))
