"""`fairway.delayed`: what is pending, as the reader gives it and as Spark does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from fairway.client.sync.client import Client
from fairway.errors import FairwayError, Misuse
from fairway.protocol.delay_messages import Stretch, Which
from fairway.spark.delayed import PENDING, DelayedReader, DelayedSource, cut, delayed_options
from tests.unit.client.broker import running

WAIT_S = 60
BEGIN = datetime.now(UTC).replace(microsecond=0) + timedelta(days=30)


def rows(url: str, columns: StructType = PENDING, **options: str) -> list[dict[str, Any]]:
    made = DelayedReader(delayed_options({"url": url, **options}), columns)
    return [row for split in made.partitions() for frame in made.read(split) for row in frame.to_pylist()]


def schedule(client: Client, subject: str, count: int, **columns: Any) -> list[str]:
    """So many messages, six hours apart; their ids."""
    times = [BEGIN + timedelta(hours=6 * number) for number in range(count)]
    sent = client.send_many(subject, [b"payload %d" % number for number in range(count)], at=times, **columns)
    return [receipt.id(index) for receipt in sent.result(WAIT_S) for index in range(receipt.count)]


def test_what_is_pending_comes_whole(url: str, client: Client) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    columns: dict[str, Any] = {"tags": [["a"], None, ["b", "c"]], "headers": [None, {"x": "1"}, None]}
    ids = schedule(client, "late.whole", 3, keys=["k0", None, "k2"], **columns)
    found = rows(url, subject="late.whole")
    assert [row["id"] for row in found] == ids
    assert [(row["subject"], row["key"], row["payload"]) for row in found] == [
        ("late.whole", "k0", b"payload 0"),
        ("late.whole", None, b"payload 1"),
        ("late.whole", "k2", b"payload 2"),
    ]
    assert [row["due_at"] for row in found] == [BEGIN + timedelta(hours=6 * number) for number in range(3)]
    assert [row["size_bytes"] for row in found] == [9, 9, 9]
    assert [list(row["tags"] or []) for row in found] == [["a"], [], ["b", "c"]]
    assert [dict(row["headers"] or []) for row in found] == [{}, {"x": "1"}, {}]
    assert all(before <= row["created_at"] <= datetime.now(UTC) for row in found)
    client.delayed.cancel(ids[1])
    assert [row["id"] for row in rows(url, subject="late.whole")] == [ids[0], ids[2]]


def test_some_of_it_and_a_part_for_each_task(url: str, client: Client) -> None:
    many = schedule(client, "late.many", 2_000, keys=[f"k{number % 2}-{number}" for number in range(2_000)])
    few = schedule(client, "late.few", 5)
    light = StructType([field for field in PENDING.fields if field.name in {"id", "due_at"}])
    assert [row["id"] for row in rows(url, light, subject="late.many")] == many
    assert {row["id"] for row in rows(url, light, subject="late.many,late.few")} == {*many, *few}
    assert {*many, *few} <= {row["id"] for row in rows(url, light)}
    assert [row["id"] for row in rows(url, light, subject="late.many", keyPrefix="k1-")] == many[1::2]
    edges = {"dueFrom": BEGIN.isoformat(), "dueTo": (BEGIN + timedelta(hours=12)).isoformat()}
    assert [row["id"] for row in rows(url, light, subject="late.many", **edges)] == many[:2]
    parts = DelayedReader(delayed_options({"url": url, "subject": "late.many", "minPartitions": "4"}), light)
    splits = parts.partitions()
    assert len(splits) == 4
    each = [[row["id"] for frame in parts.read(split) for row in frame.to_pylist()] for split in splits]
    assert all(each)
    assert [one for part in each for one in part] == many


def test_parts_cover_all_times() -> None:
    whole = Which("orders", None, 5, None)
    stretches = [Stretch(100, 3), Stretch(200, 3), Stretch(400, 9), Stretch(500, 1)]
    assert [(each.from_ms, each.to_ms) for each in cut(whole, stretches, 6)] == [(5, 400), (400, 500), (500, None)]
    assert cut(whole, [], 6) == [whole]


def test_who_keeps_none_says_so(tmp_path: Path) -> None:
    with running(tmp_path / "data") as broker, pytest.raises(FairwayError, match="keeps no delayed messages"):
        rows(broker.url)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subjct": "a"}, "fairway.delayed has no option 'subjct': did you mean subject?"),
        ({"dueFrom": "earliest"}, "it is a time"),
        ({"dueTo": "2026-01-31T08:00:00"}, "says no time zone"),
        ({"subject": "dead:g:s"}, "option subject"),
    ],
)
def test_mistakes_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        delayed_options(options)


def test_it_is_no_stream() -> None:
    with pytest.raises(Misuse, match="as a batch"):
        DelayedSource({}).streamReader(PENDING)


def test_spark_finds_it_by_name(spark: SparkSession, url: str, client: Client) -> None:
    schedule(client, "late.spark", 30, keys=["a", "b", None] * 10)
    pending = spark.read.format("fairway.delayed").options(url=url, subject="late.spark").load()
    assert pending.schema == PENDING
    counted = pending.where("key is not null").groupBy("key").count().orderBy("key").collect()
    assert [tuple(row) for row in counted] == [("a", 10), ("b", 10)]
    heaviest = pending.selectExpr("max(size_bytes)", "min(cast(payload as string))").first()
    assert heaviest == (10, "payload 0")
