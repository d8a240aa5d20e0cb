"""`fairway.events`: the life of messages, as readers give it and as Spark does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

import fairway
from fairway.client.sync.client import Client
from fairway.client.url import parse as addresses
from fairway.errors import FairwayError, Misuse
from fairway.protocol.messages import (
    Done,
    Join,
    Joined,
    Leave,
    Pull,
    Pulled,
    SequenceRange,
    Settle,
    SettleAll,
    Settled,
    Settlement,
)
from fairway.spark.connection import BlockingClient, Fixed
from fairway.spark.events import frames
from fairway.spark.events.plan import EventSplit
from fairway.spark.events.source import EventReader, EventStreamReader
from fairway.spark.options import event_options, is_meant
from fairway.spark.reader import DataLoss
from tests.unit.client.broker import Running, running

WAIT_S = 60
Row = dict[str, Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With small segments."""
    with running(tmp_path_factory.mktemp("events") / "data") as started:
        yield started


@pytest.fixture
def fw(broker: Running) -> Iterator[Client]:
    with fairway.connect(broker.url) as connected:
        yield connected


def reader(url: str, **options: str) -> EventReader:
    return EventReader(event_options({"url": url, **options}), frames.EVENTS)


def rows(url: str, **options: str) -> list[Row]:
    made = reader(url, **options)
    return [row for split in made.partitions() for frame in made.read(split) for row in frame.to_pylist()]


def brief(found: list[Row], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found]


def consume(url: str, subject: str, group: str, name: str, count: int, most: int = 1_000) -> None:
    """So many messages, each outcome about so many of them, by a consumer that leaves afterwards."""
    place = (subject, group, name)
    with BlockingClient(Fixed(addresses(url).brokers), WAIT_S) as caller:
        caller.ask(Join(*place, 0, 0), Joined)
        arrived = done = 0
        while done < count:
            pulled = caller.ask(Pull(*place, min(count - done, 1_000), 1 << 20, 0, arrived), Pulled)
            arrived = pulled.number
            spans = [(lot, first) for lot in pulled.lots for span in lot.spans for first in _cut(span, most)]
            tickets = [
                caller.put(SettleAll(*place, [Settle(Settlement.ACK, lot.first, lot.attempt, [part])], arrived))
                for lot, part in spans
            ]
            done += sum(caller.take(ticket, Settled)[0].settled for ticket in tickets)
        caller.ask(Leave(*place, arrived), Done)


def _cut(span: SequenceRange, most: int) -> list[SequenceRange]:
    end = span.first + span.count
    return [SequenceRange(first, min(most, end - first)) for first in range(span.first, end, most)]


@pytest.fixture
def streams() -> Iterator[list[EventStreamReader]]:
    made: list[EventStreamReader] = []
    yield made
    for each in made:
        each.stop()


def stream(made: list[EventStreamReader], url: str, **options: str) -> EventStreamReader:
    made.append(EventStreamReader(event_options({"url": url, "pollMs": "50", **options}), frames.EVENTS))
    return made[-1]


def between(made: EventStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
    return [row for split in made.partitions(start, end) for frame in made.read(split) for row in frame.to_pylist()]


def settled_rows(url: str, subject: str) -> list[Row]:
    """Once the dead letter is written, which a rejected message's consumer does not wait for."""
    end = time.monotonic() + WAIT_S
    while True:
        found = rows(url, subject=subject)
        if any(row["event"] == "dead" for row in found) or time.monotonic() > end:
            return found
        time.sleep(0.02)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_life_of_messages(fw: Client, broker: Running) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    fw.send_many("life", [b"a", b"b", b"c"]).result(WAIT_S)
    with fw.consumer("life", "billing", consumer="ann") as ann:
        first, second, third = ann.take(3, timeout=WAIT_S)
        first.ack()
        second.retry(after=0.01, reason="no stock")
        third.reject("nonsense")
        again = ann.take(1, timeout=WAIT_S)[0]
        again.ack()
    found = settled_rows(broker.url, "life")
    told = {row["event"]: row for row in found if row["first_sequence"] is not None}
    assert brief([told["produced"]], "first_sequence", "count", "group", "consumer", "attempt") == [
        (0, 3, None, None, None)
    ]
    pulled = [row for row in found if row["event"] == "pulled"]
    assert brief(pulled, "first_sequence", "count", "attempt") == [(0, 3, 1), (1, 1, 2)]
    acked = [row for row in found if row["event"] == "acked"]
    assert brief(acked, "first_sequence", "count", "attempt") == [(0, 1, 1), (1, 1, 2)]
    assert brief([told["retried"]], "first_sequence", "detail") == [(1, "no stock")]
    assert told["retried"]["due_at"] >= told["retried"]["at"]
    assert brief([told["rejected"], told["dead"]], "first_sequence", "detail") == [(2, "nonsense"), (2, None)]
    assert {row["consumer"] for row in pulled + acked} == {"ann"}
    assert {row["group"] for row in found if row["event"] != "produced"} == {"billing"}
    assert all(before <= row["at"] <= datetime.now(UTC) for row in found)
    members = [row["event"] for row in found if row["event"] in {"configured", "joined", "left"}]
    assert members == ["configured", "joined", "left"]
    positions = [row["position"] for row in found if row["event"] != "produced"]
    assert positions == sorted(positions)


def test_subjects_and_groups_that_are_meant(fw: Client, broker: Running) -> None:
    for subject in ("meant.a", "meant.b"):
        fw.send_many(subject, [b"x"] * 5).result(WAIT_S)
        consume(broker.url, subject, "one", "ann", 5)
        consume(broker.url, subject, "two", "bob", 5)
    assert {row["subject"] for row in rows(broker.url, subject="meant.*")} == {"meant.a", "meant.b"}
    of_two = rows(broker.url, subject="meant.a", group="two")
    assert {(row["group"], row["consumer"]) for row in of_two if row["event"] == "acked"} == {("two", "bob")}
    assert {row["group"] for row in of_two} == {"two"}, "nothing is produced by a group"
    everything = {row["subject"] for row in rows(broker.url)}
    assert {"meant.a", "meant.b"} <= everything
    assert is_meant("dead:g:meant.a", ("*:*",))
    assert not is_meant("dead:g:meant.a", ("*",))


def test_whoever_begins_in_the_middle_knows_all_names(fw: Client, broker: Running) -> None:
    """Consumers that left long ago are named in the log, in the segment that speaks of them."""
    fw.send_many("names", [b"x"] * 3_000).result(WAIT_S)
    for number in range(3):
        consume(broker.url, "names", "crew", f"hand-{number}", 1_000, most=1)
    broker.stop()  # which forgets who has left
    broker.start()
    parts = reader(broker.url, subject="names", minPartitions="6")
    splits = [each for each in parts.partitions() if isinstance(each, EventSplit)]
    assert len(splits) >= 6
    found = [[row for frame in parts.read(split) for row in frame.to_pylist()] for split in splits]
    together = [row for part in found for row in part if row["event"] != "produced"]
    assert {row["consumer"] for row in together if row["event"] == "acked"} == {"hand-0", "hand-1", "hand-2"}
    assert sum(row["count"] for row in together if row["event"] == "acked") == 3_000
    whole = [row for row in rows(broker.url, subject="names") if row["event"] != "produced"]
    assert sorted(together, key=str) == sorted(whole, key=str)
    assert not any(str(row[name]).startswith("#") for row in whole for name in ("subject", "group", "consumer"))


def test_times_narrow_what_is_read(fw: Client, broker: Running) -> None:
    fw.send_many("times", [b"x"] * 10).result(WAIT_S)
    consume(broker.url, "times", "g", "early", 10)
    written = datetime.now(UTC)  # by now all that is, perhaps some milliseconds after it was done
    middle = written.replace(microsecond=written.microsecond // 1_000 * 1_000) + timedelta(milliseconds=1)
    while datetime.now(UTC) <= middle:
        pass
    fw.send_many("times", [b"x"] * 10).result(WAIT_S)
    consume(broker.url, "times", "g", "late", 10)
    late = rows(broker.url, subject="times", starting=middle.isoformat())
    assert {row["consumer"] for row in late} == {None, "late"}
    assert sum(row["count"] for row in late if row["event"] == "produced") == 10
    early = rows(broker.url, subject="times", ending=middle.isoformat())
    assert {row["consumer"] for row in early} == {None, "early"}
    assert rows(broker.url, subject="times", starting="latest") == []


def test_ranges_with_holes_are_rows(fw: Client, broker: Running) -> None:
    fw.send_many("holes", [b"x"] * 100).result(WAIT_S)
    with fw.consumer("holes", "g", consumer="ann") as ann:
        for message in ann.take(100, timeout=WAIT_S):
            if message.sequence % 2:
                message.ack()
            else:
                message.release()
    acked = [row for row in rows(broker.url, subject="holes") if row["event"] == "acked"]
    assert sorted(brief(acked, "first_sequence", "count")) == [(each, 1) for each in range(1, 100, 2)]


def test_columns_as_asked_for(fw: Client, broker: Running) -> None:
    fw.send("columns", b"x").result(WAIT_S)
    some = frames.EVENTS
    narrow = type(some)([field for field in some.fields if field.name in {"count", "event"}])
    made = EventReader(event_options({"url": broker.url, "subject": "columns"}), narrow)
    found = [row for split in made.partitions() for frame in made.read(split) for row in frame.to_pylist()]
    assert found == [{"event": "produced", "count": 1}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subjct": "a"}, "did you mean subject?"),
        ({"starting": "17"}, "earliest, latest or a time"),
        ({"starting": '{"a": 3}', "subject": "a"}, "earliest, latest or a time"),
        ({"group": "no spaces"}, "option group"),
        ({"maxMessagesPerTrigger": "5"}, "has no option"),
        ({"maxEventsPerTrigger": "none"}, "maxEventsPerTrigger='none'"),
        ({"query": "no spaces"}, "option query"),
    ],
)
def test_mistakes_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        event_options(options)


def test_unknown_subject_is_named(broker: Running, fw: Client) -> None:
    fw.send("known", b"x").result(WAIT_S)
    with pytest.raises(FairwayError, match="did you mean 'known'"):
        rows(broker.url, subject="knwon")


# --- streams ---------------------------------------------------------------------------------------------------------


def test_conversations_stay_with_the_driver(fw: Client, broker: Running, streams: list[EventStreamReader]) -> None:
    fw.send("kept", b"x").result(WAIT_S)
    made = stream(streams, broker.url, subject="kept")
    made.latestOffset(made.initialOffset(), ReadAllAvailable())
    assert made._planner is not None
    state = made.__getstate__()
    assert (state["_planner"], state["_delay_planner"]) == (None, None)


def test_stream_goes_on_and_repeats_itself(fw: Client, broker: Running, streams: list[EventStreamReader]) -> None:
    fw.send_many("flow", [b"x"] * 20).result(WAIT_S)
    made = stream(streams, broker.url, subject="flow")
    start = made.initialOffset()
    first = made.latestOffset(start, ReadAllAvailable())
    assert brief(between(made, start, first), "event", "count") == [("produced", 20)]
    assert made.latestOffset(first, ReadAllAvailable()) == first, "idle"
    consume(broker.url, "flow", "g", "ann", 20)
    second = made.latestOffset(first, ReadAllAvailable())
    found = between(made, first, second)
    assert sum(row["count"] for row in found if row["event"] == "acked") == 20
    assert made.reportLatestOffset() == second
    other = stream(streams, broker.url, subject="flow")
    assert between(other, first, second) == found, "the same after a restart of the query"
    assert between(other, start, second)


def test_limit_of_bytes_cuts_where_records_begin(fw: Client, broker: Running, streams: list[EventStreamReader]) -> None:
    for _ in range(20):
        fw.send_many("bits", [b"x"] * 10).result(WAIT_S)
    consume(broker.url, "bits", "g", "ann", 200, most=2)
    made = stream(streams, broker.url, subject="bits", maxBytesPerTrigger="1k")
    made.prepareForTriggerAvailableNow()
    limit = made.getDefaultReadLimit()
    assert isinstance(limit, ReadMaxBytes)
    at, batches, found = made.initialOffset(), 0, []
    while (end := made.latestOffset(at, limit)) != at and batches < 10_000:
        found += between(made, at, end)
        at, batches = end, batches + 1
    assert batches > 5
    assert sorted(found, key=str) == sorted(rows(broker.url, subject="bits"), key=str)


def test_latest_is_resolved_once_and_held(fw: Client, broker: Running, streams: list[EventStreamReader]) -> None:
    fw.send_many("held", [b"old"] * 3).result(WAIT_S)
    consume(broker.url, "held", "g", "early", 3)
    wait_for_another_ms()
    first = stream(streams, broker.url, subject="held", starting="latest", query="auditor").initialOffset()
    wait_for_another_ms()
    fw.send_many("held", [b"new"] * 5).result(WAIT_S)  # and the first micro-batch fails
    consume(broker.url, "held", "g", "late", 5)
    broker.stop()
    broker.start()
    again = stream(streams, broker.url, subject="held", starting="latest", query="auditor")
    assert again.initialOffset() == first
    end = again.latestOffset(first, ReadAllAvailable())
    found = between(again, first, end)
    assert sum(row["count"] for row in found if row["event"] == "produced") == 5
    assert {row["consumer"] for row in found if row["event"] == "acked"} == {"late"}
    other = stream(streams, broker.url, subject="held", starting="latest", query="another")
    start = other.initialOffset()
    assert between(other, start, other.latestOffset(start, ReadAllAvailable())) == []
    with pytest.raises(Misuse, match="needs the option query"):
        stream(streams, broker.url, subject="held", starting="latest").initialOffset()
    everything = {row["subject"] for row in rows(broker.url)}
    assert "fairway.events" not in everything, "what queries hold is nobody's business"
    assert "fairway.events" in {row["subject"] for row in rows(broker.url, subject="fairway.events")}


def wait_for_another_ms() -> None:
    now = datetime.now(UTC)
    while datetime.now(UTC) <= now + timedelta(milliseconds=2):
        pass


def test_limit_of_events_counts_rows(fw: Client, broker: Running, streams: list[EventStreamReader]) -> None:
    for _ in range(20):
        fw.send_many("count", [b"x"] * 10).result(WAIT_S)
    consume(broker.url, "count", "g", "ann", 200, most=2)
    made = stream(streams, broker.url, subject="count", maxEventsPerTrigger="30")
    made.prepareForTriggerAvailableNow()
    limit = made.getDefaultReadLimit()
    assert isinstance(limit, ReadMaxRows)
    at, sizes, found = made.initialOffset(), list[int](), list[Row]()
    while (end := made.latestOffset(at, limit)) != at and len(sizes) < 10_000:
        few = between(made, at, end)
        sizes.append(len(few))
        found += few
        at = end
    assert len(sizes) >= 4
    assert max(sizes) <= 30
    assert sorted(found, key=str) == sorted(rows(broker.url, subject="count"), key=str)
    least = stream(streams, broker.url, subject="count", maxEventsPerTrigger="1")
    start = least.initialOffset()
    end = least.latestOffset(start, least.getDefaultReadLimit())
    assert end["position"] > start["position"]
    assert end["subjects"]["count"] > start["subjects"]["count"], "neither log waits for the other"


def test_another_log_is_refused(broker: Running, streams: list[EventStreamReader], fw: Client) -> None:
    fw.send("other", b"x").result(WAIT_S)
    made = stream(streams, broker.url, subject="other")
    alien = {**made.initialOffset(), "actions_log": f"{1:016x}"}
    with pytest.raises(DataLoss, match="another one"):
        made.latestOffset(alien, ReadAllAvailable())
    lenient = stream(streams, broker.url, subject="other", failOnDataLoss="false")
    end = lenient.latestOffset(alien, ReadAllAvailable())
    assert brief(between(lenient, alien, end), "event", "count") == [("produced", 1)]


def test_damage_is_an_error_unless_accepted(tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker:
        with fairway.connect(broker.url) as fw:
            fw.send_many("rot", [b"x"] * 20).result(WAIT_S)
        consume(broker.url, "rot", "g", "ann", 20, most=1)
        whole = rows(broker.url)
        broken = sorted(row["position"] for row in whole if row["event"] == "acked")[5]
        file = tmp_path / "data" / "actions" / f"{0:020d}.log"
        data = bytearray(file.read_bytes())
        data[broken + 100] ^= 1
        file.write_bytes(data)
        with pytest.raises(DataLoss, match=f"damaged at position {broken}"):
            rows(broker.url)
        left = rows(broker.url, failOnDataLoss="false")
        assert [row for row in whole if row["position"] != broken or row["event"] == "produced"] == left


# --- Spark -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_spark_reads_and_streams_events(spark: SparkSession, fw: Client, broker: Running, tmp_path: Path) -> None:
    fw.send_many("sparks", [b"x"] * 50).result(WAIT_S)
    consume(broker.url, "sparks", "g", "ann", 50)
    events = spark.read.format("fairway.events").options(url=broker.url, subject="sparks").load()
    counted = events.groupBy("event").sum("count").collect()
    assert {row[0]: row[1] for row in counted if row[1]} == {"produced": 50, "pulled": 50, "acked": 50}
    each = events.where("event = 'acked'").selectExpr(
        "explode(sequence(first_sequence, first_sequence + count - 1)) as sequence"
    )
    assert sorted(row[0] for row in each.collect()) == list(range(50))

    def run() -> None:
        flow = spark.readStream.format("fairway.events").options(url=broker.url, subject="sparks").load()
        writer = flow.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.option("path", str(tmp_path / "out")).trigger(availableNow=True).start()
        assert query.awaitTermination(120)

    run()
    fw.send_many("sparks", [b"y"] * 5).result(WAIT_S)
    consume(broker.url, "sparks", "g", "bob", 5)
    run()
    stored = spark.read.parquet(str(tmp_path / "out"))
    whole = spark.read.format("fairway.events").options(url=broker.url, subject="sparks").load()
    assert stored.exceptAll(whole).count() == 0
    assert whole.exceptAll(stored).count() == 0
    assert stored.where("event = 'acked' and consumer = 'bob'").count() == 1
