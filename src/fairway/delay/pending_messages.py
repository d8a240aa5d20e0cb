"""Pending messages of a delay server: cancel, reschedule, list, count.

`PendingMessages` decides. It finds a message by the message id or, within a subject, by the business key. It looks up a
key by its 64-bit hash: two keys that differ in less than 64 consecutive bits never share a hash; other pairs do with a
chance of one in 10^19. Cancel and reschedule take effect at once, in the dispatch log, which orders them with the
intents. An answer is true when it is made, and stays true once the dispatch log is synced to `end`:

    CANCELLED             the message is no longer pending and will never be sent
    RESCHEDULED           the message has the new due time
    ALREADY_DISPATCHED    an intent names the message: it is on its way, or was sent
    UNKNOWN               the message is not here: it was never scheduled, or it was sent or cancelled so long ago that
                          the server forgot it (an hour or a million messages; see `fairway.delay.maintenance`)

`Browser` lists and counts without holding up due messages. It walks over the rows in steps of a few milliseconds, with
a turn of the loop in between; it also reads keys and sizes, which are in the buckets, step by step. Rows may therefore
change during a listing. The promise: a message that is pending under the same due time from the first page to the last
is on exactly one page. A message that is scheduled, sent, cancelled or rescheduled meanwhile is on one page or on none.

Pages are ordered by due time, then subject, then sequence. A cursor names the last message of a page. A page may be
short, even empty, although more pages follow: it ends at its bounds, or after 50,000 keys were read.

`PendingQueries` is the part of the engine that answers clients. Questions wait until every row is loaded: before that,
the engine refuses them with BUSY. One copy of several answers only while it leads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import batch, limits
from fairway.batch import MessageId
from fairway.delay.dispatch.log import DispatchEvent, EventKind, by_subject, ranges_of
from fairway.delay.engine_part import EngineData, EnginePart
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer
from fairway.delay.schedule.manifest import check_horizon
from fairway.delay.schedule.pending_rows import RowLocation, RowNumbers, Rows, RowState
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.protocol.delay_messages import Fate
from fairway.runtime.clock import Timekeeper
from fairway.storage.store import Store


class PendingDecision(NamedTuple):
    """The answer, how many messages changed, and how far the dispatch log must be synced before the answer is given."""

    answer: Fate
    messages: int
    end: int


class Filter(NamedTuple):
    """Which pending messages are meant; None: any."""

    subject_id: int | None = None
    key_prefix: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None  # exclusive


class Waiting(NamedTuple):
    """One pending message, as a client sees it."""

    id: MessageId
    subject_id: int
    key: str | None
    due_ms: int
    size_bytes: int = 0  # of its payload


class PendingMessages(EnginePart):
    """Finds rows and decides about them. Every row must be loaded."""

    def __init__(self, data: EngineData, take_off: Callable[[int], None], put_on: Callable[[RowNumbers], None]) -> None:
        super().__init__(data)
        self._take_off = take_off
        self._put_on = put_on

    # --- deciding ----------------------------------------------------------------------------------------------------

    def cancel(self, rows: RowNumbers) -> PendingDecision:
        """Cancel those of the rows that are pending."""
        chosen = self._pending(rows)
        if not len(chosen):
            return self._too_late(rows)
        end = self._append(EventKind.CANCEL, chosen, 0)
        for row in chosen[self._rows.in_wheel[chosen]].tolist():
            self._take_off(row)
        self._rows.become(chosen, RowState.CANCELLED)
        self._on_done(chosen)
        return PendingDecision(Fate.CANCELLED, len(chosen), end)

    def reschedule(self, rows: RowNumbers, due_ms: int) -> PendingDecision:
        """Give a new due time to those of the rows that are pending."""
        chosen = self._pending(rows)
        if not len(chosen):
            return self._too_late(rows)
        end = self._append(EventKind.RESCHEDULE, chosen, due_ms)
        for row in chosen[self._rows.in_wheel[chosen]].tolist():
            self._take_off(row)
        self._rows.due_ms[chosen] = due_ms
        self._rows.is_rescheduled[chosen] = True
        self._put_on(chosen)
        return PendingDecision(Fate.RESCHEDULED, len(chosen), end)

    def by_id(self, message_id: MessageId) -> RowNumbers:
        """The rows of a message. A message that was sent twice under one id has two rows."""
        table = self._rows
        return self._both(table.id_low, message_id.sequence, table.id_high, message_id.producer_id)

    def by_key(self, subject_id: int, key: str) -> RowNumbers:
        return self._both(self._rows.key, batch.key_hash(key), self._rows.subject_id, subject_id)

    def _both(self, column: NDArray[Any], value: int, other: NDArray[Any], wanted: int) -> RowNumbers:
        """The rows with these values in two columns."""
        found = self._rows.where(column[: self._rows.end] == value)
        rows: RowNumbers = found[(other[found] == wanted) & (self._rows.state[found] != RowState.FREE)]
        return rows

    def _pending(self, rows: RowNumbers) -> RowNumbers:
        pending: RowNumbers = rows[self._rows.state[rows] == RowState.PENDING]
        return pending

    def _too_late(self, rows: RowNumbers) -> PendingDecision:
        """Nothing changes. The answer is valid once the decisions that it rests on are synced."""
        states = set(self._rows.state[rows].tolist())
        if states & {RowState.INTENDED, RowState.DISPATCHED}:
            answer = Fate.ALREADY_DISPATCHED
        else:
            answer = Fate.CANCELLED if RowState.CANCELLED in states else Fate.UNKNOWN
        return PendingDecision(answer, 0, self._journal.end)

    def _append(self, kind: EventKind, chosen: RowNumbers, time_ms: int) -> int:
        table = self._rows
        events = [
            DispatchEvent(kind, subject_id, ranges_of(table.sequence[rows]), time_ms=time_ms)
            for subject_id, rows in by_subject(table, chosen)
        ]
        return self._journal.append(events)


_SLICE_ROWS = 250_000  # checked in one step: 1 ms
_SORT_ROWS = 16_384  # sorted in one step, at most twice as many: 5 ms
_WINDOW_ROWS = 16_384  # found in one walk, for this page and the next ones
_WINDOWS_MAX = 8  # cursors whose next rows are kept, so that the next page needs no walk
_LOOK_ROWS = 1_024  # whose keys are read together, each bucket record opened once
_LOOKED_AT_MAX = 50_000  # keys read for one page
_PAGE_BYTES_MAX = 4 * limits.MIB  # payloads of one page; a larger message is a page of its own
_BATCH_MESSAGES_MAX = 1_000
_NOBODY = 1  # producer id for browsed batches: every message in them has its own explicit id


class BrowsedPage(NamedTuple):
    """Pending messages in order, and the cursor of the next page; "" after the last page."""

    messages: list[Waiting]
    next: str
    composers: tuple[
        tuple[int, BatchComposer, NDArray[np.int64]], ...
    ] = ()  # subject id, contents and due times, in order


@dataclass(frozen=True, slots=True)
class PendingCount:
    """The count, and for each interval that is not empty (start in ms, count), in order."""

    count: int
    stretches: list[tuple[int, int]]


class _Mark(NamedTuple):
    """A place in the order of messages."""

    due_ms: int
    subject_id: int
    sequence: int

    @classmethod
    def parse(cls, text: str) -> _Mark:
        parts = text.split(".")
        if len(parts) != 3 or not all(each.isascii() and each.isdigit() and len(each) <= 20 for each in parts):
            raise Refused(Code.BAD_REQUEST, f"{text[:80]!r} is no cursor: give the `next` of the page before, or ''")
        due_ms, subject_id, sequence = map(int, parts)
        if due_ms >= 1 << 63 or subject_id >= 1 << 32 or sequence >= 1 << 64:
            raise Refused(Code.BAD_REQUEST, f"{text[:80]!r} is no cursor: its numbers are too large")
        return cls(due_ms, subject_id, sequence)

    def __str__(self) -> str:
        return f"{self.due_ms}.{self.subject_id}.{self.sequence}"


class _Window(NamedTuple):
    """Rows in the order of pages, with the order keys that they had when they were found."""

    rows: RowNumbers
    due_ms: NDArray[np.int64]
    subject_id: NDArray[np.uint32]
    sequence: NDArray[np.uint64]
    is_all: bool = True  # no rows follow behind these

    def mark(self, at: int) -> _Mark:
        return _Mark(int(self.due_ms[at]), int(self.subject_id[at]), int(self.sequence[at]))

    def only(self, chosen: slice | NDArray[np.bool_] | NDArray[np.int64]) -> _Window:
        return _Window(
            self.rows[chosen], self.due_ms[chosen], self.subject_id[chosen], self.sequence[chosen], self.is_all
        )

    def merged(self, other: _Window) -> _Window:
        """Both windows, in order."""
        both = _Window(
            np.concatenate((self.rows, other.rows)),
            np.concatenate((self.due_ms, other.due_ms)),
            np.concatenate((self.subject_id, other.subject_id)),
            np.concatenate((self.sequence, other.sequence)),
        )
        return both.only(np.lexsort((both.sequence, both.subject_id, both.due_ms)))

    def is_behind(self, mark: _Mark) -> NDArray[np.bool_]:
        is_later: NDArray[np.bool_] = self.due_ms > mark.due_ms
        same = np.flatnonzero(self.due_ms == mark.due_ms)
        is_higher = self.subject_id[same] > mark.subject_id
        is_same = self.subject_id[same] == mark.subject_id
        is_later[same] = is_higher | (is_same & (self.sequence[same] > np.uint64(mark.sequence)))
        return is_later


class _Draft:
    """A page that is being filled."""

    def __init__(self) -> None:
        self.messages: list[Waiting] = []
        self.bytes = 0
        self._composers: list[tuple[int, BatchComposer, list[int]]] = []

    def add(self, waiting: Waiting, sheet: BatchArrays, at: int) -> None:
        self.messages.append(waiting)
        self.bytes += waiting.size_bytes
        last = self._composers[-1] if self._composers else None
        if last is None or last[0] != waiting.subject_id or len(last[1]) >= _BATCH_MESSAGES_MAX:
            last = waiting.subject_id, BatchComposer(is_copying=True), []
            self._composers.append(last)
        last[1].take(sheet, np.array([at]))
        last[2].append(waiting.due_ms)

    def page(self, following: str) -> BrowsedPage:
        composers = tuple((subject, each, np.array(due_ms, np.int64)) for subject, each, due_ms in self._composers)
        return BrowsedPage(self.messages, following, composers)


class Browser:
    """Lists and counts loaded rows. `obtain` opens the bucket record of a place; None if the record is damaged."""

    def __init__(self, rows: Rows, obtain: Callable[[RowLocation], Awaitable[BatchArrays | None]]) -> None:
        self._rows = rows
        self._obtain = obtain
        self._windows: dict[tuple[Filter, str], _Window] = {}  # by filter and cursor: the rows that follow

    # --- counting ----------------------------------------------------------------------------------------------------

    async def tally(self, which: Filter, width_ms: int) -> PendingCount:
        """Count; with a width also by intervals. `Refused` if the intervals are too many."""
        count = 0
        stretches: dict[int, int] = {}
        async for found in self._walk(which):
            count += len(found)
            if width_ms and len(found):
                starts, counts = np.unique(self._rows.due_ms[found] // width_ms, return_counts=True)
                for start, each in zip(starts.tolist(), counts.tolist(), strict=True):
                    stretches[start] = stretches.get(start, 0) + each
                if len(stretches) > limits.TALLY_STRETCHES_MAX:
                    raise Refused(
                        Code.BAD_REQUEST,
                        f"more than {limits.TALLY_STRETCHES_MAX:,} stretches of {width_ms} ms: use a wider width",
                    )
        return PendingCount(count, [(start * width_ms, stretches[start]) for start in sorted(stretches)])

    async def _walk(self, which: Filter) -> AsyncIterator[RowNumbers]:
        """All matching rows, a slice of the table at a time."""
        for at in self._slices():
            found = at.start + np.flatnonzero(self._is_meant(which, at))
            if which.key_prefix:
                for first in range(0, len(found), _LOOK_ROWS):
                    few = found[first : first + _LOOK_ROWS]
                    yield few[await self._has_prefix(few, which.key_prefix)]
            else:
                yield found
            await asyncio.sleep(0)

    def _slices(self) -> Iterator[slice]:
        """Slices of the table, which may grow meanwhile."""
        start = 0
        while start < self._rows.end:
            end = min(start + _SLICE_ROWS, self._rows.end)
            yield slice(start, end)
            start = end

    def _is_meant(self, which: Filter, at: slice | RowNumbers) -> NDArray[np.bool_]:
        """Check everything but the key prefix: keys are in the buckets."""
        table = self._rows
        mask: NDArray[np.bool_] = table.state[at] == RowState.PENDING
        if which.subject_id is not None:
            mask &= table.subject_id[at] == which.subject_id
        if which.from_ms is not None:
            mask &= table.due_ms[at] >= which.from_ms
        if which.to_ms is not None:
            mask &= table.due_ms[at] < which.to_ms
        if which.key_prefix is not None:
            mask &= table.key[at] != 0
        return mask

    async def _has_prefix(self, rows: RowNumbers, prefix: str) -> NDArray[np.bool_]:
        """Which of a few rows have a key with this prefix. Each bucket record is opened once."""
        table, wanted = self._rows, prefix.encode()
        mask = np.zeros(len(rows), np.bool_)
        order = np.lexsort((table.position[rows], table.file[rows]))
        while len(order):
            place = table.place(int(rows[order[0]]))
            is_there = (table.file[rows[order]] == place.file) & (table.position[rows[order]] == place.position)
            here, order = order[is_there], order[~is_there]
            messages = table.index[rows[here]].astype(np.int64)
            sheet = await self._obtain(place)
            if sheet is not None and sheet.keys is not None:
                starts = sheet.keys.offsets[messages].tolist()
                ends = sheet.keys.offsets[messages + 1].tolist()
                data = sheet.keys.data
                mask[here] = [
                    end - start >= len(wanted) and data[start : start + len(wanted)] == wanted
                    for start, end in zip(starts, ends, strict=True)
                ]
        return mask

    # --- listing -----------------------------------------------------------------------------------------------------

    async def page(self, which: Filter, after: str, items_max: int) -> BrowsedPage:
        """The messages that follow on a cursor; "" begins."""
        draft = _Draft()
        looked_at = 0
        while True:
            window = self._windows.pop((which, after), None) if after else None
            if window is None:
                window = await self._following(which, _Mark.parse(after) if after else None)
            for first in range(0, len(window.rows), _LOOK_ROWS):
                few = range(first, min(first + _LOOK_ROWS, len(window.rows)))
                wanted = await self._wanted(which, window, few)
                looked_at += len(few) if which.key_prefix else 0
                for at in few:
                    is_full = len(draft.messages) >= items_max or looked_at > _LOOKED_AT_MAX
                    if is_full or (at in wanted and not await self._add(draft, int(window.rows[at]))):
                        return draft.page(self._remember(which, window, at, after))
            if window.is_all:
                return draft.page("")
            after = str(window.mark(-1))

    def _remember(self, which: Filter, window: _Window, at: int, before: str) -> str:
        """Keep the rest of a window, and return the cursor that leads to it."""
        cursor = str(window.mark(at - 1)) if at else before
        if cursor:
            while len(self._windows) >= _WINDOWS_MAX:
                del self._windows[next(iter(self._windows))]
            self._windows[which, cursor] = window.only(slice(at, None))
        return cursor

    async def _wanted(self, which: Filter, window: _Window, few: range) -> set[int]:
        """The places in a window whose rows have not changed since they were found, and whose keys have the prefix."""
        table, at = self._rows, slice(few.start, few.stop)
        rows = window.rows[at]
        await asyncio.sleep(0)
        mask = self._is_meant(which, rows)
        mask &= (table.due_ms[rows] == window.due_ms[at]) & (table.sequence[rows] == window.sequence[at])
        mask &= table.subject_id[rows] == window.subject_id[at]
        if which.key_prefix:
            chosen = np.flatnonzero(mask)
            mask[chosen] = await self._has_prefix(rows[chosen], which.key_prefix)
        return set((few.start + np.flatnonzero(mask)).tolist())

    async def _add(self, draft: _Draft, row: int) -> bool:
        """Add one row to the page. False if the page has no room for it."""
        table = self._rows
        place = table.place(row)
        due_ms, subject_id = int(table.due_ms[row]), int(table.subject_id[row])
        message_id = MessageId(int(table.id_high[row]), int(table.id_low[row]))
        sheet = await self._obtain(place)
        if sheet is None or table.state[row] == RowState.LOST:  # opening its bucket record may have shown that
            return True
        size_bytes = int(sheet.payloads.offsets[place.at + 1] - sheet.payloads.offsets[place.at])
        if draft.messages and draft.bytes + size_bytes > _PAGE_BYTES_MAX:
            return False
        draft.add(Waiting(message_id, subject_id, sheet.key(place.at), due_ms, size_bytes), sheet, place.at)
        return True

    async def _following(self, which: Filter, after: _Mark | None) -> _Window:
        """The first rows behind a mark. Rows behind the last of the best so far are dropped, so that few rows are ever
        sorted."""
        best = self._noted(np.zeros(0, np.int64))
        is_all = True
        for at in self._slices():
            found = at.start + np.flatnonzero(self._is_meant(which, at))
            for first in range(0, len(found), _SORT_ROWS):
                few = self._noted(found[first : first + _SORT_ROWS])
                if after is not None:
                    few = few.only(few.is_behind(after))
                if not is_all:
                    few = few.only(~few.is_behind(best.mark(-1)))
                if len(few.rows):
                    best = best.merged(few)
                    is_all = is_all and len(best.rows) <= _WINDOW_ROWS
                    best = best.only(slice(0, _WINDOW_ROWS))
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        return best._replace(is_all=is_all)

    def _noted(self, rows: RowNumbers) -> _Window:
        """A window with the rows' current order keys: a row that is rescheduled meanwhile must not move the cursor."""
        table = self._rows
        return _Window(rows, table.due_ms[rows], table.subject_id[rows], table.sequence[rows])


NOT_MASTER = Refused(Code.NOT_MASTER, "this copy follows another, which decides: ask that one", retry_after_ms=100)


class PendingQueries(ABC):
    """The part of an engine that answers clients."""

    rows: Rows
    store: Store
    is_passive: bool  # another copy leads
    _browser: Browser
    _appender: ScheduleAppender
    _horizon_ms: int  # how far ahead a message may be due
    _pending: PendingMessages
    _time: Timekeeper

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether every message has its row, so that questions can be answered."""

    def name_of(self, subject_id: int) -> Subject:
        """The name of a subject that has or had messages here."""
        return self.rows.names.get(subject_id) or self.store.messages.views.subjects.by_id(subject_id).name

    def _id(self, subject: Subject) -> int:
        """The number of a subject; 0 if nobody ever sent to it."""
        known = self.store.messages.views.subjects.find(subject)
        if known is not None:
            return known.id
        return next((number for number, name in self.rows.names.items() if name == subject), 0)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def cancel(self, message_id: MessageId, subject: Subject | None = None) -> PendingDecision:
        """Cancel the message of that id, if it has that subject."""
        return self._questions().cancel(self._of_id(message_id, subject))

    def cancel_key(self, subject: Subject, key: str) -> PendingDecision:
        """Cancel all pending messages of that key."""
        return self._questions().cancel(self._of_key(subject, key))

    def reschedule(self, message_id: MessageId, due_ms: int, subject: Subject | None = None) -> PendingDecision:
        check_horizon(due_ms, self._time.now_ms(), self._horizon_ms)
        return self._questions().reschedule(self._of_id(message_id, subject), due_ms)

    def reschedule_key(self, subject: Subject, key: str, due_ms: int) -> PendingDecision:
        check_horizon(due_ms, self._time.now_ms(), self._horizon_ms)
        return self._questions().reschedule(self._of_key(subject, key), due_ms)

    def _of_id(self, message_id: MessageId, subject: Subject | None) -> RowNumbers:
        rows = self._pending.by_id(message_id)
        return rows if subject is None else rows[self.rows.subject_id[rows] == self._id(subject)]

    def _of_key(self, subject: Subject, key: str) -> RowNumbers:
        return self._pending.by_key(self._id(subject), key)

    def _questions(self) -> PendingMessages:
        if self.is_passive:
            raise NOT_MASTER
        if not self.is_loaded:
            raise Refused(Code.BUSY, "the delay server is loading its buckets", retry_after_ms=500)
        self._appender.admit()
        return self._pending

    # --- queries -----------------------------------------------------------------------------------------------------

    async def page(self, which: Filter, after: str = "", items_max: int = 1_000) -> BrowsedPage:
        """The pending messages that follow on a cursor, by due time; "" begins. A page may be short, even empty, while
        its `next` says that more follow. The loop gets a turn about every 5 ms."""
        self._questions()
        return await self._browser.page(which, after, items_max)

    async def tally(self, which: Filter, width_ms: int = 0) -> PendingCount:
        """How many messages are pending; with a width also by intervals of time. `Refused` (BAD_REQUEST) for more than
        10,000 intervals. The loop gets a turn about every 5 ms."""
        self._questions()
        return await self._browser.tally(which, width_ms)

    async def batches_of(self, page: BrowsedPage) -> list[tuple[Subject, bytes]]:
        """The messages of a page in order, as batches of one subject each, with their ids and due times. The loop gets
        a turn after each batch."""
        made = []
        for subject_id, composer, due_ms in page.composers:
            made.append((self.name_of(subject_id), composer.encode(_NOBODY, 0, due_ms)))
            await asyncio.sleep(0)
        return made

    def filter(
        self,
        subject: Subject | None = None,
        key_prefix: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
    ) -> Filter:
        """Make a filter from a subject's name. A subject that nobody ever sent to matches nothing."""
        return Filter(None if subject is None else self._id(subject), key_prefix, from_ms, to_ms)
