"""`fairway cluster --check`: a sentence for each problem."""

from __future__ import annotations

import msgspec
import pytest

from fairway.cli.cluster import CopyAnswer, troubles
from fairway.protocol.admin_messages import BrokerState
from fairway.protocol.delay_messages import TransitReport
from fairway.protocol.route_messages import Copy, GroupRoute, Routed

MASTER = Copy("a1", "h:1", "master", is_in_sync=True)
FOLLOWER = Copy("a2", "h:2", "follower", is_in_sync=True)
EAST = GroupRoute("east", "broker", 3, "h:1", ["h:2"], is_writable=True, copies=[MASTER, FOLLOWER])


def found(*groups: GroupRoute) -> Routed:
    return Routed(7, [], [*groups])


def with_copy(**changes: object) -> GroupRoute:
    return msgspec.structs.replace(EAST, copies=[MASTER, msgspec.structs.replace(FOLLOWER, **changes)])


def test_nothing_is_said_of_a_cluster_that_is_well() -> None:
    assert troubles(found(EAST)) == []


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (with_copy(role="catching up", is_in_sync=False),
         "copy a2 of group east, at h:2, is not in sync: it is catching up"),
        (with_copy(is_in_sync=False), "copy a2 of group east, at h:2, is not in sync: it is behind its master"),
        (with_copy(address="", role="away", is_in_sync=False),
         "copy a2 of group east is away: start it, or forget it with `fairway cluster decommission east --copy a2`"),
        (with_copy(address="", role="away"), "copy a2 of group east is away, and counts as in sync: start it"),
        (with_copy(load={"rotten_spans": 3.0}), "the disk of copy a2 of group east has lost 3 spans: replace it"),
        (msgspec.structs.replace(EAST, is_writable=False, why="group east is read-only: no room"),
         "group east is read-only: no room"),
    ],
)  # fmt: skip
def test_each_group_and_copy_that_is_not_well_has_its_sentence(group: GroupRoute, said: str) -> None:
    assert troubles(found(EAST, group)) == [said]


STATE = BrokerState("fairway", 1, 3, is_master=True, is_read_only=False, started_ms=0, connections=0)
BEHIND = msgspec.structs.replace(STATE, is_master=False)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"h:1": STATE, "h:2": BEHIND}, []),
        ({"h:1": "refused", "h:2": BEHIND},
         ["copy a1 of group east, at h:1, does not answer, though its session at the registry lives: refused"]),
        ({"h:1": BEHIND, "h:2": BEHIND},
         [("copy a1 of group east, at h:1, has taken over and is not open to clients yet: "
           "it waits until all it has is committed")]),
        ({"h:1": STATE, "h:2": msgspec.structs.replace(BEHIND, epoch=2)},
         ["copy a2 of group east, at h:2, has seen epoch 2, and its group is at 3: it catches up"]),
    ],
)  # fmt: skip
def test_what_copies_say_themselves_counts(answers: dict[str, BrokerState | str], said: list[str]) -> None:
    assert troubles(found(EAST), {address: CopyAnswer(each) for address, each in answers.items()}) == said


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (with_copy(role="waiting"), "counts as in sync and is waiting"),
        (with_copy(role="catching up"), "counts as in sync and is catching up"),
        (with_copy(role="master"), "was deposed and has not stepped down yet"),
        (msgspec.structs.replace(EAST, copies=[msgspec.structs.replace(MASTER, role="waiting"), FOLLOWER]),
         "is to lead and has not taken over yet: it is waiting"),
        (msgspec.structs.replace(EAST, copies=[msgspec.structs.replace(MASTER, epoch=2), FOLLOWER]),
         "leads under epoch 2, and the registry says 3"),
    ],
)  # fmt: skip
def test_a_copy_in_sync_that_does_something_else_has_its_sentence(group: GroupRoute, said: str) -> None:
    [sentence] = troubles(found(group))
    assert said in sentence


def test_a_group_without_a_master_is_told_beside_its_copies() -> None:
    dead = msgspec.structs.replace(with_copy(address="", role="away"), master="", is_writable=False, why="no master")
    assert troubles(found(dead)) == ["no master", "copy a2 of group east is away, and counts as in sync: start it"]


def test_a_group_that_is_being_drained_is_as_it_was_wanted() -> None:
    drained = msgspec.structs.replace(with_copy(address="", role="away"), is_draining=True, is_writable=False)
    assert troubles(found(drained)) == []
    assert troubles(found(msgspec.structs.replace(drained, master="", why="no master")))[0] == "no master"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"is_draining": True, "is_writable": False},
         [("5 delayed messages wait for broker group east, which is being drained: "
          "it takes them while its servers run")]),
        ({"name": "other"},
         [("5 delayed messages wait for broker group east, which is gone: "
          "`fairway delay retry --group east --may-repeat` sends them elsewhere")]),
        ({"master": "", "is_writable": False, "why": "no master"},
         ["no master", "5 delayed messages wait for broker group east, which has no master: start its servers"]),
    ],
)  # fmt: skip
def test_delayed_messages_that_wait_for_a_group_have_their_sentence(
    changes: dict[str, object], said: list[str]
) -> None:
    """What is on its way to a group that is as it should be is nothing to look after."""
    leads = Copy("c1", "h:5", "master", is_in_sync=True, load={"in_transit/east": 5.0})
    follows = Copy("c2", "h:6", "follower", is_in_sync=True, load={"in_transit/east": 9.0})  # of an earlier reign
    delay = GroupRoute("d1", "delay", 1, "h:5", ["h:6"], is_writable=True, copies=[leads, follows])
    assert troubles(found(msgspec.structs.replace(EAST, **changes), delay)) == said


@pytest.mark.parametrize(
    ("load", "counted", "said"),
    [
        ({}, [TransitReport("west", 5, is_reachable=False)],
         [("5 delayed messages wait for broker group west, which is gone: "
          "`fairway delay retry --group west --may-repeat` sends them elsewhere")]),
        ({}, [TransitReport("east", 1, is_reachable=False)],
         ["1 delayed message waits for broker group east, which cannot be reached from the delay servers of d1"]),
        ({}, [TransitReport("east", 5, is_reachable=True)], []),
        ({"in_transit/west": 5.0}, [], []),
        ({"in_transit/west": 5.0}, None,
         [("5 delayed messages wait for broker group west, which is gone: "
          "`fairway delay retry --group west --may-repeat` sends them elsewhere")]),
        ({}, "it is starting",
         [("copy c1 of group d1, at h:5, does not say how many delayed messages wait for broker groups: "
           "it is starting")]),
    ],
)  # fmt: skip
def test_the_count_of_a_delay_master_is_newer_than_its_report(
    load: dict[str, float], counted: list[TransitReport] | str | None, said: list[str]
) -> None:
    leads = Copy("c1", "h:5", "master", is_in_sync=True, load=load)
    delay = GroupRoute("d1", "delay", 1, "h:5", [], is_writable=True, copies=[leads])
    state = msgspec.structs.replace(STATE, epoch=1)
    assert troubles(found(EAST, delay), {"h:5": CopyAnswer(state, counted)}) == said


def test_a_cluster_of_which_nothing_is_known_is_not_well() -> None:
    assert troubles(found()) == ["there is no group of servers: start brokers with --registry and --group"]
    assert "cannot be reached" in troubles(msgspec.structs.replace(found(EAST), is_old=True))[0]
