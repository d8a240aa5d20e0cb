"""`format("fairway.events")`: the life of messages, from the action log and the indexes of subjects.

    produced           a batch was stored                     from the index of its subject
    pulled … dead      what groups and consumers did with it  from the action log
    scheduled …        what a delay server did with messages  from that server's logs (`event_delay`)

One row speaks of a range of messages. `docs/spark.md` has the columns and the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from fairway.errors import Misuse
from fairway.protocol.messages import Whence
from fairway.spark import event_delay, event_reading, event_schema, offsets, reading, splits
from fairway.spark.event_delay import DelayJob, DelayLooker, LogPlace, Places
from fairway.spark.event_frames import Columns
from fairway.spark.event_log import WHAT
from fairway.spark.event_looking import EventLooker, of_subject
from fairway.spark.event_offsets import NAME, EventOffset, between, parse
from fairway.spark.event_options import EventOptions, event_options
from fairway.spark.event_reading import EventJob, EventSplit
from fairway.spark.looking import Extent
from fairway.spark.options import EARLIEST, LATEST, Where
from fairway.spark.splits import Range
from fairway.storage.index_file import ENTRY_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

_SMALL_BYTES: Final = 1 << 20  # read sooner than a task is begun


class EventSource(DataSource):
    """`spark.read.format("fairway.events")` and `readStream`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return event_schema.EVENTS

    def reader(self, schema: StructType) -> EventReader:
        return EventReader(event_options(self.options), schema)

    def streamReader(self, schema: StructType) -> EventStreamReader:  # noqa: N802
        return EventStreamReader(event_options(self.options), schema)


class EventReader(DataSourceReader):
    """What has happened when the query is planned, between two places."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        self._options = options
        self._columns = event_schema.columns_of(schema)

    def partitions(self) -> list[InputPartition]:
        looker = EventLooker(self._options)
        try:
            extents = looker.extents()
            actions_id = looker.actions().log_id
            begin, end = looker.position(self._options.starting), looker.position(self._options.ending)
            pieces = looker.pieces(begin, end, self._options.read.min_partitions)
            ranges = []
            if self._options.groups is None:
                begins = looker.resolve(dict.fromkeys(extents, self._options.starting))
                ends = looker.resolve(dict.fromkeys(extents, self._options.ending))
                ranges = [of_subject(name, begins[name], ends[name]) for name in extents]
            job = _job(self._options, self._columns, actions_id, looker.log.id, is_strict=True)
        finally:
            looker.close()
        return _splits(*self._with_delayed(job, ranges), pieces)

    def _with_delayed(self, job: EventJob, ranges: list[Range]) -> tuple[EventJob, list[Range]]:
        options = self._options
        if not options.has_delayed:
            return job, ranges
        looker = DelayLooker(options)
        try:
            begins = looker.places(options.starting)
            ends = looker.places(LATEST if options.ending.whence is Whence.TIME else options.ending)
        finally:
            looker.close()
        until_ms = options.ending.value if options.ending.whence is Whence.TIME else None
        delay = _delay_job(options, self._columns, ends, _since_ms(options.starting), until_ms, is_strict=True)
        return job._replace(delay=delay), [*ranges, *event_delay.ranges(begins, ends)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return event_reading.read(partition) if isinstance(partition, EventSplit) else iter(())


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`readStream.format("fairway.events")`."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        if options.read.has_ending:
            raise Misuse("a stream has no ending: leave the option out, or read it as a batch (spark.read)")
        self._options = options
        self._columns = event_schema.columns_of(schema)
        self._looker: EventLooker | None = None
        self._delay_looker: DelayLooker | None = None
        self._starting = options.starting
        self._initial: EventOffset | None = None
        self._target: EventOffset | None = None  # where Trigger.AvailableNow ends
        self._seen: EventOffset | None = None

    @property
    def _look(self) -> EventLooker:
        """The driver's own; a copy of the reader that was sent to a task never asks for it."""
        if self._looker is None:
            self._looker = EventLooker(self._options)
        return self._looker

    @property
    def _look_at_delay(self) -> DelayLooker:
        if self._delay_looker is None:
            self._delay_looker = DelayLooker(self._options)
        return self._delay_looker

    def __getstate__(self) -> dict[str, Any]:
        """What travels to tasks: not the conversations."""
        return {**self.__dict__, "_looker": None, "_delay_looker": None}

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            seen, starting = self._end(), self._begin()
            self._initial = seen._replace(
                position=self._look.position(starting),
                sequences=self._look.resolve(dict.fromkeys(seen.sequences, starting)),
                delay=self._delay_places(starting),
            )
        return self._initial.to_json()

    def _begin(self) -> Where:
        """Where a query without a checkpoint begins. LATEST is held on the broker from the first time on: were it
        resolved anew after a first batch that failed, what came in between would be passed over."""
        if self._starting != LATEST:
            return self._starting
        if self._options.query is None:
            raise Misuse(
                "a stream that starts at latest needs the option query: the place is kept under that name on the "
                'broker, so that a first batch that fails loses nothing. Add .option("query", "my-query")'
            )
        self._starting = Where(Whence.TIME, self._look.held_ms(self._options.query))
        return self._starting

    def _delay_places(self, where: Where) -> dict[str, LogPlace]:
        return self._look_at_delay.places(where) if self._options.has_delayed else {}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.events_per_trigger is not None:
            return ReadMaxRows(self._options.events_per_trigger)
        bytes_max = self._options.read.bytes_per_trigger
        return ReadAllAvailable() if bytes_max is None else ReadMaxBytes(bytes_max)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._seen is None else self._seen.to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = self._checked(parse(start), self._end())
        end = self._until(begin)
        if end == begin and self._target is None:
            self._look.wait_for_any(begin.position, begin.sequences, self._options.read.poll_ms)
            self._end()
            end = self._until(begin)
        end = self._limited(begin, end, limit)
        return start if end == begin else end.to_json()

    def _limited(self, begin: EventOffset, end: EventOffset, limit: ReadLimit) -> EventOffset:
        if isinstance(limit, ReadAllAvailable):
            return end
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.read.bytes_per_trigger
        if bytes_max is not None:
            end = self._within(begin, end, bytes_max)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.events_per_trigger
        return end if rows_max is None else self._within_rows(begin, end, rows_max)

    def _end(self) -> EventOffset:
        """Where everything ends now."""
        extents = self._extents()
        actions = self._look.actions()
        ends = {name: extent.end for name, extent in extents.items()}
        delay = self._delay_places(LATEST)
        self._seen = EventOffset(actions.log_id, self._look.log.id, actions.committed_end, ends, delay)
        return self._seen

    def _extents(self) -> Mapping[str, Extent]:
        """Of what was produced; a stream of some groups has no such events."""
        extents = self._look.extents()
        return extents if self._options.groups is None else {}

    def _until(self, begin: EventOffset) -> EventOffset:
        """Where the next micro-batch may end: at the end of all, or where AvailableNow was to end."""
        end = self._seen or begin
        if self._target is not None and self._target.actions_id == end.actions_id:
            ends = {name: min(at, self._target.sequences.get(name, 0)) for name, at in end.sequences.items()}
            end = end._replace(position=min(end.position, self._target.position), sequences=ends)
        sequences = {name: max(at, begin.sequences.get(name, 0)) for name, at in end.sequences.items()}
        delay = between(begin.delay, end.delay, {} if self._target is None else self._target.delay)
        position = max(end.position, begin.position)
        return end._replace(position=position, sequences={**begin.sequences, **sequences}, delay=delay)

    def _checked(self, begin: EventOffset, end: EventOffset) -> EventOffset:
        """The place to go on from: the checkpoint's, unless the logs are not what they were and the user accepts
        that."""
        is_strict = self._options.read.fail_on_data_loss
        if (begin.actions_id, begin.messages_id) != (end.actions_id, end.messages_id):
            if is_strict:
                raise reading.other_log(WHAT, self._look.where)
            return end._replace(position=0, sequences={}, delay={})
        if begin.position > end.position:
            if is_strict:
                raise reading.cut_short(WHAT, end.position, begin.position)
            begin = begin._replace(position=end.position)
        for name, at in begin.delay.items():
            known = end.delay.get(name, at)
            if is_strict and known.log_id != at.log_id:
                raise reading.other_log("delayed messages", self._look.where)
            if is_strict and known.position < at.position:
                raise reading.cut_short("the delay server", known.position, at.position)
        return begin

    def _within(self, begin: EventOffset, end: EventOffset, bytes_max: int) -> EventOffset:
        """Cut down to so many bytes of logs and indexes, shared among those that have something."""
        busy = [name for name, at in end.sequences.items() if at > begin.sequences.get(name, 0)]
        share = max(bytes_max // (len(busy) + 1 + len(end.delay)), ENTRY_BYTES)
        position = self._look.boundary(begin.position + share, end.position)
        ends = {
            name: self._look.reach_entries(
                name, begin.sequences.get(name, 0), end.sequences[name], share // ENTRY_BYTES
            )
            for name in busy
        }
        delay, _ = self._delay_within(begin, end, share // event_delay.EVENT_BYTES)
        return end._replace(position=position, sequences={**end.sequences, **ends}, delay=delay)

    def _delay_within(self, begin: EventOffset, end: EventOffset, rows: int) -> tuple[dict[str, LogPlace], int]:
        """Each log of the delay server, cut down to so many events; how many that are in all."""
        places, counted = dict(end.delay), 0
        for wanted in event_delay.ranges(begin.delay, end.delay):
            name = wanted.subject
            position, more = self._look_at_delay.reach(name, wanted.begin, wanted.end, rows)
            places[name] = places[name]._replace(position=position)
            counted += more
        return places, counted

    def _within_rows(self, begin: EventOffset, end: EventOffset, rows_max: int) -> EventOffset:
        """Cut down to so many events: the logs have their shares first, the indexes of subjects the rest. None is ever
        passed over: a record at least, and a batch."""
        backlogs = {name: at - begin.sequences.get(name, 0) for name, at in end.sequences.items()}
        busy = {name: backlog for name, backlog in backlogs.items() if backlog > 0}
        share = max(rows_max // (len(busy) + 1 + len(end.delay)), 1)
        position, counted = self._look.reach_actions(begin.position, end.position, share)
        delay, delayed = self._delay_within(begin, end, share)
        given = offsets.shares(busy, max(rows_max - counted - delayed, 1))
        ends = {
            name: self._look.reach_entries(name, begin.sequences.get(name, 0), end.sequences[name], given.get(name, 0))
            for name in busy
        }
        return end._replace(position=position, sequences={**end.sequences, **ends}, delay=delay)

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, until = parse(start), parse(end)
        is_same = (begin.actions_id, begin.messages_id) == (until.actions_id, until.messages_id)
        if not is_same:
            begin = until._replace(position=0, sequences={}, delay={})
        pieces = self._look.pieces(begin.position, until.position, self._options.read.min_partitions)
        begins = {**self._firsts(until.sequences.keys() - begin.sequences.keys()), **begin.sequences}
        ranges = [of_subject(name, begins[name], at) for name, at in until.sequences.items()]
        job = _job(self._options, self._columns, until.actions_id, until.messages_id, is_strict=is_same)
        if until.delay:
            since_ms = _since_ms(self._begin())
            delay = _delay_job(self._options, self._columns, until.delay, since_ms, None, is_strict=is_same)
            job, ranges = job._replace(delay=delay), [*ranges, *event_delay.ranges(begin.delay, until.delay)]
        return _splits(job, ranges, pieces)

    def _firsts(self, names: Set[str]) -> dict[str, int]:
        """Where subjects begin that are new to the stream."""
        return self._look.resolve(dict.fromkeys(sorted(names), EARLIEST))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return event_reading.read(partition) if isinstance(partition, EventSplit) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the logs keep what they have."""

    def stop(self) -> None:
        for each in (self._looker, self._delay_looker):
            if each is not None:
                each.close()
        self._looker = self._delay_looker = None


def _job(options: EventOptions, columns: Columns, actions_id: int, messages_id: int, *, is_strict: bool) -> EventJob:
    return EventJob(
        options.read.url,
        options.read.patience_s,
        actions_id,
        messages_id,
        columns,
        options.groups,
        options.read.subjects,
        is_strict and options.read.fail_on_data_loss,
    )


def _delay_job(
    options: EventOptions, columns: Columns, ends: Places, since_ms: int, until_ms: int | None, *, is_strict: bool
) -> DelayJob:
    return DelayJob(
        options.read.url,
        options.read.patience_s,
        {name: at.log_id for name, at in ends.items()},
        columns,
        options.read.subjects,
        since_ms,
        until_ms,
        is_strict and options.read.fail_on_data_loss,
    )


def _since_ms(starting: Where) -> int:
    return starting.value if starting.whence is Whence.TIME else 0


def _splits(job: EventJob, ranges: list[Range], actions: list[Range]) -> list[InputPartition]:
    """One task for each piece of the action log and each log of a delay server; a single small piece shares a task with
    what was produced."""
    tasks = splits.cut([each for each in ranges if each.subject not in event_delay.LOGS], None)
    if tasks and len(actions) == 1 and actions[0].size <= _SMALL_BYTES:
        tasks[0] = (*actions, *tasks[0])
    else:
        tasks += [(each,) for each in actions]
    tasks += [(each,) for each in ranges if each.subject in event_delay.LOGS]
    return [EventSplit(job, each) for each in tasks]
