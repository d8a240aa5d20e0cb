"""The wheel gives every row once, when it is due, whatever the clock does; against a list that does the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairway.delay.schedule.wheel import TICK_MS, Wheel

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 500), max_size=6)),
        st.tuples(st.just("cancel"), st.integers(0, 100)),
        st.tuples(st.just("due"), st.integers(0, 500)),  # the clock goes back as often as on
    ),
    max_size=60,
)


@given(STEPS)
def test_like_a_list(steps: list[tuple[str, object]]) -> None:
    wheel, held, following = Wheel(), dict[int, int](), 0
    for step, value in steps:
        if step == "add":
            assert isinstance(value, list)
            rows = list(range(following, following + len(value)))
            following += len(value)
            held.update(zip(rows, value, strict=True))
            wheel.add(np.array(rows, np.int64), np.array(value, np.int64))
        elif step == "cancel":
            assert isinstance(value, int)
            due_ms = held.pop(value, None)
            assert wheel.cancel(value, due_ms or 0) == (due_ms is not None)
        else:
            assert isinstance(value, int)
            due = {row for row, due_ms in held.items() if due_ms <= value}
            found = wheel.due(value).tolist()
            assert len(found) == len(due)
            assert set(found) == due
            held = {row: due_ms for row, due_ms in held.items() if row not in due}
        assert len(wheel) == len(held)
        soonest = min(held.values(), default=None)
        assert wheel.next_ms() == (None if soonest is None else -(-soonest // TICK_MS) * TICK_MS)


def test_a_row_is_never_early_and_at_most_a_tick_late() -> None:
    wheel = Wheel()
    wheel.add(np.array([7]), np.array([1_001]))
    assert wheel.due(1_000).tolist() == []
    assert wheel.next_ms() == 1_010
    assert wheel.due(1_010).tolist() == [7]
    assert wheel.due(9_999).tolist() == []


def test_runs_stay_few() -> None:
    wheel = Wheel()
    for row in range(1_000):
        wheel.add(np.array([row]), np.array([row * 37 % 1_009]))
    assert len(wheel._runs) <= 16
    assert sorted(wheel.due(2_000).tolist()) == list(range(1_000))
