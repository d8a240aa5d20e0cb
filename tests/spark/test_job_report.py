"""The report: on events of which it is known what they amount to, and on a real broker with unequal groups."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import Row, SparkSession

import fairway
from fairway.client.sync.client import Client
from fairway.errors import Misuse
from fairway.protocol.admin_messages import ActorState, GroupDescription
from fairway.runtime.process import Child
from fairway.spark.jobs import capacity, job, report, report_page
from fairway.spark.jobs.capacity import DelayCapacity, GroupCapacity, ScrapedHistogram, Seen
from fairway.spark.jobs.report import GroupFlow, Known, ReportOptions, ReportResult, Sum
from tests.spark.jobs import send

WAIT_S = 60.0
HOUR = timedelta(hours=1)


class Served(NamedTuple):
    url: str
    metrics: str


@contextmanager
def serving(verb: str, data: Path) -> Iterator[Served]:
    with Child("fairway", verb, "--data", str(data), "--port", "0", "--http-port", "0") as child:
        ready = re.search(r"(fairway://[\d.:]+).*(http://[\d.:]+)", child.line(timeout_s=WAIT_S) or "")
        assert ready
        yield Served(ready[1], f"{ready[2]}/metrics")


# --- what groups owed, from events ------------------------------------------------------------------------------------


def sums(spark: SparkSession, rows: list[tuple[str, str | None, int | None, int, int, str | None]]) -> list[Row]:
    """Of (event, group, first sequence, count, second, detail), in the order of the log; windows of ten seconds."""
    full = [
        (event, "s", "default", group, first, count, datetime.fromtimestamp(second, UTC), position, detail)
        for position, (event, group, first, count, second, detail) in enumerate(rows)
    ]
    kinds = "event string, subject string, broker_group string, group string, first_sequence long, count long"
    schema = f"{kinds}, at timestamp, position long, detail string"
    return report.summed(spark.createDataFrame(full, schema), 10_000).collect()


def test_what_a_group_owed_follows_from_its_events(spark: SparkSession) -> None:
    """Forty messages are stored: 20, then 20."""
    rows = sums(
        spark,
        [
            ("produced", None, 0, 20, 101, None),
            ("sought", "new", 0, 0, 102, None),
            ("pulled", "new", 0, 15, 103, None),
            ("acked", "new", 0, 10, 104, None),
            ("acked", "old", 0, 5, 105, None),
            ("configured", "once", None, 0, 106, "at_most_once"),
            ("sought", "once", 10, 0, 106, None),
            ("pulled", "once", 10, 5, 107, None),
            ("produced", None, 20, 20, 111, None),
            ("dead", "new", 10, 1, 112, None),
            ("skipped", "new", 15, 5, 113, None),
            ("sought", "new", 38, 0, 125, None),
            ("acked", "new", 38, 1, 131, None),
            ("acked", "old", 5, 5, 141, None),  # behind the last window: what was owed before is still right
        ],
    )
    groups = [
        Known("s", "new", 1, 0, 40), Known("s", "old", 30, 3, 40), Known("s", "once", 25, 0, 40),
        Known("s", "idle", 40, 0, 40),
    ]  # fmt: skip
    found = {known.group: flows for known, flows in report.over_time(rows, groups, 10, 4)}
    lag = {name: [each.lag for each in flows] for name, flows in found.items()}
    assert lag["new"] == [20 - 10, 40 - 10 - 1 - 5, 40 - 38, 40 - 38 - 1]
    assert lag["old"] == [20 - 5, 40 - 5, 40 - 5, 40 - 5]  # back from the 30 that it owes now
    assert lag["once"] == [20 - 10 - 5, 25, 25, 25]
    assert lag["idle"] == [20, 40, 40, 40]
    assert [each.stored for each in found["new"]] == [20, 20, 0, 0]
    assert [each.acked for each in found["new"]] == [10, 0, 0, 1]
    assert [each.dead for each in found["new"]] == [0, 1, 0, 0]


def one(group: str | None, number: int, **more: int | str | None) -> Sum:
    return Sum(**{"subject": "s", "group": group, "epoch": 0, "number": number, "start": None, "first": None,
                  "end": None, "mode": None, **more})  # type: ignore[arg-type]  # fmt: skip


def lags(known: Known, rows: list[Sum], windows: int) -> list[int | None]:
    ((_, flows),) = report.over_time(rows, [known], 0, windows)
    return [each.lag for each in flows]


def test_broker_groups_are_added_up_window_by_window() -> None:
    first = [GroupFlow(7, 10, 9, 8, 1, 0, 2), GroupFlow(8, 0, 1, 2, 0, 0, 0)]
    second = [GroupFlow(7, 5, 0, 0, 0, 0, None), GroupFlow(8, 0, 3, 3, 0, 1, 2)]
    assert report.together([first, second]) == [GroupFlow(7, 15, 9, 8, 1, 0, None), GroupFlow(8, 0, 4, 5, 0, 1, 2)]


def test_what_was_before_the_first_seek_is_not_known() -> None:
    rows = [one(None, 0, first=5, end=15, stored=10), one("g", 0, done=1), one("g", 1, epoch=1, start=15)]
    assert lags(Known("s", "g", 0, 0, 15), rows, 2) == [None, 0]


def test_group_that_asks_for_no_acks_is_known_by_their_lack() -> None:
    rows = [one("g", 0, pulled=5), one("g", 1, pulled=5)]
    assert lags(Known("s", "g", 10, 0, 20), rows, 2) == [15, 10]
    assert lags(Known("s", "g", 20, 10, 20), rows, 2) == [20, 20]  # it has them in hand: acks are to come


# --- the broker's time ------------------------------------------------------------------------------------------------


def state(name: str, served_ns: int | None, cold_ns: int = 0, lag: int = 0) -> GroupDescription:
    actor = None if served_ns is None else ActorState("idle", 0, 0, 1, served_ns, cold_ns, 0)
    return GroupDescription(name, 0, 0, lag, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, False, 1, 0, [], actor, None)


def seen(**groups: GroupDescription) -> Seen:
    return Seen(1_000, {"s": {"default": 0}}, {("s", name): {"default": each} for name, each in groups.items()})


def test_shares_are_of_the_time_of_all_groups() -> None:
    now = seen(a=state("a", 300), b=state("b", 100, cold_ns=300), c=state("c", None))
    a, b, c = capacity.groups(now, None, ["s"])
    assert [each.group for each in (a, b, c)] == ["a", "b", "c"]
    assert [each.share for each in (a, b, c)] == [0.75, 0.25, 0.0]
    assert [each.cold_share for each in (a, b, c)] == [0.0, 0.75, 0.0]
    (remark,) = capacity.remarks(now, None, [a, b, c])
    assert remark.startswith("1 of 3 groups were idle")


def test_shares_of_a_time_that_was_watched() -> None:
    before = seen(a=state("a", 1_000), b=state("b", 500))
    now = seen(a=state("a", 1_300), b=state("b", 100))  # b's account was closed meanwhile, and opened anew
    shares = {each.group: each.share for each in capacity.groups(now, before, ["s"])}
    assert shares == {"a": 0.75, "b": 0.25}
    idle = capacity.groups(now, now, ["s"])
    assert [each.share for each in idle] == [None, None]
    assert any("no shares" in each for each in capacity.remarks(now, now, idle))
    assert any("no group" in each for each in capacity.remarks(now, None, []))


def test_subjects_are_meant_by_name_or_pattern() -> None:
    there = ["orders.eu", "orders.us", "dead:g:orders.eu", "mail"]
    assert capacity.meant((), there, "here") == ["mail", "orders.eu", "orders.us"]
    assert capacity.meant(("orders.*",), there, "here") == ["orders.eu", "orders.us"]
    with pytest.raises(Misuse, match=r"no subject 'ordrs.eu' on here: did you mean 'orders.eu'\?"):
        capacity.meant(("ordrs.eu",), there, "here")


# --- figures of a page ------------------------------------------------------------------------------------------------


def test_histogram_of_a_page() -> None:
    text = (
        '# TYPE x histogram\nx_bucket{le="0.005"} 3\nx_bucket{le="1"} 5\nx_bucket{le="+Inf"} 6\nx_sum 2.5\nx_count 6\n'
        "other 1\n"
    )
    found = capacity.histogram(text, "x")
    assert found is not None
    assert (found.bounds[:2], found.counts, found.total, found.count) == ([0.005, 1.0], [3, 2, 1], 2.5, 6)
    assert capacity.histogram(text, "y") is None


def test_histograms_of_several_servers_are_one() -> None:
    inf = float("inf")
    mine, other = ScrapedHistogram([0.1, 1.0, inf], [3, 2, 1], 2.5), ScrapedHistogram([0.1, 0.5, inf], [1, 4, 0], 1.5)
    found = capacity.together([mine, mine, other])
    assert found == ScrapedHistogram([0.1, 0.5, 1.0, inf], [7, 4, 4, 2], 6.5), "bounds of another release stay apart"


# --- a real broker ----------------------------------------------------------------------------------------------------


def consume(client: Client, subject: str, group: str, count: int) -> None:
    with client.consumer(subject, group) as consumer:
        for _ in range(count):
            message = consumer.poll(timeout=WAIT_S)
            assert message is not None
            message.ack()


def test_report_on_unequal_groups_and_delayed_messages(spark: SparkSession, tmp_path: Path) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    with serving("up", tmp_path / "data") as served, fairway.connect(served.url) as client:
        send(client, "load", 2_000)
        client.send_many("load", [b"now"] * 4, after=0.01).result(WAIT_S)
        client.send_many("soon", [b"x"] * 5, at=hour + 2.5 * HOUR).result(WAIT_S)
        client.send_many("soon", [b"x"] * 3, at=hour + 5.5 * HOUR).result(WAIT_S)
        client.send_many("soon", [b"x"] * 9, at=hour + 500 * HOUR).result(WAIT_S)
        consume(client, "load", "busy", 2_004)
        consume(client, "load", "quiet", 20)
        output = tmp_path / "spans"
        found = report.run(
            spark, ReportOptions(served.url, metrics=served.metrics, ahead=24 * HOUR, output=str(output))
        )
        narrow = report.run(spark, ReportOptions(served.url, ("load",), since=found.at, window=timedelta(seconds=1)))
    busy, quiet = found.groups
    assert (busy.group, quiet.group) == ("busy", "quiet")
    assert busy.share is not None
    assert quiet.share is not None
    assert busy.share + quiet.share == pytest.approx(1)
    assert busy.share > 0.6
    assert (busy.lag, busy.acked, busy.oldest_s) == (0, 2_004, None)
    assert quiet.owed == 2_004 - 20
    assert quiet.acked == 20
    last = {span.group: span.lag for span in found.spans}
    assert last == {"busy": 0, "quiet": 1_984}
    assert sum(span.stored for span in found.spans if span.group == "busy") == 2_004
    assert spark.read.parquet(str(output)).where("group = 'quiet'").selectExpr("sum(acked)").first() == (20,)
    due = {each.at: each.messages for each in found.delayed.forecast if each.messages}
    assert due == {hour + 2 * HOUR: 5, hour + 5 * HOUR: 3}
    assert found.delayed.overdue == 0
    assert sum(each.messages for each in found.delayed.lateness) == 4
    assert found.delayed.late_mean_s is not None
    assert found.remarks == []
    assert [span.lag for span in narrow.spans if span.group == "quiet"][-1] == 1_984  # although its acks are not read
    assert [remark for remark in narrow.remarks if "--metrics" in remark]

    page = report_page.page(found)
    root = ET.fromstring(page.html().partition("\n")[2])
    assert len(list(root.iter("svg"))) >= 5
    words = " ".join(root.itertext())
    assert "busy on load" in words
    assert "quiet on load" in words
    assert f"{hour + 2 * HOUR:%Y-%m-%d %H:%M:%S} UTC\ndue: 5" in [each.text for each in root.iter("title")]


def test_what_no_server_says_is_a_sentence(tmp_path: Path) -> None:
    with serving("broker", tmp_path / "data") as served, fairway.connect(served.url) as client:
        delayed = DelayCapacity()
        now = capacity.look(served.url, int(WAIT_S)).now
        (no_forecast,) = capacity.forecast(client, None, now, 24, delayed)
        assert "no delay server answers" in no_forecast
        (no_lateness,) = capacity.lateness([served.metrics], delayed)
        assert "a server without delayed messages" in no_lateness
        (wrong,) = capacity.lateness([served.metrics.replace("/metrics", "/figures")], delayed)
        assert "404" in wrong
    (gone,) = capacity.lateness([served.metrics], delayed)
    assert "is not known" in gone
    assert delayed == DelayCapacity()


def test_too_many_windows_are_refused_and_few_are_chosen() -> None:
    day_ms = 24 * 3_600_000
    assert report._window_ms(ReportOptions(), 0, day_ms, 5) == 15 * 60_000
    assert report._window_ms(ReportOptions(window=timedelta(minutes=1)), 0, day_ms, 5) == 60_000
    with pytest.raises(Misuse, match="more than 1,000, which is the most for 1,000 groups: choose a longer --window"):
        report._window_ms(ReportOptions(window=timedelta(minutes=1)), 0, day_ms, 1_000)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metrics", "ftp://x"], "write http://HOST:PORT/metrics"),
        (["--window", "10"], "no stretch of time"),
        (["--window", "0.1s"], "one second is the shortest"),
        (["--ahead", "30m"], "one hour at least"),
        (["--since", "2026-03-01T12:00"], "says no time zone"),
        (["--since", "2026-03-02T00:00Z", "--until", "2026-03-01T00:00Z"], "--since is the earlier one"),
        (["--url", "http://x"], "bad URL"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        job.main(report.command, "report", arguments)
    assert ended.value.code == job.USAGE
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_messages_that_wait_are_not_in_flight() -> None:
    group = GroupCapacity(
        "orders", "billing", share=0.5, busy_s=1.0, cold_s=0.0, cold_share=0.0, lag=7, in_flight=3, waiting=5, dead=0,
        lost=0, oldest_s=None, consumers=1, weight=1.0, is_paused=False,
    )  # fmt: skip
    found = ReportResult("fairway://127.0.0.1:1", datetime(2026, 3, 1, tzinfo=UTC), 0.0)
    found.groups = [group]
    (line,) = report._lines(found)
    assert "lag 7 (3 in flight, 5 to be tried again later), 0 acked" in line
    assert "in hand" not in line
