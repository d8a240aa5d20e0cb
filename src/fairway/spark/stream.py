"""The reader of a streaming query, and its offsets.

An offset names the logs, and the next sequence of each subject. For one broker:

    {"fairway": 1, "log": "9f3c…", "epoch": 4, "subjects": {"orders": 4200, "payments": 17}}

For a cluster, where each broker group has a log and sequences of its own:

    {"fairway": 2, "logs": {"g1": ["9f3c…", 4], "g2": ["08aa…", 1]}, "subjects": {"orders": {"g1": 4200, "g2": 17}}}

Spark compares offsets as text, so equal offsets must be written equally. Therefore keys are sorted, and an idle stream
returns the very offset that it was given.

Spark calls `latestOffset(start, limit)` after everything up to `start` has been processed for good. At that moment the
reader moves the query's group to `start`. So `fairway lag` shows the query like any consumer, and retention keeps what
the query still needs. A stream that has caught up waits in that call for the next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
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
from fairway.spark import frames, reader
from fairway.spark.frames import RowFilter
from fairway.spark.options import EARLIEST, LATEST, ReadOptions
from fairway.spark.plan import LogId, Planner, SubjectExtent
from fairway.spark.reader import ReadJob, ReadSplit, ScanRange
from fairway.spark.server_groups import BROKER_GROUP, SubjectPart

ALONE: Final = 1  # the version of offsets of one broker
CLUSTER: Final = 2

T = TypeVar("T")


class Offset(NamedTuple):
    """A position in the logs of broker groups."""

    logs: Mapping[str, LogId]  # by broker group
    sequences: Mapping[SubjectPart, int]

    def to_json(self) -> dict[str, Any]:
        if set(self.logs) == {BROKER_GROUP}:
            log = self.logs[BROKER_GROUP]
            alone = {part.subject: self.sequences[part] for part in sorted(self.sequences)}
            return {"fairway": ALONE, "log": f"{log.id:016x}", "epoch": log.epoch, "subjects": alone}
        subjects: dict[str, dict[str, int]] = {}
        for part in sorted(self.sequences):
            subjects.setdefault(part.subject, {})[part.broker_group] = self.sequences[part]
        logs = {group: [f"{self.logs[group].id:016x}", self.logs[group].epoch] for group in sorted(self.logs)}
        return {"fairway": CLUSTER, "logs": logs, "subjects": subjects}


def parse(said: Mapping[str, Any]) -> Offset:
    """An offset from the form that `to_json` wrote, as a checkpoint returns it."""
    if version_of(said, "fairway") == ALONE:
        log = LogId(int(said["log"], 16), int(said["epoch"]))
        return Offset({BROKER_GROUP: log}, {SubjectPart(name): at for name, at in said["subjects"].items()})
    logs = {group: LogId(int(log, 16), int(epoch)) for group, (log, epoch) in said["logs"].items()}
    sequences = {SubjectPart(name, group): at for name, of in said["subjects"].items() for group, at in of.items()}
    return Offset(logs, sequences)


def version_of(said: Mapping[str, Any], source: str) -> int:
    """The version of an offset of that source."""
    version: Any = said.get(source)
    if version not in {ALONE, CLUSTER}:
        raise Misuse(
            f"the checkpoint has an offset of version {version}: this release reads {ALONE} and {CLUSTER}; "
            "upgrade fairway"
        )
    return int(version)


def mapped(offset: Offset, logs: Mapping[str, LogId], where: str) -> Offset:
    """Rename the broker groups of an offset: from a broker given by its address to the cluster that it belongs to by
    now, or the other way round. `logs` are the present ones."""
    then, now = ({group: log.id for group, log in of.items()} for of in (offset.logs, logs))
    names = renamed(then, now, where)
    return Offset(
        {names[group]: log for group, log in offset.logs.items()},
        {SubjectPart(subject, names[group]): at for (subject, group), at in offset.sequences.items()},
    )


def renamed(then: Mapping[str, int], now: Mapping[str, int], where: str) -> dict[str, str]:
    """The present names of a checkpoint's broker groups. Groups are matched by the ids of their logs; `Misuse` if a log
    is missing."""
    if (BROKER_GROUP in then) == (BROKER_GROUP in now):
        return {group: group for group in then}
    by_log = {log_id: group for group, log_id in now.items()}
    lost = [group for group, log_id in then.items() if log_id not in by_log]
    if not lost:
        return {group: by_log[log_id] for group, log_id in then.items()}
    if BROKER_GROUP in then:
        raise Misuse(
            f"the checkpoint is of a broker that was named by its address, and no broker group of {where} that holds "
            f"these subjects has its log ({then[BROKER_GROUP]:016x}): go on with that address, or begin with a new "
            "checkpoint"
        )
    raise Misuse(
        f"the checkpoint is of a cluster, and {where} does not have the log of its broker group {', '.join(lost)}: "
        "go on with meta://HOST:PORT, or begin with a new checkpoint"
    )


def shares(backlogs: Mapping[T, int], total: int) -> dict[T, int]:
    """Divide `total` among subjects: each gets its backlog or an equal share of the rest, the smallest first.

    If `total` is less than one for each, the subjects with the largest backlogs are served, so that none waits for
    ever.
    """
    wanted = {name: backlog for name, backlog in backlogs.items() if backlog > 0}
    if total < len(wanted):
        most = sorted(wanted, key=lambda name: (-wanted[name], str(name)))[:total]
        return dict.fromkeys(most, 1)
    given: dict[T, int] = {}
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], str(name)))):
        given[name] = min(wanted[name], total // (len(wanted) - place))
        total -= given[name]
    return given


class BaseStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What the readers of messages and of events have in common."""

    def __init__(self, options: ReadOptions, rows_per_trigger: int | None) -> None:
        if options.has_ending:
            raise Misuse("a stream has no ending: leave the option out, or read it as a batch (spark.read)")
        self._rows_max, self._bytes_max = rows_per_trigger, options.bytes_per_trigger

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._rows_max is not None:
            return ReadMaxRows(self._rows_max)
        return ReadAllAvailable() if self._bytes_max is None else ReadMaxBytes(self._bytes_max)

    def bounds(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """The most rows and the most bytes of a micro-batch, by Spark's limit and by the options; None: no bound."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._rows_max
        return rows_max, limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._bytes_max

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: `latestOffset` has moved the query's group, and Spark calls this one batch late. Logs keep their
        events anyway."""


class StreamReader(BaseStreamReader):
    """`readStream.format("fairway")`."""

    def __init__(self, options: ReadOptions, schema_: StructType) -> None:
        super().__init__(options, options.messages_per_trigger)
        self._options = options
        self._columns = frames.columns_of(schema_)
        self._planner: Planner | None = None
        self._initial: Offset | None = None
        self._target: Mapping[SubjectPart, SubjectExtent] | None = None  # where Trigger.AvailableNow ends
        self._seen: Mapping[SubjectPart, SubjectExtent] = {}
        self._noted: dict[SubjectPart, int] = {}  # the group's cursors, as far as this reader has moved them

    @property
    def _look(self) -> Planner:
        """The driver's planner. A copy of the reader in a task never uses it."""
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner

    # --- places ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            begins = self._begins(self._extents())
            self._initial = Offset(self._look.logs, begins)
        return self._initial.to_json()

    def _begins(self, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, int]:
        """Where a query without a checkpoint begins. The broker keeps LATEST from the first time on. If LATEST were
        resolved again after a failed first batch, the messages in between would be skipped."""
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
            for part in floating:
                begins[part] = self._look.broker(part.broker_group).hold(part.subject, group, LATEST)
        for part, begin in begins.items():
            if begin < extents[part].first and self._options.fail_on_data_loss:
                raise reader.lost(part.subject, begin, extents[part].first)
        return begins

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._extents()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The newest offset, for Spark's own measure of how far a query is behind."""
        if not self._seen:
            return None
        return Offset(self._look.logs, {part: extent.end for part, extent in self._seen.items()}).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = parse(start)
        extents = self._extents()
        begin = self._checked(mapped(begin, self._look.logs, self._look.where), extents)
        self._note_progress(begin, extents)
        if self._target is None and not _backlogs(begin, extents):
            self._look.wait(
                {part: begin.sequences.get(part, extents[part].end) for part in extents}, self._options.poll_ms
            )
            extents = self._extents()
        ends = self._ends(begin, extents, limit)
        if all(begin.sequences.get(part, 0) == end for part, end in ends.items()):
            return start
        return Offset({**begin.logs, **self._look.logs}, {**begin.sequences, **ends}).to_json()

    def _extents(self) -> Mapping[SubjectPart, SubjectExtent]:
        self._seen = self._look.extents()
        return self._seen

    def _checked(self, begin: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> Offset:
        """The position to continue from: the checkpoint's, unless a log was replaced and the user accepts that. The
        same log with a later epoch means a change of masters, or a restart, and no loss."""
        others = _others(begin, self._look.logs)
        if others and self._options.fail_on_data_loss:
            subjects = sorted({part.subject for part in begin.sequences if part.broker_group in others})
            raise reader.other_log(", ".join(subjects), self._look.where)
        sequences = {part: at for part, at in begin.sequences.items() if part.broker_group not in others}
        for part, extent in extents.items():
            # A subject that is new to a pattern, or new in a broker group, is read from its beginning.
            sequences[part] = self._resumed(part, sequences.get(part, extent.first), extent)
        return Offset({**begin.logs, **{group: self._look.logs[group] for group in others}}, sequences)

    def _resumed(self, part: SubjectPart, at: int, extent: SubjectExtent) -> int:
        is_strict = self._options.fail_on_data_loss
        if at < extent.first:
            if is_strict:
                raise reader.lost(part.subject, at, extent.first)
            return extent.first
        end = extent.end
        if at > end:
            end = max(end, self._look.broker(part.broker_group).awaited(part.subject, at))
        if at > end and is_strict:
            raise reader.cut_short(part.subject, end, at)
        return min(at, end)

    def _note_progress(self, done: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        group = self._options.group
        if group is None:
            return
        for part in extents:
            broker, sequence = self._look.broker(part.broker_group), done.sequences[part]
            if self._noted.get(part) != sequence:
                if part not in self._noted:
                    broker.hold(part.subject, group, EARLIEST)  # makes a group if need be, and refuses consumers
                broker.progress(part.subject, group, sequence)
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
        rows_max, bytes_max = self.bounds(limit)
        if rows_max is not None:
            given = shares(backlogs, rows_max)
            ends = {part: sequences.get(part, 0) + given.get(part, 0) for part in ends}
        if bytes_max is not None:
            ends = self._within_bytes(sequences, ends, bytes_max)
        return ends

    def _within_bytes(
        self, begins: Mapping[SubjectPart, int], ends: Mapping[SubjectPart, int], bytes_max: int
    ) -> dict[SubjectPart, int]:
        """Cut the ends down to so many bytes, shared among the subjects: whole batches, at least one of each."""
        busy = [part for part, end in ends.items() if end > begins.get(part, 0)]
        share = max(bytes_max // max(len(busy), 1), 1)
        cut = {
            part: self._look.broker(part.broker_group).reach(part.subject, begins.get(part, 0), ends[part], share)
            for part in busy
        }
        return {**ends, **cut}

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if not self._look.logs:
            self._extents()
        begin, until = (mapped(parse(each), self._look.logs, self._look.where) for each in (start, end))
        others = _others(begin, until.logs)
        known = {part: at for part, at in begin.sequences.items() if part.broker_group not in others}
        firsts = self._look.resolve({part: EARLIEST for part in until.sequences if part not in known})
        ranges = [
            ScanRange(part.subject, known[part] if part in known else firsts[part], at, broker_group=part.broker_group)
            for part, at in until.sequences.items()
        ]
        measured = self._look.measured([each for each in ranges if each.end > each.begin])
        tasks = reader.cut(measured, self._options.min_partitions)
        row_filter, is_strict = RowFilter(self._options.keys, self._options.tags), self._options.fail_on_data_loss
        jobs = {
            group: ReadJob(
                self._options.place(group), log.id, self._columns, row_filter, is_strict and group not in others
            )
            for group, log in until.logs.items()
        }
        return [ReadSplit(jobs[each[0].broker_group], each) for each in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return reader.read(partition) if isinstance(partition, ReadSplit) else iter(())

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None


def _others(begin: Offset, now: Mapping[str, LogId]) -> frozenset[str]:
    """Broker groups whose log has been replaced."""
    return frozenset(group for group, log in begin.logs.items() if group in now and now[group].id != log.id)


def _backlogs(begin: Offset, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, int]:
    """The number of waiting messages of each subject."""
    waiting = {part: extent.end - begin.sequences.get(part, extent.first) for part, extent in extents.items()}
    return {part: count for part, count in waiting.items() if count > 0}
