"""Source and sink in a cluster: two broker groups behind a meta server, one of which has a replica; real processes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

import fairway
from fairway.client.message_states import REPLAY_GROUP
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.protocol.admin_messages import Depth
from fairway.spark import reader as readers
from fairway.spark.delayed import PENDING, DelayedReader, DelayedSplit, delayed_options
from fairway.spark.events.frames import EVENTS
from fairway.spark.events.source import EventReader, EventStreamReader
from fairway.spark.jobs import archive, capacity, reconcile, replay, report, report_page, trace
from fairway.spark.jobs.capacity import DelayCapacity
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import event_options, write_options
from fairway.spark.reader import ReadSplit
from fairway.spark.sink import NotTheSame, TaskIdentity, _Writing, chosen
from tests.spark.cluster_servers import Servers
from tests.spark.helpers import Streams, batch_reader, between, rows, write

GROUPS = ("g1", "g2")
STAMP = pa.timestamp("us", tz="UTC")
REPLICA: dict[str, Any] = {"from": "replica"}
pytestmark = pytest.mark.xdist_group("spark")  # one cluster for all of them


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("cluster"), "g1.a", "g1.b", "g2.a")
    yield made
    made.stop()


@pytest.fixture
def streams(servers: Servers) -> Iterator[Streams]:
    made = Streams(servers.url)
    yield made
    made.stop()


def table(first: int, count: int) -> pa.Table:
    return pa.table({"payload": pa.array([b"%d" % at for at in range(first, first + count)], pa.binary())})


def task_to(group: str, query: str, subject: str, groups: tuple[str, ...] = GROUPS) -> TaskIdentity:
    """One whose rows go there, the first time."""
    tasks = (TaskIdentity(query, 0, partition) for partition in range(1_000))
    return next(task for task in tasks if chosen(task.producer_id(subject, False, 0), groups) == group)


def fill(servers: Servers, subject: str, **counts: int) -> None:
    """So many messages in each broker group, numbered through."""
    servers.create(subject, GROUPS)
    first = 0
    for group, count in counts.items():
        write(servers.url, table(first, count), task_to(group, "fill", subject), subject=subject)
        first += count


def shown_by_replicas(url: str, subject: str, count: int) -> None:
    """Wait until replicas show all of it: they are a moment behind."""
    for _ in range(200):
        splits = batch_reader(url, subject, **REPLICA).partitions()
        if (
            sum(each.end - each.begin for split in splits if isinstance(split, ReadSplit) for each in split.ranges)
            == count
        ):
            return
        time.sleep(0.1)
    pytest.fail(f"replicas do not get to {count} messages of {subject}")


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return sorted(int(row["payload"]) for row in found)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_subject_is_read_from_every_broker_group_that_holds_it(servers: Servers) -> None:
    fill(servers, "both", g1=300, g2=200)
    servers.create("both.more", ["g2"])
    write(servers.url, table(500, 7), TaskIdentity("q", 0, 0), subject="both.more")
    reader = batch_reader(servers.url, "both")
    splits = [split for split in reader.partitions() if isinstance(split, ReadSplit)]
    assert sorted({each.broker_group for each in split.ranges} for split in splits) == [{"g1"}, {"g2"}]
    found = rows(reader)
    assert numbers(found) == list(range(500))
    for group, count in (("g1", 300), ("g2", 200)):
        assert [row["sequence"] for row in found if row["broker_group"] == group] == list(range(count))
    assert Counter(row["subject"] for row in rows(batch_reader(servers.url, "both*"))) == {"both": 500, "both.more": 7}
    narrowed = batch_reader(servers.url, "both")
    assert narrowed.pushFilters([EqualTo(("broker_group",), "g2")]) == []
    assert len(rows(narrowed)) == 200


def test_places_are_of_one_broker_group(servers: Servers) -> None:
    fill(servers, "places", g1=20, g2=20)
    with pytest.raises(Misuse, match=r"places is in broker groups g1, g2, each of which has sequences of its own"):
        batch_reader(servers.url, "places", starting="5").partitions()
    some = rows(batch_reader(servers.url, "places", starting='{"places": {"g1": 15}}', ending='{"places": {"g1": 18}}'))
    assert [(row["broker_group"], row["sequence"]) for row in some] == [("g1", at) for at in (15, 16, 17)]
    assert len(rows(batch_reader(servers.url, "places", ending="2100-01-01T00:00:00Z"))) == 40


def test_unknown_subject_is_named_with_the_nearest(servers: Servers) -> None:
    fill(servers, "near", g1=1, g2=1)
    with pytest.raises(Misuse, match=r"no subject 'neer' at meta://.*did you mean 'near'\?"):
        batch_reader(servers.url, "neer").partitions()


def test_replica_is_read_where_one_lives(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    fill(servers, "copied", g1=300, g2=200)
    master = servers.master_of("g1")
    replica = next(name for name in ("g1.a", "g1.b") if name != master)
    shown_by_replicas(servers.url, "copied", 500)
    with caplog.at_level(logging.WARNING, "fairway.spark"):
        found = rows(batch_reader(servers.url, "copied", **REPLICA))
    assert numbers(found) == list(range(500))
    assert "no replica of group g2" in caplog.text
    assert "group g1" not in caplog.text
    both = f"fairway://{servers.copies[master].address},{servers.copies[replica].address}"
    for place in ({}, REPLICA):
        of_one = rows(batch_reader(both, "copied", **place))
        assert [(row["broker_group"], row["sequence"]) for row in of_one] == [("default", at) for at in range(300)]
    backwards = f"fairway://{servers.copies[replica].address},{servers.copies[master].address}"
    for duplicates in (0, 10):
        stored = write(backwards, table(500, 10), TaskIdentity("listed", 0, 0), subject="copied")
        assert (stored.messages, stored.duplicates) == (10, duplicates), "the one that leads is found"
    alone = f"fairway://{servers.copies[replica].address}"
    with pytest.raises(Unreachable, match=r"this is a replica of group g1: its master is at .*Name all copies"):
        write(alone, table(0, 1), TaskIdentity("one", 0, 0), subject="copied", patienceSeconds="1")


def test_broker_alone_is_a_cluster_of_one(client: Client, url: str) -> None:
    client.send_many("lone", [b"%d" % at for at in range(10)]).result(30)
    here = url.replace("fairway://", "meta://")
    found = rows(batch_reader(here, "lone"))
    assert [(row["broker_group"], int(row["payload"])) for row in found] == [("here", at) for at in range(10)]
    with pytest.raises(Misuse, match=r"no subject 'lonely' at meta://.*did you mean 'lone'\?"):
        batch_reader(here, "lonely").partitions()
    due = table(0, 3).append_column("due_at", pa.array([datetime.now(UTC) + timedelta(days=30)] * 3, STAMP))
    write(here, due, TaskIdentity("lone", 0, 0), subject="lone")
    pending = DelayedReader(delayed_options({"url": here, "subject": "lone"}), PENDING)
    assert sum(frame.num_rows for split in pending.partitions() for frame in pending.read(split)) == 3


# --- streams ----------------------------------------------------------------------------------------------------------


def lags(servers: Servers, subject: str, group: str) -> dict[str, int]:
    found = {}
    for name in GROUPS:
        with fairway.connect(f"fairway://{servers.copies[servers.master_of(name)].address}") as client:
            found[name] = client.describe(subject, group, depth=Depth.GROUPS).subjects[0].groups[0].lag
    return found


def test_stream_has_a_place_in_each_broker_group(servers: Servers, streams: Streams) -> None:
    fill(servers, "flow", g1=100, g2=50)
    reader = streams("flow", group="etl")
    start = reader.initialOffset()
    assert start["subjects"] == {"flow": {"g1": 0, "g2": 0}}
    middle = reader.latestOffset(start, ReadMaxRows(60))
    assert middle["subjects"] == {"flow": {"g1": 30, "g2": 30}}
    end = reader.latestOffset(middle, ReadAllAvailable())
    assert lags(servers, "flow", "etl") == {"g1": 70, "g2": 20}
    assert numbers(between(reader, start, middle) + between(reader, middle, end)) == list(range(150))
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    assert reader.latestOffset(start, ReadMaxBytes(1))["subjects"] == {"flow": {"g1": 100, "g2": 50}}, "whole batches"
    shown_by_replicas(servers.url, "flow", 150)
    later = streams("flow", **REPLICA)
    later.prepareForTriggerAvailableNow()
    assert len(between(later, start, later.latestOffset(start, ReadAllAvailable()))) == 150


def test_broker_group_that_a_subject_gains_is_read_from_its_first_message(servers: Servers, streams: Streams) -> None:
    servers.create("grown", ["g1"])
    write(servers.url, table(0, 10), TaskIdentity("q", 0, 0), subject="grown")
    reader = streams("grown", starting="latest", group="grown-etl")
    start = reader.initialOffset()
    assert start["subjects"] == {"grown": {"g1": 10}}
    servers.extend("grown", "g2")
    write(servers.url, table(10, 5), task_to("g2", "q", "grown"), subject="grown")
    end = reader.latestOffset(start, ReadAllAvailable())
    found = between(reader, start, end)
    assert [(row["broker_group"], row["sequence"]) for row in found] == [("g2", at) for at in range(5)]


def test_checkpoint_of_one_broker_goes_on_in_the_cluster(servers: Servers, streams: Streams) -> None:
    fill(servers, "moved", g1=10, g2=10)
    alone = Streams(f"fairway://{servers.copies[servers.master_of('g1')].address}")
    try:
        first = alone("moved")
        start = first.latestOffset(first.initialOffset(), ReadMaxRows(4))
        assert (start["fairway"], start["subjects"]) == (1, {"moved": 4})
        reader = streams("moved")
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end["subjects"] == {"moved": {"g1": 10, "g2": 10}}
        assert Counter(row["broker_group"] for row in between(reader, start, end)) == {"g1": 6, "g2": 10}
        with pytest.raises(Misuse, match=r"no broker group of meta://.* has its log \(00000000000000aa\)"):
            reader.latestOffset(start | {"log": "00000000000000aa"}, ReadAllAvailable())
        with pytest.raises(Misuse, match="the checkpoint is of a cluster"):
            first.latestOffset(end, ReadAllAvailable())
    finally:
        alone.stop()


def test_other_log_in_one_broker_group_is_refused(servers: Servers, streams: Streams) -> None:
    fill(servers, "anew", g1=10, g2=10)
    reader = streams("anew")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    older = end | {"logs": {group: [log, 0] for group, (log, _) in end["logs"].items()}}
    assert reader.latestOffset(older, ReadAllAvailable()) is older, "an epoch that grew is no loss"
    strange = end | {"logs": end["logs"] | {"g2": ["00000000000000aa", 1]}}
    with pytest.raises(readers.DataLoss, match=r"the log of anew at meta://.* is another one"):
        reader.latestOffset(strange, ReadAllAvailable())
    accepting = streams("anew", failOnDataLoss="false")
    again = accepting.latestOffset(strange, ReadAllAvailable())
    assert [row["broker_group"] for row in between(accepting, strange, again)] == ["g2"] * 10


# --- the sink ---------------------------------------------------------------------------------------------------------


def test_tasks_are_spread_and_stay_where_they_began(servers: Servers) -> None:
    servers.create("spread", ["g1"])
    tasks = [TaskIdentity("first", 0, partition) for partition in range(8)]
    for at, task in enumerate(tasks):
        write(servers.url, table(at * 10, 10), task, subject="spread")
    servers.extend("spread", "g2")
    for at, task in enumerate(tasks):
        again = write(servers.url, table(at * 10, 10), task, subject="spread")
        assert again.duplicates == 10, "although some would be chosen for the new broker group"
    for at in range(8):
        write(servers.url, table(80 + at * 10, 10), TaskIdentity("second", 0, at), subject="spread")
    found = rows(batch_reader(servers.url, "spread"))
    assert numbers(found) == list(range(160))
    assert {row["broker_group"] for row in found} == set(GROUPS)
    with pytest.raises(NotTheSame, match="must give the same rows each time"):
        write(servers.url, table(0, 9), tasks[0], subject="spread")


def test_group_alone_gets_what_is_meant_for_it(servers: Servers) -> None:
    fill(servers, "inboxed", g1=1, g2=1)
    with fairway.connect(f"fairway://{servers.copies[servers.master_of('g2')].address}") as client:
        client.consumer("inboxed", "billing").close()  # nobody has joined in the other broker group
    for duplicates in (0, 20):
        stored = write(servers.url, table(0, 20), TaskIdentity("alone", 0, 0), subject="inboxed", group="billing")
        assert (stored.messages, stored.duplicates) == (20, duplicates)
    assert {row["broker_group"] for row in rows(batch_reader(servers.url, "inbox:billing:inboxed"))} == {"g2"}
    with pytest.raises(Misuse, match="there is no group 'nobody' on inboxed"):
        write(servers.url, table(0, 1), TaskIdentity("alone", 0, 0), subject="inboxed", group="nobody")


def test_due_rows_need_a_delay_server(servers: Servers) -> None:
    due = pa.table({"payload": ["x"], "due_at": pa.array([4_000_000_000_000_000], STAMP)})
    with pytest.raises(FairwayError, match="no delay server is registered"):
        write(servers.url, due, TaskIdentity("due", 0, 0), subject="due", patienceSeconds="1")


# --- events -----------------------------------------------------------------------------------------------------------


def told(found: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    counted = Counter[tuple[str, str]]()
    for row in found:
        counted[row["broker_group"], row["event"]] += row["count"]
    return counted


def test_events_of_all_broker_groups(servers: Servers) -> None:
    fill(servers, "told", g1=30, g2=20)
    reader = EventReader(event_options({"url": servers.url, "subject": "told"}), EVENTS)
    splits = reader.partitions()
    found = [row for split in splits for frame in reader.read(split) for row in frame.to_pylist()]
    assert told(found) == {("g1", "produced"): 30, ("g2", "produced"): 20}
    stream = EventStreamReader(event_options({"url": servers.url, "subject": "told", "pollMs": "50"}), EVENTS)
    try:
        start = stream.initialOffset()
        end = stream.latestOffset(start, ReadAllAvailable())
        assert set(end["groups"]) == set(GROUPS)
        for name in GROUPS:
            address = f"fairway://{servers.copies[servers.master_of(name)].address}"
            with fairway.connect(address) as client, client.consumer("told", "readers") as consumer:
                for message in consumer.take(10, timeout=30):
                    message.ack()
        last = stream.latestOffset(end, ReadAllAvailable())
        later = [
            row for split in stream.partitions(end, last) for frame in stream.read(split) for row in frame.to_pylist()
        ]
        assert {("g1", "pulled"), ("g2", "pulled")} <= set(told(later))
        assert stream.latestOffset(last, ReadMaxRows(5)) is not None
    finally:
        stream.stop()


def check_events_of_delay_servers(made: Servers) -> None:
    """Of both groups; and a stream that began with one of them goes on."""
    broker = f"fairway://{made.copies['g1.a'].address}"
    with fairway.connect(made.url) as client:
        client.send("late", b"now").result(30)
    for name in ("d1.a", "d2.a"):
        with fairway.connect(f"{broker}?delay={made.copies[name].address}") as client:
            client.send_many("late", [b"x"] * 7, after=timedelta(days=3)).result(30)
    told = {"url": made.url, "delayed": "true", "subject": "late"}
    reader = EventReader(event_options(told), EVENTS)
    events = [row for split in reader.partitions() for frame in reader.read(split) for row in frame.to_pylist()]
    assert Counter(row["broker_group"] for row in events) == {"g1": 1, "d1": 7, "d2": 7}
    one = event_options({**told, "url": f"{broker}?delay={made.copies['d1.a'].address}"})
    alone, both = EventStreamReader(one, EVENTS), EventStreamReader(event_options(told), EVENTS)
    try:
        begun = alone.latestOffset(alone.initialOffset(), ReadAllAvailable())
        end = both.latestOffset(begun, ReadAllAvailable())
        splits = both.partitions(begun, end)
        later = [row for split in splits for frame in both.read(split) for row in frame.to_pylist()]
        assert Counter(row["broker_group"] for row in later) == {"d2": 7}, "what it had of the first it has"
        check_new_group_is_noticed(made, both, end)
    finally:
        alone.stop()
        both.stop()


def check_new_group_is_noticed(made: Servers, stream: EventStreamReader, at: dict[str, Any]) -> None:
    """By a stream that is under way, within seconds."""
    made.start_again("d3.a")
    broker = made.copies["g1.a"].address
    with fairway.connect(f"fairway://{broker}?delay={made.copies['d3.a'].address}") as client:
        client.send_many("late", [b"x"] * 5, after=timedelta(days=3)).result(30)
    found = Counter[str]()
    begun = time.monotonic()
    while found["d3"] < 5 and time.monotonic() < begun + 30:
        end = stream.latestOffset(at, ReadAllAvailable())
        splits = stream.partitions(at, end)
        found.update(
            row["broker_group"] for split in splits for frame in stream.read(split) for row in frame.to_pylist()
        )
        at = end
    assert found == {"d3": 5}


def check_figures_of_delay_servers(made: Servers) -> None:
    """What is due, and how late what was due was: of all of them, whose pages are found through the meta server."""
    pages = capacity.metrics_of(made.url, 30)
    assert len(pages) == 2
    [said] = capacity.lateness(pages, DelayCapacity())
    assert said.startswith("No delayed message has had its time")
    for name in ("d1.a", "d2.a"):
        url = f"fairway://{made.copies['g1.a'].address}?delay={made.copies[name].address}"
        with fairway.connect(url) as client:
            client.send("soon", name.encode(), after=timedelta(milliseconds=50)).result(30)
            client.send_many("then", [b"x"] * 3, after=timedelta(hours=5)).result(30)
    with fairway.connect(made.url) as client:
        with client.consumer("soon", "readers") as consumer:
            told = [consumer.poll(timeout=30) for _ in range(2)]
            assert {message.payload for message in told if message is not None} == {b"d1.a", b"d2.a"}
        found = DelayCapacity()
        assert list(capacity.forecast(client, ["then"], datetime.now(UTC), 24, found)) == []
    assert (sum(each.messages for each in found.forecast), found.overdue) == (6, 0)
    assert list(capacity.lateness(pages, found)) == []
    assert sum(each.messages for each in found.lateness) == 2
    assert found.late_mean_s is not None


@pytest.mark.slow
def test_due_rows_are_spread_over_delay_servers(tmp_path: Path) -> None:
    made = Servers(tmp_path, "g1.a", "d1.a", "d2.a")
    try:
        made.create("due", ["g1"])
        times = pa.array([datetime.now(UTC) + timedelta(days=30)] * 20, STAMP)
        for again in (0, 20):
            for partition in range(6):
                due = table(partition * 20, 20).append_column("due_at", times)
                stored = write(made.url, due, TaskIdentity("due", 0, partition), subject="due")
                assert (stored.messages, stored.duplicates) == (20, again)
        reader = DelayedReader(delayed_options({"url": made.url, "subject": "due"}), PENDING)
        splits = [split for split in reader.partitions() if isinstance(split, DelayedSplit)]
        assert {split.walk.place.broker_group for split in splits} == {"d1", "d2"}
        found = [row for split in splits for frame in reader.read(split) for row in frame.to_pylist()]
        assert numbers(found) == list(range(120))
        check_figures_of_delay_servers(made)
        check_events_of_delay_servers(made)
    finally:
        made.stop()


@pytest.mark.slow
def test_copies_that_are_killed_cost_nothing(tmp_path: Path) -> None:
    """The replica is killed while it is read, and when it is back the master, while rows are written."""
    made = Servers(tmp_path, "g1.a", "g1.b")
    try:
        made.create("killed", ["g1"])
        write(made.url, table(0, 40_000), TaskIdentity("first", 0, 0), subject="killed")
        master = made.master_of("g1")
        replica = next(name for name in made.copies if name != master)
        shown_by_replicas(made.url, "killed", 40_000)
        frames = (frame for split in of_replica(made) for frame in readers.read(split))
        found = next(frames).to_pylist()
        made.kill(replica)
        found += [row for frame in frames for row in frame.to_pylist()]
        assert numbers(found) == list(range(40_000))
        made.start_again(replica)
        batches = table(40_000, 40_000).to_batches(max_chunksize=1_000)

        def interrupted() -> Iterator[pa.RecordBatch]:
            for at, batch in enumerate(batches):
                if at == 20:
                    made.kill(master)
                yield batch

        options = write_options({"url": made.url, "subject": "killed"})
        stored = _Writing(options, ["payload"], TaskIdentity("second", 0, 0), 0).write(interrupted())
        assert stored.messages == 40_000
        assert made.master_of("g1") == replica
        assert numbers(rows(batch_reader(made.url, "killed", **REPLICA))) == list(range(80_000))
    finally:
        made.stop()


def of_replica(servers: Servers) -> list[ReadSplit]:
    found = batch_reader(servers.url, "killed", **REPLICA).partitions()
    return [split for split in found if isinstance(split, ReadSplit)]


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_stream_from_and_to_all_broker_groups(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    fill(servers, "jvm", g1=60, g2=40)
    servers.create("jvm.copy", GROUPS)
    for count in (100, 150):
        stream = spark.readStream.format("fairway").options(url=servers.url, subject="jvm", minPartitions="6").load()
        writer = stream.writeStream.format("fairway").options(url=servers.url, subject="jvm.copy")
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        query.awaitTermination()
        found = rows(batch_reader(servers.url, "jvm.copy"))
        assert numbers(found) == list(range(count))
        write(servers.url, table(100, 50), task_to("g2", "later", "jvm"), subject="jvm")
    assert {row["broker_group"] for row in rows(batch_reader(servers.url, "jvm.copy"))} == set(GROUPS)


def test_archive_of_all_broker_groups(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    fill(servers, "arch", g1=60, g2=40)
    path = str(tmp_path / "archive")
    options = archive.ArchiveOptions(path, ("arch",), servers.url, once=True, group="archive")
    assert archive.run(spark, options).ends == {"arch@g1": 60, "arch@g2": 40}
    write(servers.url, table(100, 10), task_to("g2", "later", "arch"), subject="arch")
    again = archive.run(spark, options)
    assert (again.rows, again.ends) == (10, {"arch@g1": 60, "arch@g2": 50})
    found = archive.read(spark, path).select("broker_group", "sequence", "payload").collect()
    assert sorted(int(row["payload"]) for row in found) == list(range(110))
    assert Counter(row["broker_group"] for row in found) == {"g1": 60, "g2": 50}
    alone = f"fairway://{servers.copies[servers.master_of('g1')].address}"
    write(servers.url, table(110, 5), task_to("g1", "last", "arch"), subject="arch")
    assert archive.run(spark, replace(options, url=alone)).ends == {"arch@g1": 65, "arch@g2": 50}


@pytest.mark.slow
def test_archive_of_one_broker_goes_on_in_the_cluster(
    spark: SparkSession, servers: Servers, client: Client, url: str, tmp_path: Path
) -> None:
    """It is known by its log, keeps the name that it has in the archive, and is compared with what is live."""
    fill(servers, "joined", g1=30, g2=20)
    path = str(tmp_path / "archive")
    alone = f"fairway://{servers.copies[servers.master_of('g1')].address}"
    options = archive.ArchiveOptions(path, ("joined",), alone, once=True)
    assert archive.run(spark, options).ends == {"joined": 30}
    write(servers.url, table(50, 5), task_to("g1", "later", "joined"), subject="joined")
    whole = replace(options, url=servers.url)
    assert archive.run(spark, whole).ends == {"joined": 35, "joined@g2": 20}
    found = archive.read(spark, path).select("broker_group", "payload").collect()
    assert sorted(int(row["payload"]) for row in found) == list(range(55))
    assert Counter(row["broker_group"] for row in found) == {"default": 35, "g2": 20}
    books = reconcile.run(spark, reconcile.ReconcileOptions(("joined",), servers.url, archive=path))
    assert (books.is_balanced, books.findings) == (True, [])
    again = replay.ReplayOptions(Picking(("joined",), path, servers.url), "joined.again", servers.url)
    assert replay.run(spark, again).sent == 55
    said = [dict(row["headers"])[REPLAY_GROUP] for row in rows(batch_reader(servers.url, "joined.again"))]
    assert Counter(said) == {"g1": 35, "g2": 20}, "as the cluster calls it"
    client.send("joined", b"0").result()
    with pytest.raises(readers.DataLoss, match="of another log"):
        archive.run(spark, replace(options, url=url))
    elsewhere = replace(options, path=f"{path}-2", url=url)
    archive.run(spark, elsewhere)
    with pytest.raises(Misuse, match=r"named by its address, and no broker group of .* has its log .* that address"):
        archive.run(spark, replace(elsewhere, url=servers.url))


@pytest.mark.slow
def test_report_on_a_cluster(spark: SparkSession, servers: Servers) -> None:
    fill(servers, "reported", g1=60, g2=40)
    for name, count in zip(GROUPS, (50, 10), strict=True):
        address = f"fairway://{servers.copies[servers.master_of(name)].address}"
        with fairway.connect(address) as client, client.consumer("reported", "readers") as consumer:
            for message in consumer.take(count, timeout=30):
                message.ack()
    found = report.run(spark, report.ReportOptions(servers.url, ("reported",)))
    [group] = found.groups
    assert (group.group, group.owed, group.stored, group.acked) == ("readers", 40, 100, 60)
    assert group.share is not None
    assert found.spans[-1].lag == 40
    assert sum(span.acked for span in found.spans) == 60
    assert report_page.page(found).html()


@pytest.mark.slow
def test_messages_are_followed_and_books_balance(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """Over both broker groups, for a group that has acked some in each; then messages are sent to it once more."""
    fill(servers, "books", g1=60, g2=50)
    for name in GROUPS:
        address = f"fairway://{servers.copies[servers.master_of(name)].address}"
        with fairway.connect(address) as client, client.consumer("books", "readers") as consumer:
            for message in consumer.take(25, timeout=30):
                message.ack()
    picked = Picking(("books",), url=servers.url)
    [account] = trace.run(spark, trace.TraceOptions(picked, ("readers",))).accounts
    assert (account.messages, account.states["acked"]) == (110, 50)
    path = str(tmp_path / "archive")
    archive.run(spark, archive.ArchiveOptions(path, ("books",), servers.url, once=True))
    books = reconcile.run(spark, reconcile.ReconcileOptions(("books",), servers.url, archive=path, groups=("readers",)))
    assert (books.is_balanced, books.findings) == (True, [])
    assert [(book.stored, book.acked, book.outstanding) for book in books.books] == [(110, 50, 60)]
    wanted = replay.ReplayOptions(
        replace(picked, where="sequence < 5"), to="books.again", url=servers.url, state=f"{path}-state"
    )
    assert replay.run(spark, wanted).sent == 10
    assert replay.run(spark, wanted).sent == 0
    assert len(rows(batch_reader(servers.url, "books.again"))) == 10


# --- failover ---------------------------------------------------------------------------------------------------------


def test_job_goes_on_with_the_new_master_and_says_when_there_is_none(servers: Servers, streams: Streams) -> None:
    """The master of a group hands over in the middle of a stream, of a task that reads and of one that writes; then the
    other one ends, too. (The last of these tests.)"""
    fill(servers, "handed", g1=30_000, g2=10)
    reader = streams("handed")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = reader.partitions(start, end)
    large = next(task for task in tasks if isinstance(task, ReadSplit) and task.ranges[0].broker_group == "g1")
    small = [row for task in tasks if task is not large for frame in reader.read(task) for row in frame.to_pylist()]
    frames = reader.read(large)
    found = [*small, *next(iter(frames)).to_pylist()]
    old = servers.master_of("g1")
    new_rows = table(50_000, 20_000).to_batches(max_chunksize=1_000)

    def interrupted() -> Iterator[pa.RecordBatch]:
        for at, frame in enumerate(new_rows):
            if at == 10:
                servers.copies[old].stop()
            yield frame

    options = write_options({"url": servers.url, "subject": "handed"})
    stored = _Writing(options, ["payload"], task_to("g1", "handed", "handed"), 0).write(interrupted())
    assert stored.messages == 20_000
    found += [row for frame in frames for row in frame.to_pylist()]
    assert numbers(found) == list(range(30_010))
    assert servers.master_of("g1") != old
    last = reader.latestOffset(end, ReadAllAvailable())
    assert int(last["logs"]["g1"][1]) > int(end["logs"]["g1"][1])
    assert numbers(between(reader, end, last)) == list(range(50_000, 70_000))
    servers.copies[servers.master_of("g1")].stop()
    hasty = ReadSplit(large.job._replace(place=large.job.place._replace(patience_s=1)), large.ranges)
    for attempt in (
        lambda: batch_reader(servers.url, "handed", patienceSeconds="1").partitions(),
        lambda: list(readers.read(hasty)),
        lambda: write(servers.url, table(0, 5), TaskIdentity("none", 0, 0), subject="handed", patienceSeconds="1"),
    ):
        with pytest.raises(Unreachable, match=r"no broker at group g1 of meta://.*has no master.*patienceSeconds"):
            attempt()
