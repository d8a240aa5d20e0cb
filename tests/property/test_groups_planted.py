"""The model finds what it is for: each of these groups has one fault, most of them known from other queues."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fairway.errors import InvariantViolated
from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import GroupStateMachine, PullDecision, SettleDecision, SettleVerdict
from fairway.groups.attempts import added, failed
from fairway.groups.keys import Keys
from fairway.groups.lots import mask_of
from tests.property.test_groups_model import GroupMachine
from tests.property.test_ordered_groups import CoalescingMachine, OrderedMachine, RunsMachine, StrictMachine


class AcksWhatExpires(GroupStateMachine):
    """The messages of a consumer that vanished are taken as done."""

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        if event.kind is ActionKind.EXPIRE and not event.attempt:
            self._state.roster.of_id(event.consumer_id).forget()
        super().apply(event, now_ns)


class NeverCountsAttempts(GroupStateMachine):
    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        super().apply(
            event._replace(due_ms=0) if event.kind is ActionKind.RETRY and event.due_ms > 0 else event, now_ns
        )


class BelievesAnybody(GroupStateMachine):
    """An ack counts from one that does not hold the message."""

    def settle(self, *args: Any, **kwargs: Any) -> SettleDecision:
        name, verdict, first, attempt, ranges = args
        for member, lot in list(self._state.roster.held()):
            if verdict is SettleVerdict.ACK and lot.name == (first, attempt) and mask_of(ranges, first) & lot.mask:
                name = member.name
        return super().settle(name, verdict, first, attempt, ranges, **kwargs)


class NeverSendsAgain(GroupStateMachine):
    def pull(self, *args: Any, **kwargs: Any) -> PullDecision:
        for member in self._state.roster:
            member.unarrived.clear()
        return super().pull(*args, **kwargs)


class LosesPausesInTheSnapshot(GroupStateMachine):
    def snapshot(self) -> bytes:
        paused, self._state.is_paused = self._state.is_paused, False
        try:
            return super().snapshot()
        finally:
            self._state.is_paused = paused


class ForgetsTheGapBelowABelievedAck(GroupStateMachine):
    """After a crash the cursor jumps, and what lies below it is nobody's."""

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        if event.kind is ActionKind.ACK:
            self._state.cursor = max(self._state.cursor, event.ranges[0][0])
        super().apply(event, now_ns)


class KeepsOldLeases(GroupStateMachine):
    def begin_life(self, end: int, now_ns: int) -> Any:
        return super().begin_life(end, now_ns - 1)


class LetsTheNextPassOneThatFailed(GroupStateMachine):
    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        super().apply(event, now_ns)
        keys = self._state.keys
        if event.kind is ActionKind.RETRY and keys is not None:
            self._state._free(keys._advance(keys.keys_of(event.ranges)), event.time_ms)


class CountsWhatWasNotBegun(GroupStateMachine):
    """A consumer that dies takes an attempt from all of a run."""

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        keys = self._state.keys
        if event.kind is ActionKind.EXPIRE and keys is not None:
            keys._following.clear()
            keys._following_count = 0
        super().apply(event, now_ns)


class LosesRunsInTheSnapshot(GroupStateMachine):
    @classmethod
    def restore(cls, data: bytes) -> Any:
        group = super().restore(data)
        if group._state.keys is not None:
            group._state.keys._following.clear()
            group._state.keys._following_count = 0
        return group


class ExtendsRunsOfOthers(GroupStateMachine):
    def pull(self, *args: Any, **kwargs: Any) -> PullDecision:
        with patch.object(Keys, "is_all_in", lambda keys, key, _: key not in keys.halted):
            return super().pull(*args, **kwargs)


class RepeatsWhatFollowsNothing(GroupStateMachine):
    """A lost response comes again with messages behind those that others have by now."""

    def pull(self, *args: Any, **kwargs: Any) -> PullDecision:
        with patch.object(Keys, "loose", lambda _, held: held - held):
            return super().pull(*args, **kwargs)


class SeesNoKeys(GroupStateMachine):
    def pull(self, *args: Any, **kwargs: Any) -> PullDecision:
        kwargs["keys"] = [0] * len(kwargs["keys"])
        return super().pull(*args, **kwargs)


class LosesWhatIsParkedInTheSnapshot(GroupStateMachine):
    @classmethod
    def restore(cls, data: bytes) -> Any:
        group = super().restore(data)
        if group._state.keys is not None:
            group._state.keys.unpark([(each, 1) for each in group._state.keys.parked()])
        return group


class LetsTheYoungestGoFirst(GroupStateMachine):
    def pull(self, *args: Any, **kwargs: Any) -> PullDecision:
        roster = self._state.roster
        roster._by_id = dict(sorted(roster._by_id.items(), reverse=True))
        return super().pull(*args, **kwargs)


class DeclinesAllThatWait(GroupStateMachine):
    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        super().apply(event, now_ns)
        if event.kind is ActionKind.DECLINE and self._state.keys is not None:
            self._state.keys.unpark([(each, 1) for each in self._state.keys.parked()])


class LosesHistoriesInTheSnapshot(GroupStateMachine):
    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(super().snapshot())[:15])


class TakesAReleaseForAFailure(GroupStateMachine):
    """A message that was handed back untouched has a failed attempt in its history."""

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        super().apply(event, now_ns)
        lot = self._state.unheld_lots.get((event.lot, event.attempt))
        if event.kind is ActionKind.RETRY and event.due_ms == 0 and lot is not None:
            lot.history = added(lot.history, failed(event.attempt, event.time_ms, "", b""))


ORDERED = (
    (LetsTheNextPassOneThatFailed, OrderedMachine),
    (CountsWhatWasNotBegun, RunsMachine),
    (LosesRunsInTheSnapshot, RunsMachine),
    (ExtendsRunsOfOthers, RunsMachine),
    (RepeatsWhatFollowsNothing, RunsMachine),
    (SeesNoKeys, OrderedMachine),
    (LosesWhatIsParkedInTheSnapshot, OrderedMachine),
    (LetsTheYoungestGoFirst, StrictMachine),
    (DeclinesAllThatWait, CoalescingMachine),
)
PLANTED = (
    AcksWhatExpires,
    NeverCountsAttempts,
    BelievesAnybody,
    NeverSendsAgain,
    LosesPausesInTheSnapshot,
    ForgetsTheGapBelowABelievedAck,
    KeepsOldLeases,
    LosesHistoriesInTheSnapshot,
    TakesAReleaseForAFailure,
)


STEPS = (30, 45, 60)  # 2,000 stories of each length: what is drawn depends on the hashes of a process, too


@pytest.mark.parametrize(
    ("fault", "kind"),
    [*((fault, GroupMachine) for fault in PLANTED), *ORDERED],
    ids=lambda each: each.__name__,
)
def test_planted_fault_is_found(fault: type[GroupStateMachine], kind: type[GroupMachine]) -> None:
    machine = type("Planted", (kind,), {"group_class": fault})
    for steps in STEPS:
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=2_000,
                    stateful_step_count=steps,
                    database=None,
                    derandomize=True,
                    report_multiple_bugs=False,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except (AssertionError, InvariantViolated):
            return
    pytest.fail("the model does not find it")
