"""An index row per message, as arrays: 60 bytes each, so that ten million of them are in memory and every question
(which are due, which have this key, how many by day) is a pass of numpy over a column.

A row is born when its message is durable in the message log, and freed when its bucket is deleted. Its place is a token
of `young` pieces until the bucket has it (file 0), then bucket file, position and index. Its state only moves forward:

    PENDING ──► INTENDED ──► DISPATCHED        an intent names it; the broker has it
       └──────► CANCELLED

A rescheduled row stays PENDING with another due time.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway.delay.piece import Index, Sequences
from fairway.delay.wheel import RowNumbers
from fairway.names import Subject

_GROWTH = 1.25  # a column is copied when it is full: a quarter more keeps the memory for 10 M rows below 800 MB


class State(enum.IntEnum):
    """What has become of a message."""

    FREE = 0  # no message: the row may be used again
    PENDING = 1
    INTENDED = 2
    DISPATCHED = 3
    CANCELLED = 4
    LOST = 5  # its record can no longer be read


class Place(NamedTuple):
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
        self._free: RowNumbers = np.zeros(0, np.int64)
        self._done = 0
        self.names: dict[int, Subject] = {}  # of subjects, as the pieces say: the message log may have lost one

    def __len__(self) -> int:
        return self.end - len(self._free)

    @property
    def pending(self) -> int:
        """Messages that are not done with: what a quota counts."""
        return len(self) - self._done

    def become(self, rows: RowNumbers, state: State | NDArray[np.uint8]) -> None:
        """Move rows on to a state, or each to its own."""
        self._done -= self._count_done(rows)
        self.state[rows] = state
        self._done += self._count_done(rows)

    def _count_done(self, rows: RowNumbers) -> int:
        return int(np.count_nonzero(self.state[rows] >= State.DISPATCHED))

    def add(self, subject_id: int, sequences: Sequences, index: Index) -> RowNumbers:
        """New PENDING rows that have no place yet."""
        rows = self._take(len(sequences))
        self.subject_id[rows] = subject_id
        self.sequence[rows] = sequences
        self.id_high[rows] = index.id_high
        self.id_low[rows] = index.id_low
        self.key[rows] = index.key
        self.due_ms[rows] = index.due_ms
        self.state[rows] = State.PENDING
        self.file[rows] = 0
        self.in_wheel[rows] = False
        self.is_rescheduled[rows] = False
        return rows

    def put(self, rows: RowNumbers, file: int, position: int) -> None:
        """All rows of one piece, in its order, have a place."""
        self.file[rows] = file
        self.position[rows] = position
        self.index[rows] = np.arange(len(rows), dtype=np.uint16)

    def place(self, row: int) -> Place:
        return Place(int(self.file[row]), int(self.position[row]), int(self.index[row]))

    def free(self, rows: RowNumbers) -> None:
        """Forget these messages."""
        self.become(rows, State.FREE)
        self._free = np.concatenate((self._free, rows))

    def where(self, mask: NDArray[np.bool_]) -> RowNumbers:
        """The rows for which a mask over the used part of the columns holds."""
        return np.flatnonzero(mask)

    def of_file(self, file: int) -> RowNumbers:
        return self.where((self.file[: self.end] == file) & (self.state[: self.end] != State.FREE))

    def in_state(self, state: State) -> RowNumbers:
        return self.where(self.state[: self.end] == state)

    def count(self, state: State) -> int:
        return int(np.count_nonzero(self.state[: self.end] == state))

    def find(self, subject_id: int, sequences: Sequences) -> RowNumbers:
        """The rows of those messages that are here, ordered by sequence."""
        mask = (self.subject_id[: self.end] == subject_id) & (self.state[: self.end] != State.FREE)
        rows = self.where(mask)
        rows = rows[np.isin(self.sequence[rows], sequences)]
        return rows[np.argsort(self.sequence[rows], kind="stable")]

    def _take(self, count: int) -> RowNumbers:
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        self._free = self._free[: len(self._free) - len(reused)]
        fresh = np.arange(self.end, self.end + count - len(reused), dtype=np.int64)
        self.end += len(fresh)
        if self.end > len(self.state):
            self._grow(max(self.end, int(len(self.state) * _GROWTH), 1_024))
        return np.concatenate((reused, fresh))

    def _grow(self, capacity: int) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray) and name != "_free":
                larger = np.zeros(capacity, column.dtype)
                larger[: len(column)] = column
                setattr(self, name, larger)
