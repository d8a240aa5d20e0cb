"""Replication in the store: the part of a store that other copies of the same logs need.

The master is *held*: its records are committed once the copies that count have them too (`confirm`). A replica follows:
it appends the master's bytes unchanged (`follow`), shows what the master has committed, and may come to lead (`lead`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from fairway.errors import DiskFull, Misuse, Refused, StorageFault, invariant
from fairway.runtime.clock import AGE_HOLD_MS, HeldJump
from fairway.runtime.disk import Disk
from fairway.storage import log_copies, repair
from fairway.storage.action_log import ActionLog, ActionView
from fairway.storage.checkpoint import LogMark, RotMark
from fairway.storage.flusher import Durability, OnDurable
from fairway.storage.log import Damaged, Log, LogClock
from fairway.storage.message_log import MessageLog
from fairway.storage.open_store import RecoveredStore
from fairway.storage.record import Record, RecordKind
from fairway.storage.replica_directory import CatchUp

_HELD_STEP_MS = AGE_HOLD_MS // 12  # how much longer a jump of the clock was held back before a checkpoint records that


class ReplicatedStore(ABC):
    """The part of a store that concerns other copies. Logs have numbers: 0 messages, 1 actions."""

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
        self.follows = False  # this copy is a replica: its master writes the logs
        self.on_synced: Callable[[], None] = lambda: None  # one of `ends` has moved
        self._durability = durability
        self._checkpointed_ends = opened.checkpointed_ends
        self._checkpointed_epoch = opened.checkpointed_epoch
        self._action_retention = opened.action_retention
        self._held_recorded_ms = 0  # of the jump of the clock: how long it was held back at the last checkpoint
        self._is_held = False
        self._logs: tuple[Log, Log] = (logs[0].log, logs[1].log)
        self._catch_up = CatchUp(disk, self._logs)

    @abstractmethod
    def poison(self, fault: StorageFault) -> None:
        """Stop both logs: neither answers any more."""

    @abstractmethod
    def checkpoint(self, then: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint in the background."""

    @abstractmethod
    def _begin_epoch(self, epoch: int) -> None:
        """Write in this epoch from now on."""

    @abstractmethod
    def _note_rot(self, log: Log, damaged: Damaged) -> None:
        """A reader found damage."""

    def _synced(self) -> None:
        self.on_synced()

    @property
    def epoch(self) -> int:
        """The highest epoch that either log has seen."""
        return max(log.epoch for log in self._logs)

    def check_epoch(self, epoch: int) -> None:
        """`Misuse` if this epoch cannot be the next."""
        if epoch <= self.epoch:
            raise Misuse(f"epoch {epoch} cannot begin: the logs have seen {self.epoch}; choose a later one")

    def ends(self) -> tuple[int, int]:
        """How far messages and actions are synced on this copy."""
        return self.messages.log.synced_end, self.actions.log.synced_end

    def committed_ends(self) -> tuple[int, int]:
        return self.messages.log.committed_end, self.actions.log.committed_end

    def checkpointed_ends(self) -> tuple[int, int]:
        """How far the last checkpoint covers messages and actions; all of that was committed."""
        return self._checkpointed_ends

    @property
    def rotten(self) -> list[RotMark]:
        """Every known rotten span, of this process and earlier ones."""
        return list(self._rotten)

    def rotten_spans(self) -> list[repair.DamagedRange]:
        """The ranges that another copy could repair here, by log and position."""
        return [each for number, log in enumerate(self._logs) for each in repair.spans(number, log, self._rotten)]

    def first_bases(self) -> tuple[int, int]:
        """Where messages and actions begin, after retention."""
        return self.messages.log.first_base, self.actions.log.first_base

    def hold(self) -> None:
        """From now on commit only what is confirmed, except for what the last checkpoint covers. Call before anybody is
        answered; later calls change nothing."""
        if not self._is_held:
            self._is_held = True
            for log, end in zip(self._logs, self._checkpointed_ends, strict=True):
                log.hold(end, self._checkpointed_epoch)

    def confirm(self, messages_end: int, actions_end: int) -> None:
        """All copies that count have everything below these ends, which may exceed this copy's. They never go back."""
        self.messages.log.flusher.confirm(messages_end)
        self.actions.log.flusher.confirm(actions_end)

    def _follow(self, follows: bool) -> None:
        self.follows = follows
        for log in self._logs:
            log.follows = follows
        if follows:
            self.hold()

    def follow(self, log: int, base: int, position: int, data: bytes) -> None:
        """Append the master's next bytes of a log. `RemoteProtocolError`: the bytes do not fit, nothing was taken.
        After a `StorageFault` this copy stops; reopened, it may continue."""
        invariant(self.follows, "only a copy takes in what another writes")
        if self.fault is not None:
            raise self.fault
        of = self._logs[log]
        header_bytes, records = log_copies.check(of, base, position, data)
        try:
            of.take([each.header for each in records], data, header_bytes, merged=self._catch_up.merges)
        except Refused as full:
            self.poison(DiskFull(f"{full.sentence}: make room, then this copy goes on"))
        if self.fault is not None:
            raise self.fault
        try:
            for each in records:
                self._apply(log, each)
        except Exception as error:  # the views have applied a part of it, so nobody can rely on them
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
        """Write from now on, in this epoch, behind the records taken from the master before."""
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
        """The last append time in the logs; None: they are empty."""
        return max(log.newest_ms for log in self._logs) or None

    def _take_over_clocks(self) -> None:
        """Compare this machine's clock with the previous master's times, as a start does. Where the two differ, nothing
        becomes old and no append time goes back for an hour."""
        written_ms = self._written_ms()
        if written_ms is not None:
            for log, time in zip(self._logs, (self.time, self.action_time), strict=True):
                time.take_over(log.newest_ms, written_ms)

    def _vouched_ms(self) -> tuple[int, int]:
        """The times that a checkpoint records; on a replica, by its master's clock too."""
        segments = [each for log in self._logs for each in log.segments]
        return self.time.vouched_ms(segments, self._written_ms() if self.follows else None)

    def _held_jump(self) -> HeldJump | None:
        """The jump of the clock that a checkpoint records, so that the next process holds it back for the rest of the
        hour only. Otherwise a broker that is killed within every hour would let nothing go for its age."""
        held = self.time.held(self._written_ms() if self.follows else None)
        is_long = held is not None and held.for_ms >= _HELD_STEP_MS
        self._held_recorded_ms = held.for_ms if held and is_long else 0
        return held if is_long else None

    def follow_clock(self) -> None:
        """Look at the clock, regularly: messages dated ahead then begin to age, even if nothing is appended."""
        self.action_time.wall_ms()
        self.messages.log.follow_clock(self.time.wall_ms())
        held = self.time.held()
        if held is not None and abs(held.for_ms - self._held_recorded_ms) >= _HELD_STEP_MS:
            self.checkpoint()

    def read_chunk(self, log: int, position: int, bytes_max: int) -> log_copies.SegmentChunk | None:
        """Whole synced records of one segment from `position` on, for a replica; the segment's header comes before the
        first. None: there is nothing yet. `Damaged`: this copy has no intact record there."""
        with self._noting(log, position):
            return log_copies.read_chunk(self._logs[log], position, bytes_max)

    def read_warm_chunk(self, log: int, position: int, bytes_max: int) -> log_copies.SegmentChunk | None:
        """The same as far as memory holds it. None: memory does not, or there is nothing yet."""
        with self._noting(log, position):
            return log_copies.read_warm_chunk(self._logs[log], position, bytes_max)

    def fetch_chunk(self, log: int, position: int, bytes_max: int, done: log_copies.ChunkRead) -> None:
        """The same off the loop, for synced bytes; then call `done` with the chunk or the error."""

        def fetched(found: log_copies.SegmentChunk | Damaged | StorageFault) -> None:
            if isinstance(found, Damaged):
                self._note_met(log, position, found)
            done(found)

        log_copies.fetch_chunk(self._logs[log], position, bytes_max, fetched)

    @contextmanager
    def _noting(self, log: int, position: int) -> Iterator[None]:
        try:
            yield
        except Damaged as damaged:
            self._note_met(log, position, damaged)
            raise

    def _note_met(self, log: int, position: int, damaged: Damaged) -> None:
        """Note the damage, unless retention deleted the bytes."""
        if position >= self._logs[log].first_base:
            self._note_rot(self._logs[log], damaged)

    def marks(self, log: int, positions: Iterable[int]) -> list[tuple[int, int]]:
        """Epoch and header checksum of the records at these positions. (0, 0): no record begins there, or it is not
        synced. `log_copies.ROTTEN_MARK`: a record may have begun there, and has rotted."""
        return log_copies.marks(self._logs[log], positions, self._rotten)

    def tail_positions(self, log: int) -> list[int]:
        """Own records to compare with another copy's, to find the last record that both have: all from the last
        checkpoint on and near the end, and the first of each earlier segment (then look closer, by `positions`)."""
        return log_copies.tail_positions(self._logs[log], self._checkpointed_ends[log])

    def positions(self, log: int, start: int, end: int) -> list[int]:
        """Where own records begin, from `start` to before `end`."""
        return log_copies.positions(self._logs[log], start, end)

    def begin_catch_up(self) -> None:
        """This replica is far behind: from now on it syncs less often than its master did. The file says so first."""
        invariant(self.follows, "only a copy catches up")
        self._catch_up.begin()

    def end_catch_up(self, done: OnDurable = lambda _: None) -> None:
        """End the catch-up; call `done(None)` once everything is as if the replica had never been behind."""
        self._catch_up.end(done)


def mark(log: Log, end: int) -> LogMark:
    """The checkpoint's mark of a log that it covers up to `end`."""
    set_back_ms = {each.base: each.set_back_ms for each in log.segments if each.set_back_ms}
    return LogMark(log.first_base, end, {each.base: each.newest_ms for each in log.segments}, set_back_ms)
