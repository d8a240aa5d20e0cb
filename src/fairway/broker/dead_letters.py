"""Dead letters: messages that failed their last attempt, or were rejected, go to the group's dead-letter subject.

    dying, in the action log ──► durable ──► copied, with its history in headers ──► committed ──► DEAD

The broker copies a message only after "dying" is durable. Otherwise a crash could take "dying" back, and the message
would live beside its own dead letter. The broker writes DEAD only after the copy is committed. A crash in between
leaves the message dying: after the restart the broker finds the copy by its origin (`message_copies`) and only writes
DEAD. A full disk delays all this and loses nothing. Messages that cannot be read any more (rot) are marked dead without
a copy, and counted.

A redrive sends dead letters of a group back to that group, through its inbox. The broker copies the dead letters and
identifies each copy by its sequence in the dead-letter subject (`message_copies`). So the inbox's consume log shows
what was redriven: a second redrive repeats nothing, and a redrive after a crash goes on where the first stopped. The
answer comes when all copies are durable. The rate belongs to the inbox, and is durable too.

Each group has an actor for dead letters and one for redrives, so that a flood of them takes no more than one group's
share. A turn copies from one batch; a turn of a redrive may also look at up to 1,000 entries.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

from fairway import batch, limits
from fairway.broker.group_coordinator import BackgroundTask, GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.message_copies import CopiedRanges, MessageCopy, encoded, stream_of, taken_from, with_headers
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.groups import Dying, Range
from fairway.groups.attempts import count_of, decode, encode, joined
from fairway.names import Subject
from fairway.protocol import ControlMessage
from fairway.protocol.admin_messages import Redrive, Redriven
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.message_log import StoredBatch

HISTORY_SUBJECT = "fairway.dead.subject"  # the subject of the message
HISTORY_GROUP = "fairway.dead.group"
HISTORY_SEQUENCE = "fairway.dead.sequence"  # in that subject, on this broker group
HISTORY_ATTEMPTS = "fairway.dead.attempts"  # in all, over redrives too
HISTORY_REASON = "fairway.dead.reason"
HISTORY_TIME = "fairway.dead.time_ms"
HISTORY = "fairway.dead.history"  # each failed attempt: time, consumer, reason (`fairway.groups.attempts`)

_RETRY_S = 1.0  # between two tries on a full disk
_ATTEMPTS_SHOWN = (limits.HISTORY_ATTEMPTS_MAX, 2, 0)  # fewer attempts, step by step, where a batch has no room


_ENTRIES_PER_TURN = 1_000  # an entry that was redriven before costs only a look


class _DeadLetterBatch(NamedTuple):
    dying: Dying
    is_again: bool  # from before a restart: a copy may exist


class _DeadLetterQueue(BackgroundTask):
    """The messages of one group that wait for dead letter, in order."""

    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self.batches: deque[_DeadLetterBatch] = deque()
        self.is_under_way = False
        self.copies: CopiedRanges | None = None  # copies from before the restart; looked up once


class DeadLetterWriter:
    """Writes dead letters for all groups of a broker. `buried` counts all of them, `unreadable` those without a
    copy."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self._queues: dict[int, _DeadLetterQueue] = {}
        self.buried = 0
        self.unreadable = 0

    def mark_dead(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool = False) -> None:
        """Queue these messages once they are durably dying. `is_again`: copies may exist from before a restart."""
        if is_again:
            self._take(host, dying, is_again=True)
            return

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._take(host, dying, is_again=False)

        self._coordinator.when_durable(None, durable)

    def _take(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool) -> None:
        queue = self._queues.get(host.id)
        if queue is None:
            queue = self._queues[host.id] = _DeadLetterQueue(host)
        for each in dying:  # the coordinator has applied the decision by now, so the group knows their history
            known = each if each.history else each._replace(history=host.state_machine.history_of(each))
            queue.batches.append(_DeadLetterBatch(known, is_again))
        self._go_on(queue)

    # --- turns -------------------------------------------------------------------------------------------------------

    def _go_on(self, queue: _DeadLetterQueue) -> None:
        if queue.is_under_way or not queue.batches:
            return
        try:
            self._coordinator.scheduler.dispatch(("dead", queue.host.id), queue, self)
            queue.is_under_way = True
        except Refused:
            self._later(queue)

    def _later(self, queue: _DeadLetterQueue) -> None:
        queue.is_under_way = True
        self._coordinator.call_later(_RETRY_S, self._retry, queue)

    def _retry(self, queue: _DeadLetterQueue) -> None:
        queue.is_under_way = False
        self._go_on(queue)

    def process(self, queue: _DeadLetterQueue, actor: Actor) -> TurnResult:
        """Write the dead letters of one batch."""
        if not self._coordinator.groups.has(queue.host):  # the group was removed, its dead letters with it
            self._queues.pop(queue.host.id, None)
            return TurnResult.DONE
        item = queue.batches.popleft()
        try:
            done = self._mark_dead_some(queue, item, actor)
        except Refused:
            queue.batches.appendleft(item._replace(is_again=True))  # some copies may be on their way to the disk
            self._later(queue)
            return TurnResult.DONE
        rest = _less(item.dying.ranges, done)
        if rest:
            queue.batches.appendleft(item._replace(dying=item.dying._replace(first=rest[0][0], ranges=rest)))
        queue.is_under_way = bool(queue.batches)
        if queue.is_under_way:
            return TurnResult.AGAIN
        queue.copies = None
        self._queues.pop(queue.host.id, None)
        return TurnResult.DONE

    def expire(self, queue: _DeadLetterQueue, expiry: Expiry) -> None:
        """Do nothing: the broker stops, and the next start finds dying messages in the action log."""

    def fail(self, queue: _DeadLetterQueue, error: Exception) -> None:
        """Give up until the next start, after a failed disk or a bug: the messages stay dying."""
        self._queues.pop(queue.host.id, None)
        self._coordinator.remark(f"dead letters of group {queue.host.name} wait for a restart: {error}")

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _mark_dead_some(self, queue: _DeadLetterQueue, item: _DeadLetterBatch, actor: Actor) -> tuple[Range, ...]:
        """Handle the ranges in the first batch, or in the hole before it. Returns these ranges."""
        log = self._coordinator.store.messages
        subject_id = queue.host.subject_id
        ranges = item.dying.ranges
        entry = next(log.readable(subject_id, ranges[0][0]), None)
        if entry is None or entry.first_sequence > ranges[0][0]:
            return self._mark_dead_lost(
                queue, item, _within(ranges, 0, None if entry is None else entry.first_sequence)
            )
        found = log.read_entries(subject_id, [entry])
        if not found:
            return ()  # the damage is known from now on: look again
        actor.charge(size_bytes=len(found[0].data))
        parts = _within(ranges, entry.first_sequence, entry.end_sequence)
        self._copy(queue, item, found[0], parts)
        return parts

    def _mark_dead_lost(
        self, queue: _DeadLetterQueue, item: _DeadLetterBatch, parts: tuple[Range, ...]
    ) -> tuple[Range, ...]:
        count = sum(count for _, count in parts)
        self.unreadable += count
        self._coordinator.remark(
            f"group {queue.host.name} buried {count} messages from {parts[0][0]} on that cannot be read"
        )
        self._settle(queue.host, item, parts, is_lost=True)
        return parts

    def _copy(
        self, queue: _DeadLetterQueue, item: _DeadLetterBatch, stored: StoredBatch, parts: tuple[Range, ...]
    ) -> None:
        host = queue.host
        home = self._coordinator.name_of((host.main or host).subject_id)
        to = Subject.dead_letters(host.name, home)
        stream = stream_of(self._coordinator.name_of(host.subject_id), host.name)
        missing = self._missing(queue, item, to, stream, parts)
        source = batch.decode(stored.data)
        store = self._coordinator.store
        log = store.messages.log
        undos = len(log.flusher.undone_from)
        receipts = [
            store.produce_own(to, self._letter(host, home, item.dying, source, stored, part, stream))
            for part in missing
        ]

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._settle(host, item, parts)
                for receipt in receipts[-1:]:
                    self._coordinator.wake_subject(receipt.subject_id)
            elif isinstance(outcome, Refused):  # a full disk has undone some or all of it
                again = item.dying._replace(first=parts[0][0], ranges=parts)
                self._coordinator.call_later(_RETRY_S, partial(self.mark_dead, host, (again,), is_again=True))

        log.flusher.when_durable(log.end, durable, undos)

    def _missing(
        self, queue: _DeadLetterQueue, item: _DeadLetterBatch, to: Subject, stream: int, parts: tuple[Range, ...]
    ) -> list[Range]:
        """The parts that are not in the dead-letter subject yet."""
        known = self._coordinator.store.messages.views.subjects.find(to)
        if not item.is_again or known is None:
            return list(parts)
        if queue.copies is None:
            queue.copies = CopiedRanges(self._coordinator.store.messages, known.id, stream)
        queue.copies.refresh()
        return [each for part in parts for each in queue.copies.missing(*part)]

    def _letter(
        self,
        host: GroupHost,
        home: Subject,
        dying: Dying,
        source: batch.Batch,
        stored: StoredBatch,
        part: Range,
        stream: int,
    ) -> bytes:
        first, count = part
        copies = taken_from(source, first - stored.entry.first_sequence, count)
        for most in _ATTEMPTS_SHOWN:
            dead = self._with_history(host, home, dying, copies, first, most)
            try:
                return encoded(dead, source.header, stream=stream, sequence=first)
            except Misuse:  # the history makes the batch too large, and the message matters more
                continue
        return encoded(copies, source.header, stream=stream, sequence=first)

    def _with_history(
        self, host: GroupHost, home: Subject, dying: Dying, copies: list[MessageCopy], first: int, most: int
    ) -> list[MessageCopy]:
        """The copies with their history in headers, with at most `most` attempts."""
        dead = []
        attempts = encode(dying.history, dying.attempt, most)
        for offset, copy in enumerate(copies):
            history = {
                HISTORY_SUBJECT: str(home),
                HISTORY_GROUP: str(host.name),
                HISTORY_SEQUENCE: str(first + offset),
                HISTORY_ATTEMPTS: str(dying.attempt),
                HISTORY_REASON: dying.reason,
                HISTORY_TIME: str(self._coordinator.clock.wall_ms()),
                HISTORY: attempts,
            }
            if host.main is not None:  # a redriven message keeps the sequence that it had the first time
                history[HISTORY_SEQUENCE] = copy.headers.get(HISTORY_SEQUENCE, "")
                if not history[HISTORY_SEQUENCE]:  # sent to this group alone: it has no sequence in the subject
                    del history[HISTORY_SEQUENCE]
                count = count_of(copy.headers.get(HISTORY_ATTEMPTS, ""))
                history[HISTORY_ATTEMPTS] = str(dying.attempt + count)
                earlier = decode(copy.headers.get(HISTORY, ""))
                every = joined(() if earlier is None else earlier.attempts, dying.history, count)
                history[HISTORY] = encode(every, dying.attempt + count, most)
            dead.append(with_headers(copy, history))
        return dead

    def _settle(
        self, host: GroupHost, item: _DeadLetterBatch, parts: tuple[Range, ...], *, is_lost: bool = False
    ) -> None:
        """Mark the messages dead. Their copies are committed, or they are unreadable and count as lost."""
        if not self._coordinator.groups.has(host):
            return
        buried = item.dying._replace(first=parts[0][0], ranges=parts)
        try:
            self._coordinator.carry_out(
                host, host.state_machine.mark_dead(buried, is_lost=is_lost, now_ms=self._coordinator.clock.wall_ms())
            )
        except Refused:
            self._coordinator.call_later(_RETRY_S, partial(self._settle, host, item, parts, is_lost=is_lost))
            return
        self.buried += sum(count for _, count in parts)


def _within(ranges: tuple[Range, ...], begin: int, end: int | None) -> tuple[Range, ...]:
    """The part of the ranges in [begin, end)."""
    clipped = []
    for first, count in ranges:
        low = max(first, begin)
        high = first + count if end is None else min(first + count, end)
        if low < high:
            clipped.append((low, high - low))
    return tuple(clipped)


def _less(ranges: tuple[Range, ...], done: tuple[Range, ...]) -> tuple[Range, ...]:
    """The rest of the ranges when their first part is done."""
    return _within(ranges, done[-1][0] + done[-1][1], None) if done else ranges


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
