"""`fairway cluster --check`: a sentence for each thing that is not well."""

from __future__ import annotations

import msgspec
import pytest

from fairway.cli.cluster_check import troubles
from fairway.protocol.routing import Copy, GroupRoute, Routed

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


def test_a_group_without_a_master_is_told_beside_its_copies() -> None:
    dead = msgspec.structs.replace(with_copy(address="", role="away"), master="", is_writable=False, why="no master")
    assert troubles(found(dead)) == ["no master", "copy a2 of group east is away, and counts as in sync: start it"]


def test_a_group_that_is_being_drained_is_as_it_was_wanted() -> None:
    drained = msgspec.structs.replace(with_copy(address="", role="away"), is_draining=True, is_writable=False)
    assert troubles(found(drained)) == []
    assert troubles(found(msgspec.structs.replace(drained, master="", why="no master")))[0] == "no master"


def test_a_cluster_of_which_nothing_is_known_is_not_well() -> None:
    assert troubles(found()) == ["there is no group of servers: start brokers with --registry and --group"]
    assert "cannot be reached" in troubles(msgspec.structs.replace(found(EAST), is_old=True))[0]
