"""Spark: batch read, archive, sink and micro-batches, against Parquet, Kafka's source and rows made in Python.

All on local[2], 100-byte payloads, every column, medians of the rounds after a warm-up, in which the JVM compiles. CPU
is what Spark, its Python workers and the broker used together. On a machine that others use too it says more than the
time. "ready" is a source of the very Arrow batches that ours makes, from a file. A job that is slower than ours with it
is held up by Spark, or by the disk. Kafka is read with Spark's own source, to noop as well, and skipped with a word
where it cannot be had.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import fairway
from bench import machine, spark_ways
from bench.tree import Tree
from fairway.runtime.process import Child

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAYLOAD = bytes(range(100))
BATCHES = 12  # micro-batches of a few rows each
SUBJECT = "bench"
TASKS = 2  # as many as there are cores to run them

READ, LEAN, PARQUET_READ = "fairway → noop", "fairway, three columns → noop", "Parquet → noop"
READY_READ, READY, ARCHIVE = "ready → noop", "ready → Parquet", "fairway → archive"
ROWS, KAFKA = "rows made in Python → noop", "Kafka → noop"
MADE, SINK = "made by Spark → noop", "made by Spark → fairway"


@dataclass(frozen=True)
class Measured:
    """One way of doing it."""

    name: str
    rows: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.rows / self.seconds


class Way(NamedTuple):
    """Something to be timed; `run` is called again and again."""

    name: str
    rows: int
    run: Callable[[], object]


class Bar(NamedTuple):
    """What is to be reached."""

    name: str
    figure: float
    least: float
    unit: str


class Stage(NamedTuple):
    """Where it all happens."""

    url: str
    home: Path
    rows: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="ways whose names begin so")
    parser.add_argument("--no-kafka", action="store_true", help="leave Kafka out")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures, fixed_ms, peak = _on_stage(Path(folder), told)
    if told.json:
        rows = [{"name": each.name, "rows_per_s": each.rate, "cpu_s": each.cpu_s} for each in figures]
        bars = [bar._asdict() for bar in _bars(figures)]
        print(json.dumps({"rows": rows, "bars": bars, "micro_batch_ms": fixed_ms, "peak_bytes": peak}))
        return 0
    _show(figures, fixed_ms, peak)
    print(machine.describe(Path(tempfile.gettempdir())))
    return 0


def _on_stage(home: Path, told: argparse.Namespace) -> tuple[list[Measured], float, int]:
    """With a broker, and a Kafka if there is to be one."""
    from pyspark import cloudpickle

    from fairway.spark import session

    cloudpickle.register_pickle_by_value(spark_ways)  # type: ignore[no-untyped-call]  # workers cannot import a bench
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.sql.parquet.compression.codec": "zstd",
    }
    if not told.no_kafka:
        settings |= spark_ways.kafka_settings()
    with Child("fairway", "broker", "--data", str(home / "data"), "--port", "0") as broker:
        line = broker.line(timeout_s=30) or ""
        url = line[line.index("fairway://") :].partition(",")[0]
        spark = session("bench", f"local[{TASKS}]", settings)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            return _measure(spark, Stage(url, home, told.rows), "spark.jars" in settings, told)
        finally:
            spark.stop()


def _measure(
    spark: SparkSession, stage: Stage, has_kafka: bool, told: argparse.Namespace
) -> tuple[list[Measured], float, int]:
    with fairway.connect(stage.url) as client:
        client.send_many(SUBJECT, [PAYLOAD] * stage.rows).result(600)
    tree = Tree()
    figures = [_timed(tree, way, told.rounds, told.warm) for way in _ways(spark, stage) if _is_wanted(way, told.only)]
    if has_kafka and _is_wanted(Way(KAFKA, 0, int), told.only):
        with spark_ways.kafka(stage.home / "kafka") as address:
            if address is not None:
                figures.append(_timed(tree, _kafka_way(spark, stage, address), told.rounds, told.warm))
    return figures, _fixed_cost_ms(spark, stage), tree.peak_bytes


def _is_wanted(way: Way, only: Sequence[str]) -> bool:
    return not only or any(way.name.startswith(each) for each in only)


def _ways(spark: SparkSession, stage: Stage) -> Iterator[Way]:
    url, home, rows = stage.url, stage.home, stage.rows
    stored = spark.read.format("fairway").options(url=url, subject=SUBJECT).load()
    yield Way(READ, rows, lambda: _to_noop(stored))
    lean = spark.read.format("fairway").options(url=url, subject=SUBJECT)
    three = lean.schema("sequence bigint not null, payload binary not null, appended_at timestamp not null").load()
    yield Way(LEAN, rows, lambda: _to_noop(three))
    spark_ways.lay_ready(url, SUBJECT, home / "ready")
    spark.dataSource.register(spark_ways.ready_source())
    ready = spark.read.format("ready").option("folder", str(home / "ready")).load()
    yield Way(READY_READ, rows, lambda: _to_noop(ready))
    parquet = str(home / "parquet")
    yield Way(READY, rows, lambda: ready.write.mode("overwrite").parquet(parquet))
    yield Way(ARCHIVE, rows, lambda: _archive(spark, url, home / "archive"))
    if not Path(parquet).exists():
        ready.write.parquet(parquet)
    yield Way(PARQUET_READ, rows, lambda: _to_noop(spark.read.parquet(parquet)))
    spark.dataSource.register(spark_ways.row_source(SUBJECT))
    few = max(rows // 8, 1)
    slow = spark.read.format("rows").options(url=url, rows=str(few)).load()
    yield Way(ROWS, few, lambda: _to_noop(slow))
    some = max(rows // 4, 1)
    made = spark.range(some).selectExpr("repeat('x', 100) as payload")
    sink = made.write.format("fairway").mode("append").options(url=url, subject="sunk")
    yield Way(MADE, some, lambda: _to_noop(made))
    yield Way(SINK, some, sink.save)


def _kafka_way(spark: SparkSession, stage: Stage, address: str) -> Way:
    spark_ways.fill_kafka(spark, address, PAYLOAD, stage.rows)
    stored = spark_ways.from_kafka(spark, address, TASKS)
    return Way(KAFKA, stage.rows, lambda: _to_noop(stored))


def _archive(spark: SparkSession, url: str, path: Path) -> None:
    """All of it, from nothing: as the job does it, its commits included."""
    from fairway.spark.jobs import archive

    shutil.rmtree(path, ignore_errors=True)
    archive.run(spark, archive.ArchiveOptions(str(path), (SUBJECT,), url=url, once=True))


def _to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _timed(tree: Tree, way: Way, rounds: int, warm: int) -> Measured:
    seconds, cpu = [], []
    for number in range(warm + rounds):
        before, started = tree.cpu_s(), time.monotonic()
        way.run()
        if number >= warm:
            seconds.append(time.monotonic() - started)
            cpu.append(tree.cpu_s() - before)
    measured = Measured(way.name, way.rows, statistics.median(seconds), statistics.median(cpu))
    each_s = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"  {way.name}: {measured.rate:,.0f} rows/s ({each_s} s)", file=sys.stderr, flush=True)
    return measured


def _fixed_cost_ms(spark: SparkSession, stage: Stage) -> float:
    """What a micro-batch of a few rows takes."""
    with fairway.connect(stage.url) as client:
        client.send_many("few", [PAYLOAD] * (10 * BATCHES)).result(60)
    stream = spark.readStream.format("fairway").options(url=stage.url, subject="few", maxMessagesPerTrigger="10").load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(stage.home / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    times = [each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]]
    return float(statistics.median(times[2:] or times))


def _bars(figures: Sequence[Measured]) -> list[Bar]:
    """Those of which everything was measured."""
    rate = {each.name: each.rate for each in figures}
    bars = []
    if READ in rate:
        bars.append(Bar(READ, rate[READ], 2_000_000, "rows/s"))
    for mine, other, least in ((ARCHIVE, READY, 0.6), (READ, ROWS, 4), (READ, KAFKA, 1), (READ, PARQUET_READ, 0)):
        if mine in rate and other in rate:
            bars.append(Bar(f"{mine} ÷ {other}", rate[mine] / rate[other], least, "×"))
    return bars


def _show(figures: Sequence[Measured], fixed_ms: float, peak: int) -> None:
    print(f"{'':32} {'rows/s':>12} {'µs CPU/row':>11}")
    for each in figures:
        print(f"{each.name:32} {each.rate:12,.0f} {each.cpu_s / each.rows * 1e6:11.2f}")
    for name, figure, least, unit in _bars(figures):
        verdict = "" if not least else f", at least {least:,} wanted: {'met' if figure >= least else 'missed'}"
        print(f"{name}: {figure:,.2f} {unit}{verdict}")
    print(f"a micro-batch of 10 rows: {fixed_ms:.0f} ms; peak memory of Spark and its workers: {peak >> 20} MiB")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main(sys.argv[1:]))
