"""Removing subjects and groups by a client: of one broker, and of a cluster, where all are asked before any acts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fairway.client import commands
from fairway.client.cluster.requests import ask_all
from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Removed, RemoveSubject
from fairway.protocol.messages import ControlMessage
from fairway.protocol.route_messages import Govern, Governed, GroupRoute, Route, RouteChange, Routed
from fairway.testing import MemoryBroker


def test_a_producer_and_a_consumer_go_on_after_the_removal() -> None:
    """Nothing that is acknowledged after the removal is lost, and nobody has to be started again."""
    with MemoryBroker() as broker, broker.connect() as fw:
        with fw.consumer("orders", group="billing") as consumer:
            fw.send("orders", b"before").result(10)
            message = consumer.poll(10)
            assert message is not None
            message.ack()
            fw.send("orders", b"lost with it").result(10)
            with pytest.raises(Refused) as refused:
                fw.remove_subject("orders")
            assert refused.value.code is Code.BAD_REQUEST
            assert fw.remove_subject("orders", force=True).existed
            receipts = [fw.send("orders", b"after %d" % number).result(30) for number in range(5)]
            assert [receipt.sequence for receipt in receipts] == [2, 3, 4, 5, 6]
            got: list[bytes] = []  # what it had in hand may come, too
            while b"after 4" not in got:
                message = consumer.poll(60)
                assert message is not None, got
                got.append(message.payload)
                message.ack()
            assert [each for each in got if each.startswith(b"after")] == [b"after %d" % number for number in range(5)]
        assert fw.remove_group("orders", "billing").existed
        assert fw.remove_subject("orders", force=True).existed
        assert fw.describe().subjects == []
        assert not fw.remove_subject("orders").existed
        assert not fw.remove_group("orders", "billing").existed


class _ClusterClient:
    meta = "meta"

    def connection_to(self, route: GroupRoute) -> str:
        return route.name


class _Cluster:
    """Two broker groups and a meta server: `outcomes` says what each answers, in turn."""

    def __init__(self, **outcomes: Sequence[ControlMessage | Refused]) -> None:
        self.outcomes = {name: list(each) for name, each in outcomes.items()}
        self.asked: list[tuple[str, ControlMessage]] = []

    def drive(self, force: bool = False) -> Removed:
        dialog = ask_all(_ClusterClient(), commands.remove_subject("orders", is_forced=force))  # type: ignore[arg-type]
        asking = next(dialog)
        while True:
            message = asking.command.message
            if isinstance(message, Route):
                groups = [GroupRoute(name, "broker", 1, f"{name}:1", [], is_writable=True) for name in ("a", "b")]
                outcome: ControlMessage | Refused = Routed(1, [], groups)
            else:
                self.asked.append((asking.connection, message))
                outcome = self.outcomes[asking.connection].pop(0)
            try:
                asking = dialog.send(outcome)
            except StopIteration as end:
                removed: Removed = end.value
                return removed

    def deeds(self) -> list[tuple[str, object]]:
        return [
            (connection, (message.change, message.groups) if isinstance(message, Govern) else message.is_dry)  # type: ignore[attr-defined]
            for connection, message in self.asked
        ]


HERE, GONE = Removed(True, 1, 2, 3), Removed(False)
NO = Refused(Code.BAD_REQUEST, "subject orders has 3 messages not handled (g 3)")


def test_a_cluster_is_asked_first_and_the_registry_goes_last() -> None:
    cluster = _Cluster(a=[HERE, HERE, GONE], b=[HERE, HERE, GONE], meta=[Governed("subject orders is removed")])
    assert cluster.drive() == Removed(True, 2, 4, 6)
    assert cluster.deeds() == [
        ("a", True), ("b", True), ("a", False), ("b", False),
        ("meta", (RouteChange.REMOVE, [])), ("a", True), ("b", True),
    ]  # fmt: skip


def test_what_one_refuses_nobody_does() -> None:
    cluster = _Cluster(a=[HERE], b=[NO])
    with pytest.raises(Refused):
        cluster.drive()
    assert cluster.deeds() == [("a", True), ("b", True)]


def test_a_removal_that_was_broken_off_is_finished_by_the_next() -> None:
    cluster = _Cluster(a=[GONE, GONE, GONE], b=[HERE, HERE, GONE], meta=[Governed("subject orders is removed")])
    assert cluster.drive().existed
    only_the_route = _Cluster(a=[GONE] * 3, b=[GONE] * 3, meta=[Governed("subject orders is removed")])
    assert only_the_route.drive() == Removed(True)
    nothing = _Cluster(a=[GONE] * 3, b=[GONE] * 3, meta=[Governed("")])
    assert nothing.drive() == Removed(False)


def test_a_subject_that_a_producer_has_made_again_has_a_route() -> None:
    cluster = _Cluster(a=[HERE, HERE, GONE], b=[HERE, HERE, HERE], meta=[Governed("removed"), Governed("made")])
    cluster.drive(force=True)
    assert cluster.deeds()[-1] == ("meta", (RouteChange.CREATE, ["b"]))
    assert cluster.asked[-2] == ("b", RemoveSubject("orders", True, True))


def test_one_broker_is_all_there_is() -> None:
    alone = Refused(Code.UNSUPPORTED, "this is a broker")
    cluster = _Cluster(a=[HERE, HERE], b=[HERE, HERE], meta=[alone])
    assert cluster.drive().existed
