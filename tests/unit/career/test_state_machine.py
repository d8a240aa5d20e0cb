"""The law of a career: its table, and what holds whatever happens in whatever order."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fairway.career import state_machine as state_machine_module
from fairway.career.state_machine import CareerStateMachine, Confirmation, Duty, Hold, Intention
from fairway.errors import InvariantViolated

CERTAIN_NS, GONE_NS = 200, 300


def elected(state_machine: CareerStateMachine, token: int = 1, at_ns: int = 0) -> None:
    state_machine.begin(state_machine.duty(at_ns))
    state_machine.elected(confirmation(token, at_ns))


def confirmation(token: int, at_ns: int) -> Confirmation:
    return Confirmation(token, at_ns + CERTAIN_NS, at_ns + GONE_NS)


def in_office(state_machine: CareerStateMachine) -> None:
    elected(state_machine)
    state_machine.begin(state_machine.duty(0))
    state_machine.done()


def duties(state_machine: CareerStateMachine, now_ns: int = 0, most: int = 10) -> list[Duty]:
    """What it does from now on, where everything succeeds and every resignation is answered."""
    told = []
    for _ in range(most):
        duty = state_machine.duty(now_ns)
        told.append(duty)
        state_machine.begin(duty)
        if duty in (Duty.WAIT, Duty.END):
            break
        if duty is Duty.RESIGN:
            state_machine.resigned()
        elif duty is not Duty.CAMPAIGN:
            state_machine.done()
    return told


def test_a_career_from_beginning_to_end() -> None:
    state_machine = CareerStateMachine()
    elected(state_machine)
    assert duties(state_machine, most=3) == [Duty.INAUGURATE, Duty.EXECUTE, Duty.EXECUTE]
    state_machine.ask(Intention.END)
    assert duties(state_machine) == [Duty.HAND_OVER, Duty.RESIGN, Duty.END]


def test_execute_that_says_no_more_lets_another_one_have_its_turn() -> None:
    state_machine = CareerStateMachine()
    in_office(state_machine)
    state_machine.begin(state_machine.duty(0))
    state_machine.done(is_more=False)
    assert duties(state_machine) == [Duty.HAND_OVER, Duty.RESIGN, Duty.CAMPAIGN, Duty.WAIT]


def test_suspended_session_begins_nothing_and_goes_on_when_confirmed() -> None:
    state_machine = CareerStateMachine()
    in_office(state_machine)
    state_machine.suspended()
    assert state_machine.duty(1) is Duty.WAIT
    state_machine.confirmed(confirmation(1, 1), 1)
    assert state_machine.duty(1) is Duty.EXECUTE


def test_old_confirmation_begins_nothing_and_a_very_old_one_is_a_loss_for_good() -> None:
    state_machine = CareerStateMachine()
    in_office(state_machine)
    assert state_machine.duty(CERTAIN_NS - 1) is Duty.EXECUTE
    assert state_machine.duty(CERTAIN_NS) is Duty.WAIT
    assert state_machine.next_deadline(CERTAIN_NS) == GONE_NS
    assert state_machine.duty(GONE_NS) is Duty.HAND_OVER
    state_machine.confirmed(confirmation(1, GONE_NS), GONE_NS)
    assert state_machine.hold(GONE_NS) is Hold.LOST
    assert duties(state_machine, GONE_NS) == [Duty.HAND_OVER, Duty.RESIGN, Duty.CAMPAIGN, Duty.WAIT]


def test_one_that_was_never_inaugurated_hands_nothing_over() -> None:
    state_machine = CareerStateMachine()
    elected(state_machine)
    state_machine.lost(1)
    assert duties(state_machine) == [Duty.RESIGN, Duty.CAMPAIGN, Duty.WAIT]
    state_machine.elected(confirmation(2, 0))
    state_machine.begin(state_machine.duty(0))
    state_machine.broken_off()  # by inaugurate itself
    assert duties(state_machine)[0] is Duty.RESIGN


def test_end_while_waiting_in_line() -> None:
    state_machine = CareerStateMachine()
    state_machine.begin(state_machine.duty(0))
    state_machine.ask(Intention.END)
    assert state_machine.duty(0) is Duty.RESIGN
    state_machine.begin(Duty.RESIGN)
    state_machine.elected(confirmation(1, 0))  # too late: we have resigned
    assert state_machine.duty(0) is Duty.WAIT
    state_machine.resigned()
    assert state_machine.duty(0) is Duty.END


def test_events_of_an_earlier_reign_change_nothing() -> None:
    state_machine = CareerStateMachine()
    in_office(state_machine)
    state_machine.ask(Intention.YIELD)
    duties(state_machine)
    state_machine.elected(confirmation(2, 0))
    state_machine.lost(1)
    state_machine.confirmed(confirmation(1, 500), 0)
    assert state_machine.hold(0) is Hold.HELD
    assert state_machine.hold(GONE_NS) is Hold.LOST


def test_tokens_grow() -> None:
    state_machine = CareerStateMachine()
    in_office(state_machine)
    state_machine.ask(Intention.YIELD)
    duties(state_machine)
    with pytest.raises(InvariantViolated, match="larger token"):
        state_machine.elected(confirmation(1, 0))


def test_nothing_that_was_not_begun_can_end() -> None:
    with pytest.raises(InvariantViolated, match="out has begun nothing"):
        CareerStateMachine().done()


@pytest.mark.parametrize(
    ("in_hand", "what", "goes_on"),
    [
        ("finish", "suspended", True),
        ("finish", "asked to go", True),
        ("finish", "lost", False),
        ("abort", "suspended", False),
        ("abort", "asked to go", False),
        ("abort", "lost", False),
        ("abort", "nothing", True),
    ],
)
def test_what_is_in_hand_is_finished_or_aborted_as_declared(
    in_hand: Literal["finish", "abort"], what: str, goes_on: bool
) -> None:
    state_machine = CareerStateMachine(in_hand)
    in_office(state_machine)
    state_machine.begin(state_machine.duty(0))
    if what == "suspended":
        state_machine.suspended()
    elif what == "asked to go":
        state_machine.ask(Intention.YIELD)
    elif what == "lost":
        state_machine.lost(1)
    assert state_machine.may_go_on(0) is goes_on


# --- in any order ----------------------------------------------------------------------------------------------------


class LawMachine(RuleBasedStateMachine):
    """An election that says anything at any time, a career that takes its time; and a plain account beside it."""

    state_machine_type: type[CareerStateMachine] = CareerStateMachine

    @initialize(in_hand=st.sampled_from(["finish", "abort"]))
    def begin(self, in_hand: Literal["finish", "abort"]) -> None:
        self.state_machine = self.state_machine_type(in_hand)
        self.now_ns = 0
        self.token = 0
        self.busy: Duty | None = None
        self.parts: list[Duty] = []  # of this reign
        self.is_seated = False
        self.has_resigned = False
        self.until_ns = self.gone_ns = 0
        self.is_suspended = self.is_lost = False
        self.intention = Intention.STAY

    @precondition(lambda self: hasattr(self, "state_machine") and self.busy is None and not self.is_seated)
    @rule(is_inaugurated=st.booleans())
    def all_goes_well(self, is_inaugurated: bool) -> None:
        """The way into office, which chance alone would seldom find."""
        self.candidate_does_its_duty()
        self.election_elects()
        if is_inaugurated and self.is_seated:
            self.candidate_does_its_duty()
            if self.busy is Duty.INAUGURATE:
                self.part_ends(is_more=True)

    @rule()
    def election_elects(self) -> None:
        if self.busy is None and not self.is_seated:
            self.token += 1
            before = self.state_machine.phase
            self.state_machine.elected(confirmation(self.token, self.now_ns))
            if before is not self.state_machine.phase:
                self.is_seated, self.parts = True, []
                self.until_ns, self.gone_ns = self.now_ns + CERTAIN_NS, self.now_ns + GONE_NS
                self.is_suspended = self.is_lost = False

    @rule(stale=st.booleans())
    def election_confirms(self, stale: bool) -> None:
        token = self.token - 1 if stale else self.token
        self.state_machine.confirmed(confirmation(token, self.now_ns), self.now_ns)
        self.is_lost = self.is_lost or self.now_ns >= self.gone_ns
        if not stale and self.is_seated and not self.is_lost:
            self.until_ns, self.gone_ns = self.now_ns + CERTAIN_NS, self.now_ns + GONE_NS
            self.is_suspended = False

    @rule()
    def election_suspends(self) -> None:
        self.state_machine.suspended()
        self.is_suspended = True

    @rule(stale=st.booleans())
    def election_deposes(self, stale: bool) -> None:
        self.state_machine.lost(self.token - 1 if stale else self.token)
        self.is_lost = self.is_lost or not stale

    @rule()
    def election_confirms_too_late(self) -> None:
        self.election_deposes(stale=False)
        self.election_confirms(stale=False)

    @precondition(lambda self: getattr(self, "has_resigned", False))
    @rule()
    def election_answers(self) -> None:
        self.state_machine.resigned()
        self.has_resigned = self.is_seated = False
        self.intention = Intention.STAY if self.intention is Intention.YIELD else self.intention

    @rule(ns=st.sampled_from([1, 99, 100, 250]))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns

    # after END nothing happens
    @rule(intention=st.sampled_from([*[Intention.STAY] * 8, Intention.YIELD, Intention.YIELD, Intention.END]))
    def somebody_intends(self, intention: Intention) -> None:
        self.state_machine.ask(intention)
        self.intention = max(self.intention, intention)

    @precondition(lambda self: hasattr(self, "state_machine") and self.busy is None)
    @rule()
    def candidate_does_its_duty(self) -> None:
        duty = self.state_machine.duty(self.now_ns)
        self.is_lost = self.is_lost or self.now_ns >= self.gone_ns
        is_certain = not self.is_lost and not self.is_suspended and self.now_ns < self.until_ns
        if duty in (Duty.INAUGURATE, Duty.EXECUTE):
            assert self.is_seated
            assert is_certain
            assert self.intention is Intention.STAY
        if duty is Duty.EXECUTE:
            assert Duty.INAUGURATE in self.parts
        if duty is Duty.HAND_OVER:
            assert self.is_lost or self.intention is not Intention.STAY
        if duty in (Duty.EXECUTE, Duty.HAND_OVER, Duty.INAUGURATE):
            assert Duty.HAND_OVER not in self.parts
        if duty is Duty.RESIGN:
            assert (Duty.INAUGURATE in self.parts) == (Duty.HAND_OVER in self.parts)
        if duty is Duty.END:
            assert self.intention is Intention.END
            assert not self.is_seated
        self._begin(duty)

    def _begin(self, duty: Duty) -> None:
        self.state_machine.begin(duty)
        if duty in (Duty.INAUGURATE, Duty.EXECUTE, Duty.HAND_OVER):
            self.busy = duty
        elif duty is Duty.RESIGN:
            self.has_resigned, self.parts = True, []

    @precondition(lambda self: getattr(self, "busy", None) is not None)
    @rule(is_more=st.sampled_from([True, True, True, False]))
    def part_ends(self, is_more: bool) -> None:
        assert self.busy is not None
        self.state_machine.done(is_more=is_more)
        self.parts.append(self.busy)
        self.busy = None
        self.intention = self.intention if is_more else max(self.intention, Intention.YIELD)

    @precondition(lambda self: getattr(self, "busy", None) is not None)
    @rule()
    def part_fails(self) -> None:
        assert self.busy is not None
        self.state_machine.broken_off()
        if self.busy is not Duty.INAUGURATE:
            self.parts.append(self.busy)
        self.busy = None

    @invariant()
    def what_is_begun_is_told_the_truth(self) -> None:
        if getattr(self, "busy", None) is None:
            return
        is_lost = self.is_lost or self.now_ns >= self.gone_ns
        is_certain = not is_lost and not self.is_suspended and self.now_ns < self.until_ns
        expected = not is_lost
        if self.state_machine.in_hand == "abort" and self.busy is Duty.EXECUTE:
            expected = is_certain and self.intention is Intention.STAY
        assert self.state_machine.may_go_on(self.now_ns) is expected
        self.is_lost = is_lost  # looking at it makes it so for good

    @invariant()
    def it_does_not_sleep_past_what_would_change_its_mind(self) -> None:
        if (
            not hasattr(self, "state_machine")
            or self.busy is not None
            or self.state_machine.duty(self.now_ns) is not Duty.WAIT
        ):
            return
        self.is_lost = self.is_lost or self.now_ns >= self.gone_ns
        due_ns = self.state_machine.next_deadline(self.now_ns)
        if self.is_seated and not self.has_resigned:
            assert due_ns == min(due for due in (self.until_ns, self.gone_ns) if due > self.now_ns)


TestLaw = LawMachine.TestCase
TestLaw.settings = settings(max_examples=80, stateful_step_count=40)


class BelievesTheDead(CareerStateMachine):
    """A late confirmation revives an office that was lost."""

    def confirmed(self, confirmation: Confirmation, now_ns: int) -> None:
        self._is_lost = False
        super().confirmed(confirmation, now_ns)


class BelievesAnybody(CareerStateMachine):
    """A late confirmation of an earlier reign counts for this one."""

    def confirmed(self, confirmation: Confirmation, now_ns: int) -> None:
        token = self.token or 0
        super().confirmed(Confirmation(token, confirmation.until_ns, confirmation.gone_ns), now_ns)


class ExecutesInSuspense(CareerStateMachine):
    def suspended(self) -> None:
        """Nothing."""


class NeverLooksAtTheClock(CareerStateMachine):
    def hold(self, now_ns: int) -> Hold:
        return super().hold(0)


class LeavesWithoutHandingOver(CareerStateMachine):
    def duty(self, now_ns: int) -> Duty:
        duty = super().duty(now_ns)
        return Duty.RESIGN if duty is Duty.HAND_OVER else duty


@pytest.mark.parametrize(
    "planted",
    [BelievesTheDead, BelievesAnybody, ExecutesInSuspense, NeverLooksAtTheClock, LeavesWithoutHandingOver],
)
def test_account_finds_a_planted_fault(planted: type[CareerStateMachine]) -> None:
    machine = type(f"With{planted.__name__}", (LawMachine,), {"state_machine_type": planted})
    chosen = settings(
        max_examples=3_000,  # it ends with the first that finds the fault
        stateful_step_count=30,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(machine, settings=chosen)


def test_every_phase_that_waits_for_a_decision_has_one() -> None:
    phases = state_machine_module.Phase
    busy = {phases.INAUGURATING, phases.EXECUTING, phases.HANDING_OVER, phases.ENDED}
    decided: set[Any] = {phase for phase, _ in state_machine_module._OUTSIDE} | {
        phase for phase, _, _ in state_machine_module._LEADING
    }
    assert decided | busy == set(phases)
    assert len(state_machine_module._LEADING) == 2 * 3 * 2
