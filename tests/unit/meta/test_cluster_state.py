"""What an asker is told, from records alone."""

from __future__ import annotations

import pytest

from fairway.errors import Refused
from fairway.meta.cluster_state import (
    ClusterState,
    GroupView,
    base_of,
    check_names,
    choose,
    group_route,
    missing_subject,
    subject_route,
)
from fairway.protocol.route_messages import ClientRole
from fairway.registry.layout import RegisteredCopy, SubjectRecord
from tests.unit.meta.records import member, record, view, views

ORDERS = SubjectRecord(["g1", "g2"], ["g1", "g2"])


def test_a_group_whose_master_lives_is_told_with_its_address_and_its_replicas() -> None:
    route = group_route(view("g1", member("d1", 1), member("d2", 2), epoch=4))
    assert (route.master, route.replicas, route.epoch, route.is_writable, route.why) == (
        "10.0.0.1:1", ["10.0.0.1:2"], 4, True, "",
    )  # fmt: skip
    assert route.copies == []


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (GroupView("g1"), "never been led"),
        (GroupView("g1", None, {"a": member("a", ends=[64, 0])}), "fairway broker promote g1 --to DIR-ID"),
        (view("g1", of=record("d1")), "no master: 0 copies"),
        (view("g1", member("d2"), of=record("d2", master="d1")), "no master: 1 copy"),
        (view("g1", member("d1"), is_draining=True), "drained"),
        (view("g1", member("d1"), min_in_sync=2), "1 copy in sync and needs 2"),
        (view("g1", member("d1", why_read_only="the disk is full")), "the disk is full"),
    ],
)
def test_a_group_that_takes_no_messages_says_why(group: GroupView, why: str) -> None:
    route = group_route(group)
    assert not route.is_writable
    assert why in route.why


def test_an_ipv6_address_can_be_dialled() -> None:
    assert group_route(view("g1", RegisteredCopy("d1", "::1", 7))).master == "[::1]:7"


def test_producers_go_around_a_dead_group_and_consumers_are_told_of_it() -> None:
    groups = views(view("g1", member("d1")), view("g2", of=record("d2")))
    produced = subject_route(ClientRole.PRODUCER, "orders", ORDERS, groups)
    assert (produced.groups, produced.writable) == (["g1", "g2"], ["g1"])
    assert subject_route(ClientRole.CONSUMER, "orders", ORDERS, groups).groups == ["g1", "g2"]


def test_where_nobody_takes_messages_the_reasons_are_told() -> None:
    route = subject_route(ClientRole.PRODUCER, "orders", ORDERS, views(view("g2", member("d2"), is_draining=True)))
    assert route.writable == []
    assert "g1 has never been led" in route.why
    assert "g2 is being drained" in route.why


def test_a_read_only_subject_is_writable_nowhere() -> None:
    closed = SubjectRecord(["g1"], ["g1"], is_read_only=True)
    route = subject_route(ClientRole.PRODUCER, "orders", closed, views(view("g1", member("d1"))))
    assert (route.writable, route.is_read_only) == ([], True)
    assert "fairway subject read-only orders --off" in route.why


def test_delayed_messages_go_to_delay_servers() -> None:
    groups = views(
        view("g1", member("d1")), view("w1", member("d2"), kind="delay"), view("w2", of=record("d3", kind="delay"))
    )
    route = subject_route(ClientRole.SCHEDULER, "orders", SubjectRecord(["g1"], ["g1"]), groups)
    assert (route.groups, route.writable) == (["w1", "w2"], ["w1"])
    nobody = subject_route(
        ClientRole.SCHEDULER, "orders", SubjectRecord(["g1"], ["g1"]), views(view("g1", member("d1")))
    )
    assert "no delay server is registered" in nobody.why


def test_dead_letters_are_where_their_subject_is() -> None:
    assert [base_of(name) for name in ("orders", "dead:billing:orders", "dead:a:dead:b:orders")] == ["orders"] * 3


@pytest.mark.parametrize(
    ("may_create", "policy", "why"),
    [(False, True, "with its first message"), (True, False, "none is made on first use"), (True, True, "being made")],
)
def test_a_subject_that_does_not_exist_is_told_with_the_remedy(may_create: bool, policy: bool, why: str) -> None:
    route = missing_subject("orders", may_create=may_create, policy=policy)
    assert route.groups == []
    assert why in route.why


def test_tools_see_every_copy_that_was_ever_here() -> None:
    of = record("d1", "d3", members=["d1", "d2", "d3"])
    group = view("g1", member("d1", 1, role="master", ends=[5, 6]), member("d2", 2, role="catching up"), of=of)
    copies = group_route(group, with_copies=True).copies
    assert [(each.directory, each.role, each.is_in_sync) for each in copies] == [
        ("d1", "master", True), ("d2", "catching up", False), ("d3", "away", True),
    ]  # fmt: skip
    assert copies[0].ends == [5, 6]


# --- which groups -----------------------------------------------------------------------------------------------------


def test_subjects_are_spread_evenly_while_nothing_comes_in() -> None:
    groups = [view(name, member(f"d{name}")) for name in ("g1", "g2", "g3")]
    cluster_state = ClusterState()
    for number in range(9):
        chosen = choose(groups, cluster_state.carried, 1)
        cluster_state.put_subject(f"s{number}", SubjectRecord(chosen, chosen))
    assert (
        sorted(record.groups[0] for record in cluster_state.subjects.values()) == ["g1"] * 3 + ["g2"] * 3 + ["g3"] * 3
    )


def test_a_busy_group_gets_no_more() -> None:
    groups = [view("g1", member("d1", load={"bytes_per_s": 9e6})), view("g2", member("d2", load={"bytes_per_s": 1e6}))]
    assert choose(groups, {}, 1) == ["g2"]
    assert choose(groups, {}, 2) == ["g1", "g2"]


def test_only_living_broker_groups_that_take_messages_are_chosen() -> None:
    groups = [
        view("g1", of=record("d1")),
        view("g2", member("d2"), is_draining=True),
        view("w1", member("d3"), kind="delay"),
        view("g4", member("d4")),
    ]
    assert choose(groups, {}, 1) == ["g4"]
    with pytest.raises(Refused, match="2 broker groups are asked for and 1 takes messages"):
        choose(groups, {}, 2)
    with pytest.raises(Refused, match="1 more broker group is asked for and 0"):
        choose(groups, {}, 1, ["g4"])


def test_groups_that_an_operator_names_must_be_there() -> None:
    groups = views(view("g1", member("d1")), view("w1", member("d2"), kind="delay"))
    assert check_names(["g1", "g1"], groups) == ["g1"]
    with pytest.raises(Refused, match="there is no broker group g9: there are g1"):
        check_names(["g9"], groups)
    with pytest.raises(Refused, match="delay servers"):
        check_names(["w1"], groups)
