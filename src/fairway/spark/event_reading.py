"""A task of `fairway.events`: stretches of the action log, and of the indexes of subjects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from fairway.client import url
from fairway.client.trail_names import Names, Resolver
from fairway.errors import Refused
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Index, Indexed
from fairway.spark import event_delay
from fairway.spark.calling import Caller
from fairway.spark.event_delay import DelayJob
from fairway.spark.event_frames import ActionFramer, Columns, Wanted, produced
from fairway.spark.event_log import Trail, asking
from fairway.spark.event_options import is_meant
from fairway.spark.options import BROKER_GROUP
from fairway.spark.reading import explained, lost
from fairway.spark.splits import Range
from fairway.storage.record import Kind
from fairway.world.wire import spare_the_collector

ACTIONS: Final = ""  # in place of a subject, in a range: it is positions of the action log
ENTRIES_MAX: Final = 8_192


class EventJob(NamedTuple):
    """What is the same for all tasks of a read."""

    url: str
    patience_s: int
    actions_id: int
    messages_id: int
    columns: Columns
    groups: frozenset[str] | None
    subjects: tuple[str, ...]
    is_strict: bool
    delay: DelayJob | None = None


class EventSplit(InputPartition):
    """What one task reads."""

    def __init__(self, job: EventJob, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.job = job
        self.ranges = ranges


def read(split: EventSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with Caller(url.parse(split.job.url).brokers, split.job.patience_s) as caller:
        for each in split.ranges:
            if split.job.delay is not None and each.subject in event_delay.LOGS:
                yield from event_delay.read(split.job.delay, each)
            else:
                yield from (_actions if each.subject == ACTIONS else _produced)(caller, split.job, each)


def _actions(caller: Caller, job: EventJob, wanted: Range) -> Iterator[pa.RecordBatch]:
    trail = Trail(caller, job.actions_id, is_strict=job.is_strict)
    names = Names()
    resolver = Resolver(asking(caller), Trail(caller, job.actions_id, is_strict=False), names, wanted.begin)
    meant = Wanted(job.groups, lambda name: is_meant(name, job.subjects))
    framer = ActionFramer(BROKER_GROUP, job.columns, meant, names, resolver.resolve)
    for each in trail.records(wanted.begin, wanted.end):
        resolver.meet(each)
        if each.header.kind == Kind.ACTIONS:
            yield from framer.add(each)
    yield from framer.rest()


def _produced(caller: Caller, job: EventJob, wanted: Range) -> Iterator[pa.RecordBatch]:
    at = wanted.begin
    while at < wanted.end:
        asked = Index(wanted.subject, Whence.SEQUENCE, at, wanted.end, ENTRIES_MAX, job.messages_id)
        try:
            found = caller.ask(asked, Indexed)
        except Refused as refused:
            raise explained(refused, wanted.subject, caller.where) from refused
        if job.is_strict and found.first_sequence > at:
            raise lost(wanted.subject, at, min(found.first_sequence, wanted.end))
        frame = produced(found.data, wanted.subject, BROKER_GROUP, job.columns, wanted.begin, wanted.end)
        if frame.num_rows:
            yield frame
        if found.next_sequence <= at:
            return
        at = found.next_sequence
