"""Through Spark itself: found by its name, read, written, streamed; a micro-batch that runs again changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from fairway.client.sync.client import Client

WAIT_S = 120


def send(client: Client, subject: str, count: int, first: int = 0) -> None:
    numbers = range(first, first + count)
    keys = [f"k{at % 5}" for at in numbers]
    headers = [{"n": str(at)} for at in numbers]
    client.send_many(subject, [b"%d" % at for at in numbers], keys=keys, headers=headers).result(30)


def load(spark: SparkSession, url: str, subject: str, **options: str) -> DataFrame:
    return spark.read.format("fairway").options(url=url, subject=subject, **options).load()


def payloads(frame: DataFrame) -> list[int]:
    return [int(row[0]) for row in frame.select(F.col("payload").cast("string")).collect()]


def copy(spark: SparkSession, url: str, source: str, target: str, checkpoint: Path, **options: str) -> StreamingQuery:
    """A query that copies one subject to another, all there is now."""
    stream = spark.readStream.format("fairway").options(url=url, subject=source, **options).load()
    writer = stream.writeStream.format("fairway").options(url=url, subject=target)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S)
    return query


def test_batch_is_found_by_its_name_and_filtered(spark: SparkSession, client: Client, url: str) -> None:
    send(client, "jvm.read", 5_000)
    frame = load(spark, url, "jvm.read", minPartitions="2")
    assert frame.columns[:4] == ["subject", "broker_group", "sequence", "id"]
    assert frame.count() == 5_000
    narrow = frame.where("sequence >= 100 and sequence < 110 and key = 'k1'")
    assert payloads(narrow) == [101, 106]
    row = frame.where("sequence = 7").first()
    assert row is not None
    assert (bytes(row.payload), row.key, row.headers, row.tags) == (b"7", "k2", {"n": "7"}, None)
    some = spark.read.format("fairway").schema("sequence bigint not null").options(url=url).load("jvm.read")
    assert some.agg(F.sum("sequence")).first() == (sum(range(5_000)),)


@pytest.mark.parametrize("is_pushing", [False, True])
def test_frames_of_one_load_have_each_their_own_filters(
    spark: SparkSession, client: Client, url: str, is_pushing: bool
) -> None:
    """Spark 4.1 to 4.3 read every scan of a `load()` as the last pushed filter left it."""
    subject = f"jvm.scans.{is_pushing}".lower()
    send(client, subject, 1_000)
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting)
    spark.conf.set(setting, str(is_pushing).lower())
    try:
        frame = load(spark, url, subject)
        head, tail = frame.where("sequence < 10"), frame.where("sequence >= 990")
        assert [each.count() for each in (frame, head, frame, tail, frame)] == [1_000, 10, 1_000, 10, 1_000]
        assert sorted(payloads(head.union(tail))) == [*range(10), *range(990, 1_000)]
        assert head.alias("one").join(frame.alias("two"), "key").count() == 10 * 200
        assert frame.where("key = 'k1'").union(frame).count() == 1_200
    finally:
        spark.conf.set(setting, before or "false")


def test_mistakes_are_named_in_what_spark_says(spark: SparkSession, client: Client, url: str) -> None:
    send(client, "jvm.known", 1)
    with pytest.raises(PySparkException, match=r"no subject 'jvm.knwn'.*did you mean 'jvm.known'"):
        load(spark, url, "jvm.knwn").count()
    with pytest.raises(PySparkException, match="did you mean starting"):
        load(spark, url, "jvm.known", startng="latest")
    bad = spark.range(1).select(F.col("id").alias("colour"))
    with pytest.raises(PySparkException, match="does not write a column 'colour'"):
        bad.write.format("fairway").mode("append").options(url=url, subject="jvm.bad").save()


def test_stream_copies_everything_once(spark: SparkSession, client: Client, url: str, tmp_path: Path) -> None:
    send(client, "jvm.from", 2_000)
    options = {"maxMessagesPerTrigger": "1500", "group": "copier"}
    query = copy(spark, url, "jvm.from", "jvm.to", tmp_path, **options)
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [1_500, 500]
    assert payloads(load(spark, url, "jvm.to")) == list(range(2_000))
    assert client.describe("jvm.from", "copier").subjects[0].groups[0].lag == 0
    lag = subprocess.run(
        [sys.executable, "-m", "fairway", "lag", "--url", url], capture_output=True, text=True, check=True
    )
    assert "copier" in lag.stdout
    send(client, "jvm.from", 500, 2_000)
    _forget_last_commit(tmp_path)  # as if the driver had died after the sink's last word: the micro-batch runs again
    copy(spark, url, "jvm.from", "jvm.to", tmp_path, **options)
    assert payloads(load(spark, url, "jvm.to")) == list(range(2_500))


def _forget_last_commit(checkpoint: Path) -> None:
    last = max((each for each in (checkpoint / "commits").iterdir() if each.name.isdigit()), key=lambda f: int(f.name))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)


def test_micro_batch_with_other_rows_is_refused(spark: SparkSession, client: Client, url: str, tmp_path: Path) -> None:
    send(client, "jvm.random", 10)

    def run(word: str) -> None:
        stream = spark.readStream.format("fairway").options(url=url, subject="jvm.random").load()
        writer = stream.select(F.lit(word).alias("payload")).writeStream.format("fairway")
        query = writer.options(url=url, subject="jvm.chosen").option("checkpointLocation", str(tmp_path))
        started = query.trigger(availableNow=True).start()
        started.awaitTermination(WAIT_S)

    run("heads")
    _forget_last_commit(tmp_path)
    with pytest.raises(PySparkException, match="must give the same"):
        run("tails")
    assert {row.payload for row in load(spark, url, "jvm.chosen").collect()} == {b"heads"}


@pytest.mark.parametrize("parts", [1, 3])
def test_micro_batch_of_foreach_batch_that_fails_is_stored_once(
    spark: SparkSession, client: Client, url: str, tmp_path: Path, parts: int
) -> None:
    """A batch that is written whole, one that is written in part, and the ones behind them."""
    source, target = f"jvm.each.from.{parts}", f"jvm.each.to.{parts}"
    send(client, source, 2_000)
    failures = [1, 2]

    def store(frame: DataFrame, batch: int) -> None:
        writer = frame.select("payload", "key").repartition(parts, "key").write.format("fairway").mode("append")
        if batch in failures and batch == 2:
            failures.remove(batch)
            some = frame.select("payload", "key").repartition(parts, "key").where(F.spark_partition_id() == 0)
            some.write.format("fairway").mode("append").options(url=url, subject=target).save()
            raise ValueError("the driver dies when one of its tasks is done")
        writer.options(url=url, subject=target).save()
        if batch in failures:
            failures.remove(batch)
            raise ValueError("the driver dies when all is stored")

    def run() -> None:
        stream = spark.readStream.format("fairway").options(url=url, subject=source, maxMessagesPerTrigger="500").load()
        query = stream.writeStream.foreachBatch(store).option("checkpointLocation", str(tmp_path))
        query.trigger(availableNow=True).start().awaitTermination(WAIT_S)

    for _ in range(2):
        with pytest.raises(PySparkException, match="the driver dies"):
            run()
    run()
    assert failures == []
    assert sorted(payloads(load(spark, url, target))) == list(range(2_000))


def test_second_write_to_a_subject_in_foreach_batch_is_refused_or_named(
    spark: SparkSession, client: Client, url: str, tmp_path: Path
) -> None:
    send(client, "jvm.twice.from", 10)

    def run(name: str | None, checkpoint: Path) -> None:
        def store(frame: DataFrame, batch: int) -> None:
            for word in ("heads", "tails"):
                rows = frame.select(F.lit(word).alias("payload")).write.format("fairway").mode("append")
                told = {} if name is None else {"writeId": f"{name}-{batch}-{word}"}
                rows.options(url=url, subject="jvm.twice.to", **told).save()

        stream = spark.readStream.format("fairway").options(url=url, subject="jvm.twice.from").load()
        query = stream.writeStream.foreachBatch(store).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination(WAIT_S)

    with pytest.raises(PySparkException, match=r"second write to jvm.twice.to in one foreachBatch.*writeId"):
        run(None, tmp_path / "unnamed")
    assert [bytes(row.payload) for row in load(spark, url, "jvm.twice.to").collect()] == [b"heads"] * 10
    run("named", tmp_path / "named")
    assert load(spark, url, "jvm.twice.to").count() == 30


def test_idle_stream_hears_of_the_next_message(spark: SparkSession, client: Client, url: str, tmp_path: Path) -> None:
    send(client, "jvm.live", 3)
    seen: list[Any] = []
    stream = spark.readStream.format("fairway").options(
        url=url, subject="jvm.live", starting="latest", group="live", pollMs="500"
    )
    query = (
        stream.load()
        .writeStream.foreachBatch(lambda frame, _: seen.extend(payloads(frame)))
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        while query.isActive and query.lastProgress is None and "Waiting" not in query.status["message"]:
            query.awaitTermination(1)
        for number in range(3, 6):
            send(client, "jvm.live", 1, number)
        query.processAllAvailable()
    finally:
        query.stop()
    assert seen[-3:] == [3, 4, 5]


def test_rows_are_written_at_once_and_when_due(spark: SparkSession, client: Client, url: str) -> None:
    due = (F.current_timestamp() + F.expr("interval 1 second")).alias("due_at")
    rows = spark.range(10).select(F.format_string("%d", "id").alias("payload"), due)
    rows.write.format("fairway").mode("append").options(url=url, subject="jvm.due").save()
    with client.consumer("jvm.due", "readers") as consumer:
        found = [consumer.poll(timeout=30) for _ in range(10)]
    assert sorted(int(message.payload) for message in found if message is not None) == list(range(10))


def test_write_with_a_name_is_written_once(spark: SparkSession, client: Client, url: str) -> None:
    rows = spark.range(1_000).select(F.format_string("%d", "id").alias("payload"), F.lit("jvm.once").alias("subject"))
    for _ in range(2):
        rows.write.format("fairway").mode("append").options(url=url, writeId="load-2026-01-31").save()
    assert sorted(payloads(load(spark, url, "jvm.once"))) == list(range(1_000))
