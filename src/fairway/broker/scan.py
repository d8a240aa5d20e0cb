"""Scan: committed batches of a subject, without a group: for Spark, tools and replay.

Scans have actors of their own, one per subject, with a low weight: a job that reads everything cannot disturb
consumers."""

from __future__ import annotations

from fairway.broker.desk import Desk
from fairway.broker.reading import Reader
from fairway.errors import Code, Refused
from fairway.protocol.admin import Scan, Scanned
from fairway.protocol.messages import AttachedBatch, Whence
from fairway.scheduling import Actor, Expiry, Verdict
from fairway.serving.requests import ServedRequest
from fairway.storage.consume_log import Entry

SCAN_WEIGHT = 0.1  # a tenth of a group's share, while groups want theirs
_ENTRIES_MAX = 4_096  # looked at in one slice


def place(desk: Desk, subject_id: int, whence: Whence, value: int) -> int:
    """The sequence that a place in a subject stands for."""
    log = desk.store.messages
    if whence is Whence.EARLIEST:
        return log.first_sequence(subject_id)
    if whence is Whence.LATEST:
        return log.end_sequence(subject_id)
    if whence is Whence.TIME:
        found = log.views.entries.sequence_at(subject_id, value, log.log.committed_end)
        return log.end_sequence(subject_id) if found is None else found
    return value


class ScanProcessor:
    """Handles SCAN."""

    def __init__(self, desk: Desk, reader: Reader) -> None:
        self._desk = desk
        self._reader = reader

    def process(self, request: ServedRequest[Scan], actor: Actor) -> Verdict:
        message = request.message
        log = self._desk.store.messages
        if message.log_id is not None and message.log_id != log.log.log_id:
            raise Refused(Code.FENCED, "this log is another one than the scan began with: begin anew")
        subject = self._desk.subject(message.subject)
        begin = place(self._desk, subject.id, message.whence, message.value)
        if not self._reader.is_indexed(actor, subject.id, begin):
            return Verdict.AGAIN
        found = self._reader.prefix(actor, subject.id, self._choose(subject.id, begin, message))
        if found is None:
            return Verdict.AGAIN
        wanted, batches = found
        attachments = [each.data for each in batches]
        actor.charge(size_bytes=sum(map(len, attachments)))
        request.respond(
            Scanned(
                [AttachedBatch(each.entry.first_sequence, each.entry.appended_ms) for each in batches],
                wanted[-1].end_sequence if wanted else begin,
                log.first_sequence(subject.id),
                log.end_sequence(subject.id),
                log.log.log_id,
                log.log.epoch,
            ),
            attachments,
        )
        return Verdict.DONE

    def _choose(self, subject_id: int, begin: int, message: Scan) -> list[Entry]:
        wanted: list[Entry] = []
        size = 0
        if not message.bytes_max:
            return wanted
        for entry in self._desk.store.messages.readable(subject_id, begin):
            if message.end is not None and entry.first_sequence >= message.end:
                break
            if wanted and (size + entry.size > message.bytes_max or len(wanted) >= _ENTRIES_MAX):
                break
            wanted.append(entry)
            size += entry.size
        return wanted

    def expire(self, request: ServedRequest[Scan], expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: ServedRequest[Scan], error: Exception) -> None:
        request.fail(error)
