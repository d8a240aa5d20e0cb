"""Readers and writers of the source as Spark uses them, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from fairway.spark import frames
from fairway.spark.options import read_options, write_options
from fairway.spark.sink import StoredBatches, TaskIdentity, _Writing
from fairway.spark.source import BatchReader
from fairway.spark.stream import StreamReader


def batch_reader(url: str, subject: str, columns: StructType = frames.MESSAGES, **options: str) -> BatchReader:
    told = read_options({"url": url, "subject": subject, **options})
    return BatchReader(told, columns, is_pushed_by_scan=True)


class Streams:
    """Makes readers of streams, and stops them in the end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._made: list[StreamReader] = []

    def __call__(self, subject: str, **options: str) -> StreamReader:
        told = {"url": self._url, "subject": subject, "pollMs": "50", **options}
        made = StreamReader(read_options(told), frames.MESSAGES)
        self._made.append(made)
        return made

    def stop(self) -> None:
        for each in self._made:
            each.stop()


def rows(reader: BatchReader) -> list[dict[str, Any]]:
    return [row for split in reader.partitions() for frame in reader.read(split) for row in frame.to_pylist()]


def between(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    """What a micro-batch would read."""
    splits = reader.partitions(start, end)
    return [row for split in splits for frame in reader.read(split) for row in frame.to_pylist()]


def write(url: str, table: pa.Table, identity: TaskIdentity, frame_rows: int = 4_096, **options: str) -> StoredBatches:
    """What a task does with its rows."""
    told = write_options({"url": url, "patienceSeconds": "20", **options})
    writing = _Writing(told, table.column_names, identity, 0)
    return writing.write(iter(table.to_batches(max_chunksize=frame_rows)))
