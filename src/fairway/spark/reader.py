"""Cuts ranges of sequences into tasks, and reads a task's ranges.

`cut` is pure arithmetic: large ranges are cut, small ranges share a task. `read` scans a task's ranges, and asks for
the next scan before it makes frames of the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from fairway.errors import Code, FairwayError, Refused
from fairway.limits import MIB
from fairway.protocol import Bytes
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.runtime import host
from fairway.runtime.host import spare_the_collector
from fairway.spark.connection import NS, BlockingClient, Ticket
from fairway.spark.frames import Columns, Framer, RowFilter
from fairway.spark.server_groups import BROKER_GROUP, ServerGroupAddress, SubjectPart, caller_to

SPLIT_BYTES: Final = 32 * MIB  # a task costs about 30 ms, and reads 32 MiB in 150 ms
TASKS_MAX: Final = 10_000  # planning more would take all of the driver's time


class ScanRange(NamedTuple):
    """Messages of one subject in one broker group, and about how large each is in the log."""

    subject: str
    begin: int
    end: int
    message_bytes: float = 100.0
    broker_group: str = BROKER_GROUP

    @property
    def part(self) -> SubjectPart:
        return SubjectPart(self.subject, self.broker_group)

    @property
    def size(self) -> float:
        return (self.end - self.begin) * self.message_bytes


class ReadJob(NamedTuple):
    """What all tasks that read one broker group have in common. A copy travels with each task."""

    place: ServerGroupAddress
    log_id: int
    columns: Columns
    row_filter: RowFilter
    fail_on_data_loss: bool


@dataclass
class ReadSplit(InputPartition):
    """A task."""

    job: ReadJob
    ranges: tuple[ScanRange, ...]


def cut(ranges: Iterable[ScanRange], min_partitions: int | None) -> list[tuple[ScanRange, ...]]:
    """The ranges of each task, in the order of the log, all of one broker group. The result is deterministic, so that a
    repeated task reads the same."""
    wanted = [each for each in ranges if each.end > each.begin]
    total = sum(each.size for each in wanted)
    size = max(min(SPLIT_BYTES, total / (min_partitions or 1)), total / TASKS_MAX)
    return list(_packed(list(_pieces(wanted, size)), size if min_partitions is None else 0))


def _pieces(ranges: Sequence[ScanRange], size: float) -> Iterator[ScanRange]:
    for each in ranges:
        count = max(1, min(round(each.size / size + 0.49), each.end - each.begin))
        messages = each.end - each.begin
        edges = [each.begin + messages * part // count for part in range(count + 1)]
        for begin, end in pairwise(edges):
            yield each._replace(begin=begin, end=end)


def _packed(pieces: Sequence[ScanRange], size: float) -> Iterator[tuple[ScanRange, ...]]:
    """Put several pieces into a task while their sum stays within `size`."""
    task: list[ScanRange] = []
    for piece in sorted(pieces, key=lambda each: each.broker_group):
        is_elsewhere = bool(task) and task[-1].broker_group != piece.broker_group
        if is_elsewhere or (task and sum(each.size for each in task) + piece.size > size):
            yield tuple(task)
            task = []
        task.append(piece)
    if task:
        yield tuple(task)


SCAN_BYTES: Final = 4 * MIB  # in one answer; the broker has a bound of its own, 1 MiB unless configured
_WAIT_MS: Final = 1_000  # in one request
_NAP_MS: Final = 100


class DataLoss(FairwayError):
    """Wanted messages are gone; the message names them and the remedy."""


def read(split: ReadSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with caller_to(split.job.place) as caller:
        for each in split.ranges:
            yield from _read_range(caller, split.job, each)


def _read_range(caller: BlockingClient, job: ReadJob, wanted: ScanRange) -> Iterator[pa.RecordBatch]:
    framer = Framer(wanted.subject, wanted.broker_group, job.columns, job.row_filter)
    at = wanted.begin
    ticket: Ticket | None = _ask(caller, job, wanted, at)
    while ticket is not None:
        scanned, attachments = _taken(caller, job, wanted, ticket)
        reached = scanned.committed_end
        if reached < wanted.end and job.place.waits_s:
            reached = awaited(caller, wanted.subject, wanted.end, job.log_id, job.place.waits_s)
        if job.fail_on_data_loss and scanned.first_sequence > at:
            raise lost(wanted.subject, at, min(scanned.first_sequence, wanted.end))
        if job.fail_on_data_loss and reached < wanted.end:
            raise cut_short(wanted.subject, reached, wanted.end)
        is_stuck = scanned.next_sequence <= at and reached == scanned.committed_end
        at = max(scanned.next_sequence, scanned.first_sequence)
        is_done = is_stuck or at >= min(wanted.end, reached)  # stuck: only a hole is left up to the end
        ticket = None if is_done else _ask(caller, job, wanted, at)
        for batch, data in zip(scanned.batches, attachments, strict=True):
            yield from framer.add(data, batch.first_sequence, batch.appended_ms, wanted.begin, wanted.end)
    yield from framer.rest()


def _taken(caller: BlockingClient, job: ReadJob, wanted: ScanRange, ticket: Ticket) -> tuple[Scanned, Sequence[Bytes]]:
    try:
        return caller.take(ticket, Scanned)
    except Refused as refused:
        if refused.code is Code.NO_SUCH_SUBJECT and job.place.waits_s:  # this copy does not know the subject yet
            return Scanned([], wanted.begin, 0, 0, job.log_id, 0), ()
        raise explained(refused, wanted.subject, caller.where) from refused


def awaited(caller: BlockingClient, subject: str, end: int, log_id: int | None, wait_s: float) -> int:
    """Wait until the subject on this copy reaches `end`, or for `wait_s`; returns where the subject ends by then. A
    replica is a moment behind the master. A new master is behind the old one until it knows how much of its log is
    committed."""
    until_ns = caller.now_ns + int(wait_s * NS)
    while True:
        left_ms = max((until_ns - caller.now_ns) * 1_000 // NS, 0)
        asked = Scan(subject, Whence.SEQUENCE, max(end - 1, 0), None, 0, log_id, min(left_ms, _WAIT_MS))
        try:
            found = caller.ask(asked, Scanned).committed_end
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_SUBJECT:
                raise explained(refused, subject, caller.where) from refused
            found = 0
            host.sleep(min(left_ms, _NAP_MS) / 1_000)
        if found >= end or not left_ms:
            return found


def _ask(caller: BlockingClient, job: ReadJob, wanted: ScanRange, at: int) -> Ticket:
    return caller.put(
        Scan(wanted.subject, Whence.SEQUENCE, at, wanted.end, SCAN_BYTES, job.log_id, 0, list(job.row_filter.tags))
    )


def lost(subject: str, begin: int, end: int) -> DataLoss:
    return DataLoss(
        f"messages {begin} to {end - 1} of {subject} are no longer stored: retention has taken them. Begin later "
        '(option starting), keep messages longer, or accept the loss with option("failOnDataLoss", "false")'
    )


def cut_short(subject: str, at: int, end: int) -> DataLoss:
    return DataLoss(
        f"the log of {subject} ends at {at}, and messages up to {end - 1} were seen there before: the broker has lost "
        "its newest messages (a power cut with durability memory, or an older copy of its data). Begin with a new "
        'checkpoint, or accept the loss with option("failOnDataLoss", "false")'
    )


def other_log(subject: str, where: str) -> DataLoss:
    return DataLoss(
        f"the log of {subject} at {where} is another one than this read began with: the broker has new data. Begin "
        'with a new checkpoint, or accept the loss with option("failOnDataLoss", "false")'
    )


def explained(refused: Refused, subject: str, where: str) -> FairwayError:
    """A refusal as an error that names the subject and the remedy."""
    if refused.code is Code.FENCED:
        return other_log(subject, where)
    if refused.code is Code.NO_SUCH_SUBJECT:
        return FairwayError(
            f"no subject {subject!r} at {where}: nothing was ever sent to it. `fairway subjects` lists what is there"
        )
    return FairwayError(f"the broker at {where} will not read {subject}: {refused}")
