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
from fairway.batch import Batch, MessageId
from fairway.delay.buckets import check_horizon
from fairway.delay.dispatch_log import DispatchLog, Event
from fairway.delay.dispatching import Dispatcher, Intent, Route
from fairway.delay.housekeeping import Housekeeper
from fairway.delay.loader import Sweeper
from fairway.delay.moving import Mover
from fairway.delay.options import DelayOptions
from fairway.delay.pending import Decision, Filter, Pending
from fairway.delay.recovering import Recovery
from fairway.delay.rows import Place, Rows
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.timekeeper import Timekeeper
from fairway.delay.wheel import TICK_MS, RowNumbers, Wheel
from fairway.errors import Code, FairwayError, Refused, StorageFault
from fairway.names import Subject
from fairway.storage.flusher import Defer
from fairway.storage.log import Damaged
from fairway.storage.message_log import Receipt
from fairway.storage.record import Kind
from fairway.storage.store import Store
from fairway.world.clock import Clock
from fairway.world.disk import Disk
from fairway.world.rng import Rng


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
        self._young: dict[int, bytes] = {}
        self._ready: list[Intent] = []
        self.store = Store.open(disk, clock, rng, defer=defer, options=self._options.store, action_view=self._journal)
        self._journal.write = self._write
        if schedule_disk is not None:
            schedule_disk.lock()
        self._sweeper = Sweeper(self.rows, self.wheel, self._time.now_ms())
        self._mover = Mover(self.rows, self._young, self._sweeper.home)
        self.log = ScheduleLog(
            schedule_disk or disk,
            rng,
            self.store.identity.messages_id,
            defer=defer,
            poison=self._poison,
            moved_end=lambda: self._mover.moved_end,
            on_listed=self._mover.listed,
        )
        self._dispatcher = Dispatcher(
            self.rows,
            self.log,
            self._journal,
            rng,
            route=route,
            name=self._name,
            on_intent=self._intended,
            on_damage=self.damaged.append,
        )
        self._pending = Pending(
            self.rows, self._journal, open_at=self._open_at, take_off=self._take_off, put_on=self._sweeper.home
        )
        damage, step = self.damaged.append, self._options.messages_per_step
        self._housekeeper = Housekeeper(
            self.store, self.log, self.rows, self._mover, self._journal, on_damage=damage, messages_per_step=step
        )
        self._recovery = Recovery(
            self.store,
            self.log,
            self.rows,
            self._mover,
            self._journal,
            self._dispatcher,
            take=self._take,
            on_home=self._sweeper.home,
            on_damage=damage,
            messages_per_step=step,
        )

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
            or self._young
            or self._ready
            or self._sweeper.is_sweeping
            or self._housekeeper.is_busy
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
        if self._mover.unmoved_bytes > limits.DELAY_UNMOVED_BYTES_MAX:
            raise Refused(Code.BUSY, "the disk is behind: too many bytes wait for their buckets", retry_after_ms=50)
        receipt = self.store.produce(subject, data)
        if not receipt.is_duplicate:

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
        now_ms = self._time.now_ms()
        self._mover.take(self.log, self._name(subject_id), subject_id, first_sequence, data, end, now_ms, keep)

    def _name(self, subject_id: int) -> Subject:
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
        self._ready += self._recovery.step(is_quiet=not self._young)
        self._sweeper.step(now_ms)
        if self._recovery.is_remade:
            self._dispatcher.dispatch(self.wheel.due(now_ms), now_ms)
        if self.is_loaded:
            self._housekeeper.step(now_ms)
        ready, self._ready = self._ready, []
        return ready

    def wait_ms(self) -> int:
        """In how many milliseconds `on_time` wants to be called next, at the latest."""
        if not self._recovery.is_done or self._sweeper.is_sweeping or self._housekeeper.is_busy:
            return TICK_MS
        now_ms, next_ms = self._time.now_ms(), self.wheel.next_ms()
        latest_ms = self._housekeeper.wait_ms(now_ms)
        return latest_ms if next_ms is None else max(min(next_ms - now_ms, latest_ms), 0)

    def _intended(self, intent: Intent, end: int) -> None:
        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._ready.append(intent)
                self._on_ready()

        self.store.actions.log.flusher.when_durable(end, durable)

    def sent(self, number: int) -> None:
        """The broker has stored that intent's batch, or had stored it before."""
        self._dispatcher.sent(number)

    def _write(self, body: bytes, count: int) -> int:
        return self.store.actions.log.append(Kind.DISPATCH, body, self._clock.wall_ms(), count=count).end

    # --- pending -----------------------------------------------------------------------------------------------------

    def cancel(self, message_id: MessageId) -> Decision:
        return self._questions().cancel(self._pending.by_id(message_id))

    def cancel_key(self, subject: Subject, key: str) -> Decision:
        """All pending messages of that key."""
        return self._questions().cancel(self._of_key(subject, key))

    def reschedule(self, message_id: MessageId, due_ms: int) -> Decision:
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._pending.by_id(message_id), due_ms)

    def reschedule_key(self, subject: Subject, key: str, due_ms: int) -> Decision:
        check_horizon(due_ms, self._time.now_ms(), self._options.horizon_ms)
        return self._questions().reschedule(self._of_key(subject, key), due_ms)

    async def settled(self, decision: Decision) -> None:
        """Return once the answer may be given."""
        await self.store.actions.log.flusher.durable(decision.end)

    def _of_key(self, subject: Subject, key: str) -> RowNumbers:
        return self._pending.by_key(self._id(subject), key)

    def pending(self) -> Pending:
        """For list, count and histogram."""
        return self._questions()

    def _questions(self) -> Pending:
        if not self.is_loaded:
            raise Refused(Code.BUSY, "the delay server is loading its buckets", retry_after_ms=500)
        return self._pending

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

    def _open_at(self, place: Place) -> Batch | None:
        if place.file == 0:
            return batch.decode(self._young[place.position])
        try:
            return self.log.read(place.file, place.position)[1]
        except Damaged as damaged:
            self.damaged.append(damaged)
            return None

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Put everything where it belongs, leave a manifest and a checkpoint, let go of the directories."""
        try:
            await self.store.messages.log.flusher.synced(self.store.messages.log.end)
            await self.log.settle()
        finally:
            self.log.close()
            await self.store.close()

    def _poison(self, fault: StorageFault) -> None:
        self.store.poison(fault)
