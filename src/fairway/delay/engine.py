"""The delay server without a network: schedule, wait, hand out what is due, cancel; whatever crashes in between.

The way of a delayed message: `schedule` appends its batch to the message log and answers when that is synced → `moving`
puts it into its bucket → `loader` puts its row into the wheel when its hour is at hand → `on_time` finds it due and
`dispatching` names it in an intent → the intent is synced and handed to whoever sends it → `sent`.

Whoever owns an engine calls `on_time` after `wait_ms`, and sooner when `on_ready` is called, when a target comes back,
and when intents were noted as sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fairway import batch, limits
from fairway.batch import MessageId
from fairway.delay import browsing
from fairway.delay.browsing import Browser, Page, Tally
from fairway.delay.bucket_file import BucketFile
from fairway.delay.buckets import check_horizon
from fairway.delay.dispatch_log import DispatchLog, Event
from fairway.delay.dispatching import Dispatcher, Homes, Intent, Route
from fairway.delay.forgetting import Memory
from fairway.delay.housekeeping import Housekeeper
from fairway.delay.loader import Sweeper
from fairway.delay.moving import Mover
from fairway.delay.options import DelayOptions
from fairway.delay.pending import Decision, Filter, Pending
from fairway.delay.recovering import Recovery
from fairway.delay.rows import Place, Rows, State
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.sheet import Sheet
from fairway.delay.shelf import Shelf
from fairway.delay.timekeeper import Timekeeper
from fairway.delay.wheel import TICK_MS, RowNumbers, Times, Wheel
from fairway.errors import Code, FairwayError, Refused, StorageFault, WrongDirectory
from fairway.names import Subject
from fairway.storage.flusher import Defer
from fairway.storage.log import Damaged
from fairway.storage.message_log import Receipt
from fairway.storage.record import Kind
from fairway.storage.store import Store
from fairway.world.clock import Clock
from fairway.world.disk import Disk
from fairway.world.rng import Rng

_AHEAD_MS = 2_000  # pieces are open so long before their messages are due


class Engine:
    """One delay server's data. Lives on one loop; `defer` is that loop's `call_soon`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        rng: Rng,
        *,
        defer: Defer,
        route: Route,
        schedule_disk: Disk | None = None,
        options: DelayOptions | None = None,
        on_ready: Callable[[], None] = lambda: None,
        homes: Homes | None = None,
    ) -> None:
        """Recover what is there. With a `schedule_disk`, the message log has `disk` for itself."""
        self._options = options or DelayOptions()
        self._on_ready = on_ready
        self._time = Timekeeper(clock)
        self._clock = clock
        self.damaged: list[Damaged] = []  # pieces that could not be read
        self.rows = Rows()
        self.wheel = Wheel()
        self._journal = DispatchLog()
        self._ready: list[Intent] = []
        self._prepared_ms = 0
        self.scheduled_total = 0  # messages, in this life; like the other totals
        self.store = Store.open(disk, clock, rng, defer=defer, options=self._options.store, action_view=self._journal)
        self._journal.write = self._write
        self._check_history()
        if schedule_disk is not None:
            schedule_disk.lock()
        self._sweeper = Sweeper(self.rows, self.wheel, self._time.now_ms())
        self.log = self._schedule_log(schedule_disk or disk, rng, defer)
        self._shelf = Shelf(
            self.log.files, on_damage=self.damaged.append, on_fault=self._poison, on_arrival=self._on_ready
        )
        self._mover = self._new_mover(defer)
        self._memory = Memory(
            self.rows, self.log, self._journal, lambda: self._mover.taken_end, self._options.remembered_max
        )
        self._dispatcher = Dispatcher(
            self.rows,
            self._shelf,
            self._journal,
            rng,
            route=route,
            name=self.name_of,
            on_intent=self._intended,
            on_done=self._done,
            homes=homes,
        )
        self._pending = Pending(
            self.rows,
            self._journal,
            open_at=self._open_at,
            take_off=self._take_off,
            put_on=self._home,
            on_done=self._done,
        )
        self._browser = Browser(self.rows, self._obtain)
        self._recovery = self._recover()
        self._housekeeper = Housekeeper(
            self.store,
            self.log,
            self._shelf,
            self.rows,
            self._mover,
            self._journal,
            self._memory,
            messages_per_step=self._options.messages_per_step,
        )

    def _schedule_log(self, disk: Disk, rng: Rng, defer: Defer) -> ScheduleLog:
        return ScheduleLog(
            disk,
            rng,
            self.store.identity.messages_id,
            defer=defer,
            poison=self._poison,
            moved_end=lambda: self._mover.moved_end,
            on_listed=self._listed,
            catalogue_messages=self._options.catalogue_messages,
        )

    def _new_mover(self, defer: Defer) -> Mover:
        return Mover(
            self.rows,
            self.log,
            defer=defer,
            now=self._time.now_ms,
            name=self.name_of,
            on_home=self._home,
            on_warm=self._shelf.put,
            on_hold=self._on_ready,
            hold_ms=self._options.hold_ms,
        )

    def _listed(self, file: BucketFile) -> None:
        self._mover.listed(file)

    def _check_history(self) -> None:
        """Old decisions are in the checkpoint alone. Without one, what was sent would be sent again."""
        segments = self.store.actions.log.segments
        if not self._journal.is_restored and segments and segments[0].base > 0:
            raise WrongDirectory(
                "no checkpoint can be read, and the dispatch log does not go back to the beginning: "
                "restore the folder `checkpoints` from a copy"
            )

    def _recover(self) -> Recovery:
        return Recovery(
            self.store,
            self.log,
            self.rows,
            self._mover,
            self._journal,
            self._dispatcher,
            take=self._take,
            on_home=self._sweeper.home,
            on_damage=self.damaged.append,
            messages_per_step=self._options.messages_per_step,
        )

    # --- what operators see ------------------------------------------------------------------------------------------

    @property
    def messages_pending(self) -> int:
        """Scheduled, and neither sent nor cancelled: what a quota counts."""
        return self.rows.pending

    @property
    def dispatched_total(self) -> int:
        """Messages that a broker has stored."""
        return self._dispatcher.dispatched

    @property
    def cancelled_total(self) -> int:
        return self._pending.cancelled

    @property
    def rescheduled_total(self) -> int:
        return self._pending.rescheduled

    @property
    def buckets(self) -> int:
        """Files of the schedule log, but for its manifest."""
        return len(self.log.files)

    @property
    def index_bytes(self) -> int:
        """Memory of the index rows."""
        return self.rows.bytes

    @property
    def opened_bytes(self) -> int:
        """Memory of contents: pieces that are open, and what is on its way into buckets."""
        return self._shelf.bytes + self._mover.unmoved_bytes

    @property
    def fault(self) -> StorageFault | None:
        return self.store.fault

    @property
    def is_loaded(self) -> bool:
        """Every message has its row: questions can be answered."""
        return self._recovery.is_loaded

    @property
    def stuck(self) -> list[Event]:
        """Intents of an earlier life that cannot be made again: some of their messages have rotted."""
        return self._recovery.stuck

    @property
    def is_idle(self) -> bool:
        """Nothing is under way: all that was scheduled is in its bucket, all that is due was handed out."""
        busy = (
            not self._recovery.is_done
            or self._mover.is_busy
            or self._ready
            or self._sweeper.is_sweeping
            or self._housekeeper.is_busy
            or self._shelf.is_busy
            or self._dispatcher.has_more
        )
        flushers = (self.store.messages.log.flusher, self.store.actions.log.flusher)
        return self._recovery.is_done and not busy and not any(each.uncommitted_bytes for each in flushers)

    # --- scheduling --------------------------------------------------------------------------------------------------

    def schedule(self, subject: Subject, data: bytes) -> Receipt:
        """Take a batch; it counts once `store.durable(receipt)` has returned. `Refused`: nothing was appended."""
        header = batch.check(data)
        due = batch.due_times_ms(data, header)
        if due is not None:
            check_horizon(max(due), self._time.now_ms(), self._options.horizon_ms)
        if self.rows.pending + header.count > self._options.pending_max:
            raise Refused(
                Code.BUSY, f"{self._options.pending_max:,} messages are pending, and there is room for no more"
            )
        if self._mover.is_full or self.log.is_full:
            raise Refused(Code.READ_ONLY, "the disk of the schedule log is full: make room", retry_after_ms=1_000)
        if self._mover.unmoved_bytes > limits.DELAY_UNMOVED_BYTES_MAX:
            raise Refused(Code.BUSY, "the disk is behind: too many bytes wait for their buckets", retry_after_ms=50)
        receipt = self.store.produce(subject, data, header)
        if not receipt.is_duplicate:
            self.scheduled_total += header.count

            def durable(outcome: FairwayError | None) -> None:
                if outcome is None:
                    self._take(receipt.subject_id, receipt.first_sequence, data, receipt.end)

            self.store.messages.log.flusher.when_durable(receipt.end, durable)
        return receipt

    def _take(
        self,
        subject_id: int,
        first_sequence: int,
        data: bytes,
        end: int,
        keep: NDArray[np.bool_] | None = None,
    ) -> None:
        self._mover.take(subject_id, first_sequence, data, end, keep)

    def _done(self, rows: RowNumbers) -> None:
        self._memory.note(rows, self._time.now_ms())

    def name_of(self, subject_id: int) -> Subject:
        """The subject of that number, which has or had messages here."""
        return self.rows.names.get(subject_id) or self.store.messages.views.subjects.by_id(subject_id).name

    def _id(self, subject: Subject) -> int:
        """0 where nobody ever sent to it."""
        known = self.store.messages.views.subjects.find(subject)
        if known is not None:
            return known.id
        return next((number for number, name in self.rows.names.items() if name == subject), 0)

    # --- dispatching -------------------------------------------------------------------------------------------------

    def on_time(self) -> list[Intent]:
        """Do what is to be done by now. Returns intents to send, in order; the same ones again only after a restart."""
        if self.fault is not None:
            raise self.fault
        now_ms = self._time.now_ms()
        was_loaded = self.is_loaded
        self._ready += self._recovery.step(is_quiet=not (self._mover.is_busy or self._shelf.is_busy))
        if self.is_loaded and not was_loaded:
            self._remember()
        self._mover.step(now_ms)
        self._sweeper.step(now_ms)
        if self._recovery.is_remade:
            # By the tick, however often this is called: a batch a millisecond would cost more than its messages.
            self._dispatcher.dispatch(self.wheel.due(now_ms - now_ms % TICK_MS), now_ms)
            self._prepare(now_ms)
        if self.is_loaded:
            self._housekeeper.step(now_ms)
        ready, self._ready = self._ready, []
        return ready

    def _prepare(self, now_ms: int) -> None:
        """Fetch what will be due in the next seconds, a stretch at a time."""
        if not self._prepared_ms - _AHEAD_MS <= now_ms < self._prepared_ms - _AHEAD_MS // 2:
            start_ms = min(max(now_ms, self._prepared_ms), now_ms + _AHEAD_MS)
            self._prepared_ms = now_ms + _AHEAD_MS
            self._dispatcher.prepare(self.wheel.between(start_ms, self._prepared_ms))

    def _remember(self) -> None:
        """A start is done: what earlier lives sent or cancelled is remembered from now on."""
        gone = self._journal.gone
        for number in [each for each in gone if each not in self.log.files]:
            del gone[number]
        for state in (State.DISPATCHED, State.CANCELLED):
            self._done(self.rows.in_state(state))

    def wait_ms(self) -> int:
        """In how many milliseconds `on_time` wants to be called next, at the latest. 0 while a start is under way, or
        when there is more to do than one call should take: let others have a turn of the loop, and call."""
        if not self.is_loaded or self._dispatcher.has_more or self._mover.has_more:
            return 0
        if not self._recovery.is_done or self._sweeper.is_sweeping or self._housekeeper.is_busy:
            return TICK_MS
        now_ms, next_ms = self._time.now_ms(), self.wheel.next_ms()
        latest_ms = self._housekeeper.wait_ms(now_ms)
        held_ms = self._mover.wait_ms(now_ms)
        if held_ms is not None:
            latest_ms = min(latest_ms, max(held_ms, TICK_MS))
        if next_ms is None:
            return latest_ms
        if next_ms > self._prepared_ms:  # so that its piece is open in time
            next_ms = min(next_ms, max(next_ms - _AHEAD_MS, self._prepared_ms - _AHEAD_MS // 2))
        return max(min(next_ms - now_ms, latest_ms), 0)

    def _home(self, rows: RowNumbers) -> None:
        """These rows have a place or a new due time. Whoever calls `on_time` may have to do so sooner than thought."""
        before_ms = self.wheel.next_ms()
        self._sweeper.home(rows)
        next_ms = self.wheel.next_ms()
        if next_ms is not None and (before_ms is None or next_ms < before_ms):
            self._on_ready()

    def _intended(self, intent: Intent, end: int) -> None:
        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._ready.append(intent)
                self._on_ready()

        self.store.actions.log.flusher.when_durable(end, durable)

    def sent(self, number: int) -> Times:
        """The broker has stored that intent's batch, or had stored it before. Returns when its messages were due."""
        return self._dispatcher.sent(number)

    def outstanding_bytes(self, target: str) -> int:
        """Of intents for that target that are not sent yet; they are in memory."""
        return self._dispatcher.outstanding_bytes[target]

    @property
    def held_back(self) -> int:
        """Messages that are due and in no intent yet: their target is down, or has enough to do."""
        return self._dispatcher.due

    def _write(self, body: bytes, count: int) -> int:
        return self.store.actions.log.append(Kind.DISPATCH, body, self._clock.wall_ms(), count=count).end

    # --- pending -----------------------------------------------------------------------------------------------------

    def cancel(self, message_id: MessageId, subject: Subject | None = None) -> Decision:
        """The message of that id, if it has that subject."""
        return self._questions().cancel(self._of_id(message_id, subject))

    def cancel_key(self, subject: Subject, key: str) -> Decision:
        """All pending messages of that key."""
        return self._questions().cancel(self._of_key(subject, key))

    def reschedule(self, message_id: MessageId, due_ms: int, subject: Subject | None = None) -> Decision:
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._of_id(message_id, subject), due_ms)

    def reschedule_key(self, subject: Subject, key: str, due_ms: int) -> Decision:
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._of_key(subject, key), due_ms)

    async def settled(self, decision: Decision) -> None:
        """Return once the answer may be given."""
        await self.store.actions.log.flusher.durable(decision.end)

    def _of_id(self, message_id: MessageId, subject: Subject | None) -> RowNumbers:
        rows = self._pending.by_id(message_id)
        return rows if subject is None else rows[self.rows.subject_id[rows] == self._id(subject)]

    def _of_key(self, subject: Subject, key: str) -> RowNumbers:
        return self._pending.by_key(self._id(subject), key)

    def pending(self) -> Pending:
        """For list, count and histogram."""
        return self._questions()

    def _questions(self) -> Pending:
        if not self.is_loaded:
            raise Refused(Code.BUSY, "the delay server is loading its buckets", retry_after_ms=500)
        self._mover.admit()
        return self._pending

    async def page(self, which: Filter, after: str = "", items_max: int = 1_000) -> Page:
        """The pending messages that follow on a cursor, by due time; "" begins. A page may be short, even empty, while
        its `next` says that there are more. Other turns of the loop come in between, every 5 ms or so."""
        self._questions()
        return await self._browser.page(which, after, items_max)

    async def tally(self, which: Filter, width_ms: int = 0) -> Tally:
        """How many are pending; with a width also by stretches of time. `Refused` (BAD_REQUEST) where the stretches are
        more than 10,000. Other turns of the loop come in between, every 5 ms or so."""
        self._questions()
        return await self._browser.tally(which, width_ms)

    async def batches_of(self, page: Page) -> list[tuple[Subject, bytes]]:
        """The messages of a page in its order, as batches of one subject each, with their ids and due times. A step is
        one batch."""
        return await browsing.batches_of(page, self.name_of)

    def filter(
        self,
        subject: Subject | None = None,
        key_prefix: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
    ) -> Filter:
        """A filter by name; a subject that nobody ever sent to matches nothing."""
        return Filter(None if subject is None else self._id(subject), key_prefix, from_ms, to_ms)

    def _take_off(self, row: int) -> None:
        """A row is cancelled or put off: nobody holds it as due any more."""
        if self.wheel.cancel(row, int(self.rows.due_ms[row])) or self._dispatcher.drop_waiting(row):
            self.rows.in_wheel[row] = False

    async def _obtain(self, place: Place) -> Sheet | None:
        if place.file == 0:
            return self._mover.young_at(place.position)
        opened = await self._shelf.obtain((place.file, place.position))
        return None if opened is None else opened.sheet

    def _open_at(self, place: Place) -> Sheet | None:
        if place.file == 0:
            return self._mover.young_at(place.position)
        opened = self._shelf.read((place.file, place.position))
        return None if opened is None else opened.sheet

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Put everything where it belongs, leave a manifest and a checkpoint, let go of the directories."""
        try:
            await self.store.messages.log.flusher.synced(self.store.messages.log.end)
            self._mover.flush(self._time.now_ms())
            await self.log.settle(self._time.now_ms())
        finally:
            self.log.close()
            await self.store.close()

    def _poison(self, fault: StorageFault) -> None:
        self.store.poison(fault)
