"""An outbox in a cluster: the table says which broker group may have a row, and nobody else is sent it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import fairway
from fairway.errors import Misuse
from fairway.lookup.routes import home
from fairway.protocol.route_messages import SubjectRoute
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.sql import AioOutbox, AioRelay, Outbox, Relay, RelayOptions, insert
from fairway.sql.outbox_encoding import Picker
from fairway.sql.outbox_rows import OutboxRows
from fairway.sql.relay_rounds import RelayRounds
from tests.support.outboxes import NIMBLE, TABLE, eventually, numbered, put, rows
from tests.support.stub_server import group
from tests.unit.client.cluster import Cluster, clustered, stored

WAIT_S = 30.0


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    yield shared_cluster
    shared_cluster.mend()


def everywhere(cluster: Cluster, subject: str) -> Counter[bytes]:
    return Counter(payload for broker in cluster.brokers.values() for payload in stored(broker, subject))


def contents(engine: sa.Engine) -> list[sa.RowMapping]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(TABLE).order_by(TABLE.c.created_ms, TABLE.c.id)).mappings())


def until_known(engine: sa.Engine, outbox: Outbox, subject: str) -> int:
    """Messages, until the process knows where they go, and both groups are connected."""
    groups: set[str] = set()
    for number in range(10_000):
        put(engine, outbox, subject, b"known %d" % number)
        groups |= {row["broker_group"] for row in contents(engine) if row["broker_group"]}
        if groups == {"a", "b"}:
            return number + 1
    raise AssertionError(f"only {groups} took messages")


@pytest.mark.slow
def test_what_commits_is_sent_to_all_groups_and_what_is_rolled_back_to_none(
    engine: sa.Engine, cluster: Cluster, subject: str
) -> None:
    with Outbox(engine, cluster.url, options=NIMBLE) as outbox:
        outbox.create()
        before = until_known(engine, outbox, subject)
        put(engine, outbox, subject, *numbered(40))
        with engine.connect() as connection:
            outbox.send(connection, subject, b"never")
            connection.rollback()
        eventually(lambda: rows(engine) == 0, "all is sent and deleted")
    found = everywhere(cluster, subject)
    assert found.total() == before + 40
    assert set(found.values()) == {1}
    assert all(found[payload] for payload in numbered(40))
    assert all(len(stored(broker, subject)) > 10 for broker in cluster.brokers.values())


@pytest.mark.slow
def test_rows_of_programs_without_sqlalchemy_are_relayed(lite: sa.Engine, cluster: Cluster, subject: str) -> None:
    Outbox(lite).create()
    raw = lite.raw_connection()
    cursor = raw.cursor()
    insert(cursor, subject, b"plain", key="k")
    raw.commit()
    raw.close()
    with Relay(lite, cluster.url, options=NIMBLE) as relay:
        eventually(lambda: rows(lite) == 0, "it is sent")
    assert everywhere(cluster, subject) == {b"plain": 1}
    assert relay.counts.sent == 1


def test_a_row_that_a_group_may_have_waits_for_it_although_its_subject_is_elsewhere(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a"], ["a"]))
    slow = RelayOptions(grace_s=0, delete_linger_s=60)
    with Outbox(lite, cluster.url, relays=False, options=slow) as outbox:
        outbox.create()
        until_sent(lite, outbox, subject)
        left = contents(lite)
        pinned = [row for row in left if row["broker_group"] == "a"]
        assert pinned, "sent and not deleted: as if the process had died"
        assert {row["broker_group"] for row in left} <= {"a", None}
        cluster.brokers["a"].suspend()
        try:
            cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["b"]))
            with Relay(lite, cluster.url, options=NIMBLE) as relay:
                put(lite, Outbox(lite), subject, b"free")
                eventually(lambda: b"free" in stored(cluster.brokers["b"], subject), "what is free goes to the other")
                eventually(lambda: rows(lite) == len(pinned), "the rest stays")
                assert relay.counts.repeats == 0
                cluster.brokers["a"].go_on()
                eventually(lambda: rows(lite) == 0, "the group is back, and says that it has them")
                assert relay.counts.repeats == len(pinned)
        finally:
            cluster.brokers["a"].go_on()
    assert set(everywhere(cluster, subject).values()) == {1}


def until_sent(engine: sa.Engine, outbox: Outbox, subject: str) -> None:
    """Messages, until the process itself has sent one: at first it does not know where to."""
    for number in range(1_000):
        put(engine, outbox, subject, b"early %d" % number)
        if outbox.counts.committed > outbox.counts.left:
            eventually(lambda: outbox.counts.sent > 0, "it is sent")
            return
        time.sleep(0.02)
    raise AssertionError("nothing was sent after a commit")


def test_a_relay_that_dies_leaves_the_group_in_the_table(lite: sa.Engine, cluster: Cluster, subject: str) -> None:
    """It wrote down where to, and died before or after it sent: the next one sends it there, and nowhere else."""
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["b"]))
    outbox = Outbox(lite)
    outbox.create()
    put(lite, outbox, subject, b"one")
    clock = ManualClock(int(datetime.now(UTC).timestamp() * 1_000))
    dying = RelayRounds(OutboxRows(TABLE, lite.dialect, is_cluster=True), clock, SeededRng(1), RelayOptions(lease_s=0))
    with lite.begin() as connection:
        work = dying.take(connection, Chooses("a"))
    assert [(row.group, row.place) for row in work.rows] == [("a", 0)]
    with Relay(lite, cluster.url, options=NIMBLE):
        eventually(lambda: rows(lite) == 0, "another one goes on")
    assert stored(cluster.brokers["a"], subject) == [b"one"]
    assert stored(cluster.brokers["b"], subject) == []


class Chooses(Picker):
    """Knows one group, whatever is asked."""

    def __init__(self, group: str) -> None:
        self._group = group

    def pick(self, route: object) -> str:
        return self._group

    def is_lost(self, route: object, group: str) -> bool:
        return group != self._group


@pytest.mark.slow
def test_a_row_whose_group_was_given_up_is_set_aside_and_may_be_sent_elsewhere(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["b"], ["b"]))
    outbox = Outbox(lite)
    outbox.create()
    put(lite, outbox, subject, b"one")
    with lite.begin() as connection:
        connection.execute(sa.update(TABLE).values(stream=5, place=0, broker_group="gone"))
    with Relay(lite, cluster.url, options=NIMBLE):
        eventually(lambda: bool(outbox.set_aside()), "it is set aside")
        [row] = outbox.set_aside()
        assert "broker group gone, which alone can tell whether it is stored, is not in this cluster" in row.error
        assert outbox.retry() == [row.id]
        eventually(lambda: rows(lite) == 0, "it goes to another")
    assert everywhere(cluster, subject) == {b"one": 1}


def test_a_subject_without_a_place_says_nothing_of_the_groups_that_may_have_its_rows(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    """A meta server that does not know a subject yet, or has no room for it, may know its groups a moment later."""
    cluster.meta.tell(SubjectRoute(subject, [], [], why="it is being made"))
    outbox = Outbox(lite)
    outbox.create()
    put(lite, outbox, subject, b"one")
    with lite.begin() as connection:
        connection.execute(sa.update(TABLE).values(stream=5, place=0, broker_group="late"))
    with Relay(lite, cluster.url, options=NIMBLE) as relay:
        eventually(lambda: relay.counts.rounds > 3, "it is tried")
        assert outbox.set_aside() == []
        cluster.meta.tell(group("late", cluster.brokers["a"].port), SubjectRoute(subject, ["late", "b"], ["b"]))
        eventually(lambda: rows(lite) == 0, "it is sent")
    assert stored(cluster.brokers["a"], subject) == [b"one"]


def test_while_no_group_is_connected_a_relay_does_not_go_through_the_whole_table(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    """Every look at it writes to the rows that it finds."""
    cluster.meta.tell(SubjectRoute(subject, [], [], why="it is being made"))
    outbox = Outbox(lite)
    outbox.create()
    put(lite, outbox, subject, *numbered(20))
    with Relay(lite, cluster.url, options=RelayOptions(rows_max=1, poll_s=30)) as relay:
        eventually(lambda: relay.counts.rounds > 0, "it looks")
        time.sleep(0.3)
        assert relay.counts.rounds == 1


@pytest.mark.slow
def test_keys_of_an_ordered_subject_have_their_group(lite: sa.Engine, cluster: Cluster, subject: str) -> None:
    cluster.meta.tell(SubjectRoute(subject, ["a", "b"], ["a", "b"], is_ordered=True))
    with Outbox(lite, cluster.url, options=NIMBLE) as outbox:
        outbox.create()
        for number in range(60):
            with lite.begin() as connection:
                for key in (f"k{number % 10}", f"k{(number + 1) % 10}"):
                    outbox.send(connection, subject, key.encode(), key=key)
        eventually(lambda: rows(lite) == 0, "all is sent")
    for at, name in enumerate(("a", "b")):
        own = stored(cluster.brokers[name], subject)
        assert {home(payload.decode(), ("a", "b")) for payload in own} == {at}
    assert everywhere(cluster, subject).total() == 120


@pytest.mark.slow
def test_the_same_on_a_loop(tmp_path: Path, cluster: Cluster, subject: str) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'aio.db'}"

    async def main() -> None:
        engine = create_async_engine(url)
        async with AioOutbox(engine, cluster.url, options=NIMBLE) as outbox:
            await outbox.create()
            for number in range(20):
                async with engine.begin() as connection:
                    await outbox.send(connection, subject, b"%d" % number)
                await asyncio.sleep(0.01)
            await until_empty(outbox)
        async with engine.begin() as connection:
            await AioOutbox(engine).send(connection, subject, b"relayed")
        async with AioRelay(engine, cluster.url, options=NIMBLE) as relay:
            await until_empty(relay)
        await engine.dispose()

    asyncio.run(main())
    assert everywhere(cluster, subject) == Counter([*numbered(20), b"relayed"])


async def until_empty(looked_at: AioOutbox | AioRelay) -> None:
    for _ in range(3_000):
        if not (await looked_at.state()).pending:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never: all is sent")


# --- tables and rows of the other kind --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_of_an_earlier_version_gains_the_column(engine: sa.Engine, cluster: Cluster, subject: str) -> None:
    Outbox(engine).create()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {TABLE.name} DROP COLUMN broker_group")
    with pytest.raises(Misuse, match=r"earlier version.*outbox.create\(\)"):
        Relay(engine, cluster.url, options=NIMBLE).start()
    with Outbox(engine, cluster.brokers["a"].url, options=NIMBLE) as outbox:  # with one broker nothing is missing
        put(engine, outbox, subject, b"old")
        eventually(lambda: rows(engine) == 0, "it is sent")
    with Outbox(engine, cluster.url, options=NIMBLE) as outbox:
        outbox.create()
        put(engine, outbox, subject, b"new")
        eventually(lambda: rows(engine) == 0, "it is sent")
    assert everywhere(cluster, subject) == {b"old": 1, b"new": 1}


def test_relays_of_a_cluster_and_of_one_broker_leave_each_others_rows_alone(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    outbox = Outbox(lite)
    outbox.create()
    put(lite, outbox, subject, b"of one broker", b"of a cluster", b"of nobody")
    ids = [row["id"] for row in contents(lite)]
    with lite.begin() as connection:
        connection.execute(sa.update(TABLE).where(TABLE.c.id == ids[0]).values(stream=7, place=0))
        connection.execute(sa.update(TABLE).where(TABLE.c.id == ids[1]).values(stream=8, place=0, broker_group="b"))
    with Relay(lite, cluster.url, options=NIMBLE):
        eventually(lambda: rows(lite) == 1, "what is its own, and what is nobody's")
    assert [row["id"] for row in contents(lite)] == ids[:1]
    with Relay(lite, cluster.brokers["a"].url, options=NIMBLE):
        eventually(lambda: rows(lite) == 0, "the rest")
    assert stored(cluster.brokers["b"], subject).count(b"of a cluster") == 1
    assert stored(cluster.brokers["a"], subject).count(b"of one broker") == 1
    assert everywhere(cluster, subject).total() == 3


def test_a_relay_of_one_broker_sees_that_a_table_has_gained_the_column(lite: sa.Engine) -> None:
    """It was there before, and goes on: rows of the cluster are not its own."""
    outbox = Outbox(lite)
    outbox.create()
    with lite.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {TABLE.name} DROP COLUMN broker_group")
    put(lite, outbox, "orders", b"one")
    one_broker = OutboxRows(TABLE, lite.dialect)
    later_ms = int(datetime.now(UTC).timestamp() * 1_000) + 60_000
    with lite.begin() as connection:
        assert len(one_broker.claim(connection, later_ms, 0, 10, 1 << 20).rows) == 1
    outbox.create()
    with lite.begin() as connection:
        connection.execute(sa.update(TABLE).values(stream=5, place=0, broker_group="a"))
        assert one_broker.claim(connection, later_ms, 0, 10, 1 << 20).rows == []


@pytest.mark.slow
def test_messages_reach_consumers_of_the_cluster_under_their_ids(
    lite: sa.Engine, cluster: Cluster, subject: str
) -> None:
    with Outbox(lite, cluster.url, options=NIMBLE) as outbox:
        outbox.create()
        with lite.begin() as connection:
            ids = {outbox.send(connection, subject, payload) for payload in numbered(5)}
        with fairway.connect(cluster.url) as client, client.consumer(subject, group="hotel") as consumer:
            found = consumer.take(5, WAIT_S)
    assert {message.id for message in found} == ids
