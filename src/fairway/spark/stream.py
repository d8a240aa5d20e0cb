"""The reader of a streaming query: what each micro-batch takes, and where the query stands.

Spark asks `latestOffset(start, limit)` when everything up to `start` has been processed for good. So that is when the
query's group is moved there: `fairway lag` shows the query like any consumer, and retention keeps what it still needs.
A stream that has caught up waits in that call for the next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from fairway.errors import Misuse
from fairway.spark import offsets, reading, schema, splits
from fairway.spark.brokers import LogId, SubjectExtent
from fairway.spark.frames import RowFilter
from fairway.spark.looking import Planner
from fairway.spark.offsets import Offset
from fairway.spark.options import EARLIEST, LATEST, ReadOptions
from fairway.spark.places import SubjectPart
from fairway.spark.splits import ReadJob, ReadSplit, ScanRange

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`readStream.format("fairway")`."""

    def __init__(self, options: ReadOptions, schema_: StructType) -> None:
        if options.has_ending:
            raise Misuse("a stream has no ending: leave the option out, or read it as a batch (spark.read)")
        self._options = options
        self._columns = schema.columns_of(schema_)
        self._looker: Planner | None = None
        self._initial: Offset | None = None
        self._target: Mapping[SubjectPart, SubjectExtent] | None = None  # where Trigger.AvailableNow ends
        self._seen: Mapping[SubjectPart, SubjectExtent] = {}
        self._noted: dict[SubjectPart, int] = {}  # where the group stands, as far as we have moved it

    @property
    def _look(self) -> Planner:
        """The driver's own; a copy of the reader that was sent to a task never asks for it."""
        if self._looker is None:
            self._looker = Planner(self._options)
        return self._looker

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            extents = self._extents()
            begins = self._begins(extents)
            self._initial = Offset(self._look.logs, begins)
        return self._initial.to_json()

    def _begins(self, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, int]:
        """Where a query without a checkpoint begins. LATEST is held on the broker from the first time on: were it
        resolved anew after a first batch that failed, what came in between would be passed over."""
        starting, group = self._options.starting, self._options.group
        starting.check("starting", extents)
        places = {part: starting.place(part) for part in extents}
        floating = [part for part, place in places.items() if place == LATEST]
        if floating and group is None:
            raise Misuse(
                "a stream that starts at latest needs the option group: the place is kept under that name on the "
                'broker, so that a first batch that fails loses nothing. Add .option("group", "my-query")'
            )
        begins = self._look.resolve({part: place for part, place in places.items() if place != LATEST})
        if group is not None:
            begins |= {part: self._look.hold(part, group, LATEST) for part in floating}
        for part, begin in begins.items():
            if begin < extents[part].first and self._options.fail_on_data_loss:
                raise reading.lost(part.subject, begin, extents[part].first)
        return begins

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._extents()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.messages_per_trigger is not None:
            return ReadMaxRows(self._options.messages_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """For Spark's own figure of how far behind a query is."""
        if not self._seen:
            return None
        return Offset(self._look.logs, {part: extent.end for part, extent in self._seen.items()}).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = offsets.parse(start)
        extents = self._extents()
        begin = self._checked(offsets.mapped(begin, self._look.logs, self._look.where), extents)
        self._note_progress(begin, extents)
        if self._target is None and not _backlogs(begin, extents):
            self._look.wait({part: begin.sequences.get(part, extents[part].end) for part in extents}, self._wait_ms)
            extents = self._extents()
        ends = self._ends(begin, extents, limit)
        if all(begin.sequences.get(part, 0) == end for part, end in ends.items()):
            return start
        return Offset({**begin.logs, **self._look.logs}, {**begin.sequences, **ends}).to_json()

    @property
    def _wait_ms(self) -> int:
        return self._options.poll_ms

    def _extents(self) -> Mapping[SubjectPart, SubjectExtent]:
        self._seen = self._look.extents()
        return self._seen

    def _checked(self, begin: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> Offset:
        """The place to go on from: the checkpoint's, unless a log is not what it was and the user accepts that. That
        the same log has a later epoch is a change of masters, or a restart, and no loss."""
        others = _others(begin, self._look.logs)
        if others and self._options.fail_on_data_loss:
            subjects = sorted({part.subject for part in begin.sequences if part.broker_group in others})
            raise reading.other_log(", ".join(subjects), self._look.where)
        sequences = {part: at for part, at in begin.sequences.items() if part.broker_group not in others}
        for part, extent in extents.items():
            # One that is new to a pattern, or in a broker group that is new to the subject: from its beginning on.
            sequences[part] = self._resumed(part, sequences.get(part, extent.first), extent)
        return Offset({**begin.logs, **{group: self._look.logs[group] for group in others}}, sequences)

    def _resumed(self, part: SubjectPart, at: int, extent: SubjectExtent) -> int:
        is_strict = self._options.fail_on_data_loss
        if at < extent.first:
            if is_strict:
                raise reading.lost(part.subject, at, extent.first)
            return extent.first
        end = extent.end
        if at > end:
            end = max(end, self._look.awaited(part, at))
        if at > end and is_strict:
            raise reading.cut_short(part.subject, end, at)
        return min(at, end)

    def _note_progress(self, done: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        group = self._options.group
        if group is None:
            return
        for part in extents:
            sequence = done.sequences[part]
            if self._noted.get(part) != sequence:
                if part not in self._noted:
                    self._look.hold(part, group, EARLIEST)  # made if need be, and checked to have no consumers
                self._look.progress(part, group, sequence)
                self._noted[part] = sequence

    def _ends(
        self, begin: Offset, extents: Mapping[SubjectPart, SubjectExtent], limit: ReadLimit
    ) -> dict[SubjectPart, int]:
        """Where the next micro-batch ends, for each subject in each broker group."""
        target = self._target
        if target is not None:
            ends = {part: min(extents[part].end, target[part].end) for part in extents if part in target}
            extents = {part: extents[part]._replace(end=end) for part, end in ends.items()}
        sequences = begin.sequences
        backlogs = _backlogs(begin, extents)
        ends = {part: max(extents[part].end, sequences.get(part, 0)) for part in extents}
        is_all = isinstance(limit, ReadAllAvailable)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.messages_per_trigger
        if rows_max is not None and not is_all:
            given = offsets.shares(backlogs, rows_max)
            ends = {part: sequences.get(part, 0) + given.get(part, 0) for part in ends}
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_trigger
        if bytes_max is not None and not is_all:
            ends = self._within_bytes(sequences, ends, bytes_max)
        return ends

    def _within_bytes(
        self, begins: Mapping[SubjectPart, int], ends: Mapping[SubjectPart, int], bytes_max: int
    ) -> dict[SubjectPart, int]:
        """Cut down to so many bytes, shared among the subjects; whole batches, at least one of each."""
        busy = [part for part, end in ends.items() if end > begins.get(part, 0)]
        share = max(bytes_max // max(len(busy), 1), 1)
        cut = {part: self._look.reach(part, begins.get(part, 0), ends[part], share) for part in busy}
        return {**ends, **cut}

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if not self._look.logs:
            self._extents()
        begin, until = (offsets.mapped(offsets.parse(each), self._look.logs, self._look.where) for each in (start, end))
        others = _others(begin, until.logs)
        known = {part: at for part, at in begin.sequences.items() if part.broker_group not in others}
        firsts = self._look.resolve({part: EARLIEST for part in until.sequences if part not in known})
        ranges = [
            ScanRange(part.subject, known[part] if part in known else firsts[part], at, broker_group=part.broker_group)
            for part, at in until.sequences.items()
        ]
        measured = self._look.measured([each for each in ranges if each.end > each.begin])
        tasks = splits.cut(measured, self._options.min_partitions)
        return [ReadSplit(self._job(each[0].broker_group, until, others), each) for each in tasks]

    def _job(self, group: str, until: Offset, others: frozenset[str]) -> ReadJob:
        return ReadJob(
            self._look.place(group),
            until.logs[group].id,
            self._columns,
            RowFilter(self._options.keys, self._options.tags),
            self._options.fail_on_data_loss and group not in others,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reading.read(partition) if isinstance(partition, ReadSplit) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: `latestOffset` has noted it, and Spark says this one batch late."""

    def stop(self) -> None:
        if self._looker is not None:
            self._looker.close()
            self._looker = None


def _others(begin: Offset, now: Mapping[str, LogId]) -> frozenset[str]:
    """Broker groups that have another log than they had."""
    return frozenset(group for group, log in begin.logs.items() if group in now and now[group].id != log.id)


def _backlogs(begin: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, int]:
    """How much each subject has waiting."""
    waiting = {part: extent.end - begin.sequences.get(part, extent.first) for part, extent in extents.items()}
    return {part: count for part, count in waiting.items() if count > 0}
