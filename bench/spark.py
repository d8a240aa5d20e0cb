"""Spark: batch read, sink and micro-batches, against Parquet and against a source that makes rows in Python.

All on local[2], 100-byte payloads, every column, to Spark's noop sink; medians of the rounds after a warm-up, in which
the JVM compiles. CPU is what Spark, its Python workers and the broker used together: on a machine that others use too
it says more than the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fairway
from bench import machine
from bench.tree import Tree
from fairway.world.process import Child

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAYLOAD = bytes(range(100))
BATCHES = 12  # micro-batches of a few rows each
SUBJECT = "bench"


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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with Child("fairway.cli.main", "broker", "--data", str(home / "data"), "--port", "0") as broker:
            line = broker.line(timeout_s=30) or ""
            url = line[line.index("fairway://") :].partition(",")[0]
            figures, fixed_ms, peak = _measure(url, home, told.rows, told.rounds, told.warm)
    if told.json:
        rows = [{"name": each.name, "rows_per_s": each.rate, "cpu_s": each.cpu_s} for each in figures]
        print(json.dumps({"rows": rows, "micro_batch_ms": fixed_ms, "peak_bytes": peak}))
        return 0
    _show(figures, fixed_ms, peak)
    print(machine.describe(Path(tempfile.gettempdir())))
    return 0


def _measure(url: str, home: Path, rows: int, rounds: int, warm: int) -> tuple[list[Measured], float, int]:
    from pyspark import cloudpickle

    from fairway.spark import session

    with fairway.connect(url) as client:
        client.send_many(SUBJECT, [PAYLOAD] * rows).result(600)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # workers cannot import a bench
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.sql.parquet.compression.codec": "zstd",
    }
    spark = session("bench", "local[2]", settings)
    try:
        spark.sparkContext.setLogLevel("ERROR")
        tree = Tree()
        figures = [_timed(tree, *way, rounds, warm) for way in _ways(spark, url, home, rows)]
        return figures, _fixed_cost_ms(spark, url, home), tree.peak_bytes
    finally:
        spark.stop()


def _ways(spark: SparkSession, url: str, home: Path, rows: int) -> Iterator[tuple[str, int, Callable[[], None]]]:
    stored = spark.read.format("fairway").options(url=url, subject=SUBJECT).load()
    yield "fairway → noop", rows, lambda: _to_noop(stored)
    lean = spark.read.format("fairway").options(url=url, subject=SUBJECT)
    three = lean.schema("sequence bigint not null, payload binary not null, appended_at timestamp not null").load()
    yield "fairway, three columns → noop", rows, lambda: _to_noop(three)
    parquet = str(home / "parquet")
    yield "fairway → Parquet", rows, lambda: stored.write.mode("overwrite").parquet(parquet)
    yield "Parquet → noop", rows, lambda: _to_noop(spark.read.parquet(parquet))
    spark.dataSource.register(_row_source())
    few = max(rows // 8, 1)
    slow = spark.read.format("rows").options(url=url, subject=SUBJECT, rows=str(few)).load()
    yield "rows made in Python → noop", few, lambda: _to_noop(slow)
    some = max(rows // 4, 1)
    made = spark.range(some).selectExpr("repeat('x', 100) as payload")
    sink = made.write.format("fairway").mode("append").options(url=url, subject="sunk")
    yield "made by Spark → noop", some, lambda: _to_noop(made)
    yield "made by Spark → fairway", some, sink.save


def _to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _timed(tree: Tree, name: str, rows: int, run: Callable[[], None], rounds: int, warm: int) -> Measured:
    seconds, cpu = [], []
    for number in range(warm + rounds):
        before, started = tree.cpu_s(), time.monotonic()
        run()
        if number >= warm:
            seconds.append(time.monotonic() - started)
            cpu.append(tree.cpu_s() - before)
    measured = Measured(name, rows, statistics.median(seconds), statistics.median(cpu))
    each_s = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"  {name}: {measured.rate:,.0f} rows/s ({each_s} s)", file=sys.stderr, flush=True)
    return measured


def _fixed_cost_ms(spark: SparkSession, url: str, home: Path) -> float:
    """What a micro-batch of a few rows takes."""
    with fairway.connect(url) as client:
        client.send_many("few", [PAYLOAD] * (10 * BATCHES)).result(60)
    stream = spark.readStream.format("fairway").options(url=url, subject="few", maxMessagesPerTrigger="10").load()
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(home / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    times = [each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]]
    return float(statistics.median(times[2:] or times))


def _row_source() -> type[Any]:
    """What a source looks like that makes every row in Python."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.types import StructType

    from fairway.spark import schema

    class RowReader(DataSourceReader):
        def __init__(self, options: dict[str, str]) -> None:
            self._options = options

        def partitions(self) -> list[InputPartition]:
            half = int(self._options["rows"]) // 2
            return [InputPartition((0, half)), InputPartition((half, 2 * half))]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            from datetime import UTC, datetime

            begin, end = partition.value
            with fairway.connect(self._options["url"]) as client:
                for page in client.scan(self._options["subject"], begin, end):
                    stored = datetime.fromtimestamp(page.appended_ms / 1_000, UTC)
                    batch, first = page.batch, page.first_sequence
                    for at in range(max(begin - first, 0), min(end - first, len(batch))):
                        yield (
                            SUBJECT, "default", first + at, str(batch.id(at)), batch.key(at), None, None,
                            batch.payloads[at], stored, stored,
                        )  # fmt: skip

    class RowSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "rows"

        def schema(self) -> StructType:
            return schema.MESSAGES

        def reader(self, schema: StructType) -> RowReader:
            return RowReader(dict(self.options))

    return RowSource


def _show(figures: list[Measured], fixed_ms: float, peak: int) -> None:
    print(f"{'':32} {'rows/s':>12} {'µs CPU/row':>11}")
    for each in figures:
        print(f"{each.name:32} {each.rate:12,.0f} {each.cpu_s / each.rows * 1e6:11.2f}")
    of = {each.name: each for each in figures}
    mine = of["fairway → noop"]
    for other in ("Parquet → noop", "rows made in Python → noop"):
        print(f"fairway → noop: {mine.rate / of[other].rate:.2f} × {other}")
    print(f"a micro-batch of 10 rows: {fixed_ms:.0f} ms; peak memory of Spark and its workers: {peak >> 20} MiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
