"""Dead letters: what has had its last attempt, or was rejected, moves to the group's dead-letter subject.

    dying, in the action log ──► durable ──► copied, with its history in headers ──► committed ──► DEAD

That a message dies is durable before it is copied: a crash that took it back would leave the message alive beside its
own dead letter. The copy is committed before DEAD is written, so a crash in between leaves the message dying: the next
life finds the copy by its origin (`copies`) and only writes DEAD. A disk without room delays all this, and nothing is
lost by it. What cannot be read any more (rot) is buried all the same, and counted.

Each group has an actor for it, so that a flood of dead letters takes no more than one group's share. A turn copies out
of one batch.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from fairway import batch, limits
from fairway.broker.copies import CopiedRanges, MessageCopy, encoded, stream_of, taken_from, with_headers
from fairway.broker.desk import GroupCoordinator
from fairway.broker.errands import BackgroundTask
from fairway.broker.groups import GroupHost
from fairway.errors import FairwayError, Misuse, Refused
from fairway.groups import Dying, Range
from fairway.groups.attempts import count_of, decode, encode, joined
from fairway.names import Subject
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.storage.message_log import StoredBatch

HISTORY_SUBJECT = "fairway.dead.subject"  # where the message was
HISTORY_GROUP = "fairway.dead.group"
HISTORY_SEQUENCE = "fairway.dead.sequence"  # in that subject, on this broker group
HISTORY_ATTEMPTS = "fairway.dead.attempts"  # in all, over redrives too
HISTORY_REASON = "fairway.dead.reason"
HISTORY_TIME = "fairway.dead.time_ms"
HISTORY = "fairway.dead.history"  # each failed attempt: time, consumer, reason (`fairway.groups.attempts`)

_RETRY_S = 1.0  # until a disk without room is asked again
_REMARKS_MAX = 1_000
_ATTEMPTS_SHOWN = (limits.HISTORY_ATTEMPTS_MAX, 2, 0)  # fewer, one after the other, where a batch has no room


class _DeadLetterBatch(NamedTuple):
    dying: Dying
    is_again: bool  # from the life before: it may have been copied


class _DeadLetterQueue(BackgroundTask):
    """What is to be buried for one group, in order."""

    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self.queue: deque[_DeadLetterBatch] = deque()
        self.is_under_way = False
        self.copies: CopiedRanges | None = None  # what the lives before have buried; looked up once


class DeadLetterWriter:
    """Buries for all groups of a broker. `buried` and `unreadable` count messages."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._graves: dict[int, _DeadLetterQueue] = {}
        self.buried = 0
        self.unreadable = 0

    def bury(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool = False) -> None:
        """Bring these to dead letter, in a while; `is_again` where the life before may have done so."""
        if is_again:
            self._take(host, dying, is_again=True)
            return

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._take(host, dying, is_again=False)

        self._desk.when_durable(None, durable)

    def _take(self, host: GroupHost, dying: tuple[Dying, ...], *, is_again: bool) -> None:
        grave = self._graves.get(host.id)
        if grave is None:
            grave = self._graves[host.id] = _DeadLetterQueue(host)
        for each in dying:  # those of a decision have been applied by now, so the group knows their history
            known = each if each.history else each._replace(history=host.law.history_of(each))
            grave.queue.append(_DeadLetterBatch(known, is_again))
        self._go_on(grave)

    # --- turns -------------------------------------------------------------------------------------------------------

    def _go_on(self, grave: _DeadLetterQueue) -> None:
        if grave.is_under_way or not grave.queue:
            return
        try:
            self._desk.scheduler.dispatch(("dead", grave.host.id), grave, self)
            grave.is_under_way = True
        except Refused:
            self._later(grave)

    def _later(self, grave: _DeadLetterQueue) -> None:
        grave.is_under_way = True
        self._desk.call_later(_RETRY_S, self._retry, grave)

    def _retry(self, grave: _DeadLetterQueue) -> None:
        grave.is_under_way = False
        self._go_on(grave)

    def process(self, grave: _DeadLetterQueue, actor: Actor) -> TurnResult:
        """Bury what one batch holds."""
        if not self._desk.groups.has(grave.host):  # it was removed, its letters with it
            self._graves.pop(grave.host.id, None)
            return TurnResult.DONE
        burial = grave.queue.popleft()
        try:
            done = self._bury_some(grave, burial, actor)
        except Refused:
            grave.queue.appendleft(burial._replace(is_again=True))  # some of it may be on its way
            self._later(grave)
            return TurnResult.DONE
        rest = _less(burial.dying.ranges, done)
        if rest:
            grave.queue.appendleft(burial._replace(dying=burial.dying._replace(first=rest[0][0], ranges=rest)))
        grave.is_under_way = bool(grave.queue)
        if grave.is_under_way:
            return TurnResult.AGAIN
        grave.copies = None
        self._graves.pop(grave.host.id, None)
        return TurnResult.DONE

    def expire(self, grave: _DeadLetterQueue, expiry: Expiry) -> None:
        """The broker stops: what is dying is found in the action log."""

    def fail(self, grave: _DeadLetterQueue, error: Exception) -> None:
        """A failed disk, or a bug: the messages stay dying, and the next life tries again."""
        self._graves.pop(grave.host.id, None)
        self._remark(f"dead letters of group {grave.host.name} wait for a restart: {error}")

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _bury_some(self, grave: _DeadLetterQueue, burial: _DeadLetterBatch, actor: Actor) -> tuple[Range, ...]:
        """The ranges that are seen to: those in the first batch, or in the hole before it."""
        log = self._desk.store.messages
        subject_id = grave.host.subject_id
        ranges = burial.dying.ranges
        entry = next(log.readable(subject_id, ranges[0][0]), None)
        if entry is None or entry.first_sequence > ranges[0][0]:
            return self._bury_lost(grave, burial, _within(ranges, 0, None if entry is None else entry.first_sequence))
        found = log.read_entries(subject_id, [entry])
        if not found:
            return ()  # it is known to be damaged from now on: look again
        actor.charge(size_bytes=len(found[0].data))
        parts = _within(ranges, entry.first_sequence, entry.end_sequence)
        self._copy(grave, burial, found[0], parts)
        return parts

    def _bury_lost(
        self, grave: _DeadLetterQueue, burial: _DeadLetterBatch, parts: tuple[Range, ...]
    ) -> tuple[Range, ...]:
        count = sum(count for _, count in parts)
        self.unreadable += count
        self._remark(f"group {grave.host.name} buried {count} messages from {parts[0][0]} on that cannot be read")
        self._settle(grave.host, burial, parts, is_lost=True)
        return parts

    def _copy(
        self, grave: _DeadLetterQueue, burial: _DeadLetterBatch, stored: StoredBatch, parts: tuple[Range, ...]
    ) -> None:
        host = grave.host
        home = self._desk.name_of((host.main or host).subject_id)
        to = Subject.dead_letters(host.name, home)
        stream = stream_of(self._desk.name_of(host.subject_id), host.name)
        missing = self._missing(grave, burial, to, stream, parts)
        source = batch.decode(stored.data)
        store = self._desk.store
        log = store.messages.log
        undos = len(log.flusher.undone_from)
        receipts = [
            store.produce_own(to, self._letter(host, home, burial.dying, source, stored, part, stream))
            for part in missing
        ]

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._settle(host, burial, parts)
                for receipt in receipts[-1:]:
                    self._desk.wake_subject(receipt.subject_id)
            elif isinstance(outcome, Refused):  # undone for want of room, all of it or a part
                again = burial.dying._replace(first=parts[0][0], ranges=parts)
                self._desk.call_later(_RETRY_S, partial(self.bury, host, (again,), is_again=True))

        log.flusher.when_durable(log.end, durable, undos)

    def _missing(
        self, grave: _DeadLetterQueue, burial: _DeadLetterBatch, to: Subject, stream: int, parts: tuple[Range, ...]
    ) -> list[Range]:
        """The parts that are not in the dead-letter subject yet."""
        known = self._desk.store.messages.views.subjects.find(to)
        if not burial.is_again or known is None:
            return list(parts)
        if grave.copies is None:
            grave.copies = CopiedRanges(self._desk.store.messages, known.id, stream)
        grave.copies.refresh()
        return [each for part in parts for each in grave.copies.missing(*part)]

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
            except Misuse:  # the history makes it too large: the message is what matters
                continue
        return encoded(copies, source.header, stream=stream, sequence=first)

    def _with_history(
        self, host: GroupHost, home: Subject, dying: Dying, copies: list[MessageCopy], first: int, most: int
    ) -> list[MessageCopy]:
        """The copies with their history in headers, `most` of their attempts among it."""
        dead = []
        attempts = encode(dying.history, dying.attempt, most)
        for offset, copy in enumerate(copies):
            history = {
                HISTORY_SUBJECT: str(home),
                HISTORY_GROUP: str(host.name),
                HISTORY_SEQUENCE: str(first + offset),
                HISTORY_ATTEMPTS: str(dying.attempt),
                HISTORY_REASON: dying.reason,
                HISTORY_TIME: str(self._desk.clock.wall_ms()),
                HISTORY: attempts,
            }
            if host.main is not None:  # a redriven one: its place is the one it had the first time
                history[HISTORY_SEQUENCE] = copy.headers.get(HISTORY_SEQUENCE, "")
                if not history[HISTORY_SEQUENCE]:  # it was sent to this group alone: it has none in the subject
                    del history[HISTORY_SEQUENCE]
                count = count_of(copy.headers.get(HISTORY_ATTEMPTS, ""))
                history[HISTORY_ATTEMPTS] = str(dying.attempt + count)
                earlier = decode(copy.headers.get(HISTORY, ""))
                every = joined(() if earlier is None else earlier.attempts, dying.history, count)
                history[HISTORY] = encode(every, dying.attempt + count, most)
            dead.append(with_headers(copy, history))
        return dead

    def _settle(
        self, host: GroupHost, burial: _DeadLetterBatch, parts: tuple[Range, ...], *, is_lost: bool = False
    ) -> None:
        """They are in dead letter, committed, or there is nothing left of them: then they count as lost."""
        if not self._desk.groups.has(host):
            return
        buried = burial.dying._replace(first=parts[0][0], ranges=parts)
        try:
            self._desk.carry_out(host, host.law.bury(buried, is_lost=is_lost, now_ms=self._desk.clock.wall_ms()))
        except Refused:
            self._desk.call_later(_RETRY_S, partial(self._settle, host, burial, parts, is_lost=is_lost))
            return
        self.buried += sum(count for _, count in parts)

    def _remark(self, sentence: str) -> None:
        remarks = self._desk.store.remarks
        if len(remarks) < _REMARKS_MAX:
            remarks.append(sentence)


def _within(ranges: tuple[Range, ...], begin: int, end: int | None) -> tuple[Range, ...]:
    """What of the ranges lies in [begin, end)."""
    clipped = []
    for first, count in ranges:
        low = max(first, begin)
        high = first + count if end is None else min(first + count, end)
        if low < high:
            clipped.append((low, high - low))
    return tuple(clipped)


def _less(ranges: tuple[Range, ...], done: tuple[Range, ...]) -> tuple[Range, ...]:
    """What remains of the ranges when their first part is done."""
    return _within(ranges, done[-1][0] + done[-1][1], None) if done else ranges
