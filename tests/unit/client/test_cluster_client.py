"""A client of a cluster: messages to one of the groups of brokers, and from all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import fairway
from fairway.client.core import ClientOptions
from fairway.client.sync.connection import SyncClusterClient
from fairway.errors import BufferFull
from fairway.lookup.routes import home
from fairway.protocol.admin_messages import Depth, Describe
from fairway.protocol.route_messages import SubjectRoute
from tests.support.one_session import share_one_secret
from tests.support.ports import free_port
from tests.support.stub_server import FakeMeta, Follower, group
from tests.unit.client.broker import WAIT_S, run_program
from tests.unit.client.cluster import Cluster, fill, stored
from tests.unit.client.test_trouble import FORKING


def both(cluster: Cluster, subject: str) -> dict[str, list[bytes]]:
    return {name: stored(broker, subject) for name, broker in cluster.brokers.items()}


# --- sending ----------------------------------------------------------------------------------------------------------


def test_messages_are_spread_evenly_over_the_groups(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        until_both_take(client, subject)
        receipts = [client.send(subject, b"%d" % number).result(WAIT_S) for number in range(20)]
    assert Counter(receipt.broker_group for receipt in receipts) == {"a": 10, "b": 10}
    found = both(cluster, subject)
    assert [found[each.broker_group][each.sequence] for each in receipts] == [b"%d" % number for number in range(20)]


def test_batches_stay_full(cluster: Cluster, subject: str) -> None:
    """They go to the groups by turns, however many messages each has: who is slower finds fuller ones. A group whose
    disk stalls is passed over; one does not stall three times."""
    turns: list[Counter[str]] = []
    for _ in range(3):
        with fairway.connect(cluster.url) as client:
            until_both_take(client, subject)
            pendings = [client.send(subject, b"%d" % number) for number in range(20_000)]
            client.flush(WAIT_S)
        batches = {id(pending.batch): pending.result().broker_group for pending in pendings}
        assert len(batches) < 200, "not a batch for each message"
        turns.append(Counter(batches.values()))
    assert any(min(each["a"], each["b"]) > 0.3 * each.total() for each in turns), turns


def until_both_take(client: fairway.Client, subject: str) -> None:
    """One of them may be connected sooner than the other."""
    groups: set[str] = set()
    for _ in range(10_000):
        groups.add(client.send(subject, b"first").result(WAIT_S).broker_group)
        if groups == {"a", "b"}:
            return
    raise AssertionError(f"only {groups} took messages")


def test_many_at_once_go_to_one_group_and_the_next_to_the_other(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        until_both_take(client, subject)
        groups = [client.send_many(subject, [b"x"] * 100).result(WAIT_S)[0].broker_group for _ in range(10)]
    assert sorted(groups) == 5 * ["a"] + 5 * ["b"]


def test_what_is_sent_before_anybody_knows_where_to_arrives_in_order(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["b"], ["b"]))
    cluster.meta.is_mute = True
    with fairway.connect(cluster.url) as client:
        pendings = [client.send_nowait(subject, b"%d" % number) for number in range(50)]
        pendings += [client.send(subject, b"%d" % number, key=f"k{number}") for number in range(50, 60)]
        cluster.meta.is_mute = False
        cluster.meta.tell()
        pendings += [client.send(subject, b"%d" % number) for number in range(60, 100)]
        client.flush(WAIT_S)
        assert [pending.result().sequence for pending in pendings] == list(range(100))
    assert stored(cluster.brokers["b"], subject) == [b"%d" % number for number in range(100)]


class _Producing:
    """Notes how messages are added."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def add(self, *columns: object) -> None:
        self.added.append("among others")

    def add_alone(self, *columns: object) -> None:
        self.added.append("alone")


class _OtherGroup:
    """A connection with room."""

    def __init__(self) -> None:
        self.producing = _Producing()

    def put(self, add: Callable[[], object], timeout: object) -> object:
        return add()


class _TwoGroups(SyncClusterClient):
    """Picks a group that is full, and knows another."""

    def __init__(self) -> None:
        self.other = _OtherGroup()
        self.meta = None  # type: ignore[assignment]

    def adding(self, subject: str, message: object, *, is_alone: bool) -> Any:
        return self, self, None

    def put_now(self, add: object) -> object:
        raise BufferFull("no room", 1, 1)

    def another(self, connection: object) -> _OtherGroup:
        return self.other


@pytest.mark.parametrize(("is_alone", "how"), [(True, "alone"), (False, "among others")])
def test_a_message_for_a_batch_of_its_own_gets_one_at_another_group_too(is_alone: bool, how: str) -> None:
    """Its due time is so far ahead that the delay server may refuse it, and with it the whole batch."""
    client = _TwoGroups()
    client.put("orders", (b"x", None, (), None, None, 1), None, is_alone=is_alone)
    assert client.other.producing.added == [how]


def test_a_subject_that_nobody_takes_messages_for_waits_and_says_why(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a"], [], is_read_only=True, why="it is closed by command"))
    impatient = ClientOptions(producer=fairway.ProducerOptions(delivery_timeout_ms=300))
    with fairway.connect(cluster.url, options=impatient) as client:
        error = client.send(subject, b"late").exception(WAIT_S)
        assert isinstance(error, fairway.NotSent)
    with fairway.connect(cluster.url) as client:
        pending = client.send(subject, b"patient")
        cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
        assert pending.result(WAIT_S).sequence == 0


def test_keys_of_an_ordered_subject_have_their_group(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"], is_ordered=True))
    keys = [f"k{number % 10}" for number in range(200)]
    with fairway.connect(cluster.url) as client:
        for number, key in enumerate(keys[:100]):
            client.send(subject, b"%s %d" % (key.encode(), number), key=key)
        payloads = [b"%s %d" % (key.encode(), number) for number, key in enumerate(keys)]
        client.send_many(subject, payloads[100:], keys=keys[100:])
        client.flush(WAIT_S)
    for at, name in enumerate(("a", "b")):
        own = stored(cluster.brokers[name], subject)
        for key in {payload.split()[0].decode() for payload in own}:
            assert home(key, ("a", "b")) == at
            numbers = [int(payload.split()[1]) for payload in own if payload.startswith(f"{key} ".encode())]
            assert numbers == [number for number in range(200) if keys[number] == key]


def test_a_group_that_is_away_is_passed_over(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        for _ in range(4):
            client.send(subject, b"both").result(WAIT_S)
        cluster.brokers["a"].kill()
        sent = [client.send(subject, b"one")]  # it may have been under way to the dead one: then it waits for it
        settle_down(client)
        sent += [client.send(subject, b"one") for _ in range(20)]
        for pending in sent[1:]:
            pending.result(WAIT_S)
        cluster.brokers["a"].start()
        sent[0].result(WAIT_S)
    assert len(stored(cluster.brokers["b"], subject)) >= 20


def settle_down(client: fairway.Client) -> None:
    """Until it has noticed what is gone: a question to all groups is not answered."""
    with pytest.raises(TimeoutError, match="group a: no answer to Describe"):
        client.ask(Describe(Depth.SUBJECTS), timeout=0.5)


def test_what_a_group_does_not_take_goes_to_another(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.brokers["a"].url) as direct:
        direct.read_only(subject, True)
    with fairway.connect(cluster.url) as client:
        for number in range(10):
            assert client.send(subject, b"%d" % number).result(WAIT_S).subject == subject
        client.send_many(subject, [b"many"] * 10).result(WAIT_S)
        client.send_many(subject, [b"many"] * 10).result(WAIT_S)
    assert len(stored(cluster.brokers["b"], subject)) == 30


def test_what_may_be_stored_stays_with_its_group_and_is_stored_once(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a"]))
    with fairway.connect(cluster.url) as client:
        client.send(subject, b"0").result(WAIT_S)
        cluster.brokers["a"].suspend()
        doubtful = [client.send(subject, b"%d" % number) for number in range(1, 5)]
        cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
        cluster.brokers["a"].kill()
        cluster.brokers["a"].start()
        for pending in doubtful:
            pending.result(WAIT_S)
    found = both(cluster, subject)
    assert sorted(found["a"] + found["b"]) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_new_master_is_dialed_as_soon_as_it_is_known(cluster: Cluster, subject: str) -> None:
    """The old one lives, and is silent: only the meta server can tell."""
    cluster.meta.tell(SubjectRoute(subject, ["c"], ["c"]))
    silent = Silent()
    with silent:
        cluster.meta.tell(group("c", silent.port))
        with fairway.connect(cluster.url) as client:
            pending = client.send(subject, b"a")
            assert silent.asked.wait(WAIT_S)
            cluster.meta.tell(group("c", cluster.brokers["a"].port, silent.port, epoch=2))
            assert pending.result(WAIT_S).sequence == 0


class Silent(Follower):
    """It takes requests and answers none."""

    def handle(self, message: object, reply: object) -> None:
        """Nothing is said."""


def test_a_master_that_steps_down_is_left_for_the_one_that_leads(cluster: Cluster, subject: str) -> None:
    with Follower() as follower:
        cluster.meta.tell(SubjectRoute(subject, ["c"], ["c"]), group("c", follower.port, cluster.brokers["b"].port))
        with fairway.connect(cluster.url) as client:
            assert client.send(subject, b"a").result(WAIT_S).sequence == 0, "though the meta server is behind"


def test_a_group_that_no_route_names_any_more_is_not_dialed(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        until_both_take(client, subject)
        cluster.meta.tell(SubjectRoute(subject, ["b"], ["b"]))
        until_alone(client, subject, "b")
        cluster.brokers["a"].stop()
        with Follower(cluster.brokers["a"].port) as other:  # somebody else, at the same address
            other.asked.wait(0.5)  # a broker that is down is dialed again after 50 ms, after 100, and so on
            assert not other.talks
            cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
            for _ in range(1_000):
                client.send(subject, b"x").result(WAIT_S)
                if other.talks:
                    return
    raise AssertionError("it is not dialed when it is named again")


def until_alone(client: fairway.Client, subject: str, name: str) -> None:
    for _ in range(1_000):
        if {client.send(subject, b"x").result(WAIT_S).broker_group for _ in range(4)} == {name}:
            return
    raise AssertionError(f"others than {name} took messages")


def test_no_meta_server_is_unreachable_and_the_remedy_is_named() -> None:
    with pytest.raises(
        fairway.Unreachable,
        match=r"no meta server at meta://127\.0\.0\.1:\d+: .*`fairway meta --registry sqlite:meta --port",
    ):
        fairway.connect(f"meta://127.0.0.1:{free_port()}")


def test_brokers_go_on_while_meta_servers_are_away(cluster: Cluster, subject: str) -> None:
    with FakeMeta() as meta:
        meta.tell(*cluster.all_up(), SubjectRoute(subject, ["a", "b"], ["a", "b"]))
        with fairway.connect(meta.url) as client:
            client.send(subject, b"a").result(WAIT_S)
            meta.close()
            for _ in range(10):
                client.send(subject, b"b").result(WAIT_S)


def test_callbacks_of_messages_that_went_by_another_way_are_called(cluster: Cluster, subject: str) -> None:
    cluster.meta.is_mute = True
    told = threading.Event()
    with fairway.connect(cluster.url) as client:
        client.send(subject, b"a").add_done_callback(lambda _: told.set())
        cluster.meta.is_mute = False
        cluster.meta.tell()
        assert told.wait(WAIT_S)


def test_unseen_failures_of_all_ways_are_raised_once(cluster: Cluster, subject: str) -> None:
    cluster.meta.is_mute = True
    impatient = ClientOptions(producer=fairway.ProducerOptions(delivery_timeout_ms=100))
    client = fairway.connect(cluster.url, options=impatient)
    client.send(subject, b"a")
    with pytest.raises(ExceptionGroup) as caught:
        client.flush(WAIT_S)
    assert len(caught.value.exceptions) == 1
    client.close()


def test_a_forked_child_has_ways_of_its_own(cluster: Cluster) -> None:
    cluster.meta.tell(SubjectRoute("forked", ["a"], ["a"]))
    done = run_program(FORKING, cluster.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_what_is_buffered_when_a_program_ends_is_stored(cluster: Cluster, subject: str) -> None:
    source = (
        "import sys, fairway; c = fairway.connect(sys.argv[1]); c.consumer(sys.argv[2], 'g')\n"
        "for n in range(2000): c.send(sys.argv[2], b'%d' % n)"
    )
    done = run_program(source, cluster.url, subject)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sum(map(len, both(cluster, subject).values())) == 2_000


# --- consuming --------------------------------------------------------------------------------------------------------


def test_a_consumer_takes_from_all_groups_in_equal_shares(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        fill(cluster, subject, 400)
        with client.consumer(subject, "g") as consumer:
            first = consumer.poll(WAIT_S)
            assert first is not None
            first.ack()
            taken = [first]
            while len(taken) < 800:
                messages = consumer.take(100, WAIT_S)
                assert messages
                consumer.ack(messages)
                taken += messages
            assert consumer.flush(WAIT_S)
            assert consumer.counts.settled == 800
    assert Counter(message.broker_group for message in taken) == {"a": 400, "b": 400}
    assert {(message.broker_group, message.sequence) for message in taken} == {
        (name, sequence) for name in ("a", "b") for sequence in range(400)
    }


def test_a_group_that_is_away_holds_up_no_other(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        fill(cluster, subject, 10)
        cluster.brokers["a"].kill()
        with client.consumer(subject, "g") as consumer:
            for _ in range(10):
                message = consumer.poll(WAIT_S)
                assert message is not None
                assert message.broker_group == "b"
                message.ack()
            cluster.brokers["a"].start()
            for _ in range(10):
                message = consumer.poll(WAIT_S)
                assert message is not None
                assert message.broker_group == "a"
                message.ack()


def test_a_group_that_a_subject_gains_is_joined_from_its_first_message_on(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
    with fairway.connect(cluster.url) as client:
        client.send(subject, b"old").result(WAIT_S)
        with client.consumer(subject, "g", start="latest") as consumer:
            until_joined(client, subject, "g")
            with fairway.connect(cluster.brokers["b"].url) as direct:
                direct.send(subject, b"new").result(WAIT_S)
            cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
            message = consumer.poll(WAIT_S)
            assert message is not None
            assert (message.payload, message.broker_group) == (b"new", "b")
            message.ack()


def until_joined(client: fairway.Client, subject: str, group: str) -> None:
    for _ in range(10_000):
        try:
            if client.describe(subject, group).subjects[0].groups[0].consumers_count:
                return
        except (fairway.Refused, IndexError):
            continue
    raise AssertionError("nobody joined")


def test_a_group_that_a_subject_loses_is_left(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        fill(cluster, subject, 2)
        with client.consumer(subject, "g") as consumer:
            messages = [consumer.poll(WAIT_S) for _ in range(4)]
            cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
            for message in messages:
                assert message is not None
                message.ack()
            with fairway.connect(cluster.brokers["b"].url) as direct:
                until_left(direct, subject, "g")
            assert consumer.flush(WAIT_S)
            assert consumer.counts.settled == 4


def until_left(client: fairway.Client, subject: str, group: str) -> None:
    for _ in range(10_000):
        [state] = client.describe(subject, group).subjects[0].groups
        if not state.consumers_count and not state.in_flight:
            return
    raise AssertionError("somebody is still there")


def test_a_consumer_of_a_subject_that_comes_later_waits_for_it(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client, client.consumer(subject, "g", start="latest") as consumer:
        assert consumer.poll(0.1) is None
        client.send(subject, b"first").result(WAIT_S)
        message = consumer.poll(WAIT_S)
        assert message is not None
        message.ack()


def test_groups_that_are_switched_off_get_nothing(cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"], paused=["g"]))
    with fairway.connect(cluster.url) as client, client.consumer(subject, "g") as consumer:
        client.send(subject, b"a").result(WAIT_S)
        assert consumer.poll(0.3) is None
        cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
        message = consumer.poll(WAIT_S)
        assert message is not None
        message.ack()


def test_pause_rest_and_resume_are_for_all_groups(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client, client.consumer(subject, "g") as consumer:
        fill(cluster, subject, 5)
        first = consumer.poll(WAIT_S)
        assert first is not None
        first.ack()
        consumer.pause()
        consumer.rest()
        assert not consumer.take(10, 0.1), "but for what is in hand nothing comes"
        consumer.resume()
        while consumer.rest():
            assert consumer.flush(WAIT_S)
        for _ in range(9):
            message = consumer.poll(WAIT_S)
            assert message is not None
            message.ack()


def test_the_same_session_on_another_connection_ends_it(
    cluster: Cluster, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_one_secret(monkeypatch)
    with fairway.connect(cluster.url) as client, fairway.connect(cluster.url) as other:
        client.send(subject, b"a").result(WAIT_S)
        first = client.consumer(subject, "g", consumer="me")
        assert first.poll(WAIT_S) is not None
        with other.consumer(subject, "g", consumer="me") as second:
            second.poll(0.1)
            with pytest.raises(fairway.Refused, match="FENCED"):
                first.poll(WAIT_S)
        first.close()


def test_dead_letters_are_where_their_subject_is(cluster: Cluster, subject: str) -> None:
    with fairway.connect(cluster.url) as client:
        fill(cluster, subject, 1)
        with client.consumer(subject, "g") as consumer:
            for _ in range(2):
                message = consumer.poll(WAIT_S)
                assert message is not None
                message.reject("why not")
        with client.consumer(f"dead:g:{subject}", "coroner") as consumer:
            groups = set()
            for _ in range(2):
                message = consumer.poll(WAIT_S)
                assert message is not None
                groups.add(message.broker_group)
                message.ack()
            assert groups == {"a", "b"}


def test_an_app_listens_to_all_groups(cluster: Cluster, subject: str) -> None:
    app = fairway.App(cluster.url)
    seen: set[tuple[str, int]] = set()
    done = threading.Event()

    @app.listener(subject, group="g", concurrency=2)
    def on_message(message: fairway.Message) -> None:
        seen.add((message.broker_group, message.sequence))
        if len(seen) == 10:
            done.set()

    with fairway.connect(cluster.url) as client:
        for _ in range(10):
            client.send(subject, b"x").result(WAIT_S)
    app.start()
    try:
        assert done.wait(WAIT_S)
    finally:
        app.stop()
    assert {name for name, _ in seen} == {"a", "b"}
