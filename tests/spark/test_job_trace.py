"""Lives and their accounts, on a scene of which every message's fate is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from fairway import Message
from fairway.batch import MessageId
from fairway.cli.connections import describe
from fairway.cli.consume import of_page
from fairway.cli.trace import Home, SearchScope
from fairway.cli.trace_search import FoundMessage
from fairway.cli.trace_timeline import TimelineBuilder
from fairway.client.sync.client import Client
from fairway.client.sync.consumer import Consumer
from fairway.client.url import parse as addresses
from fairway.errors import Misuse
from fairway.groups import GroupConfig
from fairway.groups.config import Mode
from fairway.protocol.admin_messages import Depth, GroupDescription
from fairway.protocol.messages import Join, Joined, Pull, Pulled
from fairway.spark.connection import BlockingClient, Fixed
from fairway.spark.jobs import archive, trace
from fairway.spark.jobs.job import Point
from fairway.spark.jobs.message_lifecycle import lives
from fairway.spark.jobs.selection import Picking
from fairway.spark.jobs.trace import TraceOptions
from tests.spark.jobs import send

WAIT_S = 60
SUBJECT = "life.orders"
ANYHOW = "life.anyhow"  # of which nobody knows what becomes of what
ACKED, RETRIED, REJECTED, REDRIVEN, HELD, WAITING = range(6)


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_so():
            return
    pytest.fail("it never came to pass")


def taken(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += consumer.take(count - len(messages), timeout=WAIT_S)
    return messages


def state_of(client: Client, subject: str, group: str) -> GroupDescription:
    return client.describe(subject, group).subjects[0].groups[0]


@pytest.fixture(scope="module")
def scene(client: Client, url: str) -> Iterator[str]:
    """One subject, five groups; `ann` holds a message for as long as the module runs."""
    send(client, SUBJECT, 5, keys=[f"k{number}" for number in range(5)])
    client.configure(SUBJECT, "fraud", GroupConfig(), expected_version=0)
    client.pause(SUBJECT, "fraud")  # before there is a consumer, which would ask for messages at once
    with client.consumer(SUBJECT, "fraud"), client.consumer("life.other", "idle"):
        pass
    client.configure(SUBJECT, "quick", GroupConfig(mode=Mode.AT_MOST_ONCE), expected_version=0)
    with client.consumer(SUBJECT, "quick") as quick:
        taken(quick, 5)
    with client.consumer(SUBJECT, "late", start="latest"):
        pass
    _expire(client, url)
    with client.consumer(SUBJECT, "billing", consumer="ann") as ann:
        client.pause(SUBJECT, "late")
        messages = {message.sequence: message for message in taken(ann, 5)}
        messages[ACKED].ack()
        messages[RETRIED].retry(after=0.01, reason="no stock")
        messages[REJECTED].reject("nonsense")
        messages[REDRIVEN].reject("not today")
        taken(ann, 1)[0].ack()
        until(lambda: state_of(client, SUBJECT, "billing").dead == 2)
        letters = [page.batch.id(0) for page in client.scan(f"dead:billing:{SUBJECT}")]
        client.redrive(SUBJECT, "billing", [letters[-1]])
        taken(ann, 1)[0].ack()
        ann.flush()
        for group in ("billing", "quick"):
            client.pause(SUBJECT, group)
        send(client, SUBJECT, 1)
        yield url


@pytest.fixture(scope="module")
def anyhow(client: Client) -> Iterator[GroupDescription]:
    """Consumers come and go and do as they please; twice the cursor is moved back. The last one still holds some."""
    rng = random.Random(7)
    send(client, ANYHOW, 200)
    for number in range(8):
        with client.consumer(ANYHOW, "billing", consumer=f"c{number % 3}") as consumer:
            for message in consumer.take(rng.randrange(1, 60), timeout=WAIT_S):
                _settle(message, rng)
        if number in {2, 5}:
            client.seek(ANYHOW, "billing", rng.randrange(40))
    with client.consumer(ANYHOW, "billing", consumer="last") as last:
        last.take(20, timeout=WAIT_S)[0].ack()
        last.flush()
        client.pause(ANYHOW, "billing")
        until(lambda: not state_of(client, ANYHOW, "billing").dying)
        yield state_of(client, ANYHOW, "billing")


def _settle(message: Message, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            message.retry(after=3_600)
        case 1:
            message.reject("why not")
        case 2:
            message.release()
        case 3 | 4:
            message.ack()  # else nothing: it is handed back when the consumer leaves


def _expire(client: Client, url: str) -> None:
    """A consumer that takes everything, acks nothing and is not heard of again."""
    client.configure(SUBJECT, "frail", GroupConfig(lease_ms=100), expected_version=0)
    with BlockingClient(Fixed(addresses(url).brokers), WAIT_S) as caller:
        place = (SUBJECT, "frail", "eve")
        caller.ask(Join(*place, 0, 0), Joined)
        caller.ask(Pull(*place, 1_000, 1 << 20, 0, 0), Pulled)
    until(lambda: state_of(client, SUBJECT, "frail").returned == 5)


@pytest.fixture(scope="module")
def every(spark: SparkSession, scene: str, anyhow: GroupDescription) -> list[Row]:
    """One run of Spark for all of it."""
    return lives(spark, Picking((SUBJECT, ANYHOW), url=scene)).collect()


@pytest.fixture(scope="module")
def told(every: list[Row]) -> dict[tuple[str, int], Row]:
    rows = [row for row in every if row["subject"] == SUBJECT]
    found = {(row["group"], row["sequence"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def outcomes(row: Row) -> list[tuple[Any, ...]]:
    return [(each["attempt"], each["consumer"], each["outcome"], each["reason"]) for each in row["attempts"]]


def test_every_message_has_a_row_in_every_group(told: dict[tuple[str, int], Row]) -> None:
    states = {
        group: [told[group, sequence]["state"] for sequence in range(6)]
        for group in ("billing", "fraud", "frail", "late", "quick")
    }
    assert len(told) == 6 * len(states)
    assert states == {
        "billing": ["acked", "acked", "dead", "acked", "in hand", "waiting"],
        "fraud": ["waiting"] * 6,
        "frail": ["returned"] * 5 + ["waiting"],
        "late": ["skipped"] * 5 + ["waiting"],
        "quick": ["handed out"] * 5 + ["waiting"],
    }


def test_attempts_in_order_with_what_ended_them(told: dict[tuple[str, int], Row]) -> None:
    assert outcomes(told["billing", ACKED]) == [(1, "ann", "acked", None)]
    assert outcomes(told["billing", RETRIED]) == [(1, "ann", "retried", "no stock"), (2, "ann", "acked", None)]
    assert outcomes(told["billing", REJECTED]) == [(1, "ann", "rejected", "nonsense")]
    assert outcomes(told["billing", REDRIVEN]) == [(1, "ann", "rejected", "not today"), (1, "ann", "acked", None)]
    assert outcomes(told["billing", HELD]) == [(1, "ann", "in hand", None)]
    assert outcomes(told["frail", 0]) == [(1, "eve", "expired", None)]
    assert [each[2] for each in outcomes(told["quick", 0])] == ["handed out"]
    assert outcomes(told["fraud", 0]) == []


def test_times_and_counts_follow_the_attempts(told: dict[tuple[str, int], Row]) -> None:
    acked, retried, redriven = (told["billing", each] for each in (ACKED, RETRIED, REDRIVEN))
    assert (acked["pulls"], acked["acks"], acked["redrives"], acked["key"]) == (1, 1, 0, "k0")
    assert (retried["pulls"], retried["acks"]) == (2, 1)
    assert (redriven["pulls"], redriven["acks"], redriven["redrives"]) == (2, 1, 1)
    assert redriven["dead_at"] <= redriven["acked_at"]
    assert told["billing", REJECTED]["dead_at"] is not None
    first, second = retried["attempts"]
    assert retried["first_pulled_at"] == first["pulled_at"] <= first["ended_at"] <= second["pulled_at"]
    assert retried["acked_at"] == second["ended_at"]
    assert retried["wait_ms"] >= 0
    assert 0 <= retried["handling_ms"] <= retried["total_ms"]
    waiting = told["billing", WAITING]
    assert (waiting["pulls"], waiting["first_pulled_at"], waiting["total_ms"]) == (0, None, None)


def test_whatever_consumers_do_the_broker_counts_the_same(every: list[Row], anyhow: GroupDescription) -> None:
    states = Counter(row["state"] for row in every if row["subject"] == ANYHOW)
    assert states.total() == 200
    assert states["waiting"] == anyhow.lag
    assert states["in hand"] == anyhow.in_flight > 0
    assert states["returned"] + states["retrying"] == anyhow.returned + anyhow.retrying > 0
    assert states["acked"] > 0 < states["dead"]


def test_one_by_one_the_command_line_tells_the_same(every: list[Row], client: Client) -> None:
    _, subjects = describe(client, Depth.GROUPS, ANYHOW)
    asked = SearchScope(client, [home := Home(None, client, subjects)])
    for row in [each for each in every if each["subject"] == ANYHOW][::10]:
        page = next(client.scan(ANYHOW, row["sequence"], row["sequence"] + 1))
        found = FoundMessage(of_page(ANYHOW, page, row["sequence"]), home)
        (told,) = TimelineBuilder(asked, MessageId.parse(row["id"])).build([found], is_to_end=True).groups
        assert (told.state, told.pulls, told.acks) == (row["state"], row["pulls"], row["acks"]), row


def test_the_job_accounts_for_an_archive(spark: SparkSession, scene: str, tmp_path: Path) -> None:
    path, output = str(tmp_path / "archive"), str(tmp_path / "lives")
    archive.run(spark, archive.ArchiveOptions(path, (SUBJECT,), url=scene, once=True))
    picked = Picking((SUBJECT,), archive=path, url=scene)
    seen: list[Point] = []
    found = trace.run(spark, TraceOptions(picked, ("billing", "fraud"), 2, output), seen.append)
    assert [each.sentence for each in seen] == ["trace: 6 rows"]
    billing, fraud = found.accounts
    assert (billing.group, billing.messages, billing.again, billing.redriven) == ("billing", 6, 2, 1)
    assert billing.states == {"waiting": 1, "in hand": 1, "acked": 3, "dead": 1}
    assert billing.total.p50_ms is not None
    assert (fraud.states, fraud.wait.p50_ms) == ({"waiting": 6}, None)
    assert [each.state for each in found.slowest] == ["acked", "acked"]
    assert found.slowest[0].total_ms == max(each.total_ms or 0 for each in found.slowest)
    assert {each.state for each in found.stuck} <= {"waiting", "in hand"}
    assert spark.read.parquet(output).where("state = 'acked'").count() == 3


def test_the_job_names_subjects_without_groups_and_bad_groups(spark: SparkSession, url: str, client: Client) -> None:
    send(client, "life.alone", 3)
    found = trace.run(spark, TraceOptions(Picking(("life.alone",), url=url)))
    assert (found.accounts, found.unclaimed) == ([], ["life.alone"])
    with pytest.raises(Misuse, match="--group"):
        trace.run(spark, TraceOptions(Picking(("life.alone",), url=url), ("no group",)))
    with pytest.raises(Misuse, match=r"no subject 'life\.alone1'"):
        trace.run(spark, TraceOptions(Picking(("life.alone1",), url=url)))
