"""The data source "fairway": its readers and writers for batch and streaming queries, and the batch reader itself.

`PushedFilters` takes the filters that Spark pushes down to the batch reader: ranges of sequences and times, subjects,
broker groups, keys. The reader leaves out the rows that a filter rules out. Spark applies the filters that the reader
gives back.

Spark 4.1 to 4.3 keep the result of pushed filters with the relation, not with the scan. Every scan of that `load()`
then reads the same few rows: an unfiltered `count()` after a filtered one, both sides of a self-join, both parts of a
union. The plans no longer show the filters, so the results are wrong without a warning. Therefore the reader takes
filters only where Spark keeps them with the scan (ADR 0021). The options `starting`, `ending`, `keys` and `tags` belong
to the `load()` itself, and narrow a read in every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from fairway.protocol.messages import Whence
from fairway.spark import frames, reader
from fairway.spark.frames import RowFilter
from fairway.spark.options import ReadOptions, Where, read_options, write_options
from fairway.spark.plan import Planner, SubjectExtent
from fairway.spark.reader import ReadJob, ReadSplit, ScanRange
from fairway.spark.server_groups import SubjectPart
from fairway.spark.session import IS_PUSHED_BY_SCAN

if TYPE_CHECKING:
    from fairway.spark.sink import BatchWriter, StreamWriter
    from fairway.spark.stream import StreamReader


class FairwaySource(DataSource):
    """The entry point for Spark: `spark.read.format("fairway")`, `readStream`, `write`, `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "fairway"

    def schema(self) -> StructType:
        return frames.messages(include_headers=read_options(self.options).include_headers)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from fairway.spark.stream import StreamReader

        return StreamReader(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from fairway.spark.sink import BatchWriter

        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        from fairway.spark.sink import StreamWriter

        return StreamWriter(write_options(self.options), schema)


class BatchReader(DataSourceReader):
    """Reads what is stored when the query is planned, between two places."""

    def __init__(
        self, options: ReadOptions, schema_: StructType, *, is_pushed_by_scan: bool = IS_PUSHED_BY_SCAN
    ) -> None:
        self._options = options
        self._columns = frames.columns_of(schema_)
        self._narrowing = PushedFilters(keys=None if options.keys is None else frozenset(options.keys))
        if is_pushed_by_scan:
            self.pushFilters = _Pushing(self._narrowing)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        planner = Planner(self._options)
        try:
            ranges = planner.measured(self._ranges(planner))
            logs = planner.logs
        finally:
            planner.close()
        keys = self._narrowing.keys
        row_filter = RowFilter(
            None if keys is None else tuple(sorted(keys, key=str)), self._options.tags, self._narrowing.is_keyed
        )
        is_strict = self._options.fail_on_data_loss
        jobs = {
            group: ReadJob(self._options.place(group), log.id, self._columns, row_filter, is_strict)
            for group, log in logs.items()
        }
        return [
            ReadSplit(jobs[each[0].broker_group], each) for each in reader.cut(ranges, self._options.min_partitions)
        ]

    def _ranges(self, planner: Planner) -> list[ScanRange]:
        narrowing = self._narrowing
        extents = planner.extents()
        if narrowing.subjects is not None:
            extents = {part: extent for part, extent in extents.items() if part.subject in narrowing.subjects}
        if narrowing.broker_groups is not None:
            extents = {part: extent for part, extent in extents.items() if part.broker_group in narrowing.broker_groups}
        begins = self._resolved(planner, extents, "starting")
        ends = self._resolved(planner, extents, "ending")
        ranges = []
        for part, extent in extents.items():
            begin, end = begins[part], min(ends[part], extent.end)
            if begin < extent.first and begin < end:
                if self._options.fail_on_data_loss:
                    raise reader.lost(part.subject, begin, min(extent.first, end))
                begin = extent.first
            begin = max(begin, narrowing.begin)
            end = end if narrowing.end is None else min(end, narrowing.end)
            ranges.append(ScanRange(part.subject, begin, max(begin, end), broker_group=part.broker_group))
        return self._within_times(planner, ranges)

    def _resolved(
        self, planner: Planner, extents: dict[SubjectPart, SubjectExtent], option: str
    ) -> dict[SubjectPart, int]:
        places = self._options.starting if option == "starting" else self._options.ending
        places.check(option, extents)
        return planner.resolve({part: places.place(part) for part in extents})

    def _within_times(self, planner: Planner, ranges: list[ScanRange]) -> list[ScanRange]:
        """Cut off messages stored too early or too late. Times of storing never decrease along the log."""
        begin_ms, end_ms = self._narrowing.begin_ms, self._narrowing.end_ms
        parts = [each.part for each in ranges]
        if begin_ms is not None:
            begins = planner.resolve(dict.fromkeys(parts, Where(Whence.TIME, begin_ms)))
            ranges = [each._replace(begin=max(each.begin, begins[each.part])) for each in ranges]
        if end_ms is not None:
            ends = planner.resolve(dict.fromkeys(parts, Where(Whence.TIME, end_ms)))
            ranges = [each._replace(end=min(each.end, ends[each.part])) for each in ranges]
        return [each for each in ranges if each.end > each.begin]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadSplit):
            return iter(())  # Spark asks even if there is nothing to read
        return reader.read(partition)


class _Pushing:
    """`pushFilters`, for sessions that push filters and for those that do not.

    Spark refuses a reader that overrides the method unless `spark.sql.python.filterPushdown.enabled` is set, and Spark
    does not set it. pyspark's planner compares the `__func__` of the method with the function of the base class, so
    this object shows that function. Without `staticmethod` Python would bind the function to this object, and the
    comparison would fail.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, narrowing: PushedFilters) -> None:
        self._narrowing = narrowing

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return list(self._narrowing.push(filters))


_NEVER_NULL = frozenset({"subject", "broker_group", "sequence", "id", "payload", "created_at", "appended_at"})


@dataclass
class PushedFilters:
    """The part of the log that the filters leave to read. Times are times of storing, in ms; ends are exclusive."""

    subjects: frozenset[str] | None = None
    broker_groups: frozenset[str] | None = None
    keys: frozenset[str | None] | None = None
    is_keyed: bool = False
    begin: int = 0
    end: int | None = None
    begin_ms: int | None = None
    end_ms: int | None = None

    def push(self, filters: list[Filter]) -> Iterator[Filter]:
        """Take in as many filters as possible; yields those that Spark must apply."""
        for each in filters:
            if not self._take(each):
                yield each

    def _take(self, filter: Filter) -> bool:
        """Take in a filter; True: Spark need not apply it again."""
        column = ".".join(getattr(filter, "attribute", ()))
        match filter:
            case IsNotNull():
                self.is_keyed = self.is_keyed or column == "key"
                return column in _NEVER_NULL or column == "key"
            case IsNull() if column == "key":
                return self._keys(frozenset({None}))
            case EqualTo(value=value) | EqualNullSafe(value=value):
                return self._equal(column, (value,))
            case In(value=values):
                return self._equal(column, tuple(values))
            case GreaterThanOrEqual(value=value) | GreaterThan(value=value):
                return self._from(column, value, is_above=isinstance(filter, GreaterThan))
            case LessThan(value=value) | LessThanOrEqual(value=value):
                return self._below(column, value, is_at=isinstance(filter, LessThanOrEqual))
            case _:
                return False

    def _equal(self, column: str, values: tuple[Any, ...]) -> bool:
        if column == "subject" and all(isinstance(value, str) for value in values):
            wanted = frozenset(values)
            self.subjects = wanted if self.subjects is None else self.subjects & wanted
            return True
        if column == "broker_group" and all(isinstance(value, str) for value in values):
            wanted = frozenset(values)
            self.broker_groups = wanted if self.broker_groups is None else self.broker_groups & wanted
            return True
        if column == "key" and all(isinstance(value, str) for value in values):
            return self._keys(frozenset(values))
        if column == "sequence" and values and all(type(value) is int for value in values):
            self._from(column, min(values), is_above=False)
            self._below(column, max(values), is_at=True)
            return len(values) == 1
        return False

    def _keys(self, wanted: frozenset[str | None]) -> bool:
        self.keys = wanted if self.keys is None else self.keys & wanted
        return True

    def _from(self, column: str, value: Any, *, is_above: bool) -> bool:
        if column == "sequence" and type(value) is int:
            self.begin = max(self.begin, value + is_above)
            return True
        if column == "appended_at" and isinstance(value, datetime):
            self.begin_ms = max(self.begin_ms or 0, _ms(value))
        return False

    def _below(self, column: str, value: Any, *, is_at: bool) -> bool:
        if column == "sequence" and type(value) is int:
            end = max(value + is_at, 0)
            self.end = end if self.end is None else min(self.end, end)
            return True
        if column == "appended_at" and isinstance(value, datetime):
            end_ms = _ms(value) + 1  # Spark itself filters the last millisecond
            self.end_ms = end_ms if self.end_ms is None else min(self.end_ms, end_ms)
        return False


def _ms(moment: datetime) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(int(aware.timestamp() * 1_000), 0)
