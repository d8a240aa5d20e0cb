"""Request handler of the delay server: takes delayed messages and questions, answers once durable.

The handler works behind the broker's port in `fairway up`, and behind a port of its own in `fairway delay serve`. It
decides PRODUCE, CANCEL, RESCHEDULE and RESEND in the actor's turn and answers when the log is durable. PENDING, TALLY
and HISTORY take many steps of a few milliseconds, so each is a task of its own, at most 8 at once. `Figures` are the
metrics of the delay server.

`DelayHistory` answers HISTORY, for Spark and tools: events from the server's two logs, as far back as the logs go.

    scheduled    the message log: every stored batch, message by message
    decided      the dispatch log: intents (as dispatched), cancelled, rescheduled

The server drops both logs from their beginning, once their contents are safe elsewhere: in buckets, or in the
checkpoint. The store's options say how much of each log is kept. A page holds only committed events. The server reads
records off the loop, in chunks of 256 KiB, and a page holds up to 700 events. Due messages are dispatched in between.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fairway import batch, limits
from fairway.batch import MessageId, peek
from fairway.batch.identity import checked
from fairway.delay.dispatch import log
from fairway.delay.dispatch.log import EventKind
from fairway.delay.dispatch.sender import DispatchSender
from fairway.delay.engine import Engine
from fairway.delay.pending_messages import BrowsedPage, Filter, PendingDecision
from fairway.delay.schedule.wheel import DueTimes
from fairway.errors import Code, FairwayError, Misuse, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.protocol.delay_messages import (
    Cancel,
    Chronicle,
    Decided,
    DelayedBatch,
    DelayTally,
    Fate,
    History,
    HistoryPage,
    PastEvent,
    PastKind,
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
from fairway.protocol.messages import Produce, Produced, Whence
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.memory_plan import MemoryAccount, store_accounts
from fairway.serving.metrics import Histogram, MetricsText
from fairway.serving.requests import DelayRequest, produced
from fairway.storage import log as logs
from fairway.storage import log_copies
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.log import Damaged, Log
from fairway.storage.log_copies import SegmentChunk
from fairway.storage.message_log import AppendReceipt
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from fairway.storage.segment import Segment
from fairway.storage.store import Store

if TYPE_CHECKING:
    from fairway.serving.session import ServerSession


_WALKS_MAX = 8  # at once: each takes 5 ms of a turn, and due messages go out in between
_TIME_MS_MAX = 253_402_300_799_999  # the end of the year 9999, the last time that can be written
# Of one batch. A batch needs 4 KiB beside its only message. The rest of 64 MiB is for the ids and times that its
# messages are sent on with: 24 bytes for each of 4,096.
_RAW_BYTES_MAX = limits.DELAY_MESSAGE_BYTES_MAX + 4 * limits.KIB
_STOPPING = Refused(Code.DRAINING, "the delay server is about to stop: connect again")


# Upper bounds in ms: from one tick of the wheel to a broker that was down over a weekend.
LATENESS_MS_BUCKETS: Final = (
    *(5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 250.0, 500.0, 1_000.0, 5_000.0, 60_000.0, 3_600_000.0, 86_400_000.0),
)


class Figures:
    """The metrics of one delay server: counters since its start, and gauges that are read at each scrape. A scrape must
    not hold up the loop, so nothing here walks over all rows."""

    def __init__(self, engine: Engine, dispatch_sender: DispatchSender) -> None:
        self._engine = engine
        self._dispatch_sender = dispatch_sender
        self.scheduled = 0  # messages; so are the four below
        self.dispatched = 0
        self.repeated = 0  # sent again after a crash or a lost answer: the broker already had them
        self.cancelled = 0
        self.rescheduled = 0
        self.lateness_ms = Histogram(LATENESS_MS_BUCKETS)

    def note_decided(self, decision: PendingDecision) -> None:
        if decision.answer is Fate.CANCELLED:
            self.cancelled += decision.messages
        elif decision.answer is Fate.RESCHEDULED:
            self.rescheduled += decision.messages

    def note_sent(self, due_ms: DueTimes, receipt: Produced | None, now_ms: int) -> None:
        """The broker has these messages. Lateness is known only for messages that arrived for the first time."""
        self.dispatched += len(due_ms)
        if receipt is None or receipt.is_duplicate:
            self.repeated += len(due_ms)
            return
        late_ms = np.maximum(now_ms - due_ms, 0)
        places = np.searchsorted(self.lateness_ms.bounds, late_ms, side="left")
        for place, count in enumerate(np.bincount(places).tolist()):
            self.lateness_ms.counts[place] += count
        self.lateness_ms.total += float(late_ms.sum())

    # --- scrapes -----------------------------------------------------------------------------------------------------

    def show(self, out: MetricsText) -> None:
        engine, dispatch_sender = self._engine, self._dispatch_sender
        held_back = engine.held_back
        out.one("delay_pending_messages", "gauge", "Messages scheduled and not yet sent.", engine.rows.pending)
        due = held_back + dispatch_sender.messages
        out.one("delay_due_messages", "gauge", "Of these, due: on their way, or held back.", due)
        out.one("delay_held_back_messages", "gauge", "Of these, held back: no broker takes them now.", held_back)
        out.one("delay_scheduled_messages_total", "counter", "Messages taken.", self.scheduled)
        out.one("delay_dispatched_messages_total", "counter", "Messages that a broker has stored.", self.dispatched)
        out.one("delay_repeated_messages_total", "counter", "Sent again, and recognised.", self.repeated)
        out.one("delay_cancelled_messages_total", "counter", "Messages cancelled.", self.cancelled)
        out.one("delay_rescheduled_messages_total", "counter", "Messages put off or brought forward.", self.rescheduled)
        about = "From a message's due time to the broker's receipt."
        out.histogram_ms("delay_lateness_seconds", about, {"": self.lateness_ms})
        self._storage(out)
        self._targets(out)

    def _storage(self, out: MetricsText) -> None:
        engine = self._engine
        out.one("delay_is_loaded", "gauge", "0: still reading its files, questions wait.", int(engine.is_loaded))
        out.one("delay_buckets", "gauge", "Files of the schedule log.", len(engine.log.files))
        out.one("delay_index_rows", "gauge", "Messages with a row in memory, sent ones included.", len(engine.rows))
        columns = [each for each in vars(engine.rows).values() if isinstance(each, np.ndarray)]
        out.one("delay_index_bytes", "gauge", "Memory of the rows.", sum(each.nbytes for each in columns))
        out.one("delay_wheel_messages", "gauge", "Messages of the hour at hand and the next.", len(engine.wheel))
        out.one("delay_damaged_records", "gauge", "Records that cannot be read any more.", len(engine.damaged))
        out.one("delay_repaired_records", "counter", "Records put back from the message log.", engine.repairs.repaired)
        about = "Of damaged records: messages that the message log does not have either."
        out.one("delay_lost_messages_total", "counter", about, engine.repairs.lost_messages)
        about = "Of damaged records: messages that were read from the message log."
        out.one("delay_salvaged_messages_total", "counter", about, engine.repairs.salvaged_messages)
        out.one("delay_stuck_intents", "gauge", "Batches that cannot be made again after a crash.", len(engine.stuck))

    def _targets(self, out: MetricsText) -> None:
        targets = [({"target": each.name}, each) for each in self._dispatch_sender]
        down = [(labels, int(each.is_down)) for labels, each in targets]
        down += [({"target": name}, 1) for name in self._dispatch_sender.homeless]
        out.family("delay_target_down", "gauge", "1: that broker group cannot be reached.", down)
        intents = [(labels, each.target_sender.intents) for labels, each in targets]
        out.family("delay_intents", "gauge", "Batches on their way.", intents)
        messages = [(labels, each.target_sender.messages) for labels, each in targets]
        messages += [({"target": name}, count) for name, count in self._dispatch_sender.homeless.items()]
        out.family("delay_intent_messages", "gauge", "Messages in them.", messages)
        refused = [(labels, len(each.target_sender.refused)) for labels, each in targets]
        out.family("delay_refused_subjects", "gauge", "Subjects that the broker refuses to take now.", refused)
        codes = [
            (labels | {"code": code.value}, count)
            for labels, each in targets
            for code, count in sorted(each.target_sender.refusals.items(), key=lambda pair: pair[0].value)
        ]
        out.family("delay_refusals_total", "counter", "Batches refused; each is sent again.", codes)
        detours = [(labels, each.target_sender.detours) for labels, each in targets]
        out.family("delay_detours_total", "counter", "Batches sent anew: the broker forgot their stream.", detours)


class DelayRequestHandler:
    """A processor for the scheduler of the server that it belongs to."""

    def __init__(self, engine: Engine, dispatch_sender: DispatchSender, rows_max: int) -> None:
        self.figures = Figures(engine, dispatch_sender)
        self._engine = engine
        self._dispatch_sender = dispatch_sender
        self._rows_max = rows_max
        self._historian = DelayHistory(engine.store, engine.name_of)
        self._walks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Take no more requests. Requests already taken are answered once they are durable; queries are cancelled."""
        self._is_closed = True
        for walk in self._walks:
            walk.cancel()

    def show(self, out: MetricsText) -> None:
        self.figures.show(out)

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
                self._walk(request, partial(self._list, request, message))
            case History() as message:
                self._walk(request, partial(self._tell, request, message))
            case Resend() as message:
                self._resend(request, message)
            case DelayTally() as message:
                self._walk(request, partial(self._tally, request, message))
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
                self.figures.scheduled += receipt.count
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
        answer = Decided(decision.answer, decision.messages)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self.figures.note_decided(decision)
            request.settle(outcome, answer)

        self._engine.store.actions.log.flusher.when_durable(decision.end, durable)

    def _resend(self, request: DelayRequest, message: Resend) -> None:
        """Give what waits for a broker group to other groups."""
        group, dispatch_sender = message.group, self._dispatch_sender
        is_reached = dispatch_sender.is_reached(group)
        redirected = self._engine.redirect(group, is_reached=is_reached)
        if not is_reached:
            kept = [each for each in dispatch_sender.withdraw(group) if each.number not in redirected.numbers]
            dispatch_sender.send(kept)
        answer = Resent(redirected.messages, redirected.left)
        self._engine.store.actions.log.flusher.when_durable(redirected.end, partial(request.settle, answer=answer))

    # --- queries -----------------------------------------------------------------------------------------------------

    def _filter(self, which: Which) -> Filter:
        subject = None if which.subject is None else Subject.parse(which.subject)
        return self._engine.filter(subject, which.key_prefix, which.from_ms, which.to_ms)

    def _walk(self, request: DelayRequest, answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if len(self._walks) >= _WALKS_MAX:
            raise Refused(
                Code.BUSY, f"{_WALKS_MAX} questions are being answered: ask again when one is", retry_after_ms=100
            )

        async def walk() -> None:
            try:
                await answer()
            except asyncio.CancelledError:
                request.refuse(_STOPPING)
                raise
            except Exception as error:  # as a scheduler does when a processor raises
                request.fail(error)

        task = asyncio.get_running_loop().create_task(walk(), name="fairway-delay-question")
        self._walks.add(task)
        task.add_done_callback(self._walks.discard)

    async def _list(self, request: DelayRequest, message: PendingListed) -> None:
        engine = self._engine
        items_max = max(min(message.items_max, limits.PENDING_PAGE_MAX), 1)
        page = await engine.page(self._filter(message.which), message.after, items_max)
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
        request.respond(await self._historian.page(message))

    async def _tally(self, request: DelayRequest, message: DelayTally) -> None:
        found = await self._engine.tally(self._filter(message.which), message.width_ms)
        stretches = [Stretch(*each) for each in found.stretches]
        in_transit = sorted(self._engine.in_transit().items())
        is_reached = self._dispatch_sender.is_reached
        reports = [TransitReport(name, messages, is_reached(name)) for name, messages in in_transit]
        request.respond(Tallied(found.count, stretches, reports))


def _named(message: Cancel | Reschedule) -> tuple[MessageId, Subject | None]:
    if message.key is not None or message.id is None:
        raise Refused(Code.BAD_REQUEST, "give an id or a key, not both")
    return MessageId.parse(message.id), Subject.parse(message.subject) if message.subject else None


def _keyed(message: Cancel | Reschedule) -> tuple[Subject, str]:
    if message.key is None:
        raise Refused(Code.BAD_REQUEST, "give the id of a message, or a subject and a key")
    return Subject.parse(message.subject), message.key


EVENTS_MAX = limits.PENDING_PAGE_MAX  # in one answer: with the longest keys and subjects they fit a control message
_READ_BYTES = 256 * limits.KIB
_RECORDS_MAX = 4_096  # read for one page: most records of a dispatch log are SENT events
_DECIDED = {
    EventKind.INTENT: PastKind.DISPATCHED,
    EventKind.CANCEL: PastKind.CANCELLED,
    EventKind.RESCHEDULE: PastKind.RESCHEDULED,
}


class DelayHistory:
    """Reads the logs of a store. `name` returns a subject by its number."""

    def __init__(self, store: Store, name: Callable[[int], Subject]) -> None:
        self._store = store
        self._name = name

    async def page(self, asked: History) -> HistoryPage:
        """Read the events that follow on a place. `Refused` if the log is another one, or is damaged there."""
        log = self._log(asked.chronicle)
        if asked.log_id is not None and asked.log_id != log.log_id:
            raise Refused(Code.FENCED, "this log is another one than the reading began with: begin anew")
        at, skip = _place(log, asked.whence, asked.value), asked.skip
        end = log.committed_end if asked.end is None else min(asked.end, log.committed_end)
        events: list[PastEvent] = []
        room, looked_at = min(asked.events_max, EVENTS_MAX), 0
        async for each in _records(log, at, end if room else at):
            told = list(self._events(asked.chronicle, each))[skip:]
            taken = told[: room - len(events)]
            events += taken
            if len(taken) < len(told):
                at, skip = each.header.position, skip + len(taken)
                break
            at, skip, looked_at = each.header.end, 0, looked_at + 1
            if len(events) == room or looked_at == _RECORDS_MAX:
                break
        else:
            if room:
                at, skip = max(at, end), 0  # also past records that are missing before `end`
        return HistoryPage(events, at, skip, _first(log), log.committed_end, log.log_id)

    def _log(self, chronicle: Chronicle) -> Log:
        return self._store.messages.log if chronicle is Chronicle.SCHEDULED else self._store.actions.log

    def _events(self, chronicle: Chronicle, told: Record) -> Iterator[PastEvent]:
        if chronicle is Chronicle.SCHEDULED:
            return self._scheduled(told) if told.header.kind == RecordKind.DATA else iter(())
        return self._decided(told) if told.header.kind == RecordKind.DISPATCH else iter(())

    def _scheduled(self, told: Record) -> Iterator[PastEvent]:
        header, opened = told.header, batch.decode(told.body)
        subject = str(self._name(header.subject_id))
        columns = zip(opened.due_times_ms(), opened.ids(), opened.keys(), strict=True)
        for number, (due_ms, id_, key) in enumerate(columns, header.first_sequence):
            yield PastEvent(
                PastKind.SCHEDULED, subject, number, 1, header.appended_ms, header.position, due_ms, str(id_), key
            )

    def _decided(self, told: Record) -> Iterator[PastEvent]:
        header = told.header
        for event in log.unpack(told.body):
            kind = _DECIDED.get(event.kind)
            if kind is None:
                continue
            due_ms = event.time_ms if kind is PastKind.RESCHEDULED else None
            subject = str(self._name(event.subject_id))
            for first, count in event.ranges:
                yield PastEvent(
                    kind, subject, first, count, header.appended_ms, header.position, due_ms, None, None, event.target
                )


# --- the logs ---------------------------------------------------------------------------------------------------------


def _first(log: Log) -> int:
    return log.segments[0].base if log.segments else log.committed_end


def _place(log: Log, whence: Whence, value: int) -> int:
    """The position of a place. A time stands for the beginning of the segment that holds it."""
    if whence is Whence.EARLIEST:
        return _first(log)
    if whence is Whence.LATEST:
        return log.committed_end
    if whence is Whence.TIME:
        found = logs.segment_at(log.segments, value)
        return log.committed_end if found is None else min(found.base, log.committed_end)
    return value


def _segment(log: Log, position: int) -> Segment | None:
    """The segment that holds the position, or the next segment."""
    index = bisect_right(log.segments, position, key=lambda each: each.end)
    return log.segments[index] if index < len(log.segments) else None


async def _records(log: Log, position: int, end: int) -> AsyncIterator[Record]:
    """The records that begin in [`position`, `end`). The caller ensures that `end` is committed."""
    while position < end:
        found = _segment(log, position)
        if found is None:
            return
        at, position = max(position, found.base + SEGMENT_HEADER_BYTES), found.end
        until = min(found.end, end)
        while at < until:
            data, begin = await _fetched(log, at), at
            while at - begin < len(data):
                told = log.parse(data, at - begin, at)
                if told.header.position >= end:
                    return
                yield told
                at = told.header.end


async def _fetched(log: Log, position: int) -> bytes:
    """Read whole records off the loop, because the bytes may not be in the page cache."""
    future: asyncio.Future[SegmentChunk | Damaged | StorageFault] = asyncio.get_running_loop().create_future()

    def done(found: SegmentChunk | Damaged | StorageFault) -> None:
        if not future.done():
            future.set_result(found)

    try:
        log_copies.fetch_chunk(log, position, _READ_BYTES, done)
        found = await future
        if isinstance(found, SegmentChunk):
            return found.data
        raise found
    except Damaged as damaged:
        sentence = f"the log is damaged at position {damaged.position} ({damaged.why}): begin behind it"
        raise Refused(Code.DAMAGED, sentence) from damaged
