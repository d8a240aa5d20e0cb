"""One of several copies: what a store does because others hold the same logs.

The master is *held*: what it writes is committed once the copies that count have it too (`confirm`). A copy follows:
it takes in the master's bytes as they are (`follow`), shows what the master says is committed, and may come to lead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from fairway.errors import DiskFull, Misuse, Refused, StorageFault, invariant
from fairway.storage import copying, following, mending
from fairway.storage.action_log import ActionLog, ActionView
from fairway.storage.catching_up import CatchUp
from fairway.storage.checkpoint import LogMark, RotMark
from fairway.storage.flusher import Durability, OnDurable
from fairway.storage.log import Damaged, Log
from fairway.storage.log_time import LogClock
from fairway.storage.message_log import MessageLog
from fairway.storage.opening import RecoveredStore
from fairway.storage.record import Record, RecordKind
from fairway.world.disk import Disk


class ReplicatedStore(ABC):
    """The part of a store that concerns copies. Logs have numbers: 0 messages, 1 actions."""

    fault: StorageFault | None
    messages: MessageLog
    actions: ActionLog
    time: LogClock  # of messages
    action_time: LogClock
    _action_view: ActionView | None
    _rotten: list[RotMark]

    def __init__(
        self, disk: Disk, opened: RecoveredStore, logs: tuple[MessageLog, ActionLog], durability: Durability
    ) -> None:
        self.follows = False  # another writes these logs
        self.on_synced: Callable[[], None] = lambda: None  # one of `ends` has moved
        self._durability = durability
        self._checkpointed_ends = opened.checkpointed_ends
        self._checkpointed_epoch = opened.checkpointed_epoch
        self._action_retention = opened.action_retention
        self._is_held = False
        self._logs: tuple[Log, Log] = (logs[0].log, logs[1].log)
        self._catch_up = CatchUp(disk, self._logs)
        for log in self._logs:
            log.flusher.on_synced = self._synced

    @abstractmethod
    def poison(self, fault: StorageFault) -> None:
        """Answer nothing any more, on either log."""

    @abstractmethod
    def _begin_epoch(self, epoch: int) -> None:
        """Write, from now on, in this epoch."""

    @abstractmethod
    def _note_rot(self, log: Log, damaged: Damaged) -> None:
        """A reader met damage."""

    def _synced(self) -> None:
        self.on_synced()

    @property
    def epoch(self) -> int:
        """The highest that either log has seen."""
        return max(log.epoch for log in self._logs)

    def check_epoch(self, epoch: int) -> None:
        """`Misuse` where it cannot be the next."""
        if epoch <= self.epoch:
            raise Misuse(f"epoch {epoch} cannot begin: the logs have seen {self.epoch}; choose a later one")

    def ends(self) -> tuple[int, int]:
        """How far messages and actions are synced here."""
        return self.messages.log.synced_end, self.actions.log.synced_end

    def committed_ends(self) -> tuple[int, int]:
        return self.messages.log.committed_end, self.actions.log.committed_end

    def checkpointed_ends(self) -> tuple[int, int]:
        """How far the last checkpoint covers messages and actions; all of that was committed."""
        return self._checkpointed_ends

    @property
    def rotten(self) -> list[RotMark]:
        """Every rotten span that is known, of this life and the ones before."""
        return list(self._rotten)

    def rotten_spans(self) -> list[mending.DamagedRange]:
        """What another copy could mend here, by log and position."""
        return [each for number, log in enumerate(self._logs) for each in mending.spans(number, log, self._rotten)]

    def first_bases(self) -> tuple[int, int]:
        """Where messages and actions begin: retention took what lies before."""
        return first_base(self.messages.log), first_base(self.actions.log)

    def hold(self) -> None:
        """From now on nothing is committed that was not confirmed, but for what the last checkpoint covers. To be
        called before anybody is answered; more than once does no harm."""
        if not self._is_held:
            self._is_held = True
            for log, end in zip(self._logs, self._checkpointed_ends, strict=True):
                log.hold(end, self._checkpointed_epoch)

    def confirm(self, messages_end: int, actions_end: int) -> None:
        """All copies that count have everything below these ends, which may lie beyond our own. Never back."""
        self.messages.log.flusher.confirm(messages_end)
        self.actions.log.flusher.confirm(actions_end)

    def _follow(self, follows: bool) -> None:
        self.follows = follows
        for log in self._logs:
            log.follows = follows
        if follows:
            self.hold()

    def follow(self, log: int, base: int, position: int, data: bytes) -> None:
        """Take in the master's next bytes of a log. `RemoteProtocolError` where they do not fit: nothing was taken.
        After a `StorageFault` this copy is at an end; once it is opened again it may go on."""
        invariant(self.follows, "only a copy takes in what another writes")
        if self.fault is not None:
            raise self.fault
        of = self._logs[log]
        header_bytes, records = following.check(of, base, position, data)
        try:
            of.take([each.header for each in records], data, header_bytes, merged=self._catch_up.merges)
        except Refused as full:
            self.poison(DiskFull(f"{full.sentence}: make room, then this copy goes on"))
        if self.fault is not None:
            raise self.fault
        try:
            for each in records:
                self._apply(log, each)
        except Exception as error:  # the views have part of it: what they say can no longer be relied on
            self.poison(StorageFault(f"what came for {of.directory} at {position} cannot be taken in: {error!r}"))
            raise

    def _apply(self, log: int, found: Record) -> None:
        if log == 0:
            self.messages.views.apply(found)
            return
        if found.header.kind == RecordKind.GROUPS:
            self._action_retention.note_picture(found.header.position)
        if self._action_view is not None:
            self._action_view.replay(found)

    def lead(self, epoch: int) -> None:
        """From now on this one writes, in this epoch, behind what it has taken in."""
        invariant(self.follows, "only a copy comes to lead")
        if self._catch_up.is_on:
            raise Misuse("this copy is catching up: end that before it leads")
        self.check_epoch(epoch)
        self._follow(False)
        self._take_over_clocks()
        if self._durability is Durability.MEMORY:
            self.messages.use_memory()
            self.actions.log.flusher.use_memory()
        self._begin_epoch(epoch)

    def _written_ms(self) -> int | None:
        """The last time that somebody wrote down in the logs; None: they are empty."""
        return max(log.newest_ms for log in self._logs) or None

    def _take_over_clocks(self) -> None:
        """Compare the clock of this machine with the times that the master before wrote down, as a start does: where
        the two are apart, nothing becomes old and no append time goes back for an hour."""
        written_ms = self._written_ms()
        if written_ms is not None:
            for log, time in zip(self._logs, (self.time, self.action_time), strict=True):
                time.take_over(log.newest_ms, written_ms)

    def _vouched_ms(self) -> tuple[int, int]:
        """What a checkpoint says of the time: on a copy, by its master's clock too."""
        segments = [each for log in self._logs for each in log.segments]
        return self.time.vouched_ms(segments, self._written_ms() if self.follows else None)

    def read_chunk(self, log: int, position: int, bytes_max: int) -> copying.SegmentChunk | None:
        """For a copy: whole records from `position` on that are synced here, of one segment, its header before the
        first. None: there is nothing yet. `Damaged` where this copy cannot tell."""
        try:
            return copying.read_chunk(self._logs[log], position, bytes_max)
        except Damaged as damaged:
            self._note_met(log, position, damaged)
            raise

    def read_warm_chunk(self, log: int, position: int, bytes_max: int) -> copying.SegmentChunk | None:
        """The same as far as it is in memory. None: it is not, or there is nothing yet."""
        try:
            return copying.read_warm_chunk(self._logs[log], position, bytes_max)
        except Damaged as damaged:
            self._note_met(log, position, damaged)
            raise

    def fetch_chunk(self, log: int, position: int, bytes_max: int, done: copying.ChunkRead) -> None:
        """The same off the loop, of what is synced; then `done` is called with it, or with what is wrong."""

        def fetched(found: copying.SegmentChunk | Damaged | StorageFault) -> None:
            if isinstance(found, Damaged):
                self._note_met(log, position, found)
            done(found)

        copying.fetch_chunk(self._logs[log], position, bytes_max, fetched)

    def _note_met(self, log: int, position: int, damaged: Damaged) -> None:
        """Damage, unless retention took what was there."""
        if position >= first_base(self._logs[log]):
            self._note_rot(self._logs[log], damaged)

    def marks(self, log: int, positions: Iterable[int]) -> list[tuple[int, int]]:
        """Epoch and header checksum of the records that begin there; (0, 0) where none does, or it is not synced;
        `copying.ROTTEN_MARK` where one might, and has rotted."""
        return copying.marks(self._logs[log], positions, self._rotten)

    def tail_positions(self, log: int) -> list[int]:
        """Own records to compare with those of another copy, to find the last one that both have: all from the last
        checkpoint on and near the end, before that the first of each segment (then look closer, by `positions`)."""
        return copying.tail_positions(self._logs[log], self._checkpointed_ends[log])

    def positions(self, log: int, start: int, end: int) -> list[int]:
        """Where own records begin, from `start` to before `end`."""
        return copying.positions(self._logs[log], start, end)

    def begin_catch_up(self) -> None:
        """This copy is far behind: from now on it syncs less often than its master did. Durably said first."""
        invariant(self.follows, "only a copy catches up")
        self._catch_up.begin()

    def end_catch_up(self, done: OnDurable = lambda _: None) -> None:
        """It has caught up, or leads soon: `done(None)` once everything is as if it had never been behind."""
        self._catch_up.end(done)


def first_base(log: Log) -> int:
    """Where the log begins."""
    return log.segments[0].base if log.segments else log.end


def mark(log: Log, end: int) -> LogMark:
    """What a checkpoint says of a log that it covers up to `end`."""
    set_back_ms = {each.base: each.set_back_ms for each in log.segments if each.set_back_ms}
    return LogMark(first_base(log), end, {each.base: each.newest_ms for each in log.segments}, set_back_ms)
