"""Redrive: dead letters of a group back to that group, through its private inbox.

They are copied, each identified by its place in the dead-letter subject (`copies`): so what was redriven is known from
the inbox's consume log, a second redrive does not repeat it, and one that a crash interrupted goes on where it stood.
The answer comes when all of them are durable; the rate is a property of the inbox, and durable too.

Each group has an actor for it. A turn copies out of one batch, or looks at a number of them.
"""

from __future__ import annotations

from itertools import groupby, islice

from fairway import batch, limits
from fairway.broker.copies import CopiedRanges, encoded, stream_of, taken_from
from fairway.broker.desk import GroupCoordinator
from fairway.broker.errands import BackgroundTask
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.errors import Code, FairwayError, Refused
from fairway.names import Subject
from fairway.protocol import ControlMessage
from fairway.protocol.admin import Redrive, Redriven
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.consume_log import ConsumeLogEntry

_ENTRIES_PER_TURN = 1_000  # looked at; those that were redriven before cost no more


class _RedriveJob(BackgroundTask):
    """One request on its way."""

    def __init__(
        self, request: ServedRequest[ControlMessage], message: Redrive, host: GroupHost, dead: Subject
    ) -> None:
        self.request = request
        self.message = message
        self.host = host
        self.dead = dead
        self.wanted = None if message.ids is None else {batch.MessageId.parse(text) for text in message.ids}
        self.at = 0  # in the dead-letter subject
        self.end = 0
        self.found: set[batch.MessageId] = set()
        self.count = 0
        self.undos = 0  # of the log when it began

    @property
    def unknown(self) -> list[str]:
        return [text for text in self.message.ids or [] if batch.MessageId.parse(text) not in self.found]


class RedriveProcessor:
    """Handles REDRIVE. `redriven` counts messages."""

    def __init__(self, desk: GroupCoordinator, inboxes: Inboxes) -> None:
        self._desk = desk
        self._inboxes = inboxes
        self.redriven = 0

    def begin(self, request: ServedRequest[ControlMessage], message: Redrive) -> None:
        if message.ids is not None and len(message.ids) > limits.REDRIVE_IDS_MAX:
            raise Refused(Code.TOO_LARGE, f"{len(message.ids)} ids: at most {limits.REDRIVE_IDS_MAX} in one request")
        host = self._desk.host(message.subject, message.group)
        log = self._desk.store.messages
        job = _RedriveJob(request, message, host, Subject.dead_letters(host.name, self._desk.name_of(host.subject_id)))
        dead = log.views.subjects.find(job.dead)
        if dead is None:
            request.respond(Redriven(0, job.unknown))
            return
        job.undos = len(log.log.flusher.undone_from)
        job.at, job.end = log.first_sequence(dead.id), log.end_sequence(dead.id)

        def start(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                self._desk.scheduler.dispatch(("redrive", host.id), job, self)
            except FairwayError as error:
                request.fail(error)

        self._inboxes.when_open(host, start)

    # --- turns -------------------------------------------------------------------------------------------------------

    def process(self, job: _RedriveJob, actor: Actor) -> TurnResult:
        """The next batch with something to redrive, or the end."""
        if job.request.is_cancelled:
            job.request.end()
            return TurnResult.DONE
        log = self._desk.store.messages
        dead = log.views.subjects.find(job.dead)
        if dead is None or job.at >= job.end or job.wanted == job.found:
            self._finish(job)
            return TurnResult.DONE
        copies = redriven(self._desk, job.host, job.dead)
        for entry in islice(log.readable(dead.id, job.at), _ENTRIES_PER_TURN):
            if entry.first_sequence >= job.end:
                job.at = job.end
                return TurnResult.AGAIN
            if copies.missing(entry.first_sequence, entry.count):
                self._redrive(job, dead.id, entry, copies, actor)
                job.at = entry.end_sequence
                return TurnResult.AGAIN
            job.at = entry.end_sequence
        if next(log.readable(dead.id, job.at), None) is None:
            job.at = job.end
        return TurnResult.AGAIN

    def expire(self, job: _RedriveJob, expiry: Expiry) -> None:
        job.request.expire(expiry)

    def fail(self, job: _RedriveJob, error: Exception) -> None:
        job.request.fail(error)

    def _redrive(
        self, job: _RedriveJob, dead_id: int, entry: ConsumeLogEntry, copies: CopiedRanges, actor: Actor
    ) -> None:
        for stored in self._desk.store.messages.read_entries(dead_id, [entry]):
            actor.charge(size_bytes=len(stored.data))
            source = batch.decode(stored.data)
            ids = source.ids()
            chosen = [
                index
                for first, count in copies.missing(entry.first_sequence, entry.count)
                for index in range(first - entry.first_sequence, first - entry.first_sequence + count)
                if job.wanted is None or ids[index] in job.wanted
            ]
            for first, count in _runs(chosen):
                self._copy(job, source, entry.first_sequence, first, count, copies)
            job.found.update(ids[index] for index in chosen)
            job.count += len(chosen)

    def _copy(
        self, job: _RedriveJob, source: batch.Batch, base: int, first: int, count: int, copies: CopiedRanges
    ) -> None:
        sequence = base + first
        stream = stream_of(job.dead, job.host.name)
        data = encoded(taken_from(source, first, count), source.header, stream=stream, sequence=sequence)
        self._desk.store.produce_own(self._inboxes.subject_of(job.host), data)
        copies.add(sequence, count)

    def _finish(self, job: _RedriveJob) -> None:
        inbox = job.host.inbox

        def durable(outcome: FairwayError | None) -> None:
            if outcome is not None:
                job.request.settle(outcome, Redriven(0, []))
                return
            self.redriven += job.count
            rated = None if inbox is None else self._desk.set_rate(inbox, job.message.rate_per_s)
            answer = Redriven(job.count, job.unknown)
            self._desk.when_durable(rated, lambda told: job.request.settle(told, answer))
            self._desk.scheduler.wake(job.host.key)

        log = self._desk.store.messages.log
        log.flusher.when_durable(log.end, durable, job.undos)  # with what a request before this one had begun


def redriven(desk: GroupCoordinator, host: GroupHost, dead: Subject) -> CopiedRanges:
    """Which of a group's dead letters its inbox holds, by this life and those before it."""
    if host.inbox is None:
        return CopiedRanges(desk.store.messages, 0, 0)
    if host.redriven is None:
        host.redriven = CopiedRanges(desk.store.messages, host.inbox.subject_id, stream_of(dead, host.name))
    host.redriven.refresh()
    return host.redriven


def _runs(indexes: list[int]) -> list[tuple[int, int]]:
    """Ascending indexes as (first, count)."""
    runs = []
    for _, run in groupby(enumerate(indexes), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append((members[0], len(members)))
    return runs
