"""Ranges of sequences into tasks: large ones are cut, small ones share a task. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from fairway.limits import MIB
from fairway.spark.frames import Columns, RowFilter
from fairway.spark.places import BROKER_GROUP, ServerGroupAddress, SubjectPart

SPLIT_BYTES: Final = 32 * MIB  # a task costs about 30 ms, and reads so much in 150
TASKS_MAX: Final = 10_000  # a driver that plans more is busy with nothing else


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
    """What is the same for all tasks that read one broker group: it travels with each, for a task has nothing else."""

    place: ServerGroupAddress
    log_id: int
    columns: Columns
    sieve: RowFilter
    fail_on_data_loss: bool


class ReadSplit(InputPartition):
    """What one task reads."""

    def __init__(self, job: ReadJob, ranges: tuple[ScanRange, ...]) -> None:
        super().__init__(ranges)
        self.job = job
        self.ranges = ranges


def cut(ranges: Iterable[ScanRange], min_partitions: int | None) -> list[tuple[ScanRange, ...]]:
    """The ranges of each task, in the order of the log, all of one broker group; deterministic, so that a task that is
    repeated reads the same."""
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
    """Several pieces to a task, as long as they are no larger than one."""
    task: list[ScanRange] = []
    for piece in sorted(pieces, key=_group_of):
        is_elsewhere = bool(task) and task[-1].broker_group != piece.broker_group
        if is_elsewhere or (task and sum(each.size for each in task) + piece.size > size):
            yield tuple(task)
            task = []
        task.append(piece)
    if task:
        yield tuple(task)


def _group_of(piece: ScanRange) -> str:
    return piece.broker_group
