"""A task: scans of its ranges, one ahead of the one that is being made into frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from fairway.errors import Code, FairwayError, Refused
from fairway.limits import MIB
from fairway.protocol import Bytes
from fairway.protocol.admin import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.spark.calling import NS, BlockingClient, Ticket
from fairway.spark.frames import Framer
from fairway.spark.places import caller_to
from fairway.spark.splits import ReadJob, ReadSplit, ScanRange
from fairway.world import host
from fairway.world.wire import spare_the_collector

SCAN_BYTES: Final = 4 * MIB  # in one answer; the broker has a bound of its own, of 1 MiB unless set
_WAIT_MS: Final = 1_000  # in one question
_NAP_MS: Final = 100


class DataLoss(FairwayError):
    """Messages that were asked for are gone; the sentence names them and the remedy."""


def read(split: ReadSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow."""
    spare_the_collector()
    with caller_to(split.job.place) as caller:
        for each in split.ranges:
            yield from _read_range(caller, split.job, each)


def _read_range(caller: BlockingClient, job: ReadJob, wanted: ScanRange) -> Iterator[pa.RecordBatch]:
    framer = Framer(wanted.subject, wanted.broker_group, job.columns, job.sieve)
    at = wanted.begin
    ticket: Ticket | None = _ask(caller, job, wanted, at)
    while ticket is not None:
        scanned, attachments = _taken(caller, job, wanted, ticket)
        reached = scanned.committed_end
        if reached < wanted.end and job.place.waits_s:
            reached = awaited(caller, wanted.subject, wanted.end, job.log_id, job.place.waits_s)
        _check(job, wanted, at, scanned, reached)
        is_stuck = scanned.next_sequence <= at and reached == scanned.committed_end
        at = max(scanned.next_sequence, scanned.first_sequence)
        is_done = is_stuck or at >= min(wanted.end, reached)  # stuck: a hole up to the end, there is nothing more
        ticket = None if is_done else _ask(caller, job, wanted, at)
        for batch, data in zip(scanned.batches, attachments, strict=True):
            yield from framer.add(data, batch.first_sequence, batch.appended_ms, wanted.begin, wanted.end)
    yield from framer.rest()


def _taken(caller: BlockingClient, job: ReadJob, wanted: ScanRange, ticket: Ticket) -> tuple[Scanned, Sequence[Bytes]]:
    try:
        return caller.take(ticket, Scanned)
    except Refused as refused:
        if refused.code is Code.NO_SUCH_SUBJECT and job.place.waits_s:  # a copy that has not heard of it yet
            return Scanned([], wanted.begin, 0, 0, job.log_id, 0), ()
        raise explained(refused, wanted.subject, caller.where) from refused


def awaited(caller: BlockingClient, subject: str, end: int, log_id: int | None, wait_s: float) -> int:
    """Where the subject ends on this copy, once that is at `end`, or after so long. A copy is a moment behind the
    master, and a new master behind the one before, until it knows how much of its log is committed."""
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


def _check(job: ReadJob, wanted: ScanRange, at: int, scanned: Scanned, reached: int) -> None:
    if job.fail_on_data_loss and scanned.first_sequence > at:
        raise lost(wanted.subject, at, min(scanned.first_sequence, wanted.end))
    if job.fail_on_data_loss and reached < wanted.end:
        raise cut_short(wanted.subject, reached, wanted.end)


def _ask(caller: BlockingClient, job: ReadJob, wanted: ScanRange, at: int) -> Ticket:
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
