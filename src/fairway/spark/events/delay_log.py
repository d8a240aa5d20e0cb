"""Reads the events of delay servers: scheduled, dispatched, cancelled, rescheduled.

A delay server has two logs, and shows both for as long as it keeps them (docs/internals/protocol.md, HISTORY). In the
column `broker_group` these events have `delay`, and their sequences are those of the delay server's own log. A
dispatched message has another sequence in its subject, and the same id. If a cluster has several groups of delay
servers, the column has the name of the group whose log it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from fairway.errors import Code, FairwayError, Refused
from fairway.limits import PENDING_PAGE_MAX
from fairway.protocol.delay_messages import Chronicle, History, HistoryPage, PastEvent, PastKind
from fairway.protocol.messages import Whence
from fairway.runtime.clock import RealClock
from fairway.runtime.host import spare_the_collector
from fairway.spark.connection import NS, BlockingClient
from fairway.spark.events.frames import arrow_schema
from fairway.spark.frames import Columns, repeated, times
from fairway.spark.options import EventOptions, Where, is_meant
from fairway.spark.reader import DataLoss, ScanRange, cut_short, lost, other_log
from fairway.spark.server_groups import ServerGroupAddress, caller_to, some_delay_places

BROKER_GROUP: Final = "delay"
FRAME_ROWS: Final = 8_192
# Stands in place of a subject in a range of positions. Before it stands the group, if there are several.
LOGS: Final = {":scheduled": Chronicle.SCHEDULED, ":decided": Chronicle.DECIDED}
_WORDS: Final = {
    PastKind.SCHEDULED: "scheduled",
    PastKind.DISPATCHED: "dispatched",
    PastKind.CANCELLED: "cancelled",
    PastKind.RESCHEDULED: "rescheduled",
}
EVENT_BYTES: Final = 100  # about, in a log
_LOOK_NS: Final = 10 * NS  # between two looks for new groups


class LogPlace(NamedTuple):
    """A position, and the log it belongs to."""

    log_id: int
    position: int


Places = Mapping[str, LogPlace]  # one for each log of each group; empty if delayed messages are not wanted


class DelayJob(NamedTuple):
    """What all tasks of a read have in common."""

    places: Mapping[str, ServerGroupAddress]  # by group
    log_ids: Mapping[str, int]
    columns: Columns
    subjects: tuple[str, ...]
    since_ms: int  # reading begins at the start of a segment: earlier events are left out
    until_ms: int | None
    is_strict: bool


@dataclass
class DelaySplit(InputPartition):
    """A task: a stretch of one log."""

    job: DelayJob
    wanted: ScanRange


def places_of(options: EventOptions) -> dict[str, ServerGroupAddress]:
    """The addresses of delay servers, by group; a single group has an empty name."""
    places = some_delay_places(options.read.url, options.read.patience_s, "option delayed")
    return {"": places[0]} if len(places) == 1 else {each.broker_group: each for each in places}


def _split(name: str) -> tuple[str, Chronicle]:
    """A name in `LOGS` form as its group and its log."""
    group, colon, log = name.rpartition(":")
    return group, LOGS[f"{colon}{log}"]


class DelayPlanner:
    """A driver's conversations with delay servers."""

    def __init__(self, options: EventOptions) -> None:
        self._options = options
        self._clock = RealClock()
        self._looked_ns = self._clock.monotonic_ns()
        self.groups = places_of(options)
        self._callers = {group: caller_to(place) for group, place in self.groups.items()}

    def close(self) -> None:
        for each in self._callers.values():
            each.close()

    def _look_round(self) -> None:
        """Look for groups that the cluster may have gained."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        groups = places_of(self._options)
        if groups != self.groups:
            self.close()
            self.groups = groups
            self._callers = {group: caller_to(place) for group, place in groups.items()}

    def places(self, where: Where) -> dict[str, LogPlace]:
        """The position of `where` in each log; the earliest is 0, even if the beginning of a log is gone."""
        self._look_round()
        pages = {
            f"{group}{name}": _ask(caller, History(log, where.whence, where.value, events_max=0))
            for group, caller in self._callers.items()
            for name, log in LOGS.items()
        }
        is_all = where.whence is Whence.EARLIEST
        return {name: LogPlace(page.log_id, 0 if is_all else page.next) for name, page in pages.items()}

    def job(self, columns: Columns, ends: Places, since_ms: int, until_ms: int | None, *, is_strict: bool) -> DelayJob:
        """The job of tasks that read up to these ends."""
        ids = {name: at.log_id for name, at in ends.items()}
        read = self._options.read
        is_strict = is_strict and read.fail_on_data_loss
        return DelayJob(self.groups, ids, columns, read.subjects, since_ms, until_ms, is_strict)

    def reach(self, name: str, begin: int, end: int, rows: int) -> tuple[int, int]:
        """The position up to which there are `rows` events, and how many there are: whole records, at least one."""
        counted = before = record_at = 0
        for page in pages_of(self._callers[_split(name)[0]], name, begin, end, None):
            for each in page.events:
                if each.position != record_at:
                    if counted and counted >= rows:
                        return each.position, counted
                    record_at, before = each.position, counted
                counted += 1
                if counted > rows and before:
                    return record_at, before
        return end, counted


def ranges(begins: Places, ends: Places) -> list[ScanRange]:
    """The stretch between the places, for each log. A log that was replaced, or is new to the query, is read in full. A
    log is known by its id, because its group may have another name than before."""
    known = {(_split(name)[1], at.log_id): at.position for name, at in begins.items()}
    found = []
    for name, end in ends.items():
        start = known.get((_split(name)[1], end.log_id), 0)
        if start < end.position:
            found.append(ScanRange(name, start, end.position, 1.0))
    return found


def renamed(then: Places, now: Places) -> dict[str, LogPlace]:
    """The places of a checkpoint under the present names of their logs: the number of groups may have changed. A log
    that no longer exists keeps its name."""
    names = {(_split(name)[1], at.log_id): name for name, at in now.items()}
    return {names.get((_split(name)[1], at.log_id), name): at for name, at in then.items()}


def between(begin: Places, end: Places, target: Places | None) -> dict[str, LogPlace]:
    """The end, but not before the beginning and not behind the target, which has nothing of a newer group. A group that
    no longer exists keeps its place, so that nothing is read twice if the group comes back."""
    aims = None if target is None else renamed(target, end)
    found = dict(begin)
    for name, at in end.items():
        most = at.position if aims is None else min(at.position, _in(aims, name, at))
        found[name] = at._replace(position=max(_in(begin, name, at), most))
    return found


def _in(places: Places, name: str, log: LogPlace) -> int:
    """The position there, if it is in the same log; else 0."""
    found = places.get(name)
    return found.position if found is not None and found.log_id == log.log_id else 0


def read(job: DelayJob, wanted: ScanRange) -> Iterator[pa.RecordBatch]:
    """The rows of a stretch of one log."""
    spare_the_collector()
    group = _split(wanted.subject)[0]
    place, shown = job.places.get(group), group or BROKER_GROUP
    if place is None:
        if job.is_strict:
            raise _gone(shown)
        return
    with caller_to(place) as caller:
        events: list[PastEvent] = []
        for page in pages_of(caller, wanted.subject, wanted.begin, wanted.end, job.log_ids[wanted.subject]):
            if job.is_strict and wanted.begin and page.first_position > wanted.begin:
                raise lost("the delay server's log", wanted.begin, min(page.first_position, wanted.end))
            if job.is_strict and page.committed_end < wanted.end:
                raise cut_short("the delay server", page.committed_end, wanted.end)
            events += [each for each in page.events if _is_wanted(job, each)]
            if len(events) >= FRAME_ROWS:
                yield frame(events, job.columns, shown)
                events = []
        if events:
            yield frame(events, job.columns, shown)


def pages_of(caller: BlockingClient, name: str, begin: int, end: int, log_id: int | None) -> Iterator[HistoryPage]:
    at, skip = begin, 0
    while at < end:
        page = _ask(caller, History(_split(name)[1], Whence.SEQUENCE, at, end, skip, PENDING_PAGE_MAX, log_id))
        yield page
        if (page.next, page.next_skip) == (at, skip):
            return  # the log has nothing more
        at, skip = page.next, page.next_skip


def _is_wanted(job: DelayJob, event: PastEvent) -> bool:
    is_in_time = event.at_ms >= job.since_ms and (job.until_ms is None or event.at_ms < job.until_ms)
    return is_in_time and is_meant(event.subject, job.subjects)


def frame(events: list[PastEvent], columns: Columns, group: str) -> pa.RecordBatch:
    schema = arrow_schema(columns)

    def column(name: str) -> pa.Array:
        match name:
            case "event":
                return pa.array([_WORDS[each.kind] for each in events], pa.string())
            case "broker_group":
                return repeated(group, len(events))
            case "at":
                return times(np.array([each.at_ms for each in events], np.int64))
            case "due_at":
                has_none = np.array([each.due_ms is None for each in events])
                return times(np.array([each.due_ms or 0 for each in events], np.int64), has_none)
            case "detail":
                return pa.array([each.target or None for each in events], pa.string())
            case "subject" | "first_sequence" | "count" | "position" | "id" | "key":
                return pa.array([getattr(each, name) for each in events], schema.field(name).type)
            case _:
                return pa.nulls(len(events), schema.field(name).type)

    return pa.RecordBatch.from_arrays([column(name) for name, _ in columns], schema=schema)


def _gone(group: str) -> DataLoss:
    return DataLoss(
        f"the delay servers of group {group} are not there any more, and not all of their events were read: begin with "
        'a new checkpoint, or accept the loss with option("failOnDataLoss", "false")'
    )


def _ask(caller: BlockingClient, asked: History) -> HistoryPage:
    try:
        return caller.ask(asked, HistoryPage)
    except Refused as refused:
        if refused.code is Code.FENCED:
            raise other_log("delayed messages", caller.where) from refused
        raise FairwayError(
            f"the server at {caller.where} does not say what happened to delayed messages: {refused}"
        ) from refused
