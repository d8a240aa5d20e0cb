"""Plans and reads events of broker groups: action logs, and the indexes of subjects.

`SparkActionLogReader` is `fairway.client.action_log_reader` over a Spark conversation, with errors that name Spark's
options. `EventBroker` and `EventPlanner` answer the driver: where action logs begin and end, and what is new. `read`
runs in a task: it reads stretches of the action log, and of the indexes of subjects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from fairway.client import action_log_reader
from fairway.client.action_log_reader import Answer, NameResolver, Resolver
from fairway.errors import FairwayError, Misuse, Refused
from fairway.protocol.admin_messages import Depth, Describe, Described, Index, Indexed, Named, Retrace, Retraced
from fairway.protocol.messages import Whence
from fairway.runtime.host import spare_the_collector
from fairway.spark.connection import NS, BlockingClient, Ticket, wait_any_of
from fairway.spark.events.frames import ActionFramer, EventFilter, produced
from fairway.spark.frames import Columns
from fairway.spark.options import HELD, EventOptions, Where, is_meant
from fairway.spark.plan import BasePlanner, BrokerSession, SubjectExtent
from fairway.spark.reader import SPLIT_BYTES, DataLoss, ScanRange, awaited, cut_short, explained, lost, other_log
from fairway.spark.server_groups import BROKER_GROUP, ServerGroupAddress, SubjectPart, caller_to
from fairway.storage.action_log import walk
from fairway.storage.index_file import ENTRY_BYTES
from fairway.storage.record import RecordKind

WHAT: Final = "actions"
_ACCEPT: Final = 'or accept the loss with option("failOnDataLoss", "false")'


class SparkActionLogReader(action_log_reader.ActionLogReader):
    """Reads the action log in order. Strict: missing or damaged data is an error; otherwise it is skipped."""

    def __init__(self, caller: BlockingClient, log_id: int | None, *, is_strict: bool) -> None:
        self._caller = caller
        super().__init__(self._put, log_id, is_strict=is_strict)

    def _put(self, asked: Retrace) -> Answer:
        ticket = self._caller.put(asked)
        return lambda: self._caller.take(ticket, Retraced)[0]

    def other_log(self) -> FairwayError:
        return other_log(WHAT, self._caller.where)

    def refused(self, refused: Refused) -> FairwayError:
        return FairwayError(f"the broker at {self._caller.where} will not show its actions: {refused}")

    def cut_short(self, at: int, end: int) -> FairwayError:
        return cut_short(WHAT, at, end)

    def damaged(self, position: int, why: str) -> FairwayError:
        return DataLoss(
            f"the action log is damaged at position {position} ({why}): `fairway verify` shows how much is. Begin "
            f"later (option starting), {_ACCEPT}"
        )


# Per message in an index: a batch has about ten. A wrong estimate only makes tasks larger or smaller.
_MESSAGE_BYTES: Final = ENTRY_BYTES / 10


class EventBroker(BrokerSession):
    """A driver's conversation with one broker group, about its action log too."""

    def __init__(self, place: ServerGroupAddress, *, is_strict: bool) -> None:
        super().__init__(place)
        self._action_log = SparkActionLogReader(self.caller, None, is_strict=is_strict)
        self._watch: Ticket | None = None

    def actions(self) -> Retraced:
        """The id, the beginning and the end of the action log."""
        return self._action_log.look(Whence.LATEST)

    def position(self, place: Where) -> int:
        """The position that a place stands for now."""
        if place.whence is Whence.TIME:
            return self._action_log.position_at(place.value)
        found = self.actions()
        return found.first_position if place.whence is Whence.EARLIEST else found.committed_end

    def awaited_position(self, end: int) -> int:
        """Wait until this copy has the action log up to `end`; returns where the log ends here by then."""
        return awaited_actions(self.caller, end, None, self._place.waits_s)

    def now_ms(self) -> int:
        return self.caller.ask(Describe(Depth.SUBJECTS, HELD), Described).broker.now_ms

    def boundary(self, position: int, end: int) -> int:
        return end if position >= end else self._action_log.boundary(position, end)

    def reach_actions(self, begin: int, end: int, rows: int) -> tuple[int, int]:
        """The position up to which the action log has `rows` events, and how many it has: whole records, at least one.
        The driver counts the events itself, so it reads as much of the log as the micro-batch will."""
        counted = 0
        for each in self._action_log.records(begin, end):
            more = (
                sum(action.ranges or 1 for action in walk(each.body)) if each.header.kind == RecordKind.ACTIONS else 0
            )
            if counted and counted + more > rows:
                return each.header.position, counted
            counted += more
        return end, counted

    def reach_entries(self, subject: str, begin: int, end: int, entries: int) -> int:
        """The sequence up to which `entries` batches reach."""
        at = begin
        while at < end and entries > 0:
            asked = Index(subject, Whence.SEQUENCE, at, end, min(entries, ENTRIES_MAX), None, True)
            found = self.caller.ask(asked, Indexed)
            if found.next_sequence <= at:
                return end
            at, entries = found.next_sequence, entries - max(found.entries, 1)
        return min(at, end)

    def pieces(self, begin: int, end: int, min_partitions: int | None) -> list[ScanRange]:
        """A stretch of the action log, cut where records begin."""
        size = min(SPLIT_BYTES, (end - begin) // (min_partitions or 1) + 1)
        ranges = []
        while begin < end:
            edge = self.boundary(begin + size, end)
            ranges.append(ScanRange(ACTIONS, begin, edge, 1.0, self._place.broker_group))
            begin = edge
        return ranges

    def watch(self, position: int, wait_ms: int) -> Ticket:
        """A request that the broker answers when there is something behind this position. The request stays open from
        one wait to the next."""
        if self._watch is None or self._watch.is_answered():
            self._watch = self.caller.put(Retrace(Whence.SEQUENCE, position, 0, None, wait_ms))
        return self._watch


class EventPlanner(BasePlanner[EventBroker]):
    """A driver's conversations with broker groups about events."""

    def __init__(self, options: EventOptions) -> None:
        super().__init__(options.read, lambda place: EventBroker(place, is_strict=options.read.fail_on_data_loss))
        self._has_delayed = options.has_delayed

    def extents(self) -> dict[SubjectPart, SubjectExtent]:
        # With delayed messages a named subject need not exist yet: nothing may have been delivered to it so far.
        if self._has_delayed:
            groups = [BROKER_GROUP] if self.server_groups is None else list(self.server_groups.groups())
            stored = {
                SubjectPart(name, group): extent
                for group in groups
                for name, extent in self.broker(group).extents().items()
            }
        else:
            stored = super().extents()
        return {part: stored[part] for part in sorted(stored) if is_meant(part.subject, self._options.subjects)}

    def groups(self, parts: Mapping[SubjectPart, SubjectExtent]) -> list[str]:
        """The broker groups that hold any of these subjects; for a single broker its only group."""
        return [BROKER_GROUP] if self.server_groups is None else sorted({part.broker_group for part in parts})

    def held_ms(self, query: str) -> int:
        """When the query was first asked to begin at the latest place. The broker keeps that time as the cursor of a
        group with the query's name, on a subject without messages. There the time outlives driver and broker. In a
        cluster the first broker group keeps it, unless another group has it already."""
        names = [BROKER_GROUP] if self.server_groups is None else sorted(self.server_groups.groups())
        if not names:
            raise Misuse(f"no broker group is registered at {self.where}: start brokers, with --registry and --group")
        holding = next((name for name in names if self.broker(name).cursor(HELD, query) is not None), names[0])
        broker = self.broker(holding)
        now_ms = broker.now_ms()
        held_ms = broker.hold(HELD, query, Where(Whence.SEQUENCE, now_ms))
        if not held_ms:  # a driver died between making the group and setting its cursor
            broker.progress(HELD, query, now_ms)
        return held_ms or now_ms

    def wait_for_any(self, ends: Mapping[str, tuple[int, Mapping[str, int]]], wait_ms: int) -> None:
        """Wait until one of these broker groups has something behind its position or one of its ends, or for
        `wait_ms`."""
        waits = []
        for group, (position, sequences) in ends.items():
            broker = self.broker(group)
            waits.append((broker.caller, [broker.watch(position, wait_ms), *broker.poll(sequences, wait_ms)]))
        if waits:
            wait_any_of(waits, wait_ms / 1_000)


def of_subject(subject: str, begin: int, end: int, broker_group: str) -> ScanRange:
    return ScanRange(subject, begin, end, _MESSAGE_BYTES, broker_group)


ACTIONS: Final = ""  # stands in place of a subject in a range of positions of the action log
ENTRIES_MAX: Final = 8_192
_WAIT_MS: Final = 1_000  # in one request


class EventJob(NamedTuple):
    """What all tasks that read one broker group have in common."""

    place: ServerGroupAddress
    actions_id: int
    messages_id: int
    columns: Columns
    groups: frozenset[str] | None
    subjects: tuple[str, ...]
    is_strict: bool


@dataclass
class EventSplit(InputPartition):
    """A task."""

    job: EventJob
    ranges: tuple[ScanRange, ...]


def read(split: EventSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with caller_to(split.job.place) as caller:
        for each in split.ranges:
            yield from (_actions if each.subject == ACTIONS else _produced)(caller, split.job, each)


def awaited_actions(caller: BlockingClient, end: int, log_id: int | None, wait_s: float) -> int:
    """Wait until the action log of this copy reaches `end`, or for `wait_s`; returns where the log ends by then."""
    until_ns = caller.now_ns + int(wait_s * NS)
    at = wait_ms = 0
    while True:
        try:
            found = caller.ask(Retrace(Whence.SEQUENCE, at, 0, log_id, wait_ms), Retraced).committed_end
        except Refused as refused:
            raise explained(refused, WHAT, caller.where) from refused
        left_ms = max((until_ns - caller.now_ns) * 1_000 // NS, 0)
        if found >= end or not left_ms:
            return found
        at, wait_ms = found, min(left_ms, _WAIT_MS)


def _actions(caller: BlockingClient, job: EventJob, wanted: ScanRange) -> Iterator[pa.RecordBatch]:
    if job.place.waits_s:
        awaited_actions(caller, wanted.end, job.actions_id, job.place.waits_s)
    log = SparkActionLogReader(caller, job.actions_id, is_strict=job.is_strict)
    names = NameResolver()
    resolver = Resolver(
        lambda asked: caller.ask(asked, Named),
        SparkActionLogReader(caller, job.actions_id, is_strict=False),
        names,
        wanted.begin,
    )
    meant = EventFilter(job.groups, lambda name: is_meant(name, job.subjects))
    framer = ActionFramer(wanted.broker_group, job.columns, meant, names, resolver.resolve)
    for each in log.records(wanted.begin, wanted.end):
        resolver.meet(each)
        if each.header.kind == RecordKind.ACTIONS:
            yield from framer.add(each)
    yield from framer.rest()


def _produced(caller: BlockingClient, job: EventJob, wanted: ScanRange) -> Iterator[pa.RecordBatch]:
    if job.place.waits_s:
        awaited(caller, wanted.subject, wanted.end, job.messages_id, job.place.waits_s)
    at = wanted.begin
    while at < wanted.end:
        asked = Index(wanted.subject, Whence.SEQUENCE, at, wanted.end, ENTRIES_MAX, job.messages_id)
        try:
            found = caller.ask(asked, Indexed)
        except Refused as refused:
            raise explained(refused, wanted.subject, caller.where) from refused
        if job.is_strict and found.first_sequence > at:
            raise lost(wanted.subject, at, min(found.first_sequence, wanted.end))
        frame = produced(found.data, wanted.subject, wanted.broker_group, job.columns, wanted.begin, wanted.end)
        if frame.num_rows:
            yield frame
        if found.next_sequence <= at:
            return
        at = found.next_sequence
