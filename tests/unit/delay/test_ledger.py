"""What is known of messages that have no rows yet, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from fairway.delay.ledger import DecisionIndex
from fairway.delay.rows import RowState
from fairway.world.rng import SeededRng

SEQUENCES = np.arange(60, dtype=np.uint64)


def told(ledger: DecisionIndex, subject_id: int) -> tuple[list[int], dict[int, int]]:
    which, due_ms = ledger.dues(subject_id, SEQUENCES)
    return ledger.states(subject_id, SEQUENCES).tolist(), dict(zip(which.tolist(), due_ms.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_the_later_of_two_notes_holds_and_what_is_pruned_is_forgotten(seed: int) -> None:
    rng = SeededRng(f"ledger {seed}")
    ledger = DecisionIndex()
    states: dict[int, dict[int, int]] = {1: {}, 2: {}}
    dues: dict[int, dict[int, int]] = {1: {}, 2: {}}
    for number in range(40):
        subject_id, first = 1 + rng.below(2), rng.below(50)
        members = range(first, first + 1 + rng.below(8))
        ranges = ((members.start, len(members)),)
        state = (RowState.PENDING, RowState.INTENDED, RowState.DISPATCHED, RowState.CANCELLED)[rng.below(4)]
        if state is RowState.PENDING:
            ledger.note_due(subject_id, ranges, number)
            dues[subject_id] |= dict.fromkeys(members, number)
        else:
            ledger.note(subject_id, ranges, state)
            states[subject_id] |= dict.fromkeys(members, int(state))
        for each in (1, 2):
            expected = [states[each].get(sequence, int(RowState.PENDING)) for sequence in range(60)]
            assert told(ledger, each) == (expected, dues[each])
    named: dict[int, set[int]] = {1: set(), 2: set()}
    for subject_id, sequences in ledger.named():
        named[subject_id] |= set(sequences.tolist())
    assert named == {each: {*states[each], *dues[each]} for each in (1, 2)}
    ledger.prune(1, 30)
    left = {sequence: state for sequence, state in states[1].items() if sequence >= 30}
    for sequence in range(30, 60):
        assert told(ledger, 1)[0][sequence] == left.get(sequence, int(RowState.PENDING))
    assert told(ledger, 1)[1] == {sequence: due for sequence, due in dues[1].items() if sequence >= 30}
    ledger.prune(1, 60)
    assert ledger.subjects == {2}


def test_intended_and_then_sent_is_one_range() -> None:
    ledger = DecisionIndex()
    ledger.note(1, ((5, 10), (20, 3)), RowState.INTENDED)
    ledger.note(1, ((5, 10),), RowState.DISPATCHED)
    assert ledger.ranges(1, RowState.DISPATCHED).tolist() == [[5, 10]]
    assert ledger.ranges(1, RowState.INTENDED).tolist() == [[20, 3]]
    assert ledger.ranges(2, RowState.INTENDED).tolist() == []
