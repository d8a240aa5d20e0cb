"""Engine of the delay server, without a network: stores delayed messages, gives out due ones, survives crashes.

A delayed message takes this way. `schedule` appends its batch to the message log and answers once that is synced.
`ScheduleAppender` writes the message into its bucket. `Sweeper` puts its row on the wheel when its hour comes near.
`on_time` finds the row due, and `Dispatcher` names the message in an intent. Once the intent is synced, `on_time`
returns it for sending. `sent` notes the broker's receipt.

The owner calls `on_time` after `wait_ms`, and sooner on `on_ready`, a target's return, or a `sent`.

One copy of several follows until `lead`. It makes the same state from its master's logs as a start would
(`DelayReplica`), sends nothing and answers nobody. A master with replicas gives out an intent only when its in-sync set
has the intent. So the next master knows of everything that was sent, and a deposed master can send nothing new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fairway import batch, limits
from fairway.delay import install
from fairway.delay.dispatch.dispatcher import Dispatcher, Homes, Intent, Redirected, RouteLookup
from fairway.delay.dispatch.log import DispatchEvent, DispatchLog
from fairway.delay.engine_part import EngineData
from fairway.delay.maintenance import DelayMaintenance, Memory
from fairway.delay.pending_messages import NOT_MASTER, Browser, PendingMessages, PendingQueries
from fairway.delay.recovery import Recovery
from fairway.delay.replica import DelayReplica
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.batch_arrays import BatchArrays
from fairway.delay.schedule.log import BucketRecordCache, ScheduleLog
from fairway.delay.schedule.manifest import check_horizon
from fairway.delay.schedule.pending_rows import RowLocation, RowNumbers, Rows, RowState
from fairway.delay.schedule.repair import BucketRepair
from fairway.delay.schedule.wheel import TICK_MS, DueTimes, Sweeper, Wheel
from fairway.errors import Code, FairwayError, Misuse, Refused, StorageFault, WrongDirectory
from fairway.names import Subject
from fairway.runtime.clock import Clock, Timekeeper
from fairway.runtime.disk import Disk
from fairway.runtime.rng import Rng
from fairway.storage import retention
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Defer
from fairway.storage.log import Damaged
from fairway.storage.message_log import AppendReceipt
from fairway.storage.open_store import RecoveredStore, recover
from fairway.storage.record import RecordKind
from fairway.storage.store import Store, StoreOptions

_AHEAD_MS = 2_000  # bucket records are opened this long before their messages are due
_STIRRED_MS = 20  # between two turns of a replica while its master writes


def _store_options() -> StoreOptions:
    """Defaults for the store. Messages in buckets may leave the message log; `owed_from` names the first that is not in
    one. Part of both logs is kept for `DelayHistory`."""
    return StoreOptions(
        segment_bytes=limits.DELAY_SEGMENT_BYTES,
        retention=retention.Policy(bytes_max=limits.DELAY_HISTORY_BYTES),
        keeps_actions=False,
        actions_kept_bytes=limits.DELAY_HISTORY_BYTES,
    )


@dataclass(frozen=True, slots=True)
class DelayOptions:
    """Bounds of one delay server, and the options of its logs."""

    horizon_ms: int = limits.DELAY_HORIZON_MS
    pending_max: int = limits.DELAY_PENDING_MAX
    messages_per_step: int = limits.DELAY_STEP_MESSAGES
    hold_ms: int = 1_000  # how long small parts wait to enter their bucket together; the message log has them
    remembered_max: int = limits.DELAY_REMEMBERED_MAX
    catalogue_messages: int = 8_192  # in one catalogue of a bucket: 330 KB
    housekeeping_ms: int | None = None  # between two rounds of maintenance, at most an hour; None: a minute
    has_heartbeat: bool = True  # on connections to brokers; False for an in-memory net, which reports their end
    store: StoreOptions = field(default_factory=_store_options)

    @property
    def rows_max(self) -> int:
        """Messages with a row in memory: pending ones, and finished ones that are still remembered."""
        return self.pending_max + self.remembered_max


class RecoveredLogs(NamedTuple):
    """Both logs of a delay server, and the state of the dispatch log."""

    opened: RecoveredStore
    journal: DispatchLog


def recover_logs(
    disk: Disk, schedule_disk: Disk | None, rng: Rng, adopt: DirectoryIdentity | None = None
) -> RecoveredLogs:
    """Recover the logs. This call blocks, so a server that is one copy of several runs it off its loop. `adopt`: the
    identity for a directory that has none yet."""
    install.finish(disk, schedule_disk or disk)
    journal = DispatchLog()
    return RecoveredLogs(recover(disk, rng, journal, adopt), journal)


class Engine(PendingQueries):
    """The data of one delay server. Lives on one loop; `defer` is that loop's `call_soon`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        rng: Rng,
        *,
        defer: Defer,
        route: RouteLookup,
        schedule_disk: Disk | None = None,
        options: DelayOptions | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_fault: Callable[[StorageFault], None] = lambda _: None,
        homes: Homes | None = None,
        recovered: RecoveredLogs | None = None,
    ) -> None:
        """Recover what is on disk. With a `schedule_disk`, the message log has `disk` for itself. `on_fault`: the disk
        has failed, and requests get no answers. `recovered`: the logs of one copy of several, which follows until
        `lead`."""
        logs = recovered or recover_logs(disk, schedule_disk, rng)
        self.is_passive = follows = recovered is not None
        self._is_abandoned = False
        self._options = options or DelayOptions()
        self._horizon_ms = self._options.horizon_ms
        self._on_ready = on_ready
        self._on_fault = on_fault
        self._time = Timekeeper(clock)
        self.damaged: list[Damaged] = []  # bucket records that could not be read
        self.rows = Rows()
        self.wheel = Wheel()
        self._journal = logs.journal
        self._ready: list[Intent] = []
        self._prepared_ms = 0
        self._is_stirred = False  # the replica has a turn scheduled: on_committed need not call on_ready
        self.scheduled_total = 0  # messages, since the start
        self.store = self._open_store(disk, clock, rng, defer, logs)
        self._journal.open(self._write)
        try:
            self._check_history()
            if schedule_disk is not None:
                schedule_disk.lock()
                schedule_disk.watch(self._poison)
            self._sweeper = Sweeper(self.rows, self.wheel, None if follows else self._time.now_ms())
            self.log = self._schedule_log(schedule_disk or disk, clock, rng, defer)
            self.repairs = BucketRepair(
                self.store.messages, self.rows, lambda: self._recovery.decision_index, self._lost
            )
            self._record_cache = BucketRecordCache(
                self.log.files,
                self.repairs,
                on_damage=self.damaged.append,
                on_fault=self._poison,
                on_arrival=on_ready,
            )
            self._appender = self._new_appender(defer)
            data = self._data()
            self._memory = Memory(data, self._options.remembered_max)
            self._dispatcher = Dispatcher(
                data, rng, route=route, name=self.name_of, on_intent=self._intended, homes=homes
            )
            self._pending = PendingMessages(data, self._take_off, self._home)
            self._browser = Browser(self.rows, self._obtain)
            self._recovery = Recovery(data, self._dispatcher, self._sweeper.home)
            self._following = DelayReplica(data, self._recovery) if follows else None
            self._housekeeper = DelayMaintenance(data, self._memory, self._options.housekeeping_ms)
            self.store.on_fault = self._failed
        except FairwayError:
            self.store.poison(StorageFault("the delay server did not start"))  # else it commits to a closed disk
            raise

    def _open_store(self, disk: Disk, clock: Clock, rng: Rng, defer: Defer, logs: RecoveredLogs) -> Store:
        return Store.open(
            disk,
            clock,
            rng,
            defer=defer,
            options=self._options.store,
            action_view=logs.journal,
            keeps_from=lambda: min(self._appender.moved_end, self.repairs.needed_from),
            follows=self.is_passive,
            opened=logs.opened,
        )

    def _schedule_log(self, disk: Disk, clock: Clock, rng: Rng, defer: Defer) -> ScheduleLog:
        return ScheduleLog(
            disk,
            clock,
            rng,
            self.store.identity.messages_id,
            defer=defer,
            on_fault=self._poison,
            moved_end=lambda buckets: self._appender.end_with(buckets),  # noqa: PLW0108  the appender follows
            on_listed=lambda file: self._appender.listed(file),  # noqa: PLW0108
            catalogue_messages=self._options.catalogue_messages,
        )

    def _new_appender(self, defer: Defer) -> ScheduleAppender:
        return ScheduleAppender(
            self.rows,
            self.log,
            defer=defer,
            now=self._time.now_ms,
            name=self.name_of,
            on_home=self._home,
            on_warm=self._record_cache.put,
            on_hold=self._on_ready,
            hold_ms=self._options.hold_ms,
        )

    def _data(self) -> EngineData:
        return EngineData(
            self.store,
            self.rows,
            self.log,
            self._journal,
            self._appender,
            self._record_cache,
            self.repairs,
            self._options.messages_per_step,
            self._done,
            self.damaged.append,
        )

    def _check_history(self) -> None:
        """Refuse a dispatch log without its beginning or a checkpoint: old decisions would be lost, and messages sent
        again."""
        segments = self.store.actions.log.segments
        if not self._journal.is_restored and segments and segments[0].base > 0:
            raise WrongDirectory(
                "no checkpoint can be read, and the dispatch log does not go back to the beginning: "
                "restore the folder `checkpoints` from a copy"
            )

    # --- as one copy of several --------------------------------------------------------------------------------------

    @property
    def derived_end(self) -> int:
        """The message log must not be cut below: buckets may have its messages. Known once the buckets are loaded."""
        return self._appender.moved_end if self._following is None else self._following.derived_end

    def on_committed(self) -> None:
        """More of the store's logs may be committed than before."""
        if self._following is not None and not self._is_stirred and self._following.is_busy:
            self._is_stirred = True
            self._on_ready()

    def lead(self) -> None:
        """Begin to send what is due. The store must lead already, with everything in its logs committed."""
        following, store = self._following, self.store
        if following is None or not self.is_passive:
            raise Misuse("only a copy that follows comes to lead")
        if store.follows or store.committed_ends() != (store.messages.log.end, store.actions.log.end):
            raise Misuse("not everything in the logs is committed: wait for that before this copy leads")
        following.finish()
        self._journal.heard = None
        self.is_passive = self._is_stirred = False
        self._recovery.lead(following.at)
        self._on_ready()

    # --- for operators -----------------------------------------------------------------------------------------------

    @property
    def fault(self) -> StorageFault | None:
        return self.store.fault

    @property
    def is_loaded(self) -> bool:
        """Whether every message has its row, so that questions can be answered."""
        return self._recovery.is_loaded

    @property
    def stuck(self) -> list[DispatchEvent]:
        """Intents from before the start that cannot be made again, because some of their messages are rotten."""
        return self._recovery.stuck

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: every scheduled message is in its bucket, every due message was given out."""
        busy = (
            not self._recovery.is_done
            or self._appender.is_busy
            or self._ready
            or self._sweeper.is_sweeping
            or self._housekeeper.is_busy
            or self._record_cache.is_busy
            or self._dispatcher.has_more
            or (self.is_passive and self._following is not None and self._following.is_busy)
        )
        flushers = (self.store.messages.log.flusher, self.store.actions.log.flusher)
        return self._recovery.is_done and not busy and not any(each.uncommitted_bytes for each in flushers)

    # --- scheduling --------------------------------------------------------------------------------------------------

    def schedule(self, subject: Subject, data: bytes, secret: bytes = b"") -> AppendReceipt:
        """Append a batch to the message log. The batch counts once `store.durable(receipt)` has returned. On `Refused`,
        nothing was appended. `secret`: the secret of the producer's stream."""
        if self.is_passive:
            raise NOT_MASTER
        header = batch.check(data)
        due = batch.due_times_ms(data, header)
        if due is not None:
            check_horizon(max(due), self._time.now_ms(), self._horizon_ms)
        if self.rows.pending + header.count > self._options.pending_max:
            raise Refused(
                Code.BUSY, f"{self._options.pending_max:,} messages are pending, and there is room for no more"
            )
        if self._appender.is_full or self.log.is_full:
            raise Refused(Code.READ_ONLY, "the disk of the schedule log is full: make room", retry_after_ms=1_000)
        if self._appender.unmoved_bytes > limits.DELAY_UNMOVED_BYTES_MAX:
            raise Refused(Code.BUSY, "the disk is behind: too many bytes wait for their buckets", retry_after_ms=50)
        receipt = self.store.produce(subject, data, header, secret)
        if not receipt.is_duplicate:
            self.scheduled_total += header.count

            def durable(outcome: FairwayError | None) -> None:
                if outcome is None:
                    self._appender.take(receipt.subject_id, receipt.first_sequence, data, receipt.end)

            self.store.messages.log.flusher.when_durable(receipt.end, durable)
        return receipt

    def _done(self, rows: RowNumbers) -> None:
        self._memory.note(rows, self._time.now_ms())

    # --- dispatching -------------------------------------------------------------------------------------------------

    def on_time(self) -> list[Intent]:
        """Do everything that is due. Return intents to send, in order. The same intent comes again only after a
        restart."""
        if self.fault is not None:
            raise self.fault
        now_ms = self._time.now_ms()
        was_loaded = self.is_loaded
        self._ready += self._recovery.step(is_quiet=not (self._appender.is_busy or self._record_cache.is_busy))
        if self.is_loaded and not was_loaded:
            self._loaded(now_ms)
        self._appender.step(now_ms)
        if self.is_passive:
            self._follow_on(now_ms)
        else:
            self._sweeper.step(now_ms)
            self._dispatch(now_ms)
        if self.is_loaded:
            self._housekeeper.step(now_ms)
        ready, self._ready = self._ready, []
        return ready

    def _follow_on(self, now_ms: int) -> None:
        if self._following is not None and self.is_loaded:
            self._is_stirred = self._following.is_busy
            self._following.step(now_ms)

    def _dispatch(self, now_ms: int) -> None:
        if self._recovery.is_remade:
            # Round down to the tick, however often this is called: a batch per millisecond would cost more than its
            # messages.
            self._dispatcher.dispatch(self.wheel.due(now_ms - now_ms % TICK_MS), now_ms)
            self._prepare(now_ms)

    def _prepare(self, now_ms: int) -> None:
        """Fetch the bucket records of the next seconds, a span at a time."""
        if not self._prepared_ms - _AHEAD_MS <= now_ms < self._prepared_ms - _AHEAD_MS // 2:
            start_ms = min(max(now_ms, self._prepared_ms), now_ms + _AHEAD_MS)
            self._prepared_ms = now_ms + _AHEAD_MS
            self._dispatcher.prepare(self.wheel.between(start_ms, self._prepared_ms))

    def _loaded(self, now_ms: int) -> None:
        """Every row is loaded, after a start or when a copy comes to lead: begin to remember finished rows."""
        gone = self._journal.gone
        for number in [each for each in gone if each not in self.log.files]:
            del gone[number]
        self._memory.begin(now_ms)
        if self.is_passive and self._following is not None:
            self._following.loaded()
        else:
            self._following, self._journal.unmatched = None, tuple

    def wait_ms(self) -> int:
        """In how many milliseconds to call `on_time` again, at the latest. 0 during a start, or when more work is ready
        than one call does: let the loop have a turn, then call."""
        if not self.is_loaded or self._dispatcher.has_more or self._appender.has_more:
            return 0
        if not self._recovery.is_done or self._sweeper.is_sweeping or self._housekeeper.is_busy:
            return TICK_MS
        now_ms, next_ms = self._time.now_ms(), self.wheel.next_ms()
        latest_ms = self._housekeeper.wait_ms(now_ms)
        held_ms = self._appender.wait_ms(now_ms)
        if held_ms is not None:
            latest_ms = min(latest_ms, max(held_ms, TICK_MS))
        if self._is_stirred:
            latest_ms = min(latest_ms, _STIRRED_MS)
        confirmed_ms = self._time.wait_ms()
        if confirmed_ms is not None:
            latest_ms = min(latest_ms, confirmed_ms)
        if next_ms is None:
            return latest_ms
        if next_ms > self._prepared_ms:  # so that its bucket record is open in time
            next_ms = min(next_ms, max(next_ms - _AHEAD_MS, self._prepared_ms - _AHEAD_MS // 2))
        return max(min(next_ms - now_ms, latest_ms), 0)

    def _home(self, rows: RowNumbers) -> None:
        """Rows have a new place or a new due time. Tell the owner if the next due time is sooner now."""
        before_ms = self.wheel.next_ms()
        self._sweeper.home(rows)
        next_ms = self.wheel.next_ms()
        if next_ms is not None and (before_ms is None or next_ms < before_ms):
            self._on_ready()

    def _intended(self, intent: Intent, end: int) -> None:
        def durable(outcome: FairwayError | None) -> None:
            known = self._journal.intents.get(intent.number)
            if outcome is None and known is not None and known.target == intent.target:  # else it was redirected
                self._ready.append(intent)
                self._on_ready()

        self.store.actions.log.flusher.when_durable(end, durable)

    def sent(self, number: int) -> DueTimes:
        """Note that the broker has stored that intent's batch, now or before. Return when its messages were due."""
        return self._dispatcher.sent(number)

    def in_transit(self) -> dict[str, int]:
        """Messages of intents not known to be stored, by target, including intents that cannot be made again."""
        found: Counter[str] = Counter()
        for event in self._journal.intents.values():
            found[event.target] += event.messages
        return dict(found)

    def redirect(self, target: str, *, is_reached: bool) -> Redirected:
        """Give a target's outstanding intents to other targets. A message arrives twice if the old target has it, too.
        If the target is connected, redirect only stuck intents: nobody can send them again byte for byte."""
        self._questions()
        if not self._recovery.is_done:
            raise Refused(Code.BUSY, "batches of an earlier life are being made again", retry_after_ms=500)
        stuck = {event.number for event in self.stuck}
        moved: set[int] = set()
        messages, end = 0, self._journal.end
        meant = [event for event in self._journal.intents.values() if event.target == target]
        intended = self.rows.in_state(RowState.INTENDED)
        for event in meant:
            made = None if is_reached and event.number not in stuck else self._redirected(event, intended)
            if made is not None:
                moved.add(event.number)
                messages, end = messages + made[0], made[1]
        self._ready = [intent for intent in self._ready if intent.number not in moved]
        self._recovery.stuck = [event for event in self.stuck if event.number not in moved]
        left = sum(event.messages for event in meant if event.number not in moved)
        return Redirected(frozenset(moved), messages, left, end)

    def _redirected(self, event: DispatchEvent, intended: RowNumbers) -> tuple[int, int] | None:
        try:
            return self._dispatcher.redirect(event, intended, self._time.now_ms())
        except Refused:  # the dispatch log is behind
            return None

    def outstanding_bytes(self, target: str) -> int:
        """Bytes of a target's intents that are not stored yet. They are in memory."""
        return self._dispatcher.outstanding_bytes[target]

    @property
    def held_back(self) -> int:
        """Messages due and in no intent yet: their target is down, or has enough outstanding."""
        return self._dispatcher.due

    def _write(self, body: bytes, count: int) -> int:
        return self.store.actions.log.append(
            RecordKind.DISPATCH, body, self.store.action_time.wall_ms(), count=count
        ).end

    # --- pending ------------------------------------------------------------------------------------------------------

    def _take_off(self, row: int) -> None:
        """Take a cancelled or rescheduled row off the wheel and out of the waiting rows."""
        if self.wheel.cancel(row, int(self.rows.due_ms[row])) or self._dispatcher.drop_waiting(row):
            self.rows.in_wheel[row] = False

    def _lost(self, rows: RowNumbers) -> None:
        """Do the same for rows whose messages are lost."""
        for row in rows[self.rows.in_wheel[rows]].tolist():
            self.wheel.cancel(row, int(self.rows.due_ms[row]))
        self._dispatcher.drop_lost(rows)

    async def _obtain(self, place: RowLocation) -> BatchArrays | None:
        if place.file == 0:
            return self._appender.young_at(place.position)
        opened = await self._record_cache.obtain((place.file, place.position))
        return None if opened is None else opened.sheet

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Move every message into its bucket, write a manifest and a checkpoint, release the directories."""
        try:
            await self.store.messages.log.flusher.synced(self.store.messages.log.end)
            self._appender.flush(self._time.now_ms())
            await self.log.settle(self._time.now_ms())
        finally:
            self.log.close()
            await self.store.close()

    def abandon(self) -> None:
        """Release the directories as they are. Nothing is written or answered any more."""
        self._is_abandoned = True
        self._ready = []
        self.log.abandon(self.store.fault or StorageFault("this copy was set aside"))
        self._appender.abandon()
        self.store.abandon()

    def _poison(self, fault: StorageFault) -> None:
        if not self._is_abandoned:
            self.store.poison(fault)

    def _failed(self, fault: StorageFault) -> None:
        """The store has failed: stop the buckets, too, and tell the owner, so that nobody waits in vain."""
        self.log.poison(fault)
        self._appender.abandon()
        self._on_fault(fault)
