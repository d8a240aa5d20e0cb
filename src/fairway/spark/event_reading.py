"""A task of `fairway.events`: stretches of the action log, and of the indexes of subjects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from fairway.client.trail_names import NameResolver, Resolver
from fairway.errors import Refused
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed, Retrace, Retraced
from fairway.spark.calling import NS, BlockingClient
from fairway.spark.event_frames import ActionFramer, Columns, EventFilter, produced
from fairway.spark.event_log import WHAT, SparkActionLogReader, asking
from fairway.spark.event_options import is_meant
from fairway.spark.places import ServerGroupAddress, caller_to
from fairway.spark.reading import awaited, explained, lost
from fairway.spark.splits import ScanRange
from fairway.storage.record import RecordKind
from fairway.world.wire import spare_the_collector

ACTIONS: Final = ""  # in place of a subject, in a range: it is positions of the action log
ENTRIES_MAX: Final = 8_192
_WAIT_MS: Final = 1_000  # in one question


class EventJob(NamedTuple):
    """What is the same for all tasks that read one broker group."""

    place: ServerGroupAddress
    actions_id: int
    messages_id: int
    columns: Columns
    groups: frozenset[str] | None
    subjects: tuple[str, ...]
    is_strict: bool


class EventSplit(InputPartition):
    """What one task reads."""

    def __init__(self, job: EventJob, ranges: tuple[ScanRange, ...]) -> None:
        super().__init__(ranges)
        self.job = job
        self.ranges = ranges


def read(split: EventSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with caller_to(split.job.place) as caller:
        for each in split.ranges:
            yield from (_actions if each.subject == ACTIONS else _produced)(caller, split.job, each)


def awaited_actions(caller: BlockingClient, end: int, log_id: int | None, wait_s: float) -> int:
    """Where the action log ends on this copy, once that is at `end`, or after so long."""
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
    trail = SparkActionLogReader(caller, job.actions_id, is_strict=job.is_strict)
    names = NameResolver()
    resolver = Resolver(
        asking(caller), SparkActionLogReader(caller, job.actions_id, is_strict=False), names, wanted.begin
    )
    meant = EventFilter(job.groups, lambda name: is_meant(name, job.subjects))
    framer = ActionFramer(wanted.broker_group, job.columns, meant, names, resolver.resolve)
    for each in trail.records(wanted.begin, wanted.end):
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
