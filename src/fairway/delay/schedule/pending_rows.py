"""Pending rows: one index row per message, as numpy columns; and decisions about messages that have no row yet.

A row takes 61 bytes. So ten million rows fit in memory, and a question (which messages are due, which have this key,
how many by day) is one numpy pass over a column.

A row is created when its message is durable in the message log, and freed when maintenance forgets the message
(`fairway.delay.maintenance`). Before the message is in its bucket, the row's file is 0 and its position is a token of
`ScheduleAppender`. After that, the row has the bucket's file number, position and index. The state of a message only
moves forward:

    PENDING ──► INTENDED ──► DISPATCHED        an intent names the message; the broker has it
       └──────► CANCELLED

A rescheduled row stays PENDING with another due time. A row becomes LOST if no record and no log has its message.

`DecisionIndex` holds what the dispatch log says about messages without rows, by subject, as sorted arrays. At a start
this is every message. In a replica, these are messages that are committed later than the decisions about them. If two
notes are about one message, the later one holds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairway.delay.schedule.batch_arrays import expand
from fairway.delay.schedule.bucket_record import BucketIndex, Sequences
from fairway.names import Subject

RowNumbers: TypeAlias = NDArray[np.int64]

_POSITION_BITS = 40  # of a position in a bucket file: 1 TiB
_GROWTH = 2  # a full column is copied into a larger one; memory that is never written costs nothing


class RowState(enum.IntEnum):
    """What became of a message."""

    FREE = 0  # no message: the row may be used again
    PENDING = 1
    INTENDED = 2
    DISPATCHED = 3
    CANCELLED = 4
    LOST = 5  # its record cannot be read any more


class RowLocation(NamedTuple):
    """Where one message lies."""

    file: int
    position: int
    at: int  # in its record


class Rows:
    """All messages that the delay server knows. Anybody may read the columns; only parts of the engine write them."""

    def __init__(self) -> None:
        self.end = 0  # rows from here on were never used
        self.subject_id: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.sequence: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.id_high: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.id_low: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.key: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.due_ms: NDArray[np.int64] = np.zeros(0, np.int64)
        self.file: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.position: NDArray[np.int64] = np.zeros(0, np.int64)
        self.index: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.state: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.in_wheel: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.is_rescheduled: NDArray[np.bool_] = np.zeros(0, np.bool_)  # its bucket has another due time
        self._free: list[RowNumbers] = []
        self._free_count = 0
        self._done = 0
        self.names: dict[int, Subject] = {}  # of subjects, from the bucket records: the message log may lose one

    def __len__(self) -> int:
        return self.end - self._free_count

    @property
    def pending(self) -> int:
        """Messages that are not finished. A quota counts these."""
        return len(self) - self._done

    @property
    def index_columns(self) -> BucketIndex:
        return BucketIndex(self.due_ms, self.key, self.id_high, self.id_low)

    def become(self, rows: RowNumbers, state: RowState | NDArray[np.uint8]) -> None:
        """Give rows a new state, or each its own."""
        self._done -= int(np.count_nonzero(self.state[rows] >= RowState.DISPATCHED))
        self.state[rows] = state
        if isinstance(state, RowState):
            self._done += len(rows) if state >= RowState.DISPATCHED else 0
        else:
            self._done += int(np.count_nonzero(state >= RowState.DISPATCHED))

    def add(self, subject_id: int | NDArray[np.uint32], sequences: Sequences, index: BucketIndex) -> RowNumbers:
        """Create PENDING rows, without a place in a bucket."""
        rows = self._take(len(sequences))
        self.subject_id[rows] = subject_id
        self.sequence[rows] = sequences
        self.id_high[rows] = index.id_high
        self.id_low[rows] = index.id_low
        self.key[rows] = index.key
        self.due_ms[rows] = index.due_ms
        self.state[rows] = RowState.PENDING
        self.file[rows] = 0
        self.in_wheel[rows] = False
        self.is_rescheduled[rows] = False
        return rows

    def put(self, rows: RowNumbers, file: int, position: int) -> None:
        """Set the place of all rows of one bucket record, in order."""
        self.put_each(rows, file, position, np.arange(len(rows)))

    def put_each(self, rows: RowNumbers, file: int, position: int | NDArray[Any], index: NDArray[np.int64]) -> None:
        """Set the places of rows in several records of one file."""
        self.file[rows] = file
        self.position[rows] = position
        self.index[rows] = index

    def spots(self, rows: RowNumbers) -> NDArray[np.int64]:
        """A number for each row that names its bucket record; `record_key_of` is the inverse."""
        return (self.file[rows].astype(np.int64) << _POSITION_BITS) | self.position[rows]

    def place(self, row: int) -> RowLocation:
        return RowLocation(int(self.file[row]), int(self.position[row]), int(self.index[row]))

    def free(self, rows: RowNumbers) -> None:
        """Forget these messages."""
        self.become(rows, RowState.FREE)
        if len(rows):
            self._free.append(rows)
            self._free_count += len(rows)

    def where(self, mask: NDArray[np.bool_]) -> RowNumbers:
        """The rows for which a mask over the used part of the columns is true."""
        return np.flatnonzero(mask)

    def of_file(self, file: int) -> RowNumbers:
        return self.where((self.file[: self.end] == file) & (self.state[: self.end] != RowState.FREE))

    def in_state(self, state: RowState) -> RowNumbers:
        return self.where(self.state[: self.end] == state)

    def find(self, subject_id: int, sequences: Sequences) -> RowNumbers:
        """The rows of those messages that have one, ordered by sequence."""
        mask = (self.subject_id[: self.end] == subject_id) & (self.state[: self.end] != RowState.FREE)
        rows = self.where(mask)
        rows = rows[np.isin(self.sequence[rows], sequences)]
        return rows[np.argsort(self.sequence[rows], kind="stable")]

    def _take(self, count: int) -> RowNumbers:
        taken: list[RowNumbers] = []
        missing = count
        while missing and self._free:
            last = self._free.pop()
            if len(last) > missing:
                self._free.append(last[missing:])
                last = last[:missing]
            taken.append(last)
            missing -= len(last)
        self._free_count -= count - missing
        taken.append(np.arange(self.end, self.end + missing, dtype=np.int64))
        self.end += missing
        if self.end > len(self.state):
            self._grow(max(self.end, int(len(self.state) * _GROWTH), 1_024))
        return joined(taken)

    def reserve(self, count: int) -> None:
        """Make room for so many rows, so that they need not be copied. Unused room costs nothing."""
        if count > len(self.state):
            self._grow(count)

    def _grow(self, capacity: int) -> None:
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                larger = np.zeros(capacity, column.dtype)
                larger[: len(column)] = column
                setattr(self, name, larger)


def joined(parts: list[RowNumbers]) -> RowNumbers:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def record_key_of(number: int) -> tuple[int, int]:
    """The file and position of a number from `Rows.spots`."""
    return number >> _POSITION_BITS, number & ((1 << _POSITION_BITS) - 1)


Ranges: TypeAlias = tuple[tuple[int, int], ...]  # first sequence, count
_NumberTable: TypeAlias = NDArray[np.uint64]


def sequences_of(ranges: Ranges) -> Sequences:
    """The sequences of ranges, one by one."""
    firsts, counts = np.array(ranges, np.uint64).T
    return expand(firsts, firsts + counts)


class DecisionIndex:
    """Decisions by message, for code that creates rows."""

    def __init__(self) -> None:
        self._done: dict[int, list[_NumberTable]] = {}  # by subject: first, end, state
        self._due: dict[int, list[_NumberTable]] = {}  # by subject: sequence, due time
        self._gone: dict[tuple[int, int], int] = {}
        self._sorted: dict[int, _NumberTable] = {}
        self._sorted_due: dict[int, _NumberTable] = {}

    @property
    def subjects(self) -> set[int]:
        """The subjects with any decision."""
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
        """These messages have another due time."""
        sequences = sequences_of(ranges)
        self._note_dues(subject_id, sequences, np.full(len(sequences), due_ms, np.uint64))

    def note_dues(self, subject_id: int, pairs: Ranges) -> None:
        """These messages have other due times, one each."""
        table = np.array(pairs, np.uint64)
        self._note_dues(subject_id, table[:, 0], table[:, 1])

    def _note_dues(self, subject_id: int, sequences: _NumberTable, due_ms: _NumberTable) -> None:
        self._due.setdefault(subject_id, []).append(np.stack((sequences, due_ms)))
        self._sorted_due.pop(subject_id, None)

    def note_gone(self, file: int, position: int, mask: int) -> None:
        """The messages of a bucket record whose bits are set are finished and forgotten."""
        self._gone[file, position] = mask

    def gone(self, file: int, position: int, count: int) -> NDArray[np.bool_] | None:
        """Which messages of a bucket record are gone; None: none."""
        mask = self._gone.get((file, position))
        if mask is None:
            return None
        bits = np.frombuffer(mask.to_bytes(-(-max(count, mask.bit_length()) // 8), "little"), np.uint8)
        return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)

    def states(self, subject_id: int, sequences: Sequences) -> NDArray[np.uint8]:
        """The state of each of those messages."""
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
        """The indices of those messages that have another due time, and the due times."""
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

    # --- in a replica ------------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        """Every bucket is loaded: the bits of gone messages are not needed any more."""
        self._gone = {}

    def named(self) -> Iterator[tuple[int, Sequences]]:
        """By subject: the messages with a decision, some of them more than once."""
        for subject_id, tables in self._done.items():
            firsts, ends, _ = np.concatenate(tables, axis=1)
            yield subject_id, expand(firsts, ends)
        for subject_id, tables in self._due.items():
            yield subject_id, np.concatenate(tables, axis=1)[0]

    def prune(self, subject_id: int, below: int) -> None:
        """Forget decisions about a subject's messages below a sequence: they have rows, or are finished."""
        done = [each[:, each[1] > below] for each in self._done.pop(subject_id, [])]
        due = [each[:, each[0] >= below] for each in self._due.pop(subject_id, [])]
        for notes, tables in ((self._done, done), (self._due, due)):
            left = [each for each in tables if each.shape[1]]
            if left:
                notes[subject_id] = left
        self._sorted.pop(subject_id, None)
        self._sorted_due.pop(subject_id, None)

    def ranges(self, subject_id: int, state: RowState) -> _NumberTable:
        """The messages in that state: a row for each range, with its first sequence and count."""
        self.states(subject_id, np.zeros(0, np.uint64))
        table = self._sorted.get(subject_id, np.zeros((3, 0), np.uint64))
        chosen = table[:, table[2] == state]
        return np.stack((chosen[0], chosen[1] - chosen[0]), axis=1)

    def due_times(self, subject_id: int) -> _NumberTable:
        """The rescheduled messages: a row for each, with its sequence and due time."""
        self.dues(subject_id, np.zeros(0, np.uint64))
        return self._sorted_due.get(subject_id, np.zeros((2, 0), np.uint64)).T


def _side_by_side(noted: _NumberTable) -> _NumberTable:
    """Ranges in the order they were noted in; returned sorted and without overlaps."""
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
