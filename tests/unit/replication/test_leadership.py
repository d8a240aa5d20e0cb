"""Who leads, who follows, who waits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.replication import leadership
from fairway.replication.leadership import FollowDecision, Me, OwnStep, Wait

ME = Me("a", 11, 12, epoch=4)
RECORD = GroupRecord("broker", 5, "b", ["b", "a"], 2, 11, 12, members=["b", "a"])


def member(directory: str, role: str = "follower") -> RegisteredCopy:
    return RegisteredCopy(directory, f"host-{directory}", 20880, role)


def living(*directories: str) -> dict[str, RegisteredCopy]:
    return {each: member(each) for each in directories}


def test_a_group_that_nobody_knows_is_made_by_whoever_comes_first() -> None:
    assert leadership.decide("g", None, living("a"), ME) == OwnStep.CREATE
    made = leadership.founded(ME, min_in_sync=2)
    assert (made.epoch, made.master, made.in_sync, made.min_in_sync) == (5, "a", ["a"], 2)
    assert (made.messages_id, made.actions_id, made.members) == (11, 12, ["a"])


def test_who_was_in_a_group_does_not_make_it_again_by_itself() -> None:
    """A registry that lost everything must not let an old copy begin anew, and the others cut off what it lacks."""
    decision = leadership.decide("g", None, living("a"), replace(ME, has_promised=True))
    assert isinstance(decision, Wait)
    assert "fairway broker promote g --to a --accept-data-loss" in decision.why


def test_an_empty_copy_does_not_make_a_group_beside_those_that_hold_its_messages() -> None:
    """Else they would belong to a group of other logs, and the registry would name a master that has nothing."""
    empty = replace(ME, epoch=0)
    ends = {"b": [4_096, 128], "c": [8_192, 64]}
    others = {name: msgspec.structs.replace(member(name), ends=each) for name, each in ends.items()}
    decision = leadership.decide("g", None, {**living("a"), **others}, empty)
    assert isinstance(decision, Wait)
    assert "b and c hold messages" in decision.why
    assert "fairway broker promote g --to c --accept-data-loss" in decision.why, "it has the most"
    assert leadership.decide("g", None, living("a", "b"), empty) == OwnStep.CREATE, "nobody has anything"
    assert leadership.decide("g", None, {**living("a"), **others}, ME) == OwnStep.CREATE, "a broker that stood alone"


def test_a_master_that_lives_is_followed() -> None:
    decision = leadership.decide("g", RECORD, living("a", "b"), ME)
    assert decision == FollowDecision("b", "host-b", 20880, 5)
    assert isinstance(decision, FollowDecision)
    assert decision.address == "host-b:20880"


def test_a_copy_in_sync_stands_when_the_master_is_gone() -> None:
    assert leadership.decide("g", RECORD, living("a"), ME) == OwnStep.STAND


def test_a_copy_that_lags_never_stands() -> None:
    record = msgspec.structs.replace(RECORD, in_sync=["b"])
    alone = leadership.decide("g", record, living("a"), ME)
    assert isinstance(alone, Wait)
    assert "start one of them, or take this one with `fairway broker promote g --accept-data-loss`" in alone.why
    record = msgspec.structs.replace(RECORD, in_sync=["b", "c"])
    beside = leadership.decide("g", record, living("a", "c"), ME)
    assert isinstance(beside, Wait)
    assert "c is about to take over" in beside.why


def test_a_master_goes_on_only_under_its_own_epoch() -> None:
    record = msgspec.structs.replace(RECORD, master="a")
    assert leadership.decide("g", record, living("a", "b"), replace(ME, leads=5)) == OwnStep.LEAD
    assert leadership.decide("g", record, living("a", "b"), replace(ME, leads=4)) == OwnStep.STAND
    assert leadership.decide("g", record, living("a", "b"), ME) == OwnStep.STAND, (
        "it was restarted, and knows nothing of its copies"
    )


def test_one_that_was_deposed_by_hand_is_given_time_to_step_down() -> None:
    record = msgspec.structs.replace(RECORD, master="a")
    alive = {"a": member("a"), "b": member("b", role="master")}
    assert isinstance(leadership.decide("g", record, alive, ME), Wait)
    assert leadership.decide("g", record, alive, ME, is_patient=False) == OwnStep.STAND


def test_an_epoch_below_the_own_is_not_followed() -> None:
    decision = leadership.decide("g", RECORD, living("a", "b"), replace(ME, epoch=6))
    assert isinstance(decision, Wait)
    assert "has seen epoch 6" in decision.why


def test_who_takes_over_keeps_those_in_the_set_that_live() -> None:
    record = msgspec.structs.replace(RECORD, in_sync=["b", "c", "a", "d"])
    after = leadership.succeeded(record, living("a", "c"), replace(ME, epoch=9))
    assert (after.epoch, after.master, after.in_sync) == (10, "a", ["a", "c"])
    assert after.min_in_sync == 2
    assert leadership.succeeded(record, living("a"), ME, min_in_sync=1).min_in_sync == 1


@pytest.mark.parametrize(("messages_id", "is_ours"), [(11, True), (0, True), (99, False)])
def test_logs_of_another_group_are_refused(messages_id: int, is_ours: bool) -> None:
    record = msgspec.structs.replace(RECORD, messages_id=messages_id)
    why = leadership.foreign("g", record, ME)
    assert (why is None) == is_ours
    assert why is None or "start with an empty directory" in why


def test_promotion_by_hand() -> None:
    after = leadership.promoted(RECORD, living("a", "b"), "a")
    assert (after.epoch, after.master, after.in_sync) == (6, "a", ["b", "a"])
    with pytest.raises(ValueError, match="data loss"):
        leadership.promoted(RECORD, living("a", "c"), "c")
    lossy = leadership.promoted(RECORD, living("a", "c"), "c", accepts_data_loss=True)
    assert (lossy.master, lossy.in_sync, lossy.members) == ("c", ["c"], ["b", "a", "c"])
