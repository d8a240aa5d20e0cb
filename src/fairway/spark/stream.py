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
from fairway.spark.frames import Sieve
from fairway.spark.looking import Extent, Looker
from fairway.spark.offsets import Offset
from fairway.spark.options import EARLIEST, LATEST, ReadOptions
from fairway.spark.splits import Job, Range, Split

if TYPE_CHECKING:
    import pyarrow as pa


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`readStream.format("fairway")`."""

    def __init__(self, options: ReadOptions, schema_: StructType) -> None:
        if options.has_ending:
            raise Misuse("a stream has no ending: leave the option out, or read it as a batch (spark.read)")
        self._options = options
        self._columns = schema.columns_of(schema_)
        self._looker: Looker | None = None
        self._initial: Offset | None = None
        self._target: Mapping[str, Extent] | None = None  # where Trigger.AvailableNow ends
        self._seen: Mapping[str, Extent] = {}
        self._noted: dict[str, int] = {}  # where the group stands, as far as we have moved it

    @property
    def _look(self) -> Looker:
        """The driver's own; a copy of the reader that was sent to a task never asks for it."""
        if self._looker is None:
            self._looker = Looker(self._options)
        return self._looker

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            extents = self._extents()
            begins = self._begins(extents)
            self._initial = Offset(self._look.log.id, self._look.log.epoch, begins)
        return self._initial.to_json()

    def _begins(self, extents: Mapping[str, Extent]) -> dict[str, int]:
        """Where a query without a checkpoint begins. LATEST is held on the broker from the first time on: were it
        resolved anew after a first batch that failed, what came in between would be passed over."""
        starting, group = self._options.starting, self._options.group
        places = {name: starting.place(name) for name in extents}
        floating = [name for name, place in places.items() if place == LATEST]
        if floating and group is None:
            raise Misuse(
                "a stream that starts at latest needs the option group: the place is kept under that name on the "
                'broker, so that a first batch that fails loses nothing. Add .option("group", "my-query")'
            )
        begins = self._look.resolve({name: place for name, place in places.items() if place != LATEST})
        if group is not None:
            begins |= {name: self._look.hold(name, group, LATEST) for name in floating}
        for name, begin in begins.items():
            if begin < extents[name].first and self._options.fail_on_data_loss:
                raise reading.lost(name, begin, extents[name].first)
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
        log = self._look.log
        return Offset(log.id, log.epoch, {name: extent.end for name, extent in self._seen.items()}).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = offsets.parse(start)
        extents = self._extents()
        begin = self._checked(begin, extents)
        self._note_progress(begin)
        if self._target is None and not _backlogs(begin, extents):
            self._look.wait({name: begin.sequences.get(name, extents[name].end) for name in extents}, self._wait_ms)
            extents = self._extents()
        ends = self._ends(begin, extents, limit)
        if all(begin.sequences.get(name, 0) == end for name, end in ends.items()):
            return start
        log = self._look.log
        return Offset(log.id, log.epoch, {**begin.sequences, **ends}).to_json()

    @property
    def _wait_ms(self) -> int:
        return self._options.poll_ms

    def _extents(self) -> Mapping[str, Extent]:
        self._seen = self._look.extents()
        return self._seen

    def _checked(self, begin: Offset, extents: Mapping[str, Extent]) -> Offset:
        """The place to go on from: the checkpoint's, unless the log is not what it was and the user accepts that."""
        is_strict = self._options.fail_on_data_loss
        if begin.log_id != self._look.log.id:
            if is_strict:
                raise reading.other_log(", ".join(begin.sequences), self._look.where)
            log = self._look.log
            return Offset(log.id, log.epoch, {name: extent.first for name, extent in extents.items()})
        sequences = dict(begin.sequences)
        for name, extent in extents.items():
            at = sequences.setdefault(name, extent.first)  # a subject that is new to a pattern: from its beginning on
            if at < extent.first:
                if is_strict:
                    raise reading.lost(name, at, extent.first)
                sequences[name] = extent.first
            elif at > extent.end:
                if is_strict:
                    raise reading.cut_short(name, extent.end, at)
                sequences[name] = extent.end
        return begin._replace(sequences=sequences)

    def _note_progress(self, done: Offset) -> None:
        group = self._options.group
        if group is None:
            return
        for name, sequence in done.sequences.items():
            if self._noted.get(name) != sequence:
                if name not in self._noted:
                    self._look.hold(name, group, EARLIEST)  # made if need be, and checked to have no consumers
                self._look.progress(name, group, sequence)
                self._noted[name] = sequence

    def _ends(self, begin: Offset, extents: Mapping[str, Extent], limit: ReadLimit) -> dict[str, int]:
        """Where the next micro-batch ends, for each subject."""
        target = self._target
        if target is not None:
            ends = {name: min(extents[name].end, target[name].end) for name in extents if name in target}
            extents = {name: extents[name]._replace(end=end) for name, end in ends.items()}
        sequences = begin.sequences
        backlogs = _backlogs(begin, extents)
        ends = {name: max(extents[name].end, sequences.get(name, 0)) for name in extents}
        is_all = isinstance(limit, ReadAllAvailable)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.messages_per_trigger
        if rows_max is not None and not is_all:
            given = offsets.shares(backlogs, rows_max)
            ends = {name: sequences.get(name, 0) + given.get(name, 0) for name in ends}
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_trigger
        if bytes_max is not None and not is_all:
            ends = self._within_bytes(sequences, ends, bytes_max)
        return ends

    def _within_bytes(self, begins: Mapping[str, int], ends: Mapping[str, int], bytes_max: int) -> dict[str, int]:
        """Cut down to so many bytes, shared among the subjects; whole batches, at least one of each."""
        busy = [name for name, end in ends.items() if end > begins.get(name, 0)]
        share = max(bytes_max // max(len(busy), 1), 1)
        cut = {name: self._look.reach(name, begins.get(name, 0), ends[name], share) for name in busy}
        return {**ends, **cut}

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, until = offsets.parse(start), offsets.parse(end)
        is_same = begin.log_id == until.log_id
        known = begin.sequences if is_same else {}
        firsts = self._look.resolve({name: EARLIEST for name in until.sequences if name not in known})
        ranges = [
            Range(name, known[name] if name in known else firsts[name], end) for name, end in until.sequences.items()
        ]
        measured = self._look.measured([each for each in ranges if each.end > each.begin])
        job = Job(
            self._options.url,
            self._options.patience_s,
            until.log_id,
            self._columns,
            Sieve(None, self._options.tags),
            self._options.fail_on_data_loss and is_same,
        )
        return [Split(job, each) for each in splits.cut(measured, self._options.min_partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reading.read(partition) if isinstance(partition, Split) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: `latestOffset` has noted it, and Spark says this one batch late."""

    def stop(self) -> None:
        if self._looker is not None:
            self._looker.close()
            self._looker = None


def _backlogs(begin: Offset, extents: Mapping[str, Extent]) -> dict[str, int]:
    """How much each subject has waiting."""
    waiting = {name: extent.end - begin.sequences.get(name, extent.first) for name, extent in extents.items()}
    return {name: count for name, count in waiting.items() if count > 0}
