"""The spool of a client of a cluster: what one group may have stays with it, the rest goes wherever its subject is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairway
import fairway.aio
from fairway.client.spool.spool_directory import survey
from fairway.lookup.routes import home
from fairway.protocol.route_messages import SubjectRoute
from fairway.runtime.clock import RealClock
from tests.support.ports import free_port
from tests.support.stub_server import group
from tests.unit.client.broker import WAIT_S
from tests.unit.client.cluster import Cluster, stored
from tests.unit.client.test_cluster_client import until_both_take

BRISK = fairway.ReconnectOptions(backoff_first_ms=10, backoff_most_ms=50)


def options(spool: Path, **settings: int) -> fairway.ClientOptions:
    chosen = {"after_ms": 50, "adopt_ms": 50, **settings}
    return fairway.ClientOptions(line=BRISK, spool=fairway.SpoolOptions(str(spool), **chosen))  # type: ignore[arg-type]


def everywhere(cluster: Cluster, subject: str) -> Counter[bytes]:
    return Counter(payload for broker in cluster.brokers.values() for payload in stored(broker, subject))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def a_stands_still(cluster: Cluster) -> Iterator[None]:
    cluster.brokers["a"].suspend()
    try:
        yield
    finally:
        if cluster.brokers["a"].is_running:
            cluster.brokers["a"].go_on()


@pytest.mark.slow
def test_while_the_cluster_answers_nothing_is_spooled(cluster: Cluster, subject: str, spool: Path) -> None:
    with fairway.connect(cluster.url, options=options(spool, after_ms=10_000)) as client:
        until_both_take(client, subject)
        assert type(client.send(subject, b"x").result(WAIT_S)) is fairway.Receipt
        assert client.spool is not None
        assert client.spool.messages == 0


def test_without_a_meta_server_messages_wait_on_disk_and_keep_their_ids(
    cluster: Cluster, subject: str, spool: Path
) -> None:
    """Nobody has said where their subject is: they have a place when somebody does."""
    cluster.meta.tell(SubjectRoute(subject, ["b"], ["b"]))
    cluster.meta.is_mute = True
    with fairway.connect(cluster.url, options=options(spool)) as client:
        pendings = [client.send(subject, b"%d" % number) for number in range(20)]
        pendings += [client.send(subject, b"%d" % number, key="k") for number in range(20, 25)]
        receipts = [pending.result(WAIT_S) for pending in pendings]
        assert all(isinstance(receipt, fairway.SpoolReceipt) for receipt in receipts)
        cluster.meta.is_mute = False
        cluster.meta.tell()
        assert client.wait_drained(WAIT_S)
        with client.consumer(subject, group="hotel") as consumer:
            taken = consumer.take(25, WAIT_S)
        assert [message.payload for message in taken] == [b"%d" % number for number in range(25)]
        assert [message.id for message in taken] == [receipt.message_id for receipt in receipts]


@pytest.mark.slow
def test_nobody_is_there_at_all_and_a_later_process_drains_it(cluster: Cluster, subject: str, spool: Path) -> None:
    with fairway.connect(f"meta://127.0.0.1:{free_port()}", options=options(spool)) as away:
        assert isinstance(away.send(subject, b"early").result(WAIT_S), fairway.SpoolReceipt)
    [journal] = survey(str(spool), RealClock()).journals
    assert (journal.is_cluster, journal.messages, journal.pinned) == (True, 1, {})
    with fairway.connect(cluster.url, options=options(spool)) as client:
        assert client.wait_drained(WAIT_S)
        client.send(subject, b"late").result(WAIT_S)
    assert everywhere(cluster, subject) == {b"early": 1, b"late": 1}


def test_what_a_group_may_have_waits_for_it_while_the_subject_goes_on_elsewhere(
    cluster: Cluster, subject: str, spool: Path, request: pytest.FixtureRequest
) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
    with fairway.connect(cluster.url, options=options(spool)) as client:
        client.send(subject, b"first").result(WAIT_S)
        request.getfixturevalue("a_stands_still")
        doubtful = [client.send(subject, b"doubtful %d" % number) for number in range(5)]
        assert isinstance(doubtful[0].result(WAIT_S), fairway.SpoolReceipt), "it was under way, and may be stored"
        cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["b"]))
        moved = until_stored_in(client, subject, "b")
        assert client.spool is not None
        assert client.spool.messages >= 1
        cluster.brokers["a"].go_on()
        assert client.wait_drained(WAIT_S)
        assert all(count == 1 for count in everywhere(cluster, subject).values())
        assert b"doubtful 0" in stored(cluster.brokers["a"], subject)
        assert set(everywhere(cluster, subject)) == {b"first", *moved, *(b"doubtful %d" % at for at in range(5))}


def until_stored_in(client: fairway.Client, subject: str, name: str) -> list[bytes]:
    """Messages, until one goes directly to that group."""
    sent: list[bytes] = []
    for number in range(10_000):
        sent.append(b"moved %d" % number)
        receipt = client.send(subject, sent[-1]).result(WAIT_S)
        if receipt.broker_group == name:
            return sent
    raise AssertionError(f"nothing went to {name}")


@pytest.mark.slow
def test_what_was_never_sent_goes_to_the_group_that_is_back_first(cluster: Cluster, subject: str, spool: Path) -> None:
    with fairway.connect(cluster.url, options=options(spool)) as client:
        until_both_take(client, subject)
        before = everywhere(cluster, subject).total()
        for broker in cluster.brokers.values():
            broker.kill()
        pendings = [client.send(subject, b"%d" % number) for number in range(200)]
        assert isinstance(pendings[-1].result(WAIT_S), fairway.SpoolReceipt)
        cluster.brokers["b"].start()
        until_left(client, 50)  # what was under way to the other one waits for it
        assert len(stored(cluster.brokers["b"], subject)) > 100
        cluster.brokers["a"].start()
        assert client.wait_drained(WAIT_S)
        client.flush(WAIT_S)
    found = everywhere(cluster, subject)
    assert found.total() == before + 200
    assert all(found[b"%d" % number] == 1 for number in range(200))


def until_left(client: fairway.Client, most: int) -> None:
    for _ in range(10_000):
        if client.spool is not None and client.spool.messages <= most:
            return
        client.wait_drained(0.01)
    raise AssertionError(f"{client.spool} is left")


KILLED = """
import os, sys, fairway
spool = fairway.SpoolOptions(sys.argv[2], after_ms=50)
client = fairway.connect(sys.argv[1], spool=spool)
client.send(sys.argv[3], b"first").result(30)
print("go", flush=True)
sys.stdin.readline()
receipt = client.send(sys.argv[3], b"doubtful").result(30)
assert isinstance(receipt, fairway.SpoolReceipt), receipt
print(receipt.id, flush=True)
os._exit(0)
"""


def test_a_process_that_died_with_something_under_way_leaves_it_pinned(
    cluster: Cluster, subject: str, spool: Path
) -> None:
    """The next process knows from the journal which group to ask, although the subject is elsewhere by then."""
    cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
    die(cluster, spool, subject)
    [journal] = survey(str(spool), RealClock()).journals
    assert (journal.process, journal.messages, journal.pinned) == (None, 1, {"a": 1})
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["b"]))
    with fairway.connect(cluster.url, options=options(spool)) as client:
        assert until_stored_in(client, subject, "b")
        assert not client.wait_drained(0.2)
        cluster.brokers["a"].go_on()
        assert client.wait_drained(WAIT_S)
    assert stored(cluster.brokers["a"], subject).count(b"doubtful") == 1
    assert stored(cluster.brokers["b"], subject).count(b"doubtful") == 0


def die(cluster: Cluster, spool: Path, subject: str) -> None:
    """A process that sends to a group which stands still, has its receipt from the spool, and ends there."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, cluster.url, str(spool), subject],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "go"
        cluster.brokers["a"].suspend()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().strip()
        assert process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_keys_of_an_ordered_subject_wait_for_their_group_in_order(cluster: Cluster, subject: str, spool: Path) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"], is_ordered=True))
    with fairway.connect(cluster.url, options=options(spool)) as client:
        send_keys(client, subject, 0, 20)
        client.flush(WAIT_S)
        cluster.brokers["a"].kill()
        cluster.meta.tell(group("a", 1))
        send_keys(client, subject, 20, 60)
        client.flush(WAIT_S)
        assert client.spool is not None
        assert client.spool.messages > 0
        cluster.mend()
        send_keys(client, subject, 60, 80)
        client.flush(WAIT_S)
        assert client.wait_drained(WAIT_S)
    for at, name in enumerate(("a", "b")):
        own = stored(cluster.brokers[name], subject)
        for key in {payload.split()[0].decode() for payload in own}:
            assert home(key, ("a", "b")) == at
            numbers = [int(payload.split()[1]) for payload in own if payload.startswith(f"{key} ".encode())]
            assert numbers == [number for number in range(80) if f"k{number % 10}" == key]


def send_keys(client: fairway.Client, subject: str, start: int, end: int) -> None:
    for number in range(start, end):
        client.send(subject, b"k%d %d" % (number % 10, number), key=f"k{number % 10}")


def test_the_same_on_a_loop(cluster: Cluster, subject: str, spool: Path) -> None:
    async def main() -> None:
        cluster.meta.is_mute = True
        async with fairway.aio.connect(cluster.url, options=options(spool)) as client:
            receipts = await asyncio.gather(*(client.send(subject, b"%d" % number) for number in range(50)))
            assert all(isinstance(receipt, fairway.SpoolReceipt) for receipt in receipts)
            cluster.meta.is_mute = False
            cluster.meta.tell()
            assert await client.wait_drained(WAIT_S)
            assert type(await client.send(subject, b"50")) is fairway.Receipt

    asyncio.run(main())
    assert everywhere(cluster, subject) == Counter(b"%d" % number for number in range(51))


@pytest.mark.slow
def test_journals_of_clusters_and_of_single_brokers_are_not_mixed_up(
    cluster: Cluster, subject: str, spool: Path
) -> None:
    """Where the entries of the other kind went is not known to those who find them."""
    nobody = free_port()
    with fairway.connect(f"meta://127.0.0.1:{nobody}", options=options(spool)) as away:
        away.send(subject, b"of a cluster").result(WAIT_S)
    with fairway.connect(f"fairway://127.0.0.1:{nobody}", options=options(spool)) as away:
        away.send(subject, b"of one broker").result(WAIT_S)
    with fairway.connect(cluster.brokers["a"].url, options=options(spool)) as client:
        assert client.wait_drained(WAIT_S)
        client.send(subject, b"now").result(WAIT_S)
    assert everywhere(cluster, subject) == {b"of one broker": 1, b"now": 1}
    with fairway.connect(cluster.url, options=options(spool)) as client:
        assert client.wait_drained(WAIT_S)
        client.send(subject, b"now").result(WAIT_S)
    assert everywhere(cluster, subject) == {b"of one broker": 1, b"of a cluster": 1, b"now": 2}
