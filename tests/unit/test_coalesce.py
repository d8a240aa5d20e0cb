"""The table of the four states, and the machine that follows it."""

from __future__ import annotations

import itertools

import pytest

from fairway.coalesce import TABLE, CoalescingAnswer, CoalescingEvent, CoalescingState, Keep, Machine
from fairway.errors import InvariantViolated


def test_third_request_is_declined_and_the_second_follows_the_first() -> None:
    machine: Machine[str] = Machine()
    answers = [machine.enqueue(who).answer for who in ("one", "two", "three")]
    assert answers == [CoalescingAnswer.ACCEPT, CoalescingAnswer.WAIT, CoalescingAnswer.DECLINE]
    assert (machine.head, machine.tail, machine.state) == ("one", "two", CoalescingState.BLOCK)
    assert machine.dequeue("one") is CoalescingAnswer.PROMOTED
    assert (machine.head, machine.tail, machine.state) == ("two", None, CoalescingState.PROCESS)
    assert machine.dequeue("two") is CoalescingAnswer.FREED
    assert (machine.head, machine.tail, machine.state) == (None, None, CoalescingState.INIT)


def test_who_is_declined_is_said() -> None:
    machine = Machine("one", "two")
    assert machine.enqueue("three") == (CoalescingAnswer.DECLINE, "three")
    assert machine.enqueue("four", Keep.LATEST) == (CoalescingAnswer.WAIT, "two")
    assert machine.dequeue("one") is CoalescingAnswer.PROMOTED
    assert machine.head == "four"


@pytest.mark.parametrize("stranger", ["tail", "evicted", "nobody"])
def test_dequeue_by_one_that_is_not_the_head_does_nothing(stranger: str) -> None:
    machine = Machine("evicted", "head")
    machine.dequeue("evicted")
    machine.enqueue("tail")
    assert machine.dequeue(stranger) is CoalescingAnswer.IGNORED
    assert (machine.head, machine.tail, machine.state) == ("head", "tail", CoalescingState.BLOCK)


def test_dequeue_of_nobody_does_nothing() -> None:
    machine: Machine[int] = Machine()
    assert machine.dequeue(1) is CoalescingAnswer.IGNORED
    assert machine.withdraw(1) is CoalescingAnswer.IGNORED


def test_tail_may_go_and_only_the_tail() -> None:
    machine = Machine(1, 2)
    assert machine.withdraw(1) is CoalescingAnswer.IGNORED
    assert machine.withdraw(2) is CoalescingAnswer.WITHDRAWN
    assert (machine.head, machine.tail, machine.state) == (1, None, CoalescingState.PROCESS)
    assert machine.enqueue(3).answer is CoalescingAnswer.WAIT


def test_one_that_asks_again_is_told_the_same_and_takes_no_second_place() -> None:
    machine = Machine(0, 7)  # 0 is somebody: sequences begin there
    assert machine.enqueue(0).answer is CoalescingAnswer.ACCEPT
    assert machine.enqueue(7).answer is CoalescingAnswer.WAIT
    assert (machine.head, machine.tail) == (0, 7)
    assert machine.dequeue(0) is CoalescingAnswer.PROMOTED


@pytest.mark.parametrize(
    ("head", "tail", "state"),
    [(None, None, CoalescingState.INIT), (1, None, CoalescingState.PROCESS), (1, 2, CoalescingState.BLOCK)],
)
def test_machine_from_those_who_were_in_it(head: int | None, tail: int | None, state: CoalescingState) -> None:
    assert Machine(head, tail).state is state


def test_nobody_waits_for_nobody() -> None:
    with pytest.raises(InvariantViolated, match="waits for nobody"):
        Machine(None, 2)


def test_what_the_table_does_not_have_is_a_bug() -> None:
    machine: Machine[int] = Machine()
    with pytest.raises(InvariantViolated, match="INIT has no way on when it hears DEQUEUE"):
        machine._move(CoalescingEvent.DEQUEUE)


def test_every_state_is_reached_and_left_and_decline_leads_back_by_itself() -> None:
    reached = {following for following, _ in TABLE.values()}
    assert reached == set(CoalescingState)
    assert {state for state, _ in TABLE} == set(CoalescingState)
    assert [event for state, event in TABLE if state is CoalescingState.DECLINE] == [CoalescingEvent.SETTLE]
    assert {state for state, event in TABLE if event is CoalescingEvent.ENQUEUE} == set(CoalescingState) - {
        CoalescingState.DECLINE
    }


def test_state_is_always_what_head_and_tail_say() -> None:
    """All stories of five steps by three requests."""
    steps = [(name, who) for name in ("enqueue", "dequeue", "withdraw") for who in (1, 2, 3)]
    for story in itertools.product(steps, repeat=5):
        machine: Machine[int] = Machine()
        for name, who in story:
            getattr(machine, name)(who)
            assert machine.state is Machine(machine.head, machine.tail).state
            assert machine.head is None or machine.head != machine.tail
