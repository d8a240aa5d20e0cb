"""A task: scans of its ranges, one ahead of the one that is being made into frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from fairway.client import url
from fairway.errors import Code, FairwayError, Refused
from fairway.limits import MIB
from fairway.protocol.admin import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.spark.calling import Caller, Ticket
from fairway.spark.frames import Framer
from fairway.spark.options import BROKER_GROUP
from fairway.spark.splits import Job, Range, Split
from fairway.world.wire import spare_the_collector

SCAN_BYTES: Final = 4 * MIB  # in one answer; the broker has a bound of its own, of 1 MiB unless set


class DataLoss(FairwayError):
    """Messages that were asked for are gone; the sentence names them and the remedy."""


def read(split: Split) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with Caller(url.parse(split.job.url).brokers, split.job.patience_s) as caller:
        for each in split.ranges:
            yield from _read_range(caller, split.job, each)


def _read_range(caller: Caller, job: Job, wanted: Range) -> Iterator[pa.RecordBatch]:
    framer = Framer(wanted.subject, BROKER_GROUP, job.columns, job.sieve)
    at = wanted.begin
    ticket: Ticket | None = _ask(caller, job, wanted, at)
    while ticket is not None:
        try:
            scanned, attachments = caller.take(ticket, Scanned)
        except Refused as refused:
            raise explained(refused, wanted.subject, caller.where) from refused
        _check(job, wanted, at, scanned)
        is_stuck = scanned.next_sequence <= at  # a hole up to the end: there is nothing more
        at = max(scanned.next_sequence, scanned.first_sequence)
        is_done = is_stuck or at >= min(wanted.end, scanned.committed_end)
        ticket = None if is_done else _ask(caller, job, wanted, at)
        for batch, data in zip(scanned.batches, attachments, strict=True):
            yield from framer.add(data, batch.first_sequence, batch.appended_ms, wanted.begin, wanted.end)
    yield from framer.rest()


def _check(job: Job, wanted: Range, at: int, scanned: Scanned) -> None:
    if job.fail_on_data_loss and scanned.first_sequence > at:
        raise lost(wanted.subject, at, min(scanned.first_sequence, wanted.end))
    if job.fail_on_data_loss and scanned.committed_end < wanted.end:
        raise cut_short(wanted.subject, scanned.committed_end, wanted.end)


def _ask(caller: Caller, job: Job, wanted: Range, at: int) -> Ticket:
    return caller.put(
        Scan(wanted.subject, Whence.SEQUENCE, at, wanted.end, SCAN_BYTES, job.log_id, 0, list(job.sieve.tags))
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
    """A refusal in words that name the subject and the remedy."""
    if refused.code is Code.FENCED:
        return other_log(subject, where)
    if refused.code is Code.NO_SUCH_SUBJECT:
        return FairwayError(
            f"no subject {subject!r} at {where}: nothing was ever sent to it. `fairway subjects` lists what is there"
        )
    return FairwayError(f"the broker at {where} will not read {subject}: {refused}")
