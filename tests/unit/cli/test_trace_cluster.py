"""`fairway trace` of a whole cluster: two broker groups, two delay servers and one timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fairway
from fairway import batch
from fairway.batch import MessageId
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.route_messages import SubjectRoute
from fairway.runtime.clock import RealClock
from fairway.runtime.process import Child
from fairway.spark.server_groups import ServerGroupAddress, caller_to
from tests.support.stub_server import group
from tests.unit.cli.running import READY_S, Cli
from tests.unit.cli.test_delay_server import address_of
from tests.unit.cli.test_trace import archive_of, told
from tests.unit.client.cluster import Cluster, clustered

WAIT_S = 30
DELAYS = ("d1", "d2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("cluster")
    with clustered(home) as made, ExitStack() as stack:
        brokers = " ".join(f"{name}=127.0.0.1:{broker.port}" for name, broker in made.brokers.items())
        servers = {
            name: stack.enter_context(
                Child(
                    "fairway", "delay", "serve", "--data", str(home / name), "--broker", brokers,
                    "--port", "0", "--http-port", "0",
                )
            )
            for name in DELAYS
        }  # fmt: skip
        for name, server in servers.items():
            port = address_of(server.line(timeout_s=READY_S) or "").rpartition(":")[2]
            made.meta.tell(group(name, int(port), kind="delay"))
        yield made


@pytest.fixture
def cli(cluster: Cluster) -> Iterator[Cli]:
    yield Cli(cluster.url)
    cluster.mend()


def sent_to(cluster: Cluster, name: str, subject: str, id: MessageId | None = None) -> str:
    """One message in one broker group of a subject that is in both; its id."""
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"]))
    with fairway.connect(cluster.brokers[name].url) as direct:
        receipt = direct.send(subject, b"x", id=id).result(WAIT_S)
        return str(receipt.id)


def consume(cluster: Cluster, name: str, subject: str, what: str = "ack") -> None:
    """One message of one broker group, by billing."""
    url, ann = cluster.brokers[name].url, f"ann-{name}"
    with fairway.connect(url) as direct, direct.consumer(subject, "billing", consumer=ann) as consumer:
        message = consumer.take(1, timeout=WAIT_S)[0]
        message.ack() if what == "ack" else message.reject("nonsense")


def replay(cluster: Cluster, name: str, subject: str, id: str) -> None:
    """Into the inbox of billing there, as `fairway pipeline replay --group` does it."""
    data = batch.encode(
        [b"x"],
        producer_id=4_712,
        first_sequence=0,
        created_ms=RealClock().wall_ms(),
        headers=[{"fairway.replay.id": "r"}],
        ids=[MessageId.parse(id)],
    )
    with caller_to(ServerGroupAddress(cluster.brokers[name].url, WAIT_S)) as caller:
        caller.take(caller.put(Produce(f"inbox:billing:{subject}"), [data]), Produced)


def states(story: Any) -> list[tuple[Any, ...]]:
    return [(each["group"], each["broker_group"], each["state"], each["acks"]) for each in story["groups"]]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_message_is_found_in_whatever_broker_group_has_it(cluster: Cluster, cli: Cli, name: str) -> None:
    subject = f"found.{name}"
    ids = {each: sent_to(cluster, each, subject) for each in ("a", "b")}
    consume(cluster, name, subject)
    story = cli.json("trace", ids[name])
    assert (story["broker_group"], story["message"]["id"], story["unasked"]) == (name, ids[name], {})
    assert told(story, "event", "consumer", "broker_group") == [
        ("created", None, None),
        ("stored", None, None),
        ("pulled", f"ann-{name}", None),
        ("acked", f"ann-{name}", None),
    ]
    assert states(story) == [("billing", name, "acked", 1)]
    text = cli.run("trace", ids[name], "--subject", subject)
    assert f"sequence 0, broker group {name}" in text
    assert "billing: acked" in text


def test_what_was_replayed_to_a_group_lies_in_another_broker_group(cluster: Cluster, cli: Cli) -> None:
    born = sent_to(cluster, "a", "replayed")
    sent_to(cluster, "b", "replayed")
    consume(cluster, "a", "replayed", "reject")
    consume(cluster, "b", "replayed")
    replay(cluster, "b", "replayed", born)
    assert states(cli.json("trace", born)) == [("billing", "a", "waiting", 0)]
    consume(cluster, "b", "replayed")
    story = cli.json("trace", born)
    seen = [each for each in told(story, "event", "broker_group") if each != ("dead", None)]  # it comes in its own time
    assert seen == [
        ("created", None), ("stored", None), ("pulled", None), ("rejected", None),
        ("replayed", "b"), ("pulled", "b"), ("acked", "b"),
    ]  # fmt: skip
    assert states(story) == [("billing", "a", "acked", 1)]
    assert "in broker group b" in cli.run("trace", born)


def test_an_id_that_two_broker_groups_have_is_one_timeline(cluster: Cluster, cli: Cli) -> None:
    born = MessageId(4_711, 43)
    for name in ("b", "a"):
        sent_to(cluster, name, "twice", id=born)
    consume(cluster, "a", "twice")
    story = cli.json("trace", str(born))
    assert story["broker_group"] == "b", "the first that was stored"
    assert told(story, "event", "broker_group") == [
        ("created", None), ("stored", None), ("stored", "a"), ("pulled", "a"), ("acked", "a"),
    ]  # fmt: skip
    assert states(story) == [("billing", "a", "acked", 1)]
    consume(cluster, "b", "twice")
    text = cli.run("trace", str(born))
    assert "billing in broker group a: acked" in text
    assert "billing in broker group b: acked" in text


def test_one_that_waits_with_either_delay_server(cluster: Cluster, cli: Cli) -> None:
    cluster.meta.tell(SubjectRoute("later", ["a", "b"], ["a", "b"]))
    for name in DELAYS:
        at = cluster.meta.groups[name].master
        with fairway.connect(f"{cluster.brokers['a'].url}?delay={at}") as direct:
            receipt = direct.send("later", b"x", after=3_600).result(WAIT_S)
        assert cli.json("trace", str(receipt.id))["pending"]["id"] == str(receipt.id)


def test_a_broker_group_that_is_away_is_named(cluster: Cluster, cli: Cli) -> None:
    here, there = sent_to(cluster, "a", "away"), sent_to(cluster, "b", "away")
    cluster.brokers["b"].stop()
    story = cli.json("trace", here)
    assert story["broker_group"] == "a"
    assert list(story["unasked"]) == ["b"]
    assert "b could not be asked, and may know more: no broker at" in cli.run("trace", here)
    assert "b could not be asked: no broker at" in cli.fails("trace", there, "-s", "away", status=1)
    cluster.meta.tell(group("a", None), group("b", None))
    silent = cli.fails("trace", here, status=3)
    assert "none of the broker groups" in silent
    assert "a: nobody leads it" in silent


def test_an_archive_tells_the_broker_group_by_its_log(cluster: Cluster, cli: Cli, tmp_path: Path) -> None:
    gone = str(MessageId(79, 1))
    with fairway.connect(cluster.brokers["b"].url) as direct:
        log_id = direct.describe().broker.log_id
    archive_of(tmp_path / "archive", "taken", 0, gone, log_id, "g2")
    sent_to(cluster, "b", "taken")
    consume(cluster, "b", "taken")
    story = cli.json("trace", gone, "--archive", str(tmp_path / "archive"))
    assert (story["is_archived_only"], story["broker_group"]) == (True, "b")
    assert states(story) == [("billing", "b", "acked", 1)]


def test_what_is_nowhere(cluster: Cluster, cli: Cli) -> None:
    sent_to(cluster, "a", "somewhere")
    nobody = str(MessageId(1, 2))
    assert f"no message {nobody}" in cli.fails("trace", nobody, status=1)
    assert "nothing was ever sent to nowhere" in cli.fails("trace", nobody, "--subject", "nowhere", status=1)
