"""PRODUCE: check the batch, append it, answer when it is durable.

Small batches that a client sends to one subject in a row come as one `ProduceRequest`, and are served in one go: one
turn of the actor, one callback of the log, one write of all answers. Each batch is stored or refused by itself.

Each subject has its own actor, so no subject crowds out the others. All subjects that do not exist yet share one actor
(`NewNames`).

A batch that is large before compression is checked in a worker thread, and its actor pays for the time:

    process ── large ──► actor.suspend, AGAIN ──► a worker thread decompresses and checks ──► charge, resume ──► process

The request stays the first of its actor, and the actor handles no other meanwhile. So the batches of a subject, and of
a producer stream, keep their order. Other subjects go on. To decompress 8 MiB takes about 10 ms; on the loop, every
request of every client would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fairway import limits
from fairway.batch import HEADER_BYTES, BatchHeader, check, checksum
from fairway.batch.identity import checked
from fairway.batch.layout import raw_length
from fairway.broker.groups import Groups
from fairway.errors import Code, FairwayError, InvariantViolated, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.protocol import Bytes
from fairway.protocol.messages import Produced
from fairway.runtime.clock import Clock
from fairway.runtime.threads import WorkPool
from fairway.scheduling import Actor, Expiry, Scheduler, TurnResult
from fairway.serving.rates import CreationRate
from fairway.serving.requests import ProduceRequest, produced
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store
from fairway.storage.subjects import SubjectTable

if TYPE_CHECKING:
    from fairway.serving.session import ServerSession


class Checked(msgspec.Struct, frozen=True, gc=False):
    """The result of a check: the header of a sound batch, and the CRC-32C of the whole batch for the log's record."""

    header: BatchHeader
    crc: int


class _Check:
    """One check in a worker thread. While `result` and `error` are both None, the check is under way."""

    __slots__ = ("elapsed_ns", "error", "is_forgotten", "result")

    def __init__(self) -> None:
        self.result: Checked | None = None
        self.error: Exception | None = None
        self.elapsed_ns = 0
        self.is_forgotten = False

    def run(self, view: Bytes, now_ns: Callable[[], int]) -> None:
        """Check the batch. Runs in a worker thread."""
        if self.is_forgotten:
            return
        started_ns = now_ns()
        try:
            self.result = Checked(check(view), checksum(view))
        except Exception as error:  # raised again on the loop
            self.error = error
        self.elapsed_ns = now_ns() - started_ns


class BatchChecks:
    """All checks of one broker in worker threads. Without a pool the loop checks every batch."""

    def __init__(self, scheduler: Scheduler, clock: Clock, pool: WorkPool | None) -> None:
        self._scheduler = scheduler
        self._now_ns = clock.monotonic_ns
        self._pool = pool
        self._checks: dict[ProduceRequest, _Check] = {}  # of unfinished requests
        self.count = 0  # checks started so far

    def is_large(self, view: Bytes) -> bool:
        """Whether a worker thread must check the batch, by the length that the batch itself states."""
        is_readable = self._pool is not None and len(view) >= HEADER_BYTES
        return is_readable and raw_length(view) > limits.CHECK_ON_LOOP_BYTES_MAX

    def result(self, request: ProduceRequest, actor: Actor) -> Checked | None:
        """The result of the request's check. Raises `RemoteProtocolError` if the batch is not sound. None: the actor is
        suspended until the check ends, and the processor returns AGAIN."""
        known = self._checks.pop(request, None)
        if known is None:
            self._start(request, actor)
            return None
        if known.error is not None:
            raise known.error
        return known.result

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its check."""
        return not self._checks

    def forget(self, request: ProduceRequest) -> None:
        """Forget the check of a request that has ended in another way."""
        known = self._checks.pop(request, None)
        if known is not None:
            known.is_forgotten = True

    def _start(self, request: ProduceRequest, actor: Actor) -> None:
        if self._pool is None:
            raise InvariantViolated("a batch is large only where there is a pool")
        this = self._checks[request] = _Check()
        self.count += 1
        actor.suspend()
        self._pool.run(partial(this.run, request.attachments[0], self._now_ns), partial(self._checked, this, actor))

    def _checked(self, this: _Check, actor: Actor) -> None:
        actor.charge(elapsed_ns=this.elapsed_ns)
        self._scheduler.resume(actor)


class _Appended:
    """Batches of one request that were appended, and that a full disk takes back together or not at all: new ones, in
    one segment of the log. A repeated batch stands alone, because its original may be older."""

    __slots__ = ("answers", "base", "bytes", "last", "messages")

    def __init__(self) -> None:
        self.answers: list[tuple[int, Produced]] = []  # by correlation id
        self.messages = 0
        self.bytes = 0
        self.last: AppendReceipt | None = None
        self.base = -1  # of the segment

    def takes(self, receipt: AppendReceipt, base: int) -> bool:
        last = self.last
        return last is None or (base == self.base and not receipt.is_duplicate and not last.is_duplicate)

    def add(self, correlation: int, receipt: AppendReceipt, store: Store, base: int, size: int) -> None:
        self.answers.append((correlation, produced(receipt, store)))
        self.messages += receipt.count
        self.bytes += size
        self.last, self.base = receipt, base


class ProduceProcessor:
    """Handles PRODUCE. Calls `on_committed` with each subject that has new messages."""

    def __init__(
        self,
        store: Store,
        checks: BatchChecks,
        groups: Groups,
        on_committed: Callable[[int], None],
    ) -> None:
        self._store = store
        self._checks = checks
        self._groups = groups
        self._on_committed = on_committed
        self.batches = 0  # committed; a repeated batch counts twice
        self.messages = 0
        self.bytes = 0

    def process(self, request: ProduceRequest, actor: Actor) -> TurnResult:
        subject = Subject(request.message.subject)  # `Broker.handle` has parsed it
        if self._groups.read_only and self._is_read_only(subject):
            raise Refused(
                Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it, or send elsewhere"
            )
        secret = checked(request.message.secret, "stream")
        try:
            if not self._is_checked(request, actor):
                return TurnResult.AGAIN
        except RemoteProtocolError as error:
            _break_off(request, error)
            request.end()
            return TurnResult.DONE
        header, crc = request.checked or (None, -1)
        store, appended = self._store, _Appended()
        segments = store.messages.log.segments
        for correlation, data in zip(tuple(request.unanswered), request.attachments, strict=True):
            try:
                receipt = store.produce(subject, data, header, secret, crc)
            except RemoteProtocolError as error:
                _break_off(request, error)
                request.forget((correlation,))
            except PlaceTaken as taken:
                store.when_taken(taken, partial(self._conflicted, request, correlation))
            except Exception as error:  # of one batch: those before it are appended
                request.fail_one(correlation, error)
            else:
                base = segments[-1].base
                if not appended.takes(receipt, base):
                    self._answer_when_durable(request, appended)
                    appended = _Appended()
                appended.add(correlation, receipt, store, base, len(data))
        actor.charge(size_bytes=sum(map(len, request.attachments)))
        request.attachments = ()  # they must not stay in memory while the answers wait for the log
        self._answer_when_durable(request, appended)
        return TurnResult.DONE

    def _is_checked(self, request: ProduceRequest, actor: Actor) -> bool:
        """Whether no check by a worker thread is to come. Raises what such a check has found."""
        if request.checked is None and len(request.attachments) == 1 and self._checks.is_large(request.attachments[0]):
            result = self._checks.result(request, actor)
            if result is None:
                return False
            request.checked = result.header, result.crc
        return True

    def _answer_when_durable(self, request: ProduceRequest, appended: _Appended) -> None:
        last = appended.last
        if last is None:
            return

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self.batches += len(appended.answers)
                self.messages += appended.messages
                self.bytes += appended.bytes
                self._on_committed(last.subject_id)
            request.settle_some(outcome, appended.answers)

        self._store.messages.log.flusher.when_durable(last.end, durable, last.undos)

    def _is_read_only(self, subject: Subject) -> bool:
        state = self._store.messages.views.subjects.find(subject)
        return state is not None and state.id in self._groups.read_only

    def _conflicted(
        self,
        request: ProduceRequest,
        correlation: int,
        outcome: FairwayError | None,
        answer: AppendReceipt | PlaceTaken,
    ) -> None:
        if outcome is not None:
            request.fail_one(correlation, outcome)
        elif isinstance(answer, PlaceTaken):
            request.refuse_one(correlation, answer)
        else:
            request.answer([(correlation, produced(answer, self._store))])

    def expire(self, request: ProduceRequest, expiry: Expiry) -> None:
        self._checks.forget(request)
        request.expire(expiry)

    def fail(self, request: ProduceRequest, error: Exception) -> None:
        self._checks.forget(request)
        request.fail(error)


def _break_off(request: ProduceRequest, error: RemoteProtocolError) -> None:
    """Close the connection of a client that has sent a bad batch."""
    session: ServerSession = request.session  # type: ignore[assignment]
    session.fail(error)


class NewNames:
    """Handles PRODUCE to subjects that do not exist yet, all in one actor. Names are free: with an actor for each, a
    client that makes up many names would get the time of many.

    Requests of a connection to one subject must not overtake each other. So a subject counts as new while requests to
    it are in this mailbox, although the first of them creates it.
    """

    KEY = ("produce", None)

    def __init__(self, produce: ProduceProcessor, subjects: SubjectTable, rate: CreationRate) -> None:
        self._produce = produce
        self._subjects = subjects
        self._rate = rate
        self._pending: dict[str, int] = {}  # requests by subject

    def is_new(self, subject: Subject) -> bool:
        return str(subject) in self._pending or self._subjects.find(subject) is None

    def add(self, request: ProduceRequest) -> None:
        """Count a request that is in the mailbox."""
        name = request.message.subject
        self._pending[name] = self._pending.get(name, 0) + 1

    def process(self, request: ProduceRequest, actor: Actor) -> TurnResult:
        subject = Subject(request.message.subject)
        is_new = self._subjects.find(subject) is None
        if is_new:
            self._rate.check(request.session)
        verdict = self._produce.process(request, actor)
        if is_new and self._subjects.find(subject) is not None:
            self._rate.note(request.session)
        if verdict is not TurnResult.AGAIN:  # the request stays until a worker has checked its batch
            self._remove(request)
        return verdict

    def expire(self, request: ProduceRequest, expiry: Expiry) -> None:
        self._remove(request)
        self._produce.expire(request, expiry)

    def fail(self, request: ProduceRequest, error: Exception) -> None:
        self._remove(request)
        self._produce.fail(request, error)

    def _remove(self, request: ProduceRequest) -> None:
        name = request.message.subject
        left = self._pending.pop(name, 1) - 1
        if left:
            self._pending[name] = left
