"""`format("fairway.events")`: the life of messages, from the action log and the indexes of subjects.

    produced       a batch was stored                     from the index of its subject
    pulled … dead  what groups and consumers did with it  from the action log

One row speaks of a range of messages. `docs/spark.md` has the columns and the words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from fairway.errors import Misuse
from fairway.spark import event_reading, event_schema, reading, splits
from fairway.spark.event_frames import Columns
from fairway.spark.event_log import WHAT
from fairway.spark.event_looking import EventLooker, of_subject
from fairway.spark.event_options import EventOptions, event_options
from fairway.spark.event_reading import EventJob, EventSplit
from fairway.spark.looking import Extent
from fairway.spark.options import EARLIEST
from fairway.spark.splits import Range
from fairway.storage.index_file import ENTRY_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

NAME: Final = "fairway.events"
_VERSION: Final = 1
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


class EventOffset(NamedTuple):
    """Which logs, a position in the action log, and for each subject the sequence that comes next."""

    actions_id: int
    messages_id: int
    position: int
    sequences: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            NAME: _VERSION,
            "actions_log": f"{self.actions_id:016x}",
            "messages_log": f"{self.messages_id:016x}",
            "position": self.position,
            "subjects": {name: self.sequences[name] for name in sorted(self.sequences)},
        }


def parse(said: Mapping[str, Any]) -> EventOffset:
    """What `to_json` wrote, as it comes back from a checkpoint."""
    if said.get(NAME) != _VERSION:
        raise Misuse(
            f"the checkpoint has an offset of version {said.get(NAME)}: this release reads {_VERSION}; upgrade fairway"
        )
    return EventOffset(
        int(said["actions_log"], 16), int(said["messages_log"], 16), int(said["position"]), dict(said["subjects"])
    )


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
        return _splits(job, pieces, ranges)

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
        self._initial: EventOffset | None = None
        self._target: EventOffset | None = None  # where Trigger.AvailableNow ends
        self._seen: EventOffset | None = None

    @property
    def _look(self) -> EventLooker:
        """The driver's own; a copy of the reader that was sent to a task never asks for it."""
        if self._looker is None:
            self._looker = EventLooker(self._options)
        return self._looker

    def __getstate__(self) -> dict[str, Any]:
        """What travels to tasks: not the conversation."""
        return {**self.__dict__, "_looker": None}

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            seen, starting = self._end(), self._options.starting
            self._initial = seen._replace(
                position=self._look.position(starting),
                sequences=self._look.resolve(dict.fromkeys(seen.sequences, starting)),
            )
        return self._initial.to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
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
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.read.bytes_per_trigger
        if bytes_max is not None and not isinstance(limit, ReadAllAvailable):
            end = self._within(begin, end, bytes_max)
        return start if end == begin else end.to_json()

    def _end(self) -> EventOffset:
        """Where everything ends now."""
        extents = self._extents()
        actions = self._look.actions()
        ends = {name: extent.end for name, extent in extents.items()}
        self._seen = EventOffset(actions.log_id, self._look.log.id, actions.committed_end, ends)
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
        return end._replace(position=max(end.position, begin.position), sequences={**begin.sequences, **sequences})

    def _checked(self, begin: EventOffset, end: EventOffset) -> EventOffset:
        """The place to go on from: the checkpoint's, unless the logs are not what they were and the user accepts
        that."""
        is_strict = self._options.read.fail_on_data_loss
        if (begin.actions_id, begin.messages_id) != (end.actions_id, end.messages_id):
            if is_strict:
                raise reading.other_log(WHAT, self._look.where)
            return end._replace(position=0, sequences={})
        if begin.position > end.position:
            if is_strict:
                raise reading.cut_short(WHAT, end.position, begin.position)
            begin = begin._replace(position=end.position)
        return begin

    def _within(self, begin: EventOffset, end: EventOffset, bytes_max: int) -> EventOffset:
        """Cut down to so many bytes of logs and indexes, shared among those that have something."""
        busy = [name for name, at in end.sequences.items() if at > begin.sequences.get(name, 0)]
        share = max(bytes_max // (len(busy) + 1), ENTRY_BYTES)
        position = self._look.boundary(begin.position + share, end.position)
        ends = {
            name: self._look.reach_entries(
                name, begin.sequences.get(name, 0), end.sequences[name], share // ENTRY_BYTES
            )
            for name in busy
        }
        return end._replace(position=position, sequences={**end.sequences, **ends})

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begin, until = parse(start), parse(end)
        is_same = (begin.actions_id, begin.messages_id) == (until.actions_id, until.messages_id)
        if not is_same:
            begin = until._replace(position=0, sequences={})
        pieces = self._look.pieces(begin.position, until.position, self._options.read.min_partitions)
        begins = {**self._firsts(until.sequences.keys() - begin.sequences.keys()), **begin.sequences}
        ranges = [of_subject(name, begins[name], at) for name, at in until.sequences.items()]
        job = _job(self._options, self._columns, until.actions_id, until.messages_id, is_strict=is_same)
        return _splits(job, pieces, ranges)

    def _firsts(self, names: Set[str]) -> dict[str, int]:
        """Where subjects begin that are new to the stream."""
        return self._look.resolve(dict.fromkeys(sorted(names), EARLIEST))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return event_reading.read(partition) if isinstance(partition, EventSplit) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the logs keep what they have."""

    def stop(self) -> None:
        if self._looker is not None:
            self._looker.close()
            self._looker = None


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


def _splits(job: EventJob, actions: list[Range], produced: list[Range]) -> list[InputPartition]:
    """One task for each piece of the action log; a single small one shares a task with what was produced."""
    tasks = splits.cut(produced, None)
    if tasks and len(actions) == 1 and actions[0].size <= _SMALL_BYTES:
        tasks[0] = (*actions, *tasks[0])
    else:
        tasks += [(each,) for each in actions]
    return [EventSplit(job, each) for each in tasks]
