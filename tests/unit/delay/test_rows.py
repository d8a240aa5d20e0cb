"""Rows are found, freed and used again."""

from __future__ import annotations

import numpy as np

from fairway.delay.schedule.bucket_record import BucketIndex
from fairway.delay.schedule.pending_rows import RowLocation, Rows, RowState
from fairway.delay.schedule.wheel import RowNumbers


def add(rows: Rows, first: int, count: int, subject_id: int = 1) -> RowNumbers:
    sequences = np.arange(first, first + count, dtype=np.uint64)
    return rows.add(subject_id, sequences, BucketIndex(sequences.astype(np.int64), sequences, sequences, sequences))


def test_rows_grow_and_keep_what_they_hold() -> None:
    rows = Rows()
    for first in range(0, 5_000, 100):
        rows.put(add(rows, first, 100), 3, first)
    assert len(rows) == rows.count(RowState.PENDING) == 5_000
    assert rows.sequence[: rows.end].tolist() == list(range(5_000))
    assert rows.place(4_242) == RowLocation(3, 4_200, 42)


def test_freed_rows_are_used_again() -> None:
    rows = Rows()
    old = add(rows, 0, 10)
    rows.is_rescheduled[old] = True
    rows.free(old[:4])
    assert len(rows) == 6
    new = add(rows, 100, 6)
    assert rows.end == 12
    assert set(new.tolist()) >= set(old[:4].tolist())
    assert not rows.is_rescheduled[new].any()
    assert (rows.file[new] == 0).all()


def test_messages_are_found_by_their_names() -> None:
    rows = Rows()
    add(rows, 0, 10, subject_id=1)
    add(rows, 0, 10, subject_id=2)
    found = rows.find(2, np.array([7, 3, 99], np.uint64))
    assert rows.sequence[found].tolist() == [3, 7]
    assert set(rows.subject_id[found].tolist()) == {2}


def test_a_quota_counts_what_is_not_done_with() -> None:
    rows = Rows()
    numbers = add(rows, 0, 10)
    rows.become(numbers[:3], RowState.INTENDED)
    rows.become(numbers[:2], RowState.DISPATCHED)
    rows.become(numbers[5:6], RowState.CANCELLED)
    assert (rows.pending, len(rows)) == (7, 10)
    rows.free(numbers[:2])
    assert (rows.pending, len(rows)) == (7, 8)
