"""Small files into large ones.

Files of one subject, broker group and date are in order of their sequences. Eight neighbours of about the same size
become one, which is of the next size up: so a row is written again a few times in all, not once per micro-batch. When a
later date has begun, whatever is still small on an earlier one is put together. `plan` decides; `run` writes and
commits, as many subjects and dates at once as make a batch: with hundreds of subjects a job for each takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from pyspark.sql import SparkSession

from fairway.limits import KIB, MIB
from fairway.spark.jobs.columns import by_file, frame, stage, to_stage
from fairway.spark.jobs.ledger import ArchiveRunRecord
from fairway.spark.jobs.manifest import ArchiveFile
from fairway.spark.places import SubjectPart

FAN_IN: Final = 8
TARGET_BYTES: Final = 128 * MIB  # what Spark reads in one task
SMALLEST_BYTES: Final = 64 * KIB
BATCH_BYTES: Final = 256 * MIB  # of one job: what is repeated after a crash


def plan(files: Iterable[ArchiveFile]) -> list[list[ArchiveFile]]:
    """Which files become one, each list in order."""
    ordered = sorted(files, key=lambda each: (*_part(each), each.date, each.first))
    latest = {_part(each): each.date for each in ordered}
    groups: list[list[ArchiveFile]] = []
    for (part, date), of_day in groupby(ordered, key=lambda each: (_part(each), each.date)):
        choose = _over if date < latest[part] else _same_size
        groups.extend(choose(of_day))
    return groups


def _part(file: ArchiveFile) -> SubjectPart:
    return SubjectPart(file.subject, file.broker_group)


def _same_size(files: Iterable[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    """Neighbours of one tier, eight at least."""
    for _, run in groupby(files, key=lambda each: _tier(each.size_bytes)):
        for group in _fitting(run):
            if len(group) >= FAN_IN:
                yield group


def _over(files: Iterable[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    """All neighbours that are small, on a day that is over."""
    for is_small, run in groupby(files, key=lambda each: each.size_bytes < TARGET_BYTES // 2):
        if is_small:
            yield from (group for group in _fitting(run) if len(group) > 1)


def _fitting(files: Iterable[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    """Cut where a file would become too large."""
    group: list[ArchiveFile] = []
    size_bytes = 0
    for each in files:
        if group and size_bytes + each.size_bytes > TARGET_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(each)
        size_bytes += each.size_bytes
    if group:
        yield group


def _tier(size_bytes: int) -> int:
    tier, limit = 0, SMALLEST_BYTES
    while size_bytes >= limit and limit < TARGET_BYTES:
        tier, limit = tier + 1, limit * FAN_IN
    return tier


def batches(groups: Iterable[list[ArchiveFile]]) -> list[list[list[ArchiveFile]]]:
    """Groups that are compacted by one job: none of them is of the same broker group, subject and date as another, so
    that each becomes one file; together they have `BATCH_BYTES`, or are one."""
    waiting = list(groups)
    made = []
    while waiting:
        taken: set[tuple[SubjectPart, str]] = set()
        batch: list[list[ArchiveFile]] = []
        size_bytes, left = 0, list[list[ArchiveFile]]()
        for group in waiting:
            place, size = (_part(group[0]), group[0].date), sum(each.size_bytes for each in group)
            if place in taken or (batch and size_bytes + size > BATCH_BYTES):
                left.append(group)
                continue
            taken.add(place)
            batch.append(group)
            size_bytes += size
        made.append(batch)
        waiting = left
    return made


def run(spark: SparkSession, ledger: ArchiveRunRecord) -> int:
    """Compact what is to be; how many files are gone by it."""
    fewer = 0
    for batch in batches(plan(ledger.state.files.values())):
        removed = [file for group in batch for file in group]
        rows = to_stage(frame(spark, ledger.files.root, removed))
        stage(by_file(rows, min(len(batch), spark.sparkContext.defaultParallelism)), ledger.room)
        staged = ledger.staged()
        ledger.commit(staged, (), removed)
        fewer += len(removed) - len(staged)
    return fewer
