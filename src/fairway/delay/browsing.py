"""Looking at what is pending, page by page and by the count, without holding up what is due.

Every question is a walk over the rows in steps of a few milliseconds, with a turn of the loop in between; so is the
reading of keys and sizes, which lie in the buckets. What is asked may therefore change under way. The promise: a
message that is pending, under the same due time, from the first page of a listing to its last is on exactly one page.
What is scheduled, sent, cancelled or put off meanwhile is on one or on none.

Pages are ordered by due time, then subject, then sequence; a cursor names the last message of a page. A page may be
short, even empty, while there are more: it ends with what fits into its bounds, or when so many keys were looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.batch import MessageId
from fairway.delay.letters import BatchComposer
from fairway.delay.pending import Filter, Waiting
from fairway.delay.rows import RowLocation, Rows, RowState
from fairway.delay.sheet import BatchArrays
from fairway.delay.wheel import RowNumbers
from fairway.errors import Code, Refused
from fairway.names import Subject

STRETCHES_MAX = 10_000  # of a histogram
_SLICE_ROWS = 250_000  # looked at in one step: 1 ms
_SORT_ROWS = 16_384  # sorted in one step, twice as many at most: 5 ms
_WINDOW_ROWS = 16_384  # found in one walk, for this page and those that follow
_WINDOWS_MAX = 8  # listings that go on from page to page without a walk each
_LOOK_ROWS = 1_024  # whose keys are looked at together, each piece opened once
_LOOKED_AT_MAX = 50_000  # keys of one page
_PAGE_BYTES_MAX = 4 * limits.MIB  # payloads of one page; a single larger message is a page of its own
_BATCH_MESSAGES_MAX = 1_000
_NOBODY = 1  # producer of a batch that is only looked at: every message in it has an id of its own


class BrowsedPage(NamedTuple):
    """Pending messages in their order, and the cursor of the next page; "" on the last one."""

    messages: list[Waiting]
    next: str
    letters: tuple[
        tuple[int, BatchComposer, NDArray[np.int64]], ...
    ] = ()  # subject id, contents and due times, in order


@dataclass(frozen=True, slots=True)
class PendingCount:
    """How many, and how many in each stretch of time that is not empty: (start in ms, count), in order."""

    count: int
    stretches: list[tuple[int, int]]


class _Mark(NamedTuple):
    """A place in the order of pages."""

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
    """Rows in the order of pages, with the marks they had when they were found."""

    rows: RowNumbers
    due_ms: NDArray[np.int64]
    subject_id: NDArray[np.uint32]
    sequence: NDArray[np.uint64]
    is_all: bool = True  # nothing follows behind them

    def mark(self, at: int) -> _Mark:
        return _Mark(int(self.due_ms[at]), int(self.subject_id[at]), int(self.sequence[at]))

    def only(self, chosen: slice | NDArray[np.bool_] | NDArray[np.int64]) -> _Window:
        return _Window(
            self.rows[chosen], self.due_ms[chosen], self.subject_id[chosen], self.sequence[chosen], self.is_all
        )

    def merged(self, other: _Window) -> _Window:
        """Both, in order."""
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
        self._letters: list[tuple[int, BatchComposer, list[int]]] = []

    def add(self, waiting: Waiting, sheet: BatchArrays, at: int) -> None:
        self.messages.append(waiting)
        self.bytes += waiting.size_bytes
        last = self._letters[-1] if self._letters else None
        if last is None or last[0] != waiting.subject_id or len(last[1]) >= _BATCH_MESSAGES_MAX:
            last = waiting.subject_id, BatchComposer(is_copying=True), []
            self._letters.append(last)
        last[1].take(sheet, np.array([at]))
        last[2].append(waiting.due_ms)

    def page(self, following: str) -> BrowsedPage:
        letters = tuple((subject, letters, np.array(due_ms, np.int64)) for subject, letters, due_ms in self._letters)
        return BrowsedPage(self.messages, following, letters)


class Browser:
    """Answers questions about rows that are loaded. `obtain`: the piece of a place, opened; None if it is damaged."""

    def __init__(self, rows: Rows, obtain: Callable[[RowLocation], Awaitable[BatchArrays | None]]) -> None:
        self._rows = rows
        self._obtain = obtain
        self._windows: dict[tuple[Filter, str], _Window] = {}  # what follows on a cursor

    # --- how many ----------------------------------------------------------------------------------------------------

    async def tally(self, which: Filter, width_ms: int) -> PendingCount:
        """Count; with a width also by stretches of it. `Refused` where these are too many."""
        count = 0
        stretches: dict[int, int] = {}
        async for found in self._walk(which):
            count += len(found)
            if width_ms and len(found):
                starts, counts = np.unique(self._rows.due_ms[found] // width_ms, return_counts=True)
                for start, each in zip(starts.tolist(), counts.tolist(), strict=True):
                    stretches[start] = stretches.get(start, 0) + each
                if len(stretches) > STRETCHES_MAX:
                    raise Refused(
                        Code.BAD_REQUEST, f"more than {STRETCHES_MAX:,} stretches of {width_ms} ms: use a wider width"
                    )
        return PendingCount(count, [(start * width_ms, stretches[start]) for start in sorted(stretches)])

    async def _walk(self, which: Filter) -> AsyncIterator[RowNumbers]:
        """All rows that are meant, a slice of the table at a time."""
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
        """Of the table, which may grow meanwhile."""
        start = 0
        while start < self._rows.end:
            end = min(start + _SLICE_ROWS, self._rows.end)
            yield slice(start, end)
            start = end

    def _is_meant(self, which: Filter, at: slice | RowNumbers) -> NDArray[np.bool_]:
        """All but the prefix: keys lie in the buckets."""
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
        """Which of a few rows have a key that begins so; each piece is opened once."""
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

    # --- which ones --------------------------------------------------------------------------------------------------

    async def page(self, which: Filter, after: str, items_max: int) -> BrowsedPage:
        """The messages that follow on a cursor ("": the first ones)."""
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
        """The cursor of what begins at that place of a window."""
        cursor = str(window.mark(at - 1)) if at else before
        if cursor:
            while len(self._windows) >= _WINDOWS_MAX:
                del self._windows[next(iter(self._windows))]
            self._windows[which, cursor] = window.only(slice(at, None))
        return cursor

    async def _wanted(self, which: Filter, window: _Window, few: range) -> set[int]:
        """The places in a window whose rows are still what they were when they were found, and have the prefix."""
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
        """Put one row on the page; False where it does not fit any more."""
        table = self._rows
        place = table.place(row)
        due_ms, subject_id = int(table.due_ms[row]), int(table.subject_id[row])
        message_id = MessageId(int(table.id_high[row]), int(table.id_low[row]))
        sheet = await self._obtain(place)
        if sheet is None or table.state[row] == RowState.LOST:  # which opening its piece may have shown
            return True
        size_bytes = int(sheet.payloads.offsets[place.at + 1] - sheet.payloads.offsets[place.at])
        if draft.messages and draft.bytes + size_bytes > _PAGE_BYTES_MAX:
            return False
        draft.add(Waiting(message_id, subject_id, sheet.key(place.at), due_ms, size_bytes), sheet, place.at)
        return True

    async def _following(self, which: Filter, after: _Mark | None) -> _Window:
        """The first rows behind a mark. Whatever is found is compared with the last of the best so far, so that few
        rows are ever sorted."""
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
        """With the marks that they have now: a row that is put off meanwhile must not move the cursor."""
        table = self._rows
        return _Window(rows, table.due_ms[rows], table.subject_id[rows], table.sequence[rows])


async def batches_of(page: BrowsedPage, name: Callable[[int], Subject]) -> list[tuple[Subject, bytes]]:
    """The messages of a page, in its order, as batches of one subject each; they keep ids and due times."""
    made = []
    for subject_id, letters, due_ms in page.letters:
        made.append((name(subject_id), letters.encode(_NOBODY, 0, due_ms)))
        await asyncio.sleep(0)
    return made
