"""The data source `fairway.events`: what happened to messages, from action logs and the indexes of subjects.

    produced           a batch was stored                     from the index of its subject
    pulled … dead      what groups and consumers did with it  from the action log
    scheduled …        what a delay server did with messages  from that server's logs (`delay_log`)

Each row stands for a range of messages. `docs/how-to/spark.md` lists the columns and the events.

An offset of a streaming query has, for each broker group, a position in the action log and the next sequence of each
subject. If delayed messages are wanted, it also has a position in each log of each group of delay servers.

    {"fairway.events": 1, "actions_log": …, "messages_log": …, "position": 4096, "subjects": {"orders": 17}}
    {"fairway.events": 2, "groups": {"g1": {"actions_log": …, "messages_log": …, "position": 4096, "subjects": {…}}}}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
)
from pyspark.sql.types import StructType

from fairway.errors import Misuse
from fairway.protocol.messages import Whence
from fairway.spark import reader, stream
from fairway.spark.events import delay_log, frames, plan
from fairway.spark.events.delay_log import DelayPlanner, LogPlace, Places
from fairway.spark.events.plan import WHAT, EventJob, EventPlanner, EventSplit, of_subject
from fairway.spark.frames import Columns
from fairway.spark.options import EARLIEST, LATEST, EventOptions, Where, event_options
from fairway.spark.plan import SubjectExtent
from fairway.spark.reader import ScanRange
from fairway.spark.server_groups import BROKER_GROUP, ServerGroupAddress, SubjectPart
from fairway.spark.stream import ALONE, CLUSTER
from fairway.storage.index_file import ENTRY_BYTES

NAME: Final = "fairway.events"
_DELAY: Final = "delay"


class LogsPlace(NamedTuple):
    """A position in the two logs of one broker group, and the ids of the logs."""

    actions_id: int
    messages_id: int
    position: int
    sequences: Mapping[str, int]

    @property
    def ids(self) -> tuple[int, int]:
        return self.actions_id, self.messages_id

    @property
    def beginning(self) -> LogsPlace:
        """The beginning of the same logs."""
        return self._replace(position=0, sequences={})

    def sequence(self, subject: str) -> int:
        return self.sequences.get(subject, 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "actions_log": f"{self.actions_id:016x}",
            "messages_log": f"{self.messages_id:016x}",
            "position": self.position,
            "subjects": {name: self.sequences[name] for name in sorted(self.sequences)},
        }


class EventOffset(NamedTuple):
    """A position in the logs of all groups."""

    groups: Mapping[str, LogsPlace]
    delay: Places = {}  # noqa: RUF012  (never changed)

    def logs(self, group: str, now: LogsPlace) -> LogsPlace:
        """The place in a group's logs; their beginning if the group is not in the offset."""
        return self.groups.get(group, now.beginning)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any]
        if set(self.groups) == {BROKER_GROUP}:
            said = {NAME: ALONE, **self.groups[BROKER_GROUP].to_json()}
        else:
            said = {NAME: CLUSTER, "groups": {name: self.groups[name].to_json() for name in sorted(self.groups)}}
        if self.delay:
            said[_DELAY] = {
                name: [f"{self.delay[name].log_id:016x}", self.delay[name].position] for name in sorted(self.delay)
            }
        return said


def parse(said: Mapping[str, Any]) -> EventOffset:
    """An offset from the form that `to_json` wrote, as a checkpoint returns it."""
    groups = {BROKER_GROUP: said} if stream.version_of(said, NAME) == ALONE else said["groups"]
    delay = {name: LogPlace(int(log, 16), int(position)) for name, (log, position) in said.get(_DELAY, {}).items()}
    return EventOffset({name: _logs_place(each) for name, each in groups.items()}, delay)


def _logs_place(said: Mapping[str, Any]) -> LogsPlace:
    ids = int(said["actions_log"], 16), int(said["messages_log"], 16)
    return LogsPlace(*ids, int(said["position"]), dict(said["subjects"]))


def mapped(offset: EventOffset, now: EventOffset, where: str) -> EventOffset:
    """The offset with the present names of broker groups. Groups are matched by the ids of their logs."""
    ids = [{name: each.actions_id for name, each in of.groups.items()} for of in (offset, now)]
    names = stream.renamed(ids[0], ids[1], where)
    groups = {names[name]: each for name, each in offset.groups.items()}
    return EventOffset(groups, delay_log.renamed(offset.delay, now.delay))


_SMALL_BYTES: Final = 1 << 20  # takes less time to read than a task takes to start


class EventSource(DataSource):
    """The entry point for Spark: `spark.read.format("fairway.events")` and `readStream`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return frames.EVENTS

    def reader(self, schema: StructType) -> EventReader:
        return EventReader(event_options(self.options), schema)

    def streamReader(self, schema: StructType) -> EventStreamReader:  # noqa: N802
        return EventStreamReader(event_options(self.options), schema)


class EventReader(DataSourceReader):
    """Reads what has happened when the query is planned, between two places."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        self._options = options
        self._columns = frames.columns_of(schema)

    def partitions(self) -> list[InputPartition]:
        planner = EventPlanner(self._options)
        try:
            extents = planner.extents()
            made = [self._of_group(planner, group, extents) for group in planner.groups(extents)]
        finally:
            planner.close()
        return [*itertools.chain.from_iterable(made), *self._delayed()]

    def _of_group(
        self, planner: EventPlanner, group: str, extents: Mapping[SubjectPart, SubjectExtent]
    ) -> list[InputPartition]:
        broker, options = planner.broker(group), self._options
        actions_id = broker.actions().log_id
        begin, end = broker.position(options.starting), broker.position(options.ending)
        pieces = broker.pieces(begin, end, options.read.min_partitions)
        ranges = []
        if options.groups is None:
            parts = [part for part in extents if part.broker_group == group]
            begins = planner.resolve(dict.fromkeys(parts, options.starting))
            ends = planner.resolve(dict.fromkeys(parts, options.ending))
            ranges = [of_subject(part.subject, begins[part], ends[part], group) for part in parts]
        ids = actions_id, broker.log.id
        return _splits(_job(options, self._columns, options.read.place(group), ids, is_strict=True), ranges, pieces)

    def _delayed(self) -> list[InputPartition]:
        options = self._options
        if not options.has_delayed:
            return []
        planner = DelayPlanner(options)
        try:
            begins = planner.places(options.starting)
            ends = planner.places(LATEST if options.ending.whence is Whence.TIME else options.ending)
            times = _since_ms(options.starting), options.ending.value if options.ending.whence is Whence.TIME else None
            job = planner.job(self._columns, ends, *times, is_strict=True)
        finally:
            planner.close()
        return [delay_log.DelaySplit(job, each) for each in delay_log.ranges(begins, ends)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


class EventStreamReader(stream.BaseStreamReader):
    """`readStream.format("fairway.events")`."""

    def __init__(self, options: EventOptions, schema: StructType) -> None:
        super().__init__(options.read, options.events_per_trigger)
        self._options = options
        self._columns = frames.columns_of(schema)
        self._planner: EventPlanner | None = None
        self._delay_planner: DelayPlanner | None = None
        self._starting = options.starting
        self._initial: EventOffset | None = None
        self._target: EventOffset | None = None  # where Trigger.AvailableNow ends
        self._seen: EventOffset | None = None

    @property
    def _look(self) -> EventPlanner:
        """The driver's planner. A copy of the reader in a task never uses it."""
        if self._planner is None:
            self._planner = EventPlanner(self._options)
        return self._planner

    @property
    def _look_at_delay(self) -> DelayPlanner:
        if self._delay_planner is None:
            self._delay_planner = DelayPlanner(self._options)
        return self._delay_planner

    def __getstate__(self) -> dict[str, Any]:
        """The state that travels to tasks. The conversations stay behind."""
        return {**self.__dict__, "_planner": None, "_delay_planner": None}

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            seen, starting = self._end(), self._begin()
            groups = {}
            for group, each in seen.groups.items():
                parts = [SubjectPart(name, group) for name in each.sequences]
                begins = self._look.resolve(dict.fromkeys(parts, starting))
                sequences = {part.subject: at for part, at in begins.items()}
                position = self._look.broker(group).position(starting)
                groups[group] = each._replace(position=position, sequences=sequences)
            self._initial = EventOffset(groups, self._delay_places(starting))
        return self._initial.to_json()

    def _begin(self) -> Where:
        """Where a query without a checkpoint begins. The broker keeps LATEST from the first time on. If LATEST were
        resolved again after a failed first batch, the events in between would be skipped."""
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

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._seen is None else self._seen.to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        seen = self._end()
        begin = self._checked(mapped(parse(start), seen, self._look.where), seen)
        end = self._until(begin)
        if end == begin and self._target is None:
            waits = {
                name: (each.position, each.sequences) for name, each in begin.groups.items() if name in seen.groups
            }
            self._look.wait_for_any(waits, self._options.read.poll_ms)
            self._end()
            end = self._until(begin)
        rows_max, bytes_max = self.bounds(limit)
        if bytes_max is not None:
            end = self._within(begin, end, bytes_max)
        if rows_max is not None:
            end = self._within_rows(begin, end, rows_max)
        return start if end == begin else end.to_json()

    def _end(self) -> EventOffset:
        """Where all logs end now."""
        extents = self._look.extents()
        groups = {}
        for group in self._look.groups(extents):
            actions = self._look.broker(group).actions()
            ends = {part.subject: extent.end for part, extent in extents.items() if part.broker_group == group}
            if self._options.groups is not None:
                ends = {}  # a stream of some groups has no `produced` events
            log_id = self._look.broker(group).log.id
            groups[group] = LogsPlace(actions.log_id, log_id, actions.committed_end, ends)
        self._seen = EventOffset(groups, self._delay_places(LATEST))
        return self._seen

    def _until(self, begin: EventOffset) -> EventOffset:
        """Where the next micro-batch may end: at the end of all logs, or where AvailableNow is to end."""
        seen = self._seen or begin
        groups = {name: self._until_in(name, each, begin.logs(name, each)) for name, each in seen.groups.items()}
        delay = delay_log.between(begin.delay, seen.delay, None if self._target is None else self._target.delay)
        return EventOffset({**begin.groups, **groups}, delay)

    def _until_in(self, group: str, end: LogsPlace, begin: LogsPlace) -> LogsPlace:
        target = None if self._target is None else self._target.groups.get(group, end.beginning)
        if target is not None and target.actions_id == end.actions_id:
            ends = {name: min(at, target.sequence(name)) for name, at in end.sequences.items()}
            end = end._replace(position=min(end.position, target.position), sequences=ends)
        sequences = {name: max(at, begin.sequence(name)) for name, at in end.sequences.items()}
        return end._replace(
            position=max(end.position, begin.position), sequences={**begin.sequences, **sequences}
        )  # fmt: skip

    def _checked(self, begin: EventOffset, end: EventOffset) -> EventOffset:
        """The position to continue from: the checkpoint's, unless a log was replaced or cut short and the user accepts
        that."""
        is_strict = self._options.read.fail_on_data_loss
        groups = dict(begin.groups)
        for name, now in end.groups.items():
            groups[name] = self._checked_in(name, begin.groups.get(name), now)
        for name, at in begin.delay.items():
            known = end.delay.get(name, at)
            if is_strict and known.log_id != at.log_id:
                raise reader.other_log("delayed messages", self._look.where)
            if is_strict and known.position < at.position:
                raise reader.cut_short("the delay server", known.position, at.position)
        is_anew = any(name in begin.groups and begin.groups[name].ids != now.ids for name, now in end.groups.items())
        return EventOffset(groups, {} if is_anew else begin.delay)

    def _checked_in(self, group: str, begin: LogsPlace | None, now: LogsPlace) -> LogsPlace:
        is_strict = self._options.read.fail_on_data_loss
        if begin is None:
            return now.beginning  # new to the stream: read it from its beginning
        if begin.ids != now.ids:
            if is_strict:
                raise reader.other_log(WHAT, self._look.where)
            return now.beginning
        if begin.position <= now.position:
            return begin
        end = self._look.broker(group).awaited_position(begin.position)
        if is_strict and end < begin.position:
            raise reader.cut_short(WHAT, end, begin.position)
        return begin._replace(position=min(begin.position, end))

    def _within(self, begin: EventOffset, end: EventOffset, bytes_max: int) -> EventOffset:
        """Cut the end down to so many bytes of logs and indexes, shared among those that have something."""
        busy = _busy(begin, end)
        share = max(bytes_max // (len(busy) + len(end.groups) + len(end.delay)), ENTRY_BYTES)
        positions = {
            name: self._look.broker(name).boundary(begin.logs(name, each).position + share, each.position)
            for name, each in end.groups.items()
        }
        delay, _ = self._delay_within(begin, end, share // delay_log.EVENT_BYTES)
        entries = dict.fromkeys(busy, share // ENTRY_BYTES)
        return EventOffset(self._cut(end, positions, busy, entries), delay)

    def _cut(
        self,
        end: EventOffset,
        positions: Mapping[str, int],
        busy: Mapping[SubjectPart, int],
        entries: Mapping[SubjectPart, int],
    ) -> dict[str, LogsPlace]:
        """The places of the end, cut down to positions of action logs, and to so many entries of each busy index."""
        ends = {name: dict(each.sequences) for name, each in end.groups.items()}
        for part, waiting in busy.items():
            broker, at = self._look.broker(part.broker_group), ends[part.broker_group][part.subject]
            reached = broker.reach_entries(part.subject, at - waiting, at, entries.get(part, 0))
            ends[part.broker_group][part.subject] = reached
        return {
            name: each._replace(position=positions[name], sequences=ends[name]) for name, each in end.groups.items()
        }

    def _delay_within(self, begin: EventOffset, end: EventOffset, rows: int) -> tuple[dict[str, LogPlace], int]:
        """Cut each log of the delay servers down to `rows` events; returns how many events that is in all."""
        places, counted = dict(end.delay), 0
        for wanted in delay_log.ranges(begin.delay, end.delay):
            name = wanted.subject
            position, more = self._look_at_delay.reach(name, wanted.begin, wanted.end, rows)
            places[name] = places[name]._replace(position=position)
            counted += more
        return places, counted

    def _within_rows(self, begin: EventOffset, end: EventOffset, rows_max: int) -> EventOffset:
        """Cut the end down to so many events. The logs get their shares first, the indexes of subjects the rest. Each
        gets at least a record or a batch, so that none waits for ever."""
        busy = _busy(begin, end)
        share = max(rows_max // (len(busy) + len(end.groups) + len(end.delay)), 1)
        delay, counted = self._delay_within(begin, end, share)
        positions = {}
        for name, each in end.groups.items():
            at = begin.logs(name, each).position
            positions[name], more = self._look.broker(name).reach_actions(at, each.position, share)
            counted += more
        given = stream.shares(busy, max(rows_max - counted, 1))
        return EventOffset(self._cut(end, positions, busy, given), delay)

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        seen = self._seen or self._end()
        begin, until = (mapped(parse(each), seen, self._look.where) for each in (start, end))
        made: list[InputPartition] = []
        is_same = True
        for name, each in until.groups.items():
            known = begin.groups.get(name)
            is_known = known is not None and known.ids == each.ids
            is_same = is_same and (known is None or is_known)
            made += self._of_group(name, known if known is not None and is_known else each.beginning, each, is_known)
        delayed = delay_log.ranges(begin.delay if is_same else {}, until.delay)
        if delayed:
            since_ms, planner = _since_ms(self._begin()), self._look_at_delay
            job = planner.job(self._columns, until.delay, since_ms, None, is_strict=is_same)
            made += [delay_log.DelaySplit(job, each) for each in delayed]
        return made

    def _of_group(self, group: str, begin: LogsPlace, until: LogsPlace, is_strict: bool) -> list[InputPartition]:
        pieces = self._look.broker(group).pieces(begin.position, until.position, self._options.read.min_partitions)
        new = [SubjectPart(name, group) for name in sorted(until.sequences.keys() - begin.sequences.keys())]
        firsts = self._look.resolve(dict.fromkeys(new, EARLIEST))
        begins = {**{part.subject: at for part, at in firsts.items()}, **begin.sequences}
        ranges = [of_subject(name, begins[name], at, group) for name, at in until.sequences.items()]
        job = _job(self._options, self._columns, self._options.read.place(group), until.ids, is_strict=is_strict)
        return _splits(job, ranges, pieces)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def stop(self) -> None:
        for each in (self._planner, self._delay_planner):
            if each is not None:
                each.close()
        self._planner = self._delay_planner = None


def _busy(begin: EventOffset, end: EventOffset) -> dict[SubjectPart, int]:
    """The number of waiting messages of each subject that has any."""
    found = {}
    for group, each in end.groups.items():
        start = begin.logs(group, each)
        for name, at in each.sequences.items():
            if at > start.sequence(name):
                found[SubjectPart(name, group)] = at - start.sequence(name)
    return found


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if isinstance(partition, delay_log.DelaySplit):
        return delay_log.read(partition.job, partition.wanted)
    return plan.read(partition) if isinstance(partition, EventSplit) else iter(())


def _job(
    options: EventOptions, columns: Columns, place: ServerGroupAddress, ids: tuple[int, int], *, is_strict: bool
) -> EventJob:  # fmt: skip
    return EventJob(
        place, *ids, columns, options.groups, options.read.subjects, is_strict and options.read.fail_on_data_loss
    )


def _since_ms(starting: Where) -> int:
    return starting.value if starting.whence is Whence.TIME else 0


def _splits(job: EventJob, ranges: list[ScanRange], actions: list[ScanRange]) -> list[InputPartition]:
    """One task for each piece of the action log. A single small piece shares a task with `produced` events."""
    tasks = reader.cut(ranges, None)
    if tasks and len(actions) == 1 and actions[0].size <= _SMALL_BYTES:
        tasks[0] = (*actions, *tasks[0])
    else:
        tasks += [(each,) for each in actions]
    return [EventSplit(job, each) for each in tasks]
