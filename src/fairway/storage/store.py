"""The store: the message log and the action log of one data directory, with their views.

The store owns the concerns of both logs: recovery, checkpoints, disk space, retention, and the first fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

from fairway import batch, limits
from fairway.errors import Code, DiskFull, FairwayError, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk, Part
from fairway.runtime.rng import Rng
from fairway.storage import checkpoint as checkpoints
from fairway.storage import index_file, repair, retention, segment
from fairway.storage.action_log import TOO_MANY_GROUPS, Action, ActionLog, ActionView, NameStatements
from fairway.storage.checkpoint import Checkpoint, RotMark
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.directory import DirectoryIdentity, remove_in_order
from fairway.storage.flusher import Defer, Durability
from fairway.storage.log import Damaged, Log, LogClock, LogSetup
from fairway.storage.message_log import AppendReceipt, MessageLog, OnTaken
from fairway.storage.open_store import RecoveredStore, recover
from fairway.storage.record import RecordHeader
from fairway.storage.recovery import Finding
from fairway.storage.replicated_store import ReplicatedStore, mark
from fairway.storage.retention import AgeSource
from fairway.storage.subjects import SubjectState


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store that an operator may set."""

    segment_bytes: int = limits.SEGMENT_BYTES
    action_segment_bytes: int = limits.ACTION_SEGMENT_BYTES
    low_water_bytes: int = limits.DISK_LOW_WATER_BYTES
    checkpoint_every_bytes: int = limits.CHECKPOINT_EVERY_BYTES
    retention: retention.Policy = field(default_factory=retention.Policy)
    age_source: AgeSource = AgeSource.OPTIONS  # of `retention.age_ms_max`
    durability: Durability = Durability.SYNC
    streams_bytes_max: int = limits.STREAMS_BYTES_MAX  # of dedupe windows
    subjects_max: int = limits.SUBJECTS_MAX
    keeps_actions: bool = True  # False: the checkpoint carries the groups, and older action segments may go
    actions_kept_bytes: int = 0  # with `keeps_actions` False: at least so much stays, for readers of the history


class Store(ReplicatedStore):
    """One data directory, owned by this process. Lives on one loop; `defer` is that loop's `call_soon`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        opened: RecoveredStore,
        options: StoreOptions,
        defer: Defer,
        names: NameStatements,
        action_view: ActionView | None,
        keeps_from: Callable[[], int | None],
        *,
        follows: bool,
    ) -> None:
        self.identity: DirectoryIdentity = opened.identity
        self.findings: list[Finding] = opened.findings
        self.remarks: list[str] = opened.remarks
        self.fault: StorageFault | None = None
        self._disk = disk
        self._clock = clock
        self.time = LogClock(clock, opened.messages.newest_ms, *opened.times)
        self.action_time = LogClock(clock, opened.actions.newest_ms, *opened.times)
        self._options = options
        self._number = opened.checkpoint_number
        self.is_view_stale = False  # the action log was repaired: only the next start rebuilds the view of it
        self.checkpointed_ms = clock.wall_ms()  # until this process writes its first checkpoint: its start
        self._checkpointing = False
        self._when_checkpointed: list[Callable[[], None]] = []
        self._checkpoint_at_id = opened.views.subjects.next_id + limits.CHECKPOINT_EVERY_SUBJECTS
        self._doomed: list[int] = []  # bases of message segments off the log whose files are still there
        self._doomed_actions: list[tuple[int, int]] = []  # the same of actions; and the checkpoint that deletes them
        self.has_room = True
        self.is_closed = False
        self._free_bytes = 0
        self._oldest = (-1, 0)  # of the newest segment of messages: its base, and the append time of its first record
        self._action_view = action_view
        self.on_fault: Callable[[StorageFault], None] = lambda _fault: None  # called once, with the fault that ends it
        self.on_actions: Callable[[], None] = lambda: None  # something was committed to the action log
        self.keeps_from = keeps_from
        self.on_rot: Callable[[], None] = lambda: None  # a reader has found new damage
        setup = LogSetup(
            disk,
            self.time,
            options.segment_bytes,
            defer,
            options.durability if not follows else Durability.SYNC,
            self.time.is_ahead,
            on_progress=self._messages_progressed,
            on_synced=self._synced,
            on_cut=self._messages_undone,
        )
        self.messages = MessageLog(
            setup,
            opened.messages,
            opened.views,
            opened.unsealed_from,
            on_damage=lambda damaged: self._note_rot(self.messages.log, damaged),
        )
        self.messages.bound(options.subjects_max, options.streams_bytes_max)
        setup = replace(
            setup,
            clock=self.action_time,
            segment_bytes=options.action_segment_bytes,
            on_progress=self._actions_progressed,
            on_cut=self._actions_undone,
        )
        self.actions = ActionLog(setup, opened.actions, names)
        super().__init__(disk, opened, (self.messages, self.actions), options.durability)
        self._rotten = [each for each in opened.rotten if not self._is_mended(each)]
        self._follow(follows)

    @classmethod
    def open(
        cls,
        disk: Disk,
        clock: Clock,
        rng: Rng,
        *,
        defer: Defer,
        options: StoreOptions | None = None,
        action_view: ActionView | None = None,
        names: NameStatements = tuple,
        keeps_from: Callable[[], int | None] = lambda: None,
        follows: bool = False,
        adopt: DirectoryIdentity | None = None,
        epoch: int | None = None,
        opened: RecoveredStore | None = None,
    ) -> Store:
        """Lock the directory, recover, and begin `epoch` or the next one. A foreign directory is left untouched.

        `names`: names that actions use; each segment of the action log repeats them. `keeps_from`: the lowest position
        of messages that somebody still needs, if any. A replica (`follows`) begins no epoch. `adopt`: the log ids for a
        new directory. `opened`: the result of `recover` with the same `action_view`.
        """
        opened = opened or recover(disk, rng, action_view, adopt)
        chosen = options or StoreOptions()
        policy, warnings = retention.settle(disk, chosen.retention, chosen.age_source, is_new=opened.is_new)
        opened.remarks += warnings
        chosen = replace(chosen, retention=policy)
        store = cls(disk, clock, opened, chosen, defer, names, action_view, keeps_from, follows=follows)
        disk.watch(store.poison)
        try:
            if follows:
                store.actions.take_ballast()
            else:
                store._begin_epoch(store.epoch + 1 if epoch is None else epoch)
        except FairwayError:
            store.poison(StorageFault("the store did not start"))  # otherwise the flushers commit to a closed disk
            raise
        return store

    def _begin_epoch(self, epoch: int) -> None:
        self.check_epoch(epoch)
        self.actions.take_ballast()
        self._check_room()
        is_first = all(log.end == 0 for log in self._logs)
        for log, time in zip(self._logs, (self.time, self.action_time), strict=True):
            log.open_epoch(epoch, time.wall_ms())
        if is_first:
            policy, warnings = retention.found(self._disk, self._options.retention, self._options.age_source)
            self._options = replace(self._options, retention=policy)
            self.remarks += warnings

    # --- copies ------------------------------------------------------------------------------------------------------

    def retain_from(self, messages_base: int, actions_base: int) -> None:
        """Drop the segments that the master has dropped, if they are settled here: for readers at once, on disk after
        the next checkpoint."""
        messages, actions = self.messages.log, self.actions.log
        needed_from = self.keeps_from()
        if needed_from is not None:
            messages_base = min(messages_base, needed_from)
        while len(messages.segments) > 1 and messages.segments[0].end <= min(messages_base, self._droppable_end()):
            self._drop(messages.segments[0].base)
        while len(actions.segments) > 1 and actions.segments[0].end <= min(actions_base, self._checkpointed_ends[1]):
            self._drop_actions(actions.segments[0].base, self._number + self._checkpointing)
        if self._doomed:
            self.checkpoint()

    def mend(self, log: int, position: int, data: bytes) -> int:
        """Write another copy's bytes over rotten ones; return where they end. After `RemoteProtocolError`, for bytes
        that do not belong there, nothing was changed. Readers see repaired messages at once; only the next start
        rebuilds the groups (`is_view_stale`)."""
        if self.fault is not None:
            raise self.fault
        of = self._logs[log]
        span = next((each for each in repair.spans(log, of, self._rotten) if each.start <= position < each.end), None)
        if span is None:
            raise RemoteProtocolError(f"nothing has to be mended in {of.directory} at {position}")
        patch = repair.check(of, span, position, data)
        base = repair.place(of, position, patch)
        if of is self.actions.log:
            self._distrust_view()
        else:
            self.messages.check_mended(patch.records)
        newest_ms = patch.records[-1].header.appended_ms if patch.records else 0
        mended = of.mend(base, position, patch.data, newest_ms)
        if of is self.messages.log:
            self.messages.mended(mended, patch.records, self._background_fault)
        self._rotten = repair.left(self._rotten, of, position, position + len(patch.data))
        self.checkpoint()
        return position + len(patch.data)

    def _is_mended(self, mark: RotMark) -> bool:
        """Whether an earlier process repaired the bytes and died before a checkpoint recorded that. The indexes may
        still lack them."""
        log = next(each for each in self._logs if each.directory == mark.log)
        if not repair.is_whole(log, mark):
            return False
        if log is self.messages.log:
            for of, records in repair.within(log, mark):
                self.messages.mended(of, records, self._background_fault)
        return True

    def _distrust_view(self) -> None:
        """Replace all checkpoints by one without groups: the view lacks actions that the log will have. Raise `Refused`
        where the log could not rebuild the groups."""
        if self.is_view_stale:
            return
        if self.actions.log.first_base > 0 and not self._action_retention.pictures:
            raise Refused(Code.DAMAGED, "actions before these were let go of: what they made could not be made again")
        if self._checkpointing:
            raise Refused(Code.BUSY, "a checkpoint is being written: mend a little later", retry_after_ms=100)
        self.is_view_stale = True
        picture = self._picture()
        try:
            self._disk.publish(checkpoints.file_name(picture.number), checkpoints.pack(picture))
        except DiskFull:
            self.is_view_stale = False  # nothing was repaired; the next attempt begins here again
            raise
        for number in checkpoints.numbers(self._disk):
            if number < picture.number:
                self._disk.remove(checkpoints.file_name(number))
        self._number = picture.number

    # --- writing -----------------------------------------------------------------------------------------------------

    def produce(
        self, subject: Subject, data: Part, checked: batch.BatchHeader | None = None, secret: bytes = b"", crc: int = -1
    ) -> AppendReceipt:
        """Check a batch, unless `checked` is its header, and append it. After `Refused` or `RemoteProtocolError`
        nothing was appended. `secret`: of the stream, from the sender. `crc`: of the whole batch; -1: unknown."""
        header = checked or batch.check(data)
        self._admit()
        return self.messages.append(subject, data, header, secret, crc)

    def when_taken(self, taken: PlaceTaken, told: OnTaken) -> None:
        """Call `told(None, answer)` once the record in the batch's place is committed. The answer is the receipt if the
        batch is the same, else the conflict. With a fault, the caller answers only the fault."""

        def durable(fault: FairwayError | None) -> None:
            told(fault, taken if fault is not None else self.messages.resolve(taken))

        flusher = self.messages.log.flusher
        flusher.when_durable(taken.end, durable, len(flusher.undone_from))

    def produce_own(self, subject: Subject, data: bytes) -> AppendReceipt:
        """Append a batch of the broker's own making to an internal subject; `Refused`: nothing was appended."""
        header = batch.check(data)
        self._admit()
        return self.messages.append_own(subject, data, header)

    def ensure_subject(self, subject: Subject) -> SubjectState:
        """Return the subject; write its name to the log where it is new. It counts once that record is committed."""
        if self.messages.views.subjects.find(subject) is None:
            self._admit()
        return self.messages.ensure(subject)

    def remove_subjects(self, states: Sequence[SubjectState]) -> RecordHeader:
        """Remove all of these subjects or none; `messages.on_removed` reports when they are gone."""
        self._admit()
        return self.messages.remove(states)

    async def durable(self, receipt: AppendReceipt) -> None:
        """Return once the batch is committed, as the durability says; raise the reason if it never will be."""
        await self.messages.log.flusher.durable(receipt.end, receipt.undos)

    def act(self, actions: Iterable[Action]) -> RecordHeader:
        """Append actions. They have reserved disk space, so they find room even when produce does not."""
        return self.actions.append(actions)

    def _admit(self) -> None:
        if self.fault is not None:
            raise self.fault
        if self.follows:
            raise Refused(Code.NOT_MASTER, "this is a copy: its master is the one who writes")
        if not self.has_room and not self._check_room():
            raise retention.nearly_full()

    def _check_room(self) -> bool:
        """Whether produce may go on: free space above the low-water mark, and disk space for actions reserved."""
        if not self.actions.has_ballast:
            self.actions.take_ballast()
        has_room = self.actions.has_ballast and self._disk.free_bytes() >= self._options.low_water_bytes
        self.has_room = retention.note_room(before=self.has_room, now=has_room)
        return has_room

    def sync(self) -> None:
        """Durability `memory`: sync soon what was answered so far. The server calls this regularly."""
        for log in self._logs:
            log.flusher.sync()

    # --- progress and faults -----------------------------------------------------------------------------------------

    def _messages_progressed(self) -> None:
        if self._take_fault(self.messages.log):
            return
        self.messages.settle_removals()
        self.messages.seal_complete_segments(self._background_fault)
        self._check_room()
        is_far = self.messages.settled_end - self._checkpointed_ends[0] >= self._options.checkpoint_every_bytes
        if is_far or self.messages.views.subjects.next_id >= self._checkpoint_at_id:
            self.checkpoint()

    def _actions_progressed(self) -> None:
        if self._take_fault(self.actions.log):
            return
        self.on_actions()
        if self.actions.log.committed_end - self._checkpointed_ends[1] >= self._options.checkpoint_every_bytes:
            self.checkpoint()

    def _messages_undone(self, _position: int) -> None:
        """A full disk undid records. A replica stops: its master has to send them again."""
        if self.follows:
            self.poison(DiskFull("the disk of this copy is full: make room, then it goes on"))
        else:
            self._check_room()

    def _actions_undone(self, position: int) -> None:
        """A full disk undid actions that a view has applied already: only a restart brings the two together again."""
        self._messages_undone(position)
        self._action_retention.undo(position)
        if self._action_view is not None:
            self.poison(StorageFault("the disk is full and the room kept for actions is used up: make room, restart"))

    def _take_fault(self, log: Log) -> bool:
        if log.flusher.fault is not None:
            self.poison(log.flusher.fault)
        return self.fault is not None

    def poison(self, fault: StorageFault) -> None:
        """Stop both logs: neither answers any more."""
        if self.fault is None:
            self.fault = fault
            for log in self._logs:
                log.flusher.poison(fault)
            self.on_fault(fault)

    def _background_fault(self, fault: StorageFault) -> None:
        """A view could not be written. On a full disk it waits, because it can be rebuilt; else the disk is dying."""
        if isinstance(fault, DiskFull):
            self.remarks.append(f"a view was not written: {fault}")
        else:
            self.poison(fault)

    def free_bytes(self) -> int:
        """Free space on the disk; after `close`, the last known value."""
        if not self.is_closed:
            self._free_bytes = self._disk.free_bytes()
        return self._free_bytes

    def _note_rot(self, log: Log, damaged: Damaged) -> None:
        mark = RotMark(log.directory, damaged.position, repair.end_of(log, damaged.position), str(damaged))
        if mark not in self._rotten:
            self._rotten.append(mark)
            self.on_rot()

    # --- checkpoint and retention ------------------------------------------------------------------------------------

    def checkpoint(self, then: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint in the background, unless one is being written; call `then` when that one has ended."""
        self._when_checkpointed.append(then)
        if self._checkpointing or self.fault is not None:
            return
        self._checkpointing = True
        self._checkpoint_at_id = self.messages.views.subjects.next_id + limits.CHECKPOINT_EVERY_SUBJECTS
        picture = self._picture()
        self._state_groups(picture.groups)
        steps = [(checkpoints.file_name(picture.number), checkpoints.pack(picture))]
        newest = self.messages.open_segment(picture.messages.end)
        if newest is not None:
            parts = self.messages.views.entries.picture(newest.base, picture.messages.end)
            steps.insert(0, (index_file.file_name(newest.base), parts))

        def publish(undone: FairwayError | None) -> None:
            if undone is not None:
                self._checkpoint_ended(undone)
            elif steps:
                self._disk.publish_later(*steps.pop(0), publish)
            else:
                self._checkpoint_written(picture)

        # The checkpoint holds the groups as of the end of the action log, so it waits until that end is settled.
        self.actions.log.flusher.when_settled(picture.actions.end, publish)

    def _state_groups(self, picture: bytes) -> None:
        """Append the state of all groups once the action log has grown by a segment. Older actions may then go with the
        messages that they speak of. The checkpoint that is being written does not wait for this record."""
        log, known = self.actions.log, self._action_retention
        if self.follows or not (self._options.keeps_actions and self._options.retention.is_limited):
            return
        known.note_complete(log.segments, self.messages.log.end)
        is_due = known.is_picture_due(log.segments, log.end, len(picture), self._options.action_segment_bytes)
        if picture and is_due and self.has_room:
            try:
                known.note_picture(self.actions.state_groups(picture).position)
            except Refused as refused:  # no room now: segments that could go stay a little longer
                if refused.code is Code.TOO_LARGE and TOO_MANY_GROUPS not in self.remarks:
                    self.remarks.append(TOO_MANY_GROUPS)

    def _trusted_view(self) -> ActionView | None:
        """The view of actions, unless it lacks actions that the log has or will get. A replica that began in the middle
        of the log lacks groups until a GROUPS record comes; a start from its checkpoint would skip that record."""
        view = self._action_view
        if view is None or self.is_view_stale:
            return None
        return view if not self.follows or view.is_whole(self.actions.log.first_base) else None

    def _picture(self) -> Checkpoint:
        """The next checkpoint: views of messages at the settled end, the view of actions as it is now."""
        self.messages.settle_removals()
        views = self.messages.views
        end = self.messages.settled_end
        actions, view = self.actions.log, self._trusted_view()
        actions_end = min(actions.synced_end, actions.committed_end) if view is None else actions.end
        known = self._action_retention.below(actions_end, actions.segments)
        views.dedupe.expire(self.aging_ms())
        first_places = cache(partial(views.entries.first_places_from, end))
        aging_ms, latest_ms = self._vouched_ms()
        held = self._held_jump()
        return Checkpoint(
            number=self._number + 1,
            messages_id=self.identity.messages_id,
            actions_id=self.identity.actions_id,
            epoch=min(self.messages.log.committed_epoch, self.actions.log.committed_epoch),
            messages=mark(self.messages.log, end),
            actions=mark(actions, actions_end),
            subjects=views.subjects.pack_picture(end, views.entries.first_sequences_from(end)),
            streams=views.dedupe.pack(end, first_places),
            rotten=list(self._rotten),
            groups=b"" if view is None else view.picture(),
            verifiers=views.dedupe.pack_verifiers(end, first_places),
            action_bounds=known.bounds,
            pictures=known.pictures,
            aging_ms=aging_ms,
            latest_ms=latest_ms,
            held_to_ms=held.to_ms if held else 0,
            held_for_ms=held.for_ms if held else 0,
        )

    def _checkpoint_written(self, written: Checkpoint) -> None:
        self._number = written.number
        self.checkpointed_ms = self._clock.wall_ms()
        self._checkpointed_ends = (written.messages.end, written.actions.end)
        doomed = [base for base in self._doomed if base < written.messages.first_base]
        self._doomed = self._doomed[len(doomed) :]
        # An older checkpoint that names deleted segments would report them as missing, so it is deleted before them.
        keep = 1 if doomed else limits.CHECKPOINTS_KEPT
        old = [number for number in checkpoints.numbers(self._disk) if number <= written.number - keep]
        names = [checkpoints.file_name(number) for number in old]
        for base in doomed:
            names += [segment.file_name(self.messages.log.directory, base), index_file.file_name(base)]
        remove_in_order(self._disk, names + self._trim_actions(written), self._checkpoint_ended)

    def _trim_actions(self, written: Checkpoint) -> list[str]:
        """Drop the action segments below this checkpoint's end; return the files that no kept checkpoint needs. A
        dropped segment's file goes once every kept checkpoint was written without it."""
        log = self.actions.log
        if self._options.keeps_actions and not self.follows and not self.is_view_stale:
            covered_end = min(written.actions.end, log.synced_end, log.committed_end)
            messages_base = self.messages.log.first_base
            for base in self._action_retention.droppable(log.segments, messages_base, covered_end):
                self._drop_actions(base, written.number)
        elif not self._options.keeps_actions and self._action_view is not None and not self.is_view_stale:
            kept_from = log.end - self._options.actions_kept_bytes
            while len(log.segments) > 1 and log.segments[0].end <= written.actions.end:
                if log.segments[0].base >= kept_from:
                    break
                self._drop_actions(log.segments[0].base, written.number)
        gone = [base for base, number in self._doomed_actions if number <= written.number]
        self._doomed_actions = [each for each in self._doomed_actions if each[1] > written.number]
        return [segment.file_name(log.directory, base) for base in gone]

    def _drop_actions(self, base: int, number: int) -> None:
        """Take a segment off the log. Its file goes once every kept checkpoint is newer than `number`."""
        log = self.actions.log
        log.drop(base)
        self._doomed_actions.append((base, number + limits.CHECKPOINTS_KEPT))
        self._action_retention.forget_below(log.first_base)
        self._rotten = repair.left(self._rotten, log, 0, log.first_base)

    def _checkpoint_ended(self, fault: FairwayError | None = None) -> None:
        if isinstance(fault, StorageFault):
            self._background_fault(fault)
        self._checkpointing = False
        waiting, self._when_checkpointed = self._when_checkpointed, []
        for then in waiting:
            then()

    @property
    def age_ms_max(self) -> int | None:
        """The greatest age of messages that is in force; None: messages are kept for ever."""
        return self._options.retention.age_ms_max

    def aging_ms(self) -> int:
        """The time by which things are too old to be kept (`LogClock`); on a replica, by its master's clock too."""
        now_ms = self.time.aging_ms()
        return min(now_ms, self._written_ms() or now_ms) if self.follows else now_ms

    def plan_retention(self, owed_from: int | None = None) -> retention.RetentionPlan:
        """Which segments `retain` would drop."""
        now_ms, policy = self.aging_ms(), self._options.retention
        return retention.plan(self.messages.log.segments, now_ms, policy, owed_from, below=self._droppable_end())

    def _droppable_end(self) -> int:
        return min(self.messages.sealed_end, self.messages.settled_end)

    def _drop(self, base: int) -> None:
        log = self.messages.log
        log.drop(base)
        self.messages.views.entries.forget(base)
        self.messages.views.subjects.forget_removed(log.first_base)
        self._doomed.append(base)
        self._rotten = repair.left(self._rotten, log, 0, log.first_base)

    def retain(self, owed_from: int | None = None) -> retention.RetentionPlan:
        """Drop the segments that the policy allows: for readers at once, on disk after the next checkpoint."""
        plan = self.plan_retention(owed_from)
        for base in plan.doomed:
            self._drop(base)
        if self._doomed:
            self.checkpoint()
        return plan

    def complete_old_segment(self) -> None:
        """Complete the newest message segment early where few messages and many actions arrive. Only complete segments
        can go: otherwise it would keep the actions that speak of it for many times their age."""
        log = self.messages.log
        early_ms = retention.early_completion_ms(self._options.retention, len(self.actions.log.segments))
        if early_ms is None or self.follows or self.fault is not None or not self.has_room or not log.segments:
            return
        newest = log.segments[-1]
        if self._oldest[0] != newest.base and newest.end <= log.synced_end:
            self._oldest = (newest.base, log.first_appended_ms(newest) or newest.newest_ms)
        base, appended_ms = self._oldest
        if base == newest.base and self.aging_ms() - appended_ms > early_ms:
            with suppress(Refused):
                log.roll()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Sync everything appended, write a checkpoint, release the directory."""
        try:
            for log in self._logs:
                await log.flusher.synced(log.end)
            self.messages.views.subjects.lower_ceilings()
            if self.actions.log.committed_end == self.actions.log.end:  # else other copies lack what it would record
                await self._last_checkpoint()
        finally:
            self._let_go()

    def abandon(self) -> None:
        """Release the directory as it is: nobody is answered any more, and nothing is written."""
        self.fault = self.fault or StorageFault("this copy was set aside")
        for log in self._logs:
            log.flusher.poison(self.fault)
        self._checkpoint_ended()
        self._let_go()

    def _let_go(self) -> None:
        self.is_closed = True
        for log in self._logs:
            log.close()
        self._disk.close()

    async def _last_checkpoint(self) -> None:
        """Write a second checkpoint if the one under way does not cover everything."""
        for _ in range(2 if self._checkpointing else 1):
            ended = asyncio.Event()
            self.checkpoint(then=ended.set)
            if self.fault is None:
                await ended.wait()
