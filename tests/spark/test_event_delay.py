"""`fairway.events` with what happened at the delay server: scheduled, dispatched, cancelled, rescheduled."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse
from fairway.spark.events import delay_log, frames
from fairway.spark.events.delay_log import LogPlace
from fairway.spark.events.source import EventReader, EventStreamReader
from fairway.spark.options import event_options
from fairway.spark.reader import DataLoss
from tests.unit.client.broker import running

WAIT_S = 60
Row = dict[str, Any]


def rows(url: str, **options: str) -> list[Row]:
    made = EventReader(event_options({"url": url, "delayed": "true", **options}), frames.EVENTS)
    return [row for split in made.partitions() for frame in made.read(split) for row in frame.to_pylist()]


def delayed(found: list[Row]) -> list[Row]:
    return [row for row in found if row["broker_group"] == "delay"]


@pytest.fixture
def streams() -> Iterator[list[EventStreamReader]]:
    made: list[EventStreamReader] = []
    yield made
    for each in made:
        each.stop()


def stream(made: list[EventStreamReader], url: str, **options: str) -> EventStreamReader:
    told = event_options({"url": url, "delayed": "true", "pollMs": "50", **options})
    made.append(EventStreamReader(told, frames.EVENTS))
    return made[-1]


def between(made: EventStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
    return [row for split in made.partitions(start, end) for frame in made.read(split) for row in frame.to_pylist()]


def live_through(client: Client, subject: str) -> list[str]:
    """One is delivered, one cancelled, one put off; their ids."""
    soon = datetime.now(UTC) + timedelta(milliseconds=200)
    later = datetime.now(UTC) + timedelta(days=3)
    sent = client.send_many(subject, [b"a", b"b", b"c"], at=[soon, later, later], keys=["k", "l", None])
    ids = [receipt.id(index) for receipt in sent.result(WAIT_S) for index in range(receipt.count)]
    client.delayed.cancel(ids[1])
    client.delayed.reschedule(ids[2], after=timedelta(days=9))
    with client.consumer(subject, "readers") as consumer:
        [message] = consumer.take(1, timeout=WAIT_S)
        message.ack()
    return ids


def test_life_of_delayed_messages(url: str, client: Client) -> None:
    ids = live_through(client, "past.life")
    found = delayed(rows(url, subject="past.life"))
    scheduled = [row for row in found if row["event"] == "scheduled"]
    assert [(row["id"], row["key"], row["count"]) for row in scheduled] == [
        (ids[0], "k", 1),
        (ids[1], "l", 1),
        (ids[2], None, 1),
    ]
    sequence = {row["id"]: row["first_sequence"] for row in scheduled}
    rest = {row["event"]: row for row in found if row["event"] != "scheduled"}
    assert {name: row["first_sequence"] for name, row in rest.items()} == {
        "dispatched": sequence[ids[0]],
        "cancelled": sequence[ids[1]],
        "rescheduled": sequence[ids[2]],
    }
    assert rest["dispatched"]["at"] >= scheduled[0]["due_at"], "never early"
    assert rest["rescheduled"]["due_at"] > datetime.now(UTC) + timedelta(days=8)
    assert rest["cancelled"]["due_at"] is None
    whole = rows(url, subject="past.life")
    assert {"produced", "pulled", "acked"} <= {row["event"] for row in whole}
    plain = EventReader(event_options({"url": url, "subject": "past.life"}), frames.EVENTS)
    without = [row for split in plain.partitions() for frame in plain.read(split) for row in frame.to_pylist()]
    assert without == [row for row in whole if row["broker_group"] != "delay"], "only who asks for it gets it"


def test_times_and_subjects_narrow_it(url: str, client: Client) -> None:
    client.send("past.pending", b"x", after=timedelta(days=1)).result(WAIT_S)
    assert [row["event"] for row in rows(url, subject="past.pending")] == ["scheduled"], "nothing is stored there yet"
    begun = datetime.now(UTC) + timedelta(milliseconds=2)
    begun = begun.replace(microsecond=begun.microsecond // 1_000 * 1_000)  # what is logged has whole milliseconds
    while datetime.now(UTC) <= begun:
        pass
    client.send("past.pending", b"y", after=timedelta(days=1)).result(WAIT_S)
    times = begun.isoformat()
    assert len(rows(url, subject="past.pending", starting=times)) == 1
    assert len(rows(url, subject="past.pending", ending=times)) == 1
    assert rows(url, subject="past.pending", starting="latest") == []
    assert {"past.pending"} <= {row["subject"] for row in rows(url)}
    assert {row["subject"] for row in rows(url, subject="past.pend*")} == {"past.pending"}


def test_stream_of_it(url: str, client: Client, streams: list[EventStreamReader]) -> None:
    for _ in range(5):
        client.send_many("past.flow", [b"x"] * 20, after=timedelta(days=2)).result(WAIT_S)
    live_through(client, "past.flow")
    made = stream(streams, url, subject="past.flow", maxEventsPerTrigger="70")
    made.prepareForTriggerAvailableNow()
    at, sizes, found = made.initialOffset(), list[int](), list[Row]()
    while (end := made.latestOffset(at, made.getDefaultReadLimit())) != at and len(sizes) < 10_000:
        few = between(made, at, end)
        sizes.append(len(few))
        found += few
        at = end
    assert len(sizes) > 2
    assert max(sizes) <= 70
    whole = rows(url, subject="past.flow")
    assert sorted(found, key=str) == sorted(whole, key=str)
    other = stream(streams, url, subject="past.flow")
    assert other.latestOffset(at, ReadAllAvailable()) == at, "idle"
    client.send("past.flow", b"new", after=timedelta(days=2)).result(WAIT_S)
    end = other.latestOffset(at, ReadAllAvailable())
    assert [row["event"] for row in between(other, at, end)] == ["scheduled"]
    latest = stream(streams, url, subject="past.flow", starting="latest", query="past")
    start = latest.initialOffset()
    assert delayed(between(latest, start, latest.latestOffset(start, ReadAllAvailable()))) == []


def test_who_cannot_say_says_so(tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker, pytest.raises(FairwayError, match="keeps no delayed messages"):
        rows(broker.url)
    with pytest.raises(Misuse, match="no group's yet"):
        event_options({"delayed": "true", "group": "billing"})


# --- several groups of delay servers ----------------------------------------------------------------------------------

ONE = {":scheduled": LogPlace(1, 100), ":decided": LogPlace(2, 50)}
TWO = {
    "d1:scheduled": LogPlace(1, 130), "d1:decided": LogPlace(2, 50),
    "d2:scheduled": LogPlace(3, 70), "d2:decided": LogPlace(4, 0),
}  # fmt: skip


def test_log_is_known_by_its_identity_whatever_its_group_is_called() -> None:
    known = delay_log.renamed(ONE, TWO)
    assert known == {"d1:scheduled": LogPlace(1, 100), "d1:decided": LogPlace(2, 50)}
    end = delay_log.between(known, TWO, None)
    assert end == TWO
    wanted = [("d1:scheduled", 100, 130), ("d2:scheduled", 0, 70)]
    for begin in (ONE, known):
        assert [each[:3] for each in delay_log.ranges(begin, end)] == wanted
    fewer = {":scheduled": TWO["d1:scheduled"], ":decided": TWO["d1:decided"]}
    away = {name: at for name, at in TWO.items() if "d2" in name}
    assert delay_log.renamed(end, ONE) == {**fewer, **away}


def test_available_now_ends_where_logs_ended_when_it_began_also_if_groups_are_new() -> None:
    end = delay_log.between(delay_log.renamed(ONE, TWO), TWO, ONE)
    assert end["d1:scheduled"] == LogPlace(1, 100), "it was there, under another name"
    assert end["d2:scheduled"] == LogPlace(3, 0), "it was not: the next run reads it"
    assert delay_log.ranges(ONE, end) == []


def test_group_that_was_away_is_not_read_once_more() -> None:
    alone = {name: at for name, at in TWO.items() if "d1" in name}
    end = delay_log.between(TWO, alone, None)
    assert end == TWO
    assert delay_log.ranges(end, delay_log.between(end, TWO, None)) == []
    job = delay_log.DelayJob({}, {name: at.log_id for name, at in TWO.items()}, (), ("*",), 0, None, is_strict=True)
    [wanted, *_] = delay_log.ranges({}, {"d2:scheduled": TWO["d2:scheduled"]})
    with pytest.raises(DataLoss, match="delay servers of group d2 are not there any more"):
        list(delay_log.read(job, wanted))
    assert list(delay_log.read(job._replace(is_strict=False), wanted)) == []
