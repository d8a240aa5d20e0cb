"""Rows are found, freed and used again; and what is known of messages that have no rows yet, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from fairway.delay.schedule.bucket_record import BucketIndex
from fairway.delay.schedule.pending_rows import DecisionIndex, RowLocation, RowNumbers, Rows, RowState
from fairway.runtime.rng import SeededRng

SEQUENCES = np.arange(60, dtype=np.uint64)


def add(rows: Rows, first: int, count: int, subject_id: int = 1) -> RowNumbers:
    sequences = np.arange(first, first + count, dtype=np.uint64)
    return rows.add(subject_id, sequences, BucketIndex(sequences.astype(np.int64), sequences, sequences, sequences))


def test_rows_grow_and_keep_what_they_hold() -> None:
    rows = Rows()
    for first in range(0, 5_000, 100):
        rows.put(add(rows, first, 100), 3, first)
    assert len(rows) == len(rows.in_state(RowState.PENDING)) == 5_000
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


def told(decision_index: DecisionIndex, subject_id: int) -> tuple[list[int], dict[int, int]]:
    which, due_ms = decision_index.dues(subject_id, SEQUENCES)
    return decision_index.states(subject_id, SEQUENCES).tolist(), dict(
        zip(which.tolist(), due_ms.tolist(), strict=True)
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_later_of_two_notes_holds_and_what_is_pruned_is_forgotten(seed: int) -> None:
    rng = SeededRng(f"ledger {seed}")
    decision_index = DecisionIndex()
    states: dict[int, dict[int, int]] = {1: {}, 2: {}}
    dues: dict[int, dict[int, int]] = {1: {}, 2: {}}
    for number in range(40):
        subject_id, first = 1 + rng.below(2), rng.below(50)
        members = range(first, first + 1 + rng.below(8))
        ranges = ((members.start, len(members)),)
        state = (RowState.PENDING, RowState.INTENDED, RowState.DISPATCHED, RowState.CANCELLED)[rng.below(4)]
        if state is RowState.PENDING:
            decision_index.note_due(subject_id, ranges, number)
            dues[subject_id] |= dict.fromkeys(members, number)
        else:
            decision_index.note(subject_id, ranges, state)
            states[subject_id] |= dict.fromkeys(members, int(state))
        for each in (1, 2):
            expected = [states[each].get(sequence, int(RowState.PENDING)) for sequence in range(60)]
            assert told(decision_index, each) == (expected, dues[each])
    named: dict[int, set[int]] = {1: set(), 2: set()}
    for subject_id, sequences in decision_index.named():
        named[subject_id] |= set(sequences.tolist())
    assert named == {each: {*states[each], *dues[each]} for each in (1, 2)}
    decision_index.prune(1, 30)
    left = {sequence: state for sequence, state in states[1].items() if sequence >= 30}
    for sequence in range(30, 60):
        assert told(decision_index, 1)[0][sequence] == left.get(sequence, int(RowState.PENDING))
    assert told(decision_index, 1)[1] == {sequence: due for sequence, due in dues[1].items() if sequence >= 30}
    decision_index.prune(1, 60)
    assert decision_index.subjects == {2}


def test_intended_and_then_sent_is_one_range() -> None:
    decision_index = DecisionIndex()
    decision_index.note(1, ((5, 10), (20, 3)), RowState.INTENDED)
    decision_index.note(1, ((5, 10),), RowState.DISPATCHED)
    assert decision_index.ranges(1, RowState.DISPATCHED).tolist() == [[5, 10]]
    assert decision_index.ranges(1, RowState.INTENDED).tolist() == [[20, 3]]
    assert decision_index.ranges(2, RowState.INTENDED).tolist() == []
