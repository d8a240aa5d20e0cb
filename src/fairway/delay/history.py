"""History of a delay server, for Spark and tools: events from its two logs, as far back as the logs go.

    scheduled    the message log: every stored batch, message by message
    decided      the dispatch log: intents (as dispatched), cancelled, rescheduled

The server drops both logs from their beginning, once their contents are safe elsewhere: in buckets, or in the
checkpoint. The store's options say how much of each log is kept. A page holds only committed events.

The server reads records off the loop, in chunks of 256 KiB, and a page holds up to 700 events. Due messages are
dispatched in between.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator

from fairway import batch, limits
from fairway.delay.dispatch import log
from fairway.delay.dispatch.log import EventKind
from fairway.errors import Code, Refused, StorageFault
from fairway.names import Subject
from fairway.protocol.delay_messages import Chronicle, History, HistoryPage, PastEvent, PastKind
from fairway.protocol.messages import Whence
from fairway.storage import log as logs
from fairway.storage import log_copies
from fairway.storage.log import Damaged, Log
from fairway.storage.log_copies import SegmentChunk
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES
from fairway.storage.segment import Segment
from fairway.storage.store import Store

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
