"""Questions to a cluster: asked of every group of brokers that they concern, and answered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

import fairway
from fairway.errors import Code, Misuse
from fairway.groups import GroupConfig
from fairway.protocol.admin_messages import Names
from fairway.protocol.route_messages import SubjectRoute
from tests.support.stub_server import group
from tests.unit.client.broker import WAIT_S
from tests.unit.client.cluster import Cluster, clustered
from tests.unit.client.test_delayed_messages_processes import DelayServer


@pytest.fixture
def client(cluster: Cluster) -> Iterator[fairway.Client]:
    with fairway.connect(cluster.url) as connected:
        yield connected


@pytest.fixture
def filled(cluster: Cluster, subject: str) -> str:
    """A subject with 10 messages on one group and 20 on the other."""
    for name, count in (("a", 10), ("b", 20)):
        with fairway.connect(cluster.brokers[name].url) as direct:
            direct.send_many(subject, [b"%d" % number for number in range(count)]).result(WAIT_S)
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
    return subject


def handle(client: fairway.Client, subject: str, count: int, **settings: object) -> None:
    with client.consumer(subject, "g") as consumer:
        for _ in range(count):
            message = consumer.poll(WAIT_S)
            assert message is not None
            message.reject("no") if settings.get("rejects") else message.ack()


def test_a_description_adds_up(client: fairway.Client, filled: str) -> None:
    handle(client, filled, 30)
    [subject] = client.describe(filled).subjects
    [state] = subject.groups
    assert (subject.committed_end, state.cursor, state.lag) == (30, 30, 0)
    assert client.describe(filled).broker.server == "2 broker groups"


def test_all_subjects_of_all_groups_are_described(client: fairway.Client, cluster: Cluster, filled: str) -> None:
    with fairway.connect(cluster.brokers["b"].url) as direct:
        direct.send(f"{filled}.b", b"only here").result(WAIT_S)
    names = [each.name for each in client.describe().subjects]
    assert filled in names
    assert f"{filled}.b" in names
    assert len(names) == len(set(names))


def test_a_group_is_moved_on_all_of_them(client: fairway.Client, filled: str) -> None:
    handle(client, filled, 30)
    assert client.seek(filled, "g", "earliest").was == 30
    handle(client, filled, 30)
    client.seek(filled, "g", datetime(2020, 1, 1, tzinfo=UTC))
    handle(client, filled, 30)


def test_a_sequence_is_a_place_in_one_group(client: fairway.Client, filled: str) -> None:
    handle(client, filled, 1)
    with pytest.raises(Misuse, match=r"a sequence is a place in one broker group.*\(a, b\).*fairway://HOST:PORT"):
        client.seek(filled, "g", 3)
    with pytest.raises(Misuse, match="a place in one broker group"):
        next(client.scan(filled, 3))


def test_a_question_that_has_no_sum_is_for_one_group(client: fairway.Client) -> None:
    with pytest.raises(Misuse, match="Names is for one"):
        client.ask(Names([], [], []))


def test_switches_are_switched_everywhere(client: fairway.Client, filled: str) -> None:
    handle(client, filled, 2)
    assert not client.pause(filled, "g").was_on
    assert client.resume(filled, "g").was_on
    client.weight(filled, "g", 2)
    assert not client.read_only(filled, True).was_on
    assert client.read_only(filled, False).was_on


def test_a_group_that_one_of_them_does_not_know_is_known(client: fairway.Client, cluster: Cluster, filled: str) -> None:
    with fairway.connect(cluster.brokers["a"].url) as direct:
        handle(direct, filled, 1)
    assert not client.pause(filled, "g").was_on
    with pytest.raises(fairway.Refused) as caught:
        client.pause(filled, "nobody")
    assert caught.value.code is Code.NO_SUCH_GROUP


def test_dead_letters_of_all_come_back(client: fairway.Client, filled: str) -> None:
    handle(client, filled, 30, rejects=True)
    for _ in range(10_000):
        if client.describe(filled).subjects[0].groups[0].dead == 30:
            break
    assert client.redrive(filled, "g").count == 30
    handle(client, filled, 30)


def test_a_configuration_holds_on_all_and_may_be_set_again(
    client: fairway.Client, cluster: Cluster, filled: str
) -> None:
    config = GroupConfig(attempts_max=3)
    with fairway.connect(cluster.brokers["a"].url) as direct:
        direct.configure(filled, "g", config, expected_version=0)
    assert client.configure(filled, "g", config, expected_version=0).version == 1, "as far as it is not set already"
    with pytest.raises(fairway.Refused) as caught:
        client.configure(filled, "g", GroupConfig(attempts_max=4), expected_version=0)
    assert caught.value.code is Code.STALE_CONFIG


def test_all_is_read_group_after_group(client: fairway.Client, filled: str) -> None:
    payloads = [payload for page in client.scan(filled) for payload in page.batch.payloads]
    assert sorted(payloads, key=int) == sorted([b"%d" % n for n in [*range(10), *range(20)]], key=int)


def test_a_subject_that_nobody_knows_is_refused_with_the_reason(client: fairway.Client) -> None:
    with pytest.raises(fairway.Refused, match=r"there is no subject unheard\.of"):
        client.describe("unheard.of")


# --- later ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker group, and two delay servers that send there."""
    data = tmp_path_factory.mktemp("late")
    with clustered(data, "a") as made, ExitStack() as stack:
        servers = [DelayServer(data / name, made.brokers["a"]) for name in ("d", "e")]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        made.meta.tell(*(group(f"d{at}", server.port, kind="delay") for at, server in enumerate(servers)))
        yield made


def test_delayed_messages_go_to_delay_servers_and_arrive(late: Cluster, subject: str) -> None:
    with fairway.connect(late.url) as client, client.consumer(subject, "g") as consumer:
        for number in range(10):
            client.send(subject, b"%d" % number, after=0.1).result(WAIT_S)
        client.send_many(subject, [b"10", b"11"], after=[0.1, 0.2]).result(WAIT_S)
        found: set[int] = set()
        while len(found) < 12:
            message = consumer.poll(WAIT_S)
            assert message is not None
            found.add(int(message.payload))
            message.ack()
    assert found == set(range(12))


def test_all_delay_servers_are_asked(late: Cluster, subject: str) -> None:
    with fairway.connect(late.url) as client:
        receipts = [client.send(subject, b"x", after=1_000 + number).result(WAIT_S) for number in range(8)]
        assert client.delayed.count(subject) == 8
        listed = list(client.delayed.list(subject))
        assert [each.due_at for each in listed] == sorted(each.due_at for each in listed)
        assert len(listed) == 8
        assert len(list(client.delayed.list(subject, limit=3))) == 3
        assert sum(client.delayed.histogram(3_600, subject).values()) == 8
        for receipt in receipts:
            assert client.delayed.cancel(receipt.id).fate == "cancelled"
        assert client.delayed.cancel(receipts[0].id).messages == 0
        assert client.delayed.count(subject) == 0


def test_without_delay_servers_that_is_said(client: fairway.Client) -> None:
    with pytest.raises(fairway.Refused, match="no delay server is registered"):
        client.delayed.count()
