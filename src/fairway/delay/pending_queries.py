"""Queries and decisions of clients about pending messages: cancel, reschedule, page, count. A base class of the engine.

Questions wait until every row is loaded: before that, the engine refuses them with BUSY. One copy of several answers
only while it leads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from fairway.batch import MessageId
from fairway.delay import pending_messages
from fairway.delay.options import DelayOptions
from fairway.delay.pending_messages import BrowsedPage, Browser, Filter, PendingCount, PendingDecision, PendingMessages
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.manifest import check_horizon
from fairway.delay.schedule.pending_rows import Rows
from fairway.delay.schedule.wheel import RowNumbers
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.runtime.clock import Timekeeper
from fairway.storage.store import Store

NOT_MASTER = Refused(Code.NOT_MASTER, "this copy follows another, which decides: ask that one", retry_after_ms=100)


class PendingQueries(ABC):
    """The part of an engine that answers clients."""

    rows: Rows
    store: Store
    is_passive: bool  # another copy leads
    _browser: Browser
    _appender: ScheduleAppender
    _options: DelayOptions
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
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._of_id(message_id, subject), due_ms)

    def reschedule_key(self, subject: Subject, key: str, due_ms: int) -> PendingDecision:
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._of_key(subject, key), due_ms)

    async def settled(self, decision: PendingDecision) -> None:
        """Return once the answer may be given."""
        await self.store.actions.log.flusher.durable(decision.end)

    def _of_id(self, message_id: MessageId, subject: Subject | None) -> RowNumbers:
        rows = self._pending.by_id(message_id)
        return rows if subject is None else rows[self.rows.subject_id[rows] == self._id(subject)]

    def _of_key(self, subject: Subject, key: str) -> RowNumbers:
        return self._pending.by_key(self._id(subject), key)

    def pending(self) -> PendingMessages:
        """For list, count and histogram."""
        return self._questions()

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
        return await pending_messages.batches_of(page, self.name_of)

    def filter(
        self,
        subject: Subject | None = None,
        key_prefix: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
    ) -> Filter:
        """Make a filter from a subject's name. A subject that nobody ever sent to matches nothing."""
        return Filter(None if subject is None else self._id(subject), key_prefix, from_ms, to_ms)
