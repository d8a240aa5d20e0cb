"""Redrive: sends dead letters of a group back to that group, through its inbox.

The broker copies the dead letters and identifies each copy by its sequence in the dead-letter subject
(`message_copies`). So the inbox's consume log shows what was redriven: a second redrive repeats nothing, and a redrive
after a crash goes on where the first stopped. The answer comes when all copies are durable. The rate belongs to the
inbox, and is durable too.

Each group has an actor for this. A turn copies from one batch, or looks at up to 1,000 entries.
"""

from __future__ import annotations

from itertools import groupby, islice

from fairway import batch, limits
from fairway.broker.group_coordinator import BackgroundTask, GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.message_copies import CopiedRanges, encoded, stream_of, taken_from
from fairway.errors import Code, FairwayError, Refused
from fairway.names import Subject
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import Redrive, Redriven
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.consume_log import ConsumeLogEntry

_ENTRIES_PER_TURN = 1_000  # an entry that was redriven before costs only a look


class _RedriveJob(BackgroundTask):
    """One request under way."""

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
        self.undos = 0  # the log's count of undone appends when the job began

    @property
    def unknown(self) -> list[str]:
        return [text for text in self.message.ids or [] if batch.MessageId.parse(text) not in self.found]


class RedriveProcessor:
    """Handles REDRIVE. `redriven` counts messages."""

    def __init__(self, coordinator: GroupCoordinator, inboxes: Inboxes) -> None:
        self._coordinator = coordinator
        self._inboxes = inboxes
        self.redriven = 0

    def begin(self, request: ServedRequest[ControlMessage], message: Redrive) -> None:
        if message.ids is not None and len(message.ids) > limits.REDRIVE_IDS_MAX:
            raise Refused(Code.TOO_LARGE, f"{len(message.ids)} ids: at most {limits.REDRIVE_IDS_MAX} in one request")
        host = self._coordinator.host(message.subject, message.group)
        log = self._coordinator.store.messages
        job = _RedriveJob(
            request, message, host, Subject.dead_letters(host.name, self._coordinator.name_of(host.subject_id))
        )
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
                self._coordinator.scheduler.dispatch(("redrive", host.id), job, self)
            except FairwayError as error:
                request.fail(error)

        self._inboxes.when_open(host, start)

    # --- turns -------------------------------------------------------------------------------------------------------

    def process(self, job: _RedriveJob, actor: Actor) -> TurnResult:
        """Redrive the next batch with something to copy, or finish."""
        if job.request.is_cancelled:
            job.request.end()
            return TurnResult.DONE
        log = self._coordinator.store.messages
        dead = log.views.subjects.find(job.dead)
        if dead is None or job.at >= job.end or job.wanted == job.found:
            self._finish(job)
            return TurnResult.DONE
        copies = redriven(self._coordinator, job.host, job.dead)
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
        for stored in self._coordinator.store.messages.read_entries(dead_id, [entry]):
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
        self._coordinator.store.produce_own(self._inboxes.subject_of(job.host), data)
        copies.add(sequence, count)

    def _finish(self, job: _RedriveJob) -> None:
        inbox = job.host.inbox

        def durable(outcome: FairwayError | None) -> None:
            if outcome is not None:
                job.request.settle(outcome, Redriven(0, []))
                return
            self.redriven += job.count
            rated = None if inbox is None else self._coordinator.set_rate(inbox, job.message.rate_per_s)
            answer = Redriven(job.count, job.unknown)
            self._coordinator.when_durable(rated, lambda told: job.request.settle(told, answer))
            self._coordinator.scheduler.wake(job.host.key)

        log = self._coordinator.store.messages.log
        log.flusher.when_durable(log.end, durable, job.undos)  # with copies that an earlier request has begun


def redriven(coordinator: GroupCoordinator, host: GroupHost, dead: Subject) -> CopiedRanges:
    """Which of a group's dead letters its inbox holds, over all restarts."""
    if host.inbox is None:
        return CopiedRanges(coordinator.store.messages, 0, 0)
    if host.redriven is None:
        host.redriven = CopiedRanges(coordinator.store.messages, host.inbox.subject_id, stream_of(dead, host.name))
    host.redriven.refresh()
    return host.redriven


def _runs(indexes: list[int]) -> list[tuple[int, int]]:
    """Ascending indexes as (first, count)."""
    runs = []
    for _, run in groupby(enumerate(indexes), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append((members[0], len(members)))
    return runs
