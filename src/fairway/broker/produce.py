"""PRODUCE: check the batch, append it, answer when it is durable.

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
from fairway.protocol.messages import Produce
from fairway.runtime.clock import Clock
from fairway.runtime.threads import WorkPool
from fairway.scheduling import Actor, Expiry, Scheduler, TurnResult
from fairway.serving.rates import CreationRate
from fairway.serving.requests import ServedRequest, produced
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
        self._checks: dict[ServedRequest[Produce], _Check] = {}  # of unfinished requests
        self.count = 0  # checks started so far

    def is_large(self, view: Bytes) -> bool:
        """Whether a worker thread must check the batch, by the length that the batch itself states."""
        is_readable = self._pool is not None and len(view) >= HEADER_BYTES
        return is_readable and raw_length(view) > limits.CHECK_ON_LOOP_BYTES_MAX

    def result(self, request: ServedRequest[Produce], actor: Actor) -> Checked | None:
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

    def forget(self, request: ServedRequest[Produce]) -> None:
        """Forget the check of a request that has ended in another way."""
        known = self._checks.pop(request, None)
        if known is not None:
            known.is_forgotten = True

    def _start(self, request: ServedRequest[Produce], actor: Actor) -> None:
        if self._pool is None:
            raise InvariantViolated("a batch is large only where there is a pool")
        this = self._checks[request] = _Check()
        self.count += 1
        actor.suspend()
        self._pool.run(partial(this.run, request.attachments[0], self._now_ns), partial(self._checked, this, actor))

    def _checked(self, this: _Check, actor: Actor) -> None:
        actor.charge(elapsed_ns=this.elapsed_ns)
        self._scheduler.resume(actor)


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

    def process(self, request: ServedRequest[Produce], actor: Actor) -> TurnResult:
        subject = Subject(request.message.subject)  # `Broker.handle` has parsed it
        if self._groups.read_only and self._is_read_only(subject):
            raise Refused(
                Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it, or send elsewhere"
            )
        data, header, crc = request.attachments[0], None, -1
        try:
            if self._checks.is_large(data):
                result = self._checks.result(request, actor)
                if result is None:
                    return TurnResult.AGAIN
                header, crc = result.header, result.crc
            receipt = self._store.produce(subject, data, header, checked(request.message.secret, "stream"), crc)
        except RemoteProtocolError as error:
            session: ServerSession = request.session  # type: ignore[assignment]
            session.fail(error)
            request.end()
            return TurnResult.DONE
        except PlaceTaken as taken:
            self._store.when_taken(taken, partial(self._conflicted, request))
            return TurnResult.DONE
        size = len(data)  # the callback must not keep the batch in memory while it waits for the log
        actor.charge(size_bytes=size)
        answer = produced(receipt, self._store)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self.batches += 1
                self.messages += receipt.count
                self.bytes += size
                self._on_committed(receipt.subject_id)
            request.settle(outcome, answer)

        self._store.messages.log.flusher.when_durable(receipt.end, durable, receipt.undos)
        return TurnResult.DONE

    def _is_read_only(self, subject: Subject) -> bool:
        state = self._store.messages.views.subjects.find(subject)
        return state is not None and state.id in self._groups.read_only

    def _conflicted(
        self, request: ServedRequest[Produce], outcome: FairwayError | None, answer: AppendReceipt | PlaceTaken
    ) -> None:
        request.settle(outcome, answer if isinstance(answer, PlaceTaken) else produced(answer, self._store))

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        self._checks.forget(request)
        request.expire(expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        self._checks.forget(request)
        request.fail(error)


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

    def add(self, request: ServedRequest[Produce]) -> None:
        """Count a request that is in the mailbox."""
        name = request.message.subject
        self._pending[name] = self._pending.get(name, 0) + 1

    def process(self, request: ServedRequest[Produce], actor: Actor) -> TurnResult:
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

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        self._remove(request)
        self._produce.expire(request, expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        self._remove(request)
        self._produce.fail(request, error)

    def _remove(self, request: ServedRequest[Produce]) -> None:
        name = request.message.subject
        left = self._pending.pop(name, 1) - 1
        if left:
            self._pending[name] = left
