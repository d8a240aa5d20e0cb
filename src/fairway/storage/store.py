"""The store: both logs of one data directory, opened, kept healthy and closed.

It owns what concerns the logs together: whose directory it is, recovery, the checkpoint, room on the disk, retention,
and the first fault, after which nothing is answered any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from fairway import batch, limits
from fairway.errors import (
    Code,
    DiskFull,
    FairwayError,
    Refused,
    RemoteProtocolError,
    StorageFault,
)
from fairway.names import Subject
from fairway.storage import checkpoint as checkpoints
from fairway.storage import directory, index_file, mending, retention, segment
from fairway.storage.action_log import Action, ActionLog, ActionView, Names
from fairway.storage.checkpoint import Checkpoint, LogMark, RotMark
from fairway.storage.copies import Copies, first_base
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.directory import Identity
from fairway.storage.flusher import Defer, Durability, Outcome
from fairway.storage.log import Damaged, Log
from fairway.storage.message_log import MessageLog, Receipt
from fairway.storage.opening import Opened, open_directory
from fairway.storage.record import Header
from fairway.storage.recovery import Finding
from fairway.storage.subjects import SubjectState
from fairway.world.clock import Clock
from fairway.world.disk import Disk
from fairway.world.rng import Rng


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What an operator may set."""

    segment_bytes: int = limits.SEGMENT_BYTES
    action_segment_bytes: int = limits.ACTION_SEGMENT_BYTES
    low_water_bytes: int = limits.DISK_LOW_WATER_BYTES
    checkpoint_every_bytes: int = limits.CHECKPOINT_EVERY_BYTES
    retention: retention.Policy = field(default_factory=retention.Policy)
    durability: Durability = Durability.SYNC
    keeps_actions: bool = True  # False: the checkpoint's picture is all that a start needs of old actions,
    actions_kept_bytes: int = 0  # and so much of them is kept all the same, for whoever asks what happened


class Store(Copies):
    """One data directory, owned by this process. Lives on one loop; `defer` is that loop's `call_soon`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        opened: Opened,
        options: StoreOptions,
        defer: Defer,
        names: Names = tuple,
        *,
        follows: bool = False,
    ) -> None:
        self.identity: Identity = opened.identity
        self.findings: list[Finding] = opened.findings
        self.remarks: list[str] = opened.remarks
        self.fault: StorageFault | None = None
        self._disk = disk
        self._clock = clock
        self._options = options
        self._number = opened.checkpoint_number
        self.is_view_stale = False  # the action log was mended: only the next start makes the view of it again
        self.checkpointed_ms = clock.wall_ms()  # or begun, before the first checkpoint of this life
        self._checkpointing = False
        self._when_checkpointed: list[Callable[[], None]] = []
        self._doomed: list[int] = []  # segments that retention has taken off the log, their files still there
        self._doomed_actions: list[tuple[int, int]] = []  # the same of actions; by which checkpoint they may go
        self.has_room = True
        self._action_view: ActionView | None = None
        self.on_fault: Callable[[StorageFault], None] = lambda _fault: None  # told once, of the fault that ends it
        self.on_actions: Callable[[], None] = lambda: None  # something was committed to the action log
        self.keeps_from: Callable[[], int | None] = lambda: None  # messages from here on are needed here, if any are
        self.on_rot: Callable[[], None] = lambda: None  # a reader has met damage that was not known
        self.messages = MessageLog(
            disk,
            clock,
            opened.messages,
            opened.views,
            unsealed_from=opened.unsealed_from,
            segment_bytes=options.segment_bytes,
            defer=defer,
            on_progress=self._messages_progressed,
            on_damage=self._note_damage,
            on_cut=self._messages_undone,
            durability=options.durability if not follows else Durability.SYNC,
        )
        self.actions = ActionLog(
            disk,
            clock,
            opened.actions,
            segment_bytes=options.action_segment_bytes,
            defer=defer,
            on_progress=self._actions_progressed,
            on_cut=self._actions_undone,
            durability=options.durability if not follows else Durability.SYNC,
            names=names,
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
        names: Names = tuple,
        follows: bool = False,
        adopt: Identity | None = None,
        epoch: int | None = None,
    ) -> Store:
        """Lock, recover, and begin a new epoch: this one, or the next. The directory is left alone if it cannot be
        ours.

        `names` are those that actions speak of, restated where a segment of the action log begins. A copy `follows`
        another: it is held and begins no epoch. `adopt` has the ids of the logs, for a directory that is new.
        """
        directory.identify(disk)  # before the lock, which would leave a file in a directory that is not ours
        disk.lock()
        opened = open_directory(disk, rng, action_view, adopt)
        store = cls(disk, clock, opened, options or StoreOptions(), defer, names, follows=follows)
        store._action_view = action_view
        if follows:
            store.actions.take_ballast()
        else:
            store._begin_epoch(store.epoch + 1 if epoch is None else epoch)
        return store

    def _begin_epoch(self, epoch: int) -> None:
        self.check_epoch(epoch)
        self.actions.take_ballast()
        self._check_room()
        for log in self._logs:
            log.open_epoch(epoch, self._clock.wall_ms())

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
            self._doomed_actions.append((actions.segments[0].base, self._number + limits.CHECKPOINTS_KEPT))
            actions.drop(actions.segments[0].base)
        if self._doomed:
            self.checkpoint()

    def rotten_spans(self) -> list[mending.Span]:
        """What another copy could mend here, by log and position."""
        return [each for number, log in enumerate(self._logs) for each in mending.spans(number, log, self._rotten)]

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
        newest_ms = max((each.header.appended_ms for each in patch.records), default=0)
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
        if first_base(self.actions.log) > 0:
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

    def produce(self, subject: Subject, data: bytes, checked: batch.Header | None = None) -> Receipt:
        """Check a batch, unless that was done, and append it; `Refused` and `RemoteProtocolError` mean that nothing was
        appended."""
        header = checked or batch.check(data)
        self._admit()
        return self.messages.append(subject, data, header)

    def when_taken(self, taken: PlaceTaken, outcome: Outcome) -> None:
        """Call `outcome(None)` once it is certain that what was in a batch's way stays there."""
        flusher = self.messages.log.flusher
        flusher.when_durable(taken.end, outcome, len(flusher.undone_from))

    def produce_own(self, subject: Subject, data: bytes) -> Receipt:
        """Append a batch of the broker's own making to a subject of its own; `Refused`: nothing was appended."""
        header = batch.check(data)
        self._admit()
        return self.messages.append_own(subject, data, header)

    def ensure_subject(self, subject: Subject) -> SubjectState:
        """The subject, named in the log where it is new; committed once the log is beyond its birth."""
        known = self.messages.views.subjects.find(subject)
        if known is None:
            self._admit()
            known = self.messages.introduce(subject)
        return known

    async def durable(self, receipt: Receipt) -> None:
        """Return once the batch is synced; raise if it never will be."""
        await self.messages.log.flusher.durable(receipt.end, receipt.undos)

    def act(self, actions: Iterable[Action]) -> Header:
        """Append actions; they find room even when produce does not."""
        return self.actions.append(actions)

    def _admit(self) -> None:
        if self.fault is not None:
            raise self.fault
        if self.follows:
            raise Refused(Code.NOT_MASTER, "this is a copy: its master is the one who writes")
        if not self.has_room and not self._check_room():
            raise Refused(
                Code.READ_ONLY, "the disk is nearly full: make room, or shorten retention", retry_after_ms=1_000
            )

    def _check_room(self) -> bool:
        """Whether produce may go on: room above the low-water mark, and the room for actions safely reserved."""
        if not self.actions.has_ballast:
            self.actions.take_ballast()
        self.has_room = self.actions.has_ballast and self._disk.free_bytes() >= self._options.low_water_bytes
        return self.has_room

    def sync(self) -> None:
        """Durability `memory`: sync soon what was answered so far. To be called every so often."""
        for log in self._logs:
            log.flusher.sync()

    # --- keeping house -----------------------------------------------------------------------------------------------

    def _messages_progressed(self) -> None:
        if self._take_fault(self.messages.log):
            return
        self.messages.seal_complete_segments(self._background_fault)
        self._check_room()
        if self.messages.settled_end - self._checkpointed_ends[0] >= self._options.checkpoint_every_bytes:
            self.checkpoint()

    def _actions_progressed(self) -> None:
        if not self._take_fault(self.actions.log):
            self.on_actions()

    def _messages_undone(self, _position: int) -> None:
        """A full disk undid what a copy had taken in: whoever sends must begin again."""
        if self.follows:
            self.poison(DiskFull("the disk of this copy is full: make room, then it goes on"))

    def _actions_undone(self, position: int) -> None:
        """A full disk undid actions that a view has taken in already: only a restart brings the two together again."""
        self._messages_undone(position)
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
        """Room left on the disk."""
        return self._disk.free_bytes()

    @property
    def rotten(self) -> list[RotMark]:
        """Every rotten span that is known, of this life and the ones before."""
        return list(self._rotten)

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
        picture = self._picture()
        steps = [(checkpoints.file_name(picture.number), checkpoints.pack(picture))]
        newest = self.messages.open_segment(picture.messages.end)
        if newest is not None:
            parts = self.messages.views.entries.picture(newest.base, picture.messages.end)
            steps.insert(0, (index_file.file_name(newest.base), parts))

        def publish(undone: FairwayError | None) -> None:
            if undone is not None:
                self._checkpoint_failed(undone)
            elif steps:
                self._disk.publish_later(*steps.pop(0), publish)
            else:
                self._checkpoint_written(picture)

        # The groups are pictured up to the end of the action log: that is written once this end is settled.
        self.actions.log.flusher.when_settled(picture.actions.end, publish)

    def _picture(self) -> Checkpoint:
        """The views of messages as they were at the settled end, that of actions as it is."""
        views = self.messages.views
        end = self.messages.settled_end
        actions, view = self.actions.log, None if self.is_view_stale else self._action_view
        settled_end = min(actions.synced_end, actions.committed_end)
        views.dedupe.expire(self._clock.wall_ms())
        return Checkpoint(
            number=self._number + 1,
            messages_id=self.identity.messages_id,
            actions_id=self.identity.actions_id,
            epoch=min(self.messages.log.committed_epoch, self.actions.log.committed_epoch),
            messages=_mark(self.messages.log, end),
            actions=_mark(actions, settled_end if view is None else actions.end),
            subjects=views.subjects.pack(end, views.entries.first_sequences_from(end)),
            streams=views.dedupe.pack(end, partial(views.entries.first_places_from, end)),
            rotten=list(self._rotten),
            groups=b"" if view is None else view.picture(),
        )

    def _checkpoint_failed(self, fault: FairwayError) -> None:
        if isinstance(fault, StorageFault):
            self._background_fault(fault)
        self._checkpoint_ended()

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
        self._remove_in_order(names + self._trim_actions(written))

    def _trim_actions(self, written: Checkpoint) -> list[str]:
        """The files of action segments that no kept checkpoint speaks of. The segments below this one's end are taken
        off the log, and go once every checkpoint that is kept was made without them."""
        log = self.actions.log
        if not self._options.keeps_actions and self._action_view is not None and not self.is_view_stale:
            kept = self._options.actions_kept_bytes
            while (
                len(log.segments) > 1
                and log.segments[0].end <= written.actions.end
                and log.end - log.segments[0].base > kept
            ):
                self._doomed_actions.append((log.segments[0].base, written.number + limits.CHECKPOINTS_KEPT))
                log.drop(log.segments[0].base)
        gone = [base for base, number in self._doomed_actions if number <= written.number]
        self._doomed_actions = [each for each in self._doomed_actions if each[1] > written.number]
        return [segment.file_name(log.directory, base) for base in gone]

    def _remove_in_order(self, names: list[str]) -> None:
        if not names:
            self._checkpoint_ended()
            return

        def removed(fault: StorageFault | None) -> None:
            if fault is not None:
                self._checkpoint_failed(fault)  # the rest must stay: an older checkpoint may still speak of it
            else:
                self._remove_in_order(names[1:])

        self._disk.remove_later(names[0], removed)

    def _checkpoint_ended(self) -> None:
        self._checkpointing = False
        waiting, self._when_checkpointed = self._when_checkpointed, []
        for then in waiting:
            then()

    def plan_retention(self, owed_from: int | None = None) -> retention.Plan:
        """What `retain` would let go of."""
        now_ms, policy = self._clock.wall_ms(), self._options.retention
        return retention.plan(self.messages.log.segments, now_ms, policy, owed_from, below=self._droppable_end())

    def _droppable_end(self) -> int:
        return min(self.messages.sealed_end, self.messages.settled_end)

    def _drop(self, base: int) -> None:
        log = self.messages.log
        log.drop(base)
        self.messages.views.entries.forget(base)
        self._doomed.append(base)
        self._rotten = mending.left(self._rotten, log, 0, first_base(log))

    def retain(self, owed_from: int | None = None) -> retention.Plan:
        """Let go of what the policy allows: at once for readers, on disk once a checkpoint says so."""
        plan = self.plan_retention(owed_from)
        for base in plan.doomed:
            self._drop(base)
        if self._doomed:
            self.checkpoint()
        return plan

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
        if self.fault is None:
            self.fault = StorageFault("this copy was set aside")
        for log in self._logs:
            log.flusher.poison(self.fault)
        self._checkpoint_ended()
        self._let_go()

    def _let_go(self) -> None:
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


def _mark(log: Log, end: int) -> LogMark:
    return LogMark(first_base(log), end, {each.base: each.newest_ms for each in log.segments})
