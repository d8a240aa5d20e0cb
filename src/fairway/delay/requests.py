"""Request handler of the delay server: takes delayed messages and questions, answers once durable.

The handler works behind the broker's port in `fairway up`, and behind a port of its own in `fairway delay serve`. It
decides PRODUCE, CANCEL, RESCHEDULE and RESEND in the actor's turn and answers when the log is durable. PENDING, TALLY
and HISTORY take many steps of a few milliseconds, so each is a task of its own, at most 8 at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fairway import limits
from fairway.batch import MessageId, peek
from fairway.batch.identity import checked
from fairway.delay.dispatch.dispatcher import Redirected
from fairway.delay.engine import Engine
from fairway.delay.history import DelayHistory
from fairway.delay.metrics import Figures
from fairway.delay.pending_messages import BrowsedPage, CancelOutcome, Filter, PendingDecision
from fairway.errors import Code, FairwayError, Misuse, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.protocol.delay_messages import (
    Cancel,
    Decided,
    DelayedBatch,
    DelayTally,
    Fate,
    History,
    HistoryPage,
    PendingListed,
    PendingMessage,
    PendingPage,
    Reschedule,
    Resend,
    Resent,
    Stretch,
    Tallied,
    TransitReport,
    Which,
)
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.delay_port import DelayRequest
from fairway.serving.memory_plan import MemoryAccount, store_accounts
from fairway.serving.metrics import MetricsText
from fairway.serving.requests import produced
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.message_log import AppendReceipt

if TYPE_CHECKING:
    from fairway.serving.session import ServerSession

_FATES = {
    CancelOutcome.CANCELLED: Fate.CANCELLED,
    CancelOutcome.RESCHEDULED: Fate.RESCHEDULED,
    CancelOutcome.ALREADY_DISPATCHED: Fate.ALREADY_DISPATCHED,
    CancelOutcome.UNKNOWN: Fate.UNKNOWN,
}
_WALKS_MAX = 8  # at once: each takes 5 ms of a turn, and due messages go out in between
_TIME_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the last time that can be written
# Of one batch. A batch needs 4 KiB beside its only message. The rest of 64 MiB is for the ids and times that its
# messages are sent on with: 24 bytes for each of 4,096.
_RAW_BYTES_MAX = limits.DELAY_MESSAGE_BYTES_MAX + 4 * limits.KIB
_STOPPING = Refused(Code.DRAINING, "the delay server is about to stop: connect again")


class Transit(Protocol):
    """Knows the messages on their way to broker groups."""

    def in_transit(self) -> list[TransitReport]:
        """Messages on their way, by broker group."""

    def resend(self, group: str) -> Redirected:
        """Give the messages for this group to other groups."""


class DelayRequestHandler:
    """A processor for the scheduler of the server that it belongs to."""

    def __init__(self, engine: Engine, figures: Figures, transit: Transit, rows_max: int) -> None:
        self._engine = engine
        self._rows_max = rows_max
        self._transit = transit
        self._figures = figures
        self._historian = DelayHistory(engine.store, engine.name_of)
        self._walks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Take no more requests. Requests already taken are answered once they are durable; queries are cancelled."""
        self._is_closed = True
        for walk in self._walks:
            walk.cancel()

    def show(self, out: MetricsText) -> None:
        self._figures.show(out)

    def memory_accounts(self) -> list[MemoryAccount]:
        rows, rows_max = self._engine.rows, self._rows_max
        held = MemoryAccount(
            "delay_rows", rows_max * limits.DELAY_ROW_BYTES, lambda: len(rows) * limits.DELAY_ROW_BYTES
        )
        return [held, *store_accounts(self._engine.store, "delay_")]

    @property
    def damaged(self) -> int:
        """Records that the disk lost and no repair brought back."""
        return len(self._engine.damaged)

    # --- for the scheduler -------------------------------------------------------------------------------------------

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult:
        if self._is_closed:
            raise _STOPPING
        match request.message:
            case Produce() as message:
                self._schedule(request, message, actor)
            case Cancel() as message:
                self._cancel(request, message)
            case Reschedule() as message:
                self._reschedule(request, message)
            case PendingListed() as message:
                self._walk(request, self._list(request, message, self._filter(message.which)))
            case History() as message:
                self._admit_walk()
                self._walk(request, self._tell(request, message))
            case Resend() as message:
                self._resend(request, message)
            case DelayTally() as message:
                self._walk(request, self._tally(request, message, self._filter(message.which)))
            case _:
                raise Misuse(f"a {type(request.message).__name__} does not concern delayed messages")
        return TurnResult.DONE

    def expire(self, request: DelayRequest, expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: DelayRequest, error: Exception) -> None:
        request.fail(error)

    # --- scheduling --------------------------------------------------------------------------------------------------

    def _schedule(self, request: DelayRequest, message: Produce, actor: Actor) -> None:
        engine = self._engine
        data = bytes(request.attachments[0])
        try:
            if peek(data).raw_length > _RAW_BYTES_MAX:
                sentence = (
                    f"a delayed message, and all of one batch together, has {limits.DELAY_MESSAGE_BYTES_MAX:,} bytes "
                    "at most: send several, or a reference to it"
                )
                raise Refused(Code.TOO_LARGE, sentence)
            receipt = engine.schedule(Subject.parse(message.subject), data, checked(message.secret, "stream"))
        except RemoteProtocolError as error:
            session: ServerSession = request.session  # type: ignore[assignment]
            session.fail(error)
            request.end()
            return
        except PlaceTaken as taken:
            engine.store.when_taken(taken, partial(self._conflicted, request))
            return
        actor.charge(size_bytes=len(data))
        log = engine.store.messages.log
        answer = produced(receipt, engine.store)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None and not receipt.is_duplicate:
                self._figures.scheduled += receipt.count
            request.settle(outcome, answer)

        log.flusher.when_durable(receipt.end, durable, receipt.undos)

    def _conflicted(
        self, request: DelayRequest, outcome: FairwayError | None, answer: AppendReceipt | PlaceTaken
    ) -> None:
        request.settle(outcome, answer if isinstance(answer, PlaceTaken) else produced(answer, self._engine.store))

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _cancel(self, request: DelayRequest, message: Cancel) -> None:
        engine, is_named = self._engine, message.id is not None
        decision = engine.cancel(*_named(message)) if is_named else engine.cancel_key(*_keyed(message))
        self._decide(request, decision)

    def _reschedule(self, request: DelayRequest, message: Reschedule) -> None:
        engine, due_ms = self._engine, message.due_ms
        if due_ms > _TIME_MS_MAX:
            raise Refused(Code.BAD_REQUEST, f"{due_ms} ms is a time behind the year 9999: give one that can be said")
        if message.id is not None:
            message_id, subject = _named(message)
            decision = engine.reschedule(message_id, due_ms, subject)
        else:
            decision = engine.reschedule_key(*_keyed(message), due_ms)
        self._decide(request, decision)

    def _decide(self, request: DelayRequest, decision: PendingDecision) -> None:
        answer = Decided(_FATES[decision.answer], decision.messages)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._figures.note_decided(decision)
            request.settle(outcome, answer)

        self._engine.store.actions.log.flusher.when_durable(decision.end, durable)

    def _resend(self, request: DelayRequest, message: Resend) -> None:
        redirected = self._transit.resend(message.group)
        answer = Resent(redirected.messages, redirected.left)
        self._engine.store.actions.log.flusher.when_durable(redirected.end, partial(request.settle, answer=answer))

    # --- queries -----------------------------------------------------------------------------------------------------

    def _admit_walk(self) -> None:
        if len(self._walks) >= _WALKS_MAX:
            raise Refused(
                Code.BUSY, f"{_WALKS_MAX} questions are being answered: ask again when one is", retry_after_ms=100
            )

    def _filter(self, which: Which) -> Filter:
        self._admit_walk()
        subject = None if which.subject is None else Subject.parse(which.subject)
        return self._engine.filter(subject, which.key_prefix, which.from_ms, which.to_ms)

    def _walk(self, request: DelayRequest, answering: Coroutine[Any, Any, None]) -> None:
        async def walk() -> None:
            try:
                await answering
            except asyncio.CancelledError:
                request.refuse(_STOPPING)
                raise
            except Exception as error:  # as a scheduler does when a processor raises
                request.fail(error)

        task = asyncio.get_running_loop().create_task(walk(), name="fairway-delay-question")
        self._walks.add(task)
        task.add_done_callback(self._walks.discard)

    async def _list(self, request: DelayRequest, message: PendingListed, which: Filter) -> None:
        engine = self._engine
        items_max = max(min(message.items_max, limits.PENDING_PAGE_MAX), 1)
        page = await engine.page(which, message.after, items_max)
        batches = await engine.batches_of(page) if message.with_batches else []
        counts = [peek(data).count for _, data in batches]
        attached = [DelayedBatch(str(subject), count) for (subject, _), count in zip(batches, counts, strict=True)]
        request.respond(PendingPage(self._rows(page), page.next, attached), [data for _, data in batches])

    def _rows(self, page: BrowsedPage) -> list[PendingMessage]:
        name = self._engine.name_of
        return [
            PendingMessage(str(name(each.subject_id)), str(each.id), each.key, each.due_ms, each.size_bytes)
            for each in page.messages
        ]

    async def _tell(self, request: DelayRequest, message: History) -> None:
        page: HistoryPage = await self._historian.page(message)
        request.respond(page)

    async def _tally(self, request: DelayRequest, message: DelayTally, which: Filter) -> None:
        found = await self._engine.tally(which, message.width_ms)
        stretches = [Stretch(*each) for each in found.stretches]
        request.respond(Tallied(found.count, stretches, self._transit.in_transit()))


def _named(message: Cancel | Reschedule) -> tuple[MessageId, Subject | None]:
    if message.key is not None or message.id is None:
        raise Refused(Code.BAD_REQUEST, "give an id or a key, not both")
    return MessageId.parse(message.id), Subject.parse(message.subject) if message.subject else None


def _keyed(message: Cancel | Reschedule) -> tuple[Subject, str]:
    if message.key is None:
        raise Refused(Code.BAD_REQUEST, "give the id of a message, or a subject and a key")
    return Subject.parse(message.subject), message.key
