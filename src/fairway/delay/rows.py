"""An index row per message, as arrays: 61 bytes each, so that ten million of them are in memory and every question
(which are due, which have this key, how many by day) is a pass of numpy over a column.

A row is born when its message is durable in the message log, and freed when nothing more is to be said of it
(`forgetting`). Its place is a token of `young` batches until the bucket has it (file 0), then bucket file, position and
index. Its state only moves forward:

    PENDING ──► INTENDED ──► DISPATCHED        an intent names it; the broker has it
       └──────► CANCELLED

A rescheduled row stays PENDING with another due time.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import BucketIndex, Sequences
from fairway.delay.wheel import RowNumbers
from fairway.names import Subject

_POSITION_BITS = 40  # of a place in a bucket file: 1 TiB
_GROWTH = 2  # a column is copied when it is full; what was never written to takes no memory


class RowState(enum.IntEnum):
    """What has become of a message."""

    FREE = 0  # no message: the row may be used again
    PENDING = 1
    INTENDED = 2
    DISPATCHED = 3
    CANCELLED = 4
    LOST = 5  # its record can no longer be read


class RowLocation(NamedTuple):
    """Where one message lies."""

    file: int
    position: int
    at: int  # in its piece


class Rows:
    """All messages that the delay server knows of. Columns are read freely; only the owner's parts write them."""

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
        self.is_rescheduled: NDArray[np.bool_] = np.zeros(0, np.bool_)  # its bucket says another due time
        self._free: list[RowNumbers] = []
        self._free_count = 0
        self._done = 0
        self.names: dict[int, Subject] = {}  # of subjects, as the pieces say: the message log may have lost one

    def __len__(self) -> int:
        return self.end - self._free_count

    @property
    def pending(self) -> int:
        """Messages that are not done with: what a quota counts."""
        return len(self) - self._done

    @property
    def bytes(self) -> int:
        """What the columns take of memory, as far as they were ever used."""
        return self.end * sum(each.itemsize for each in vars(self).values() if isinstance(each, np.ndarray))

    @property
    def index_columns(self) -> BucketIndex:
        return BucketIndex(self.due_ms, self.key, self.id_high, self.id_low)

    def become(self, rows: RowNumbers, state: RowState | NDArray[np.uint8]) -> None:
        """Move rows on to a state, or each to its own."""
        self._done -= int(np.count_nonzero(self.state[rows] >= RowState.DISPATCHED))
        self.state[rows] = state
        if isinstance(state, RowState):
            self._done += len(rows) if state >= RowState.DISPATCHED else 0
        else:
            self._done += int(np.count_nonzero(state >= RowState.DISPATCHED))

    def add(self, subject_id: int | NDArray[np.uint32], sequences: Sequences, index: BucketIndex) -> RowNumbers:
        """New PENDING rows that have no place yet."""
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
        """All rows of one piece, in its order, have a place."""
        self.put_each(rows, file, position, np.arange(len(rows)))

    def put_each(
        self,
        rows: RowNumbers,
        file: int,
        position: int | NDArray[np.int64] | NDArray[np.uint64],
        index: NDArray[np.int64],
    ) -> None:
        """Rows of several pieces of one file."""
        self.file[rows] = file
        self.position[rows] = position
        self.index[rows] = index

    def spots(self, rows: RowNumbers) -> NDArray[np.int64]:
        """A number for each row that is the same for rows of one piece alone; `spot_of` undoes it."""
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
        """The rows for which a mask over the used part of the columns holds."""
        return np.flatnonzero(mask)

    def of_file(self, file: int) -> RowNumbers:
        return self.where((self.file[: self.end] == file) & (self.state[: self.end] != RowState.FREE))

    def in_state(self, state: RowState) -> RowNumbers:
        return self.where(self.state[: self.end] == state)

    def count(self, state: RowState) -> int:
        return int(np.count_nonzero(self.state[: self.end] == state))

    def find(self, subject_id: int, sequences: Sequences) -> RowNumbers:
        """The rows of those messages that are here, ordered by sequence."""
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
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def reserve(self, count: int) -> None:
        """Have room for so many: they need not be copied then. Room that is never used costs nothing."""
        if count > len(self.state):
            self._grow(count)

    def _grow(self, capacity: int) -> None:
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                larger = np.zeros(capacity, column.dtype)
                larger[: len(column)] = column
                setattr(self, name, larger)


def spot_of(number: int) -> tuple[int, int]:
    """File and position of one of `Rows.spots`."""
    return number >> _POSITION_BITS, number & ((1 << _POSITION_BITS) - 1)
