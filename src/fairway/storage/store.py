"""The store of one data directory. It owns what concerns both logs: directory, recovery, checkpoint, room on the disk,
retention, and the first fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

from fairway import batch, limits
from fairway.errors import Code, DiskFull, FairwayError, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.storage import checkpoint as checkpoints
from fairway.storage import index_file, mending, retention, retention_choice, segment
from fairway.storage.action_log import Action, ActionLog, ActionView, NameStatements
from fairway.storage.action_retention import TOO_MANY_GROUPS
from fairway.storage.checkpoint import Checkpoint, RotMark
from fairway.storage.copies import ReplicatedStore, first_base, mark
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.flusher import Defer, Durability
from fairway.storage.log import Damaged, Log
from fairway.storage.log_time import LogClock
from fairway.storage.message_log import AppendReceipt, MessageLog, OnTaken
from fairway.storage.opening import RecoveredStore, recover
from fairway.storage.record import RecordHeader
from fairway.storage.recovery import Finding
from fairway.storage.removal import remove_in_order
from fairway.storage.retention_choice import AgeSource
from fairway.storage.subjects import SubjectState
from fairway.world.clock import Clock
from fairway.world.disk import Disk, Part
from fairway.world.rng import Rng


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What an operator may set."""

    segment_bytes: int = limits.SEGMENT_BYTES
    action_segment_bytes: int = limits.ACTION_SEGMENT_BYTES
    low_water_bytes: int = limits.DISK_LOW_WATER_BYTES
    checkpoint_every_bytes: int = limits.CHECKPOINT_EVERY_BYTES
    retention: retention.Policy = field(default_factory=retention.Policy)
    age_source: AgeSource = AgeSource.OPTIONS  # of `retention.age_ms_max`
    durability: Durability = Durability.SYNC
    streams_bytes_max: int = limits.STREAMS_BYTES_MAX  # of dedupe windows
    subjects_max: int = limits.SUBJECTS_MAX
    keeps_actions: bool = True  # False: the checkpoint's picture is all that a start needs of old actions,
    actions_kept_bytes: int = 0  # and so much of them is kept all the same, for whoever asks what happened


class Store(ReplicatedStore):
    """One data directory, owned by this process. Lives on one loop; `defer` is that loop's `call_soon`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        opened: RecoveredStore,
        options: StoreOptions,
        defer: Defer,
        names: NameStatements = tuple,
        *,
        follows: bool = False,
    ) -> None:
        self.identity: DirectoryIdentity = opened.identity
        self.findings: list[Finding] = opened.findings
        self.remarks: list[str] = opened.remarks
        self.fault: StorageFault | None = None
        self._disk = disk
        self._clock = clock
        self.time = LogClock(clock, opened.messages.newest_ms, opened.aging_ms, opened.latest_ms)
        self.action_time = LogClock(clock, opened.actions.newest_ms, opened.aging_ms, opened.latest_ms)
        self._options = options
        self._number = opened.checkpoint_number
        self.is_view_stale = False  # the action log was mended: only the next start makes the view of it again
        self.checkpointed_ms = clock.wall_ms()  # or begun, before the first checkpoint of this life
        self._checkpointing = False
        self._when_checkpointed: list[Callable[[], None]] = []
        self._checkpoint_at_id = opened.views.subjects.next_id + limits.CHECKPOINT_EVERY_SUBJECTS
        self._doomed: list[int] = []  # segments that retention has taken off the log, their files still there
        self._doomed_actions: list[tuple[int, int]] = []  # the same of actions; by which checkpoint they may go
        self.has_room = True
        self.is_closed = False
        self._free_bytes = 0
        self._oldest = (-1, 0)  # of the newest segment of messages: its base, and when its first record was appended
        self._action_view: ActionView | None = None
        self.on_fault: Callable[[StorageFault], None] = lambda _fault: None  # told once, of the fault that ends it
        self.on_actions: Callable[[], None] = lambda: None  # something was committed to the action log
        self.keeps_from: Callable[[], int | None] = lambda: None  # messages from here on are needed here, if any are
        self.on_rot: Callable[[], None] = lambda: None  # a reader has met damage that was not known
        self.messages = MessageLog(
            disk,
            self.time,
            opened.messages,
            opened.views,
            unsealed_from=opened.unsealed_from,
            segment_bytes=options.segment_bytes,
            defer=defer,
            on_progress=self._messages_progressed,
            on_damage=self._note_damage,
            on_cut=self._messages_undone,
            durability=options.durability if not follows else Durability.SYNC,
            is_ahead=self.time.is_ahead,
        )
        self.messages.bound(options.subjects_max, options.streams_bytes_max)
        self.actions = ActionLog(
            disk,
            self.action_time,
            opened.actions,
            segment_bytes=options.action_segment_bytes,
            defer=defer,
            on_progress=self._actions_progressed,
            on_cut=self._actions_undone,
            durability=options.durability if not follows else Durability.SYNC,
            names=names,
            is_ahead=self.time.is_ahead,
        )
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
        follows: bool = False,
        adopt: DirectoryIdentity | None = None,
        epoch: int | None = None,
        opened: RecoveredStore | None = None,
    ) -> Store:
        """Lock, recover, and begin a new epoch: this one, or the next. A directory that cannot be ours is left alone.

        `names`: those that actions speak of, restated in each segment of the action log. A copy that `follows` begins
        no epoch. `adopt`: the ids of the logs of a new directory. `opened`: what `recover` found, with the same view.
        """
        opened = opened or recover(disk, rng, action_view, adopt)
        chosen = options or StoreOptions()
        policy, warnings = retention_choice.settle(disk, chosen.retention, chosen.age_source, is_new=opened.is_new)
        opened.remarks += warnings
        store = cls(disk, clock, opened, replace(chosen, retention=policy), defer, names, follows=follows)
        store._action_view = action_view
        disk.watch(store.poison)
        try:
            if follows:
                store.actions.take_ballast()
            else:
                store._begin_epoch(store.epoch + 1 if epoch is None else epoch)
        except FairwayError:
            store.poison(StorageFault("the store did not start"))  # otherwise it commits to a closed disk
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
            policy, warnings = retention_choice.found(self._disk, self._options.retention, self._options.age_source)
            self._options = replace(self._options, retention=policy)
            self.remarks += warnings

    # --- copies ------------------------------------------------------------------------------------------------------

    def retain_from(self, messages_base: int, actions_base: int) -> None:
        """Let go of what the master has let go of, as far as it is settled here: at once for readers, on disk once a
        checkpoint says so."""
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
        """Put another copy's bytes in place of what has rotted; how far they reached. `RemoteProtocolError` where they
        do not belong there: nothing was changed. Messages can be read at once; groups are made again at the next
        start (`is_view_stale`)."""
        if self.fault is not None:
            raise self.fault
        of = self._logs[log]
        span = next((each for each in mending.spans(log, of, self._rotten) if each.start <= position < each.end), None)
        if span is None:
            raise RemoteProtocolError(f"nothing has to be mended in {of.directory} at {position}")
        patch = mending.check(of, span, position, data)
        base = mending.place(of, position, patch)
        if of is self.actions.log:
            self._distrust_view()
        else:
            self.messages.check_mended(patch.records)
        newest_ms = patch.records[-1].header.appended_ms if patch.records else 0
        mended = of.mend(base, position, patch.data, newest_ms)
        if of is self.messages.log:
            self.messages.mended(mended, patch.records, self._background_fault)
        self._rotten = mending.left(self._rotten, of, position, position + len(patch.data))
        self.checkpoint()
        return position + len(patch.data)

    def _is_mended(self, mark: RotMark) -> bool:
        """Whether a life before this one put the bytes back, and could not write that down. Then the indexes may be
        without them still."""
        log = next(each for each in self._logs if each.directory == mark.log)
        if not mending.is_whole(log, mark):
            return False
        if log is self.messages.log:
            for of, records in mending.within(log, mark):
                self.messages.mended(of, records, self._background_fault)
        return True

    def _distrust_view(self) -> None:
        """The view lacks actions that the log will have: no checkpoint may carry it on, this one's least of all.
        `Refused` where there is nothing to make it again from."""
        if self.is_view_stale:
            return
        if first_base(self.actions.log) > 0 and not self._action_retention.pictures:
            raise Refused(Code.DAMAGED, "actions before these were let go of: what they made could not be made again")
        if self._checkpointing:
            raise Refused(Code.BUSY, "a checkpoint is being written: mend a little later", retry_after_ms=100)
        self.is_view_stale = True
        picture = self._picture()
        try:
            self._disk.publish(checkpoints.file_name(picture.number), checkpoints.pack(picture))
        except DiskFull:
            self.is_view_stale = False  # nothing was mended; whoever tries again has to begin here
            raise
        for number in checkpoints.numbers(self._disk):
            if number < picture.number:
                self._disk.remove(checkpoints.file_name(number))
        self._number = picture.number

    # --- writing -----------------------------------------------------------------------------------------------------

    def produce(
        self, subject: Subject, data: Part, checked: batch.BatchHeader | None = None, secret: bytes = b"", crc: int = -1
    ) -> AppendReceipt:
        """Check a batch, unless that was done, and append it; `Refused` and `RemoteProtocolError` mean that nothing was
        appended. `secret`: what the sender shows of its stream. `crc`: of the whole batch; -1: not known."""
        header = checked or batch.check(data)
        self._admit()
        return self.messages.append(subject, data, header, secret, crc)

    def when_taken(self, taken: PlaceTaken, told: OnTaken) -> None:
        """Call `told(None, answer)` once it is certain that what was in a batch's way stays there: the receipt of the
        same batch, or the conflict with what is stored. With a fault, nothing is to be answered but that."""

        def durable(fault: FairwayError | None) -> None:
            told(fault, taken if fault is not None else self.messages.resolve(taken))

        flusher = self.messages.log.flusher
        flusher.when_durable(taken.end, durable, len(flusher.undone_from))

    def produce_own(self, subject: Subject, data: bytes) -> AppendReceipt:
        """Append a batch of the broker's own making to a subject of its own; `Refused`: nothing was appended."""
        header = batch.check(data)
        self._admit()
        return self.messages.append_own(subject, data, header)

    def ensure_subject(self, subject: Subject) -> SubjectState:
        """The subject, named in the log where it is new; committed once the log is beyond its birth."""
        if self.messages.views.subjects.find(subject) is None:
            self._admit()
        return self.messages.ensure(subject)

    def remove_subjects(self, states: Sequence[SubjectState]) -> RecordHeader:
        """Remove these subjects, all or none of them; `messages.on_removed` says when they are gone."""
        self._admit()
        return self.messages.remove(states)

    async def durable(self, receipt: AppendReceipt) -> None:
        """Return once the batch is synced; raise if it never will be."""
        await self.messages.log.flusher.durable(receipt.end, receipt.undos)

    def act(self, actions: Iterable[Action]) -> RecordHeader:
        """Append actions; they find room even when produce does not."""
        return self.actions.append(actions)

    def _admit(self) -> None:
        if self.fault is not None:
            raise self.fault
        if self.follows:
            raise Refused(Code.NOT_MASTER, "this is a copy: its master is the one who writes")
        if not self.has_room and not self._check_room():
            raise retention.nearly_full()

    def _check_room(self) -> bool:
        """Whether produce may go on: room above the low-water mark, and the room for actions safely reserved."""
        if not self.actions.has_ballast:
            self.actions.take_ballast()
        has_room = self.actions.has_ballast and self._disk.free_bytes() >= self._options.low_water_bytes
        self.has_room = retention.note_room(before=self.has_room, now=has_room)
        return has_room

    def sync(self) -> None:
        """Durability `memory`: sync soon what was answered so far. To be called every so often."""
        for log in self._logs:
            log.flusher.sync()

    # --- keeping house -----------------------------------------------------------------------------------------------

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
        """A full disk undid what a copy had taken in: whoever sends must begin again."""
        if self.follows:
            self.poison(DiskFull("the disk of this copy is full: make room, then it goes on"))
        else:
            self._check_room()

    def _actions_undone(self, position: int) -> None:
        """A full disk undid actions that a view has taken in already: only a restart brings the two together again."""
        self._messages_undone(position)
        self._action_retention.undo(position)
        if self._action_view is not None:
            self.poison(StorageFault("the disk is full and the room kept for actions is used up: make room, restart"))

    def _take_fault(self, log: Log) -> bool:
        if log.flusher.fault is not None:
            self.poison(log.flusher.fault)
        return self.fault is not None

    def poison(self, fault: StorageFault) -> None:
        """Answer nothing any more, on either log."""
        if self.fault is None:
            self.fault = fault
            for log in self._logs:
                log.flusher.poison(fault)
            self.on_fault(fault)

    def _background_fault(self, fault: StorageFault) -> None:
        """A view could not be written. On a full disk it can wait, for it can be made again; else the disk is dying."""
        if isinstance(fault, DiskFull):
            self.remarks.append(f"a view was not written: {fault}")
        else:
            self.poison(fault)

    def free_bytes(self) -> int:
        """Room left on the disk; once the directory is closed, what was left when it was asked last."""
        if not self.is_closed:
            self._free_bytes = self._disk.free_bytes()
        return self._free_bytes

    def _note_damage(self, damaged: Damaged) -> None:
        self._note_rot(self.messages.log, damaged)

    def _note_rot(self, log: Log, damaged: Damaged) -> None:
        mark = RotMark(log.directory, damaged.position, mending.end_of(log, damaged.position), str(damaged))
        if mark not in self._rotten:
            self._rotten.append(mark)
            self.on_rot()

    # --- checkpoint and retention ------------------------------------------------------------------------------------

    def checkpoint(self, then: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint in the background, unless one is under way; `then` is called when it has ended."""
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

        # The groups are pictured up to the end of the action log: that is written once this end is settled.
        self.actions.log.flusher.when_settled(picture.actions.end, publish)

    def _state_groups(self, picture: bytes) -> None:
        """Have the action log say what it amounts to so far, once it has grown by a segment: then what lies before may
        go, when the messages have gone that it speaks of. The checkpoint that is being made does not wait for this."""
        log, known = self.actions.log, self._action_retention
        if self.follows or not (self._options.keeps_actions and self._options.retention.is_limited):
            return
        known.note_complete(log.segments, self.messages.log.end)
        is_due = known.is_picture_due(log.segments, log.end, len(picture), self._options.action_segment_bytes)
        if picture and is_due and self.has_room:
            try:
                known.note_picture(self.actions.state_groups(picture).position)
            except Refused as refused:  # no room now: what could go stays a little longer
                if refused.code is Code.TOO_LARGE and TOO_MANY_GROUPS not in self.remarks:
                    self.remarks.append(TOO_MANY_GROUPS)

    def _trusted_view(self) -> ActionView | None:
        """The view of actions, unless it lacks something that the log makes good. A copy that began in the middle of
        the log is without its groups until a GROUPS record comes: a start from its picture would pass over that."""
        view = self._action_view
        if view is None or self.is_view_stale:
            return None
        return view if not self.follows or view.is_whole(first_base(self.actions.log)) else None

    def _picture(self) -> Checkpoint:
        """The views of messages as they were at the settled end, that of actions as it is."""
        self.messages.settle_removals()
        views = self.messages.views
        end = self.messages.settled_end
        actions, view = self.actions.log, self._trusted_view()
        actions_end = min(actions.synced_end, actions.committed_end) if view is None else actions.end
        known = self._action_retention.below(actions_end, actions.segments)
        views.dedupe.expire(self.aging_ms())
        first_places = cache(partial(views.entries.first_places_from, end))
        aging_ms, latest_ms = self._vouched_ms()
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
        )

    def _checkpoint_written(self, written: Checkpoint) -> None:
        self._number = written.number
        self.checkpointed_ms = self._clock.wall_ms()
        self._checkpointed_ends = (written.messages.end, written.actions.end)
        doomed = [base for base in self._doomed if base < written.messages.first_base]
        self._doomed = self._doomed[len(doomed) :]
        # An older checkpoint that still speaks of deleted segments would call them missing: it goes before they do.
        keep = 1 if doomed else limits.CHECKPOINTS_KEPT
        old = [number for number in checkpoints.numbers(self._disk) if number <= written.number - keep]
        names = [checkpoints.file_name(number) for number in old]
        for base in doomed:
            names += [segment.file_name(self.messages.log.directory, base), index_file.file_name(base)]
        remove_in_order(self._disk, names + self._trim_actions(written), self._checkpoint_ended)

    def _trim_actions(self, written: Checkpoint) -> list[str]:
        """The files of action segments that no kept checkpoint speaks of. The segments below this one's end are taken
        off the log, and go once every checkpoint that is kept was made without them."""
        log = self.actions.log
        if self._options.keeps_actions and not self.follows and not self.is_view_stale:
            covered_end = min(written.actions.end, log.synced_end, log.committed_end)
            messages_base = first_base(self.messages.log)
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
        """Take a segment off the log; its file goes once all checkpoints that are kept are younger than this number."""
        log = self.actions.log
        log.drop(base)
        self._doomed_actions.append((base, number + limits.CHECKPOINTS_KEPT))
        self._action_retention.forget_below(first_base(log))
        self._rotten = mending.left(self._rotten, log, 0, first_base(log))

    def _checkpoint_ended(self, fault: FairwayError | None = None) -> None:
        if isinstance(fault, StorageFault):
            self._background_fault(fault)
        self._checkpointing = False
        waiting, self._when_checkpointed = self._when_checkpointed, []
        for then in waiting:
            then()

    @property
    def age_ms_max(self) -> int | None:
        """The greatest age of messages that is in force; None: they are kept for ever."""
        return self._options.retention.age_ms_max

    def aging_ms(self) -> int:
        """By this time things are too old to be kept (`log_time`); on a copy, by its master's clock too."""
        now_ms = self.time.aging_ms()
        return min(now_ms, self._written_ms() or now_ms) if self.follows else now_ms

    def follow_clock(self) -> None:
        """Look at the clock, every so often: what was dated ahead ages from then on, also if nothing is appended."""
        self.action_time.wall_ms()
        self.messages.log.follow_clock(self.time.wall_ms())

    def plan_retention(self, owed_from: int | None = None) -> retention.RetentionPlan:
        """What `retain` would let go of."""
        now_ms, policy = self.aging_ms(), self._options.retention
        return retention.plan(self.messages.log.segments, now_ms, policy, owed_from, below=self._droppable_end())

    def _droppable_end(self) -> int:
        return min(self.messages.sealed_end, self.messages.settled_end)

    def _drop(self, base: int) -> None:
        log = self.messages.log
        log.drop(base)
        self.messages.views.entries.forget(base)
        self.messages.views.subjects.forget_removed(first_base(log))
        self._doomed.append(base)
        self._rotten = mending.left(self._rotten, log, 0, first_base(log))

    def retain(self, owed_from: int | None = None) -> retention.RetentionPlan:
        """Let go of what the policy allows: at once for readers, on disk once a checkpoint says so."""
        plan = self.plan_retention(owed_from)
        for base in plan.doomed:
            self._drop(base)
        if self._doomed:
            self.checkpoint()
        return plan

    def complete_old_segment(self) -> None:
        """Only complete segments can go. Where few messages come and much happens to them, the segment of messages that
        is written is completed early: else it would keep the actions that speak of it for many times their age."""
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
        """Sync what was appended, leave a checkpoint, let go of the directory."""
        try:
            for log in self._logs:
                await log.flusher.synced(log.end)
            self.messages.views.subjects.lower_ceilings()
            if self.actions.log.committed_end == self.actions.log.end:  # else copies lack what a checkpoint would say
                await self._last_checkpoint()
        finally:
            self._let_go()

    def abandon(self) -> None:
        """Let go of the directory as it is: nobody is answered any more, and nothing is written."""
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
        """A second one, if the one under way does not cover everything."""
        for _ in range(2 if self._checkpointing else 1):
            ended = asyncio.Event()
            self.checkpoint(then=ended.set)
            if self.fault is None:
                await ended.wait()
