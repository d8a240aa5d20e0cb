"""Readers against a real broker, as Spark calls them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, IsNotNull, IsNull, LessThan
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

import fairway
from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.protocol.admin_messages import Depth, Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.spark import frames, reader, stream
from fairway.spark import reader as readers
from fairway.spark.reader import ScanRange
from fairway.spark.source import FairwaySource
from tests.spark.conftest import Server
from tests.spark.helpers import Streams, batch_reader, between, rows
from tests.unit.client.broker import running


def send(client: Client, subject: str, count: int, first: int = 0) -> None:
    client.send_many(subject, [b"%d" % at for at in range(first, first + count)]).result(30)


def numbers(found: list[dict[str, object]]) -> list[int]:
    return [int(row["payload"]) for row in found]  # type: ignore[call-overload]


@pytest.fixture
def streams(url: str) -> Iterator[Streams]:
    made = Streams(url)
    yield made
    made.stop()


# --- batches ---------------------------------------------------------------------------------------------------------


def test_whole_subject_in_several_tasks(client: Client, url: str) -> None:
    send(client, "tasks", 10_000)
    reader = batch_reader(url, "tasks", minPartitions="3")
    assert len(reader.partitions()) == 3
    found = rows(reader)
    assert numbers(found) == list(range(10_000))
    assert [row["sequence"] for row in found] == list(range(10_000))


def test_range_by_sequence_and_time(client: Client, url: str) -> None:
    send(client, "ranges", 100)
    assert numbers(rows(batch_reader(url, "ranges", starting="10", ending="20"))) == list(range(10, 20))
    assert numbers(rows(batch_reader(url, "ranges", starting='{"ranges": 95}'))) == list(range(95, 100))
    assert rows(batch_reader(url, "ranges", starting="2100-01-01T00:00:00Z")) == []
    assert len(rows(batch_reader(url, "ranges", ending="2100-01-01T00:00:00Z"))) == 100
    assert rows(batch_reader(url, "ranges", starting="latest")) == []


def test_time_cuts_between_two_messages(client: Client, url: str) -> None:
    send(client, "timed", 10)
    send(client, "timed", 10, 10)
    while True:  # until the two are stored in different milliseconds: a batch has one time
        found = rows(batch_reader(url, "timed"))
        first, last = found[0]["appended_at"], found[-1]["appended_at"]
        if first < last:
            break
        send(client, "timed", 10, len(found))
    before = [int(row["payload"]) for row in found if row["appended_at"] < last]
    assert numbers(rows(batch_reader(url, "timed", ending=last.isoformat()))) == before
    assert numbers(rows(batch_reader(url, "timed", starting=last.isoformat())))[0] == len(before)


def test_headers_can_be_left_out(client: Client, url: str) -> None:
    client.send("headed", b"0", headers={"tenant": "a"}).result(30)
    told = {"url": url, "subject": "headed", "includeHeaders": "false"}
    source = FairwaySource(told)
    columns = source.schema()
    assert columns.fieldNames() == [name for name in frames.MESSAGES.fieldNames() if name != "headers"]
    [row] = rows(source.reader(columns))
    assert (row["payload"], "headers" in row) == (b"0", False)


def test_list_and_pattern_of_subjects(client: Client, url: str) -> None:
    for name in ("many.a", "many.b", "many.c"):
        send(client, name, 5)
    named = rows(batch_reader(url, "many.a, many.c"))
    assert {row["subject"] for row in named} == {"many.a", "many.c"}
    matched = batch_reader(url, "many.[ab]")
    assert len(matched.partitions()) == 1, "small subjects share a task"
    assert {row["subject"] for row in rows(matched)} == {"many.a", "many.b"}
    assert batch_reader(url, "nothing.*").partitions() == []


def test_filters_narrow_what_is_read(client: Client, url: str) -> None:
    keys = ["a", "b", None, "c"]
    client.send_many("pushed", [b"%d" % at for at in range(40)], keys=keys * 10).result(30)
    reader = batch_reader(url, "pushed")
    other = GreaterThanOrEqual(("created_at",), datetime(2020, 1, 1, tzinfo=UTC))
    filters = [
        GreaterThanOrEqual(("sequence",), 10),
        LessThan(("sequence",), 30),
        In(("key",), ("a", "c")),
        IsNotNull(("sequence",)),
        other,
    ]
    assert reader.pushFilters(filters) == [other], "Spark sees to what we do not understand"
    assert [split.ranges[0][1:3] for split in reader.partitions()] == [(10, 30)]  # type: ignore[attr-defined]
    assert numbers(rows(reader)) == [at for at in range(10, 30) if keys[at % 4] in {"a", "c"}]
    keyless = batch_reader(url, "pushed")
    assert keyless.pushFilters([IsNull(("key",))]) == []
    assert len(rows(keyless)) == 10
    elsewhere = batch_reader(url, "pushed")
    assert elsewhere.pushFilters([EqualTo(("subject",), "another")]) == []
    assert elsewhere.partitions() == []
    past = batch_reader(url, "pushed")
    bound = LessThan(("appended_at",), datetime(2020, 1, 1, tzinfo=UTC))
    assert past.pushFilters([bound]) == [bound]
    assert past.partitions() == []


def test_keys_are_an_option_of_batches_and_streams(client: Client, url: str, streams: Streams) -> None:
    keys = ["a", "b, c", None, "d"]
    client.send_many("keyed", [b"%d" % at for at in range(8)], keys=keys * 2).result(30)
    assert numbers(rows(batch_reader(url, "keyed", keys="a, d"))) == [0, 3, 4, 7]
    assert numbers(rows(batch_reader(url, "keyed", keys='["b, c"]'))) == [1, 5]
    both = batch_reader(url, "keyed", keys="a,d")
    assert both.pushFilters([EqualTo(("key",), "d")]) == []
    assert numbers(rows(both)) == [3, 7]
    reader = streams("keyed", keys="d")
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert numbers(between(reader, reader.initialOffset(), end)) == [3, 7]


def test_tags_are_looked_for_by_the_broker_and_in_the_rows(client: Client, url: str) -> None:
    client.send_many("tagged", [b"0", b"1"], tags=[["eu"], ["us"]]).result(30)
    client.send_many("tagged", [b"2", b"3"], tags=[["us"], []]).result(30)
    assert numbers(rows(batch_reader(url, "tagged", tags="eu, asia"))) == [0]
    assert numbers(rows(batch_reader(url, "tagged", tags="us"))) == [1, 2]


def test_unknown_subject_is_named_with_the_nearest(client: Client, url: str) -> None:
    send(client, "nearly", 1)
    with pytest.raises(Misuse, match=r"no subject 'nearby' at fairway://.*did you mean 'nearly'\?"):
        batch_reader(url, "nearby").partitions()


def test_broker_that_is_not_there() -> None:
    with pytest.raises(Unreachable, match=r"no broker at fairway://127.0.0.1:1: .*refused.*patienceSeconds"):
        batch_reader("fairway://127.0.0.1:1", "orders", patienceSeconds="1").partitions()


def test_range_that_is_no_longer_stored(client: Client, url: str) -> None:
    send(client, "short", 5)
    [split] = batch_reader(url, "short").partitions()
    assert isinstance(split, reader.ReadSplit)
    beyond = reader.ReadSplit(split.job, (split.ranges[0]._replace(end=9),))
    with pytest.raises(readers.DataLoss, match="the log of short ends at 5"):
        list(readers.read(beyond))
    accepting = reader.ReadSplit(split.job._replace(fail_on_data_loss=False), beyond.ranges)
    assert sum(frame.num_rows for frame in readers.read(accepting)) == 5
    other = reader.ReadSplit(split.job._replace(log_id=split.job.log_id + 1), split.ranges)
    with pytest.raises(readers.DataLoss, match="is another one than this read began with"):
        list(readers.read(other))


def test_what_retention_has_taken_is_an_error_unless_accepted(tmp_path: Path) -> None:
    """Of a batch, and of a stream whose checkpoint is older."""
    with running(tmp_path / "data", keep_bytes=512 << 10) as broker, fairway.connect(broker.url) as client:
        client.send("taken", bytes(100_000)).result(30)
        streams = Streams(broker.url)
        at = streams("taken").initialOffset()
        end = time.monotonic() + 30
        while not (first := client.describe("taken").subjects[0].first_sequence):
            assert time.monotonic() < end, "nothing is deleted"
            client.send("taken", bytes(100_000)).result(30)
        client.send("taken", b"the last").result(30)
        said = r"messages 0 to \d+ of taken are no longer stored: .*failOnDataLoss"
        with pytest.raises(readers.DataLoss, match=said):
            batch_reader(broker.url, "taken", starting="0").partitions()
        with pytest.raises(readers.DataLoss, match=said):
            streams("taken").latestOffset(at, ReadAllAvailable())
        some = rows(batch_reader(broker.url, "taken", starting="0", failOnDataLoss="false"))
        going_on = streams("taken", failOnDataLoss="false")
        rest = between(going_on, at, going_on.latestOffset(at, ReadAllAvailable()))
        streams.stop()
    for found in (some, rest):
        assert found[0]["sequence"] >= first
        assert [row["sequence"] for row in found] == list(range(found[0]["sequence"], found[-1]["sequence"] + 1))
        assert found[-1]["payload"] == b"the last"


def test_reader_outlives_a_broker_that_is_killed(tmp_path: Path) -> None:
    served = Server(tmp_path)
    try:
        with fairway.connect(served.url) as client:
            send(client, "orders", 30_000)
        reader = batch_reader(served.url, "orders", minPartitions="2")
        first, second = reader.partitions()
        found = [row for frame in reader.read(first) for row in frame.to_pylist()]
        served.stop(9)
        served.start()
        found += [row for frame in reader.read(second) for row in frame.to_pylist()]
    finally:
        served.stop()
    assert numbers(found) == list(range(30_000))


# --- the broker's side -----------------------------------------------------------------------------------------------


def scan(client: Client, subject: str, at: int, wait_ms: int = 0, bytes_max: int = 0, is_dry: bool = False) -> Scanned:
    answer = client.ask(Scan(subject, Whence.SEQUENCE, at, None, bytes_max, None, wait_ms, [], is_dry))
    assert isinstance(answer, Scanned)
    return answer


def test_scan_waits_for_the_first_message(client: Client, url: str, streams: Streams) -> None:
    send(client, "waited", 1)
    assert scan(client, "waited", 1, wait_ms=50).committed_end == 1, "nothing came"
    with fairway.connect(url) as other:
        reader = streams("waited", pollMs="20000")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        other.send("waited", b"1")
        last = reader.latestOffset(end, ReadAllAvailable())
        assert numbers(between(reader, end, last)) == [1]


def test_dry_scan_says_how_far_bytes_reach(client: Client) -> None:
    for first in range(0, 30, 10):
        send(client, "measured", 10, first)
    whole = scan(client, "measured", 0, bytes_max=1 << 30, is_dry=True)
    assert (whole.next_sequence, whole.batches) == (30, [])
    one = scan(client, "measured", 0, bytes_max=1, is_dry=True)
    assert one.next_sequence == 10
    assert whole.size_bytes >= 3 * one.size_bytes - 24


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_reads_everything_once_within_its_limit(client: Client, streams: Streams) -> None:
    send(client, "limited", 250)
    reader = streams("limited", maxMessagesPerTrigger="100")
    at, found = reader.initialOffset(), []
    for _ in range(3):
        end = reader.latestOffset(at, reader.getDefaultReadLimit())
        batch = between(reader, at, end)
        assert len(batch) <= 100
        assert numbers(between(reader, at, end)) == numbers(batch), "a replay gives the same rows"
        found += numbers(batch)
        at = end
    assert found == list(range(250))
    assert reader.latestOffset(at, ReadMaxRows(100)) is at, "idle: the same offset, to the letter"
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert latest["subjects"] == {"limited": 250}


def test_limit_in_bytes_takes_whole_batches(client: Client, streams: Streams) -> None:
    for first in range(0, 40, 10):
        send(client, "bytes", 10, first)
    reader = streams("bytes")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxBytes(1))
    assert end["subjects"] == {"bytes": 10}
    assert reader.latestOffset(end, ReadMaxBytes(1 << 20))["subjects"] == {"bytes": 40}


def test_available_now_ends_where_the_log_ended_when_it_began(client: Client, streams: Streams) -> None:
    send(client, "now", 10)
    reader = streams("now")
    reader.prepareForTriggerAvailableNow()
    send(client, "now", 10, 10)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert numbers(between(reader, start, end)) == list(range(10))
    assert reader.latestOffset(end, ReadAllAvailable()) is end


def test_latest_is_held_on_the_broker_from_the_first_time_on(client: Client, streams: Streams) -> None:
    send(client, "held", 5)
    with pytest.raises(Misuse, match="needs the option group"):
        streams("held", starting="latest").initialOffset()
    first = streams("held", starting="latest", group="etl-held")
    assert first.initialOffset()["subjects"] == {"held": 5}
    send(client, "held", 5, 5)  # and the first micro-batch fails
    again = streams("held", starting="latest", group="etl-held")
    start = again.initialOffset()
    assert numbers(between(again, start, again.latestOffset(start, ReadAllAvailable()))) == list(range(5, 10))


def lag(client: Client, subject: str, group: str) -> int:
    described = client.describe(subject, group, depth=Depth.GROUPS)
    return described.subjects[0].groups[0].lag


def test_progress_is_that_of_a_group(client: Client, streams: Streams) -> None:
    send(client, "progress", 10)
    reader = streams("progress", group="etl", maxMessagesPerTrigger="4")
    at = reader.initialOffset()
    lags = []
    for _ in range(4):
        at = reader.latestOffset(at, ReadMaxRows(4))
        lags.append(lag(client, "progress", "etl"))
    assert lags == [10, 6, 2, 0]


def test_group_with_consumers_is_left_alone(client: Client, streams: Streams) -> None:
    send(client, "shared", 1)
    with client.consumer("shared", "service") as consumer:
        assert consumer.poll(timeout=10) is not None
        reader = streams("shared", group="service")
        with pytest.raises(Misuse, match="has consumers"):
            reader.latestOffset(reader.initialOffset(), ReadAllAvailable())


def test_subject_that_is_new_to_a_pattern_is_read_from_its_beginning(client: Client, streams: Streams) -> None:
    send(client, "grow.a", 3)
    reader = streams("grow.*")
    start = reader.initialOffset()
    at = reader.latestOffset(start, ReadAllAvailable())
    send(client, "grow.b", 2)
    end = reader.latestOffset(at, ReadAllAvailable())
    assert [(row["subject"], row["sequence"]) for row in between(reader, at, end)] == [("grow.b", 0), ("grow.b", 1)]


def test_checkpoint_of_another_log_is_refused(client: Client, streams: Streams) -> None:
    send(client, "others", 3)
    reader = streams("others")
    start = reader.initialOffset() | {"log": "00000000000000aa"}
    with pytest.raises(readers.DataLoss, match="Begin with a new checkpoint"):
        reader.latestOffset(start, ReadAllAvailable())
    accepting = streams("others", failOnDataLoss="false")
    end = accepting.latestOffset(start, ReadAllAvailable())
    assert numbers(between(accepting, start, end)) == [0, 1, 2]
    ahead = reader.initialOffset() | {"subjects": {"others": 9}}
    with pytest.raises(readers.DataLoss, match="ends at 3"):
        reader.latestOffset(ahead, ReadAllAvailable())
    with pytest.raises(Misuse, match="upgrade fairway"):
        reader.latestOffset({"fairway": 3}, ReadAllAvailable())


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_ranges_are_cut_and_packed_without_loss() -> None:
    ranges = [
        ScanRange("a", 0, 1_000_000, 100.0),
        ScanRange("b", 5, 6),
        ScanRange("c", 0, 0),
        ScanRange("d", 7, 9, 60e6),
    ]
    tasks = reader.cut(ranges, None)
    pieces = [piece for task in tasks for piece in task]
    for each in ranges:
        of = [piece for piece in pieces if piece.subject == each.subject]
        assert sum(piece.end - piece.begin for piece in of) == each.end - each.begin
        assert all(left.end == right.begin for left, right in pairwise(of))
    assert all(sum(piece.size for piece in task) < 80e6 for task in tasks)
    assert len(reader.cut([ScanRange("a", 0, 10)], 4)) == 4


def test_shares_are_fair_and_whole() -> None:
    assert stream.shares({"a": 1_000, "b": 10, "c": 0}, 100) == {"a": 90, "b": 10}
    assert stream.shares({"a": 5, "b": 9, "c": 9}, 2) == {"b": 1, "c": 1}
    assert sum(stream.shares({"a": 70, "b": 70, "c": 70}, 100).values()) == 100


def test_errors_of_the_family_are_ours() -> None:
    assert issubclass(readers.DataLoss, FairwayError)
