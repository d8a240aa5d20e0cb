"""Replay: what is picked is sent, once, with the ids it had."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from fairway.client.sync.client import Client
from fairway.client.sync.consumer import Consumer
from fairway.errors import Misuse
from fairway.protocol.delivery import Message
from fairway.spark.jobs import archive, replay, selection
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.replay import ReplayOptions
from fairway.spark.jobs.selection import Picking
from tests.spark.jobs import rows, send


def received(spark: SparkSession, url: str, subject: str) -> list[Row]:
    return rows(spark.read.format("fairway").options(url=url, subject=subject).load())


@pytest.fixture(scope="module")
def source(spark: SparkSession, url: str, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of two subjects."""
    path = tmp_path_factory.mktemp("replay") / "archive"
    keys, tags = [f"k{number % 5}" for number in range(50)], [["red"], ["blue", "x"]] * 25
    send(client, "play.one", 50, keys=keys, tags=tags, headers=[{"n": "1"}] * 50)
    send(client, "play.two", 10)
    archive.run(spark, archive.ArchiveOptions(str(path), ("play.one", "play.two"), url, once=True))
    return path


def test_dry_run_counts_and_sends_nothing(spark: SparkSession, url: str, source: Path) -> None:
    for picked in (Picking(("play.*",), str(source)), Picking(("play.one", "play.two"), url=url)):
        found = replay.count(spark, ReplayOptions(picked, "play.none", url))
        assert (found.matched, found.sent, found.by_subject) == (60, 0, {"play.one": 50, "play.two": 10})
    picked = Picking(("play.one",), str(source), keys=("k1", "k2"), tags=("blue",), where="sequence >= 10")
    assert replay.count(spark, ReplayOptions(picked, "play.none", url)).matched == 8
    late = Picking(("play.one",), str(source), since=datetime(2100, 1, 1, tzinfo=UTC))
    early = Picking(("play.one",), str(source), until=datetime(2100, 1, 1, tzinfo=UTC))
    assert replay.count(spark, ReplayOptions(late, "play.none", url)).matched == 0
    assert replay.count(spark, ReplayOptions(early, "play.none", url)).matched == 50
    for hours in (-14, 14):  # where it is another day already, or still
        zone = timezone(timedelta(hours=hours))
        begin, end = (datetime.now(zone) + timedelta(hours=each) for each in (-1, 1))
        hour = Picking(("play.one",), str(source), since=begin, until=end)
        assert replay.count(spark, ReplayOptions(hour, "play.none", url)).matched == 50
    with pytest.raises(Misuse, match=r"no subject 'play.none'"):
        replay.count(spark, ReplayOptions(Picking(("play.none",), url=url), "play.two", url))


def test_replayed_messages_are_the_same_and_say_so(spark: SparkSession, url: str, source: Path) -> None:
    options = ReplayOptions(Picking(("play.one",), str(source), keys=("k3",)), "play.again", url, id="case-7")
    done = replay.run(spark, options)
    assert (done.matched, done.sent, done.is_complete) == (10, 10, True)
    before = [row for row in received(spark, url, "play.one") if row["key"] == "k3"]
    after = received(spark, url, "play.again")
    same = ("id", "key", "tags", "payload", "created_at")
    assert [[row[name] for name in same] for row in after] == [[row[name] for name in same] for row in before]
    assert after[0]["headers"] == {
        "n": "1",
        "fairway.replay.id": "case-7",
        "fairway.replay.subject": "play.one",
        "fairway.replay.sequence": str(before[0]["sequence"]),
    }
    again = replay.run(spark, options)
    assert (again.sent, again.sent_before, again.is_complete) == (0, 10, True)
    assert len(received(spark, url, "play.again")) == 10


def test_replay_goes_on_where_it_stopped(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    send(client, "play.live", 25)
    options = ReplayOptions(
        Picking(("play.live",), url=url), "play.rest", url, state=str(tmp_path / "state"), rate_per_s=10
    )  # slices of ten
    sent = list[int]()
    first = replay.run(spark, options, lambda point: sent.append(point.rows), lambda: bool(sent))
    assert (first.matched, first.sent, first.is_complete) == (25, 10, False)
    send(client, "play.live", 5)  # comes too late to be in it

    second = replay.run(spark, options, lambda point: sent.append(point.rows), lambda: len(sent) == 2)
    assert (second.sent_before, second.sent) == (10, 10)
    state = Files(spark, str(tmp_path / "state"))
    state.move("sent-000000000002.json", "sent-000000000001.json")  # as if it had died before it noted the second
    last = replay.run(spark, options)
    assert (last.sent_before, last.sent, last.is_complete) == (10, 15, True)
    assert [row["payload"] for row in received(spark, url, "play.rest")] == [b"%d" % number for number in range(25)]
    other = ReplayOptions(Picking(("play.live",), url=url, keys=("a",)), "play.rest", url, state=options.state)
    with pytest.raises(Misuse, match="which asked for something else"):
        replay.run(spark, other)


def test_a_rate_is_never_exceeded(spark: SparkSession, url: str, client: Client, tmp_path: Path) -> None:
    send(client, "play.fast", 30)
    picked, begun_s = Picking(("play.fast",), url=url), list[float]()
    options = ReplayOptions(picked, "play.slow", url, state=str(tmp_path / "state"), rate_per_s=10)

    def is_to_end() -> bool:
        begun_s.append(time.time())  # first when all is selected, and nothing is sent yet
        return False

    assert replay.run(spark, options, is_to_end=is_to_end).sent == 30
    for number, row in enumerate(received(spark, url, "play.slow")):
        after_s = row["appended_at"].timestamp() - begun_s[0]
        assert after_s >= number // 10 - 0.01, f"{number} messages before this one, after {after_s} s"


def test_one_group_alone_gets_a_replay(spark: SparkSession, url: str, client: Client, source: Path) -> None:
    with client.consumer("play.one", "repair") as mine, client.consumer("play.one", "others") as other:
        for each in (mine, other):
            drained(each, 50)
        picked = Picking(("play.one",), str(source), keys=("k1", "k4"))
        options = ReplayOptions(picked, "play.one", url, rate_per_s=15, group="repair")  # slices of fifteen
        counted = replay.count(spark, options)
        assert (counted.matched, counted.sent, counted.group) == (20, 0, "repair")
        sent = list[int]()
        first = replay.run(spark, options, lambda point: sent.append(point.rows), lambda: bool(sent))
        assert (first.matched, first.sent, first.is_complete) == (20, 15, False)
        last = replay.run(spark, options)
        assert (last.sent_before, last.sent, last.is_complete) == (15, 5, True)
        assert replay.run(spark, options).sent == 0
        before = [row for row in received(spark, url, "play.one") if row["key"] in {"k1", "k4"}]
        got = drained(mine, 20)
        assert [str(message.id) for message in got] == [row["id"] for row in before]
        assert [message.headers["fairway.replay.sequence"] for message in got] == [
            str(row["sequence"]) for row in before
        ]
        assert {message.headers["fairway.replay.id"] for message in got} == {replay.id_of(options)}
        assert not mine.take(1, timeout=0.2)
        assert not other.take(1, timeout=0.2)
    assert len(received(spark, url, "play.one")) == 50
    nobody = ReplayOptions(picked, "play.one", url, group="nobody")
    for ask in (replay.count, replay.run):
        with pytest.raises(Misuse, match=r"there is no group 'nobody' on play.one"):
            ask(spark, nobody)
    with pytest.raises(Misuse, match=r"there is no group 'repair' on play.none"):
        replay.count(spark, ReplayOptions(picked, "play.none", url, group="repair"))


def drained(consumer: Consumer, count: int) -> list[Message]:
    got: list[Message] = []
    while len(got) < count:
        taken = consumer.take(count - len(got), timeout=30)
        assert taken
        for message in taken:
            message.ack()
        got += taken
    return got


def test_where_to_is_asked_for() -> None:
    assert replay.receiving("orders", None, ["a", "b"]) == "orders"
    assert replay.receiving(None, "billing", ["orders"]) == "orders"
    for to, group, subjects in ((None, None, ["a"]), (None, "g", ["a", "b"]), (None, "g", ["a.*"])):
        with pytest.raises(Misuse, match="Give it --to SUBJECT"):
            replay.receiving(to, group, subjects)


def test_bad_requests_are_sentences(spark: SparkSession, url: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="give it --state DIR"):
        replay.run(spark, ReplayOptions(Picking(("play.one",), url=url), "play.x", url))
    with pytest.raises(Misuse, match=r"no subject 'play.on' in the archive.*did you mean 'play.one'"):
        replay.count(spark, ReplayOptions(Picking(("play.on",), str(source)), "play.x", url))
    for where in ("nothing = 1", "sequence >"):
        with pytest.raises(Misuse, match=r"--where '.*' cannot be used"):
            replay.count(spark, ReplayOptions(Picking(("play.one",), str(source), where=where), "play.x", url))
    with pytest.raises(Misuse, match="the broker's own"):
        replay.run(spark, ReplayOptions(Picking(("play.one",), str(source)), "inbox:billing:play.one", url))
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(Misuse, match="not the state of a replay"):
        replay.run(spark, ReplayOptions(Picking(("play.one",), str(source)), "play.x", url, state=str(tmp_path)))
    with pytest.raises(Misuse, match="no time zone"):
        selection.moment("2026-03-01T12:00", "since")
