"""The contenders of bench.spark: rows made in Python, Arrow batches that lie ready, Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fairway
from bench.peers.install import NotInstalled, spark_kafka_jars
from bench.peers.servers import CannotRun, KafkaPageCache

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def row_source(subject: str) -> type[Any]:
    """What a source looks like that makes every row in Python."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.types import StructType

    from fairway.spark import frames

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
                for page in client.scan(subject, begin, end):
                    stored = datetime.fromtimestamp(page.appended_ms / 1_000, UTC)
                    batch, first = page.batch, page.first_sequence
                    for at in range(max(begin - first, 0), min(end - first, len(batch))):
                        yield (
                            subject, "default", first + at, str(batch.id(at)), batch.key(at), None, None,
                            batch.payloads[at], stored, stored,
                        )  # fmt: skip

    class RowSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "rows"

        def schema(self) -> StructType:
            return frames.MESSAGES

        def reader(self, schema: StructType) -> RowReader:
            return RowReader(dict(self.options))

    return RowSource


def lay_ready(url: str, subject: str, folder: Path) -> int:
    """The Arrow batches that our source gives Spark, in a file for each of its tasks; how many bytes that is."""
    import pyarrow as pa

    from fairway.spark import frames as frames_module
    from fairway.spark.source import FairwaySource

    reader = FairwaySource({"url": url, "subject": subject}).reader(frames_module.MESSAGES)
    folder.mkdir()
    for number, partition in enumerate(reader.partitions()):
        frames = reader.read(partition)
        first = next(frames)
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, first.schema) as out:
            out.write_batch(first)
            for frame in frames:
                out.write_batch(frame)
    return sum(each.stat().st_size for each in folder.iterdir())


def ready_source() -> type[Any]:
    """The same batches without a broker: whatever Spark does with them, it does with ours."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
    from pyspark.sql.types import StructType

    from fairway.spark import frames

    class ReadyReader(DataSourceReader):
        def __init__(self, folder: str) -> None:
            self._folder = folder

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(str(each)) for each in sorted(Path(self._folder).iterdir())]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa

            with pa.memory_map(partition.value) as file, pa.ipc.open_file(file) as opened:
                for number in range(opened.num_record_batches):
                    yield opened.get_batch(number)

    class ReadySource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ready"

        def schema(self) -> StructType:
            return frames.MESSAGES

        def reader(self, schema: StructType) -> ReadyReader:
            return ReadyReader(self.options["folder"])

    return ReadySource


# --- Kafka -----------------------------------------------------------------------------------------------------------

TOPIC = "bench"


def kafka_settings() -> dict[str, str]:
    """What a session needs to read from Kafka; nothing where that cannot be had, and a word on it."""
    try:
        return {"spark.jars": ",".join(map(str, spark_kafka_jars()))}
    except (NotInstalled, OSError) as problem:
        print(f"skipped: Spark's source for Kafka cannot be had: {problem}")
        return {}


@contextmanager
def kafka(data: Path) -> Iterator[str | None]:
    """Where a Kafka listens; None, and a word on it, where none can be had."""
    try:
        with KafkaPageCache(data) as server:
            yield f"127.0.0.1:{server.port}"
    except (NotInstalled, CannotRun) as problem:
        print(f"skipped: no Kafka: {problem}")
        yield None


def fill_kafka(spark: SparkSession, address: str, payload: bytes, rows: int) -> None:
    made = spark.range(rows).selectExpr(f"unhex('{payload.hex()}') as value")
    made.write.format("kafka").options(**{"kafka.bootstrap.servers": address, "topic": TOPIC}).save()


def from_kafka(spark: SparkSession, address: str, tasks: int) -> DataFrame:
    options = {"kafka.bootstrap.servers": address, "subscribe": TOPIC, "minPartitions": str(tasks)}
    return spark.read.format("kafka").options(**options).load()
