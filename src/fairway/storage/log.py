"""The segmented log: a chain of segments that only grows at its end, and the clock that dates its records.

`LogClock` gives each record its append time, and says what is old. Append times never decrease within a segment. They
go back where a segment begins, once the log is known to be ahead of the clock:

    the clock was ahead for less than an hour   a minute after it was put right: ages never followed it
    the clock was ahead for longer              an hour after it was put right: ages had followed it
    the clock is set back wrongly               not at all within an hour: append times stand still

A message before such a segment was stored no later than the segment began, whatever its append time says. Its
*effective time* is the earlier of the two times. Effective times never decrease. Look-up by time and retention use
effective times.

`Log` is the base of the message log and the action log. A log knows bytes, positions and records; its owner knows their
meaning. The log calls its owner in two cases. It calls `on_roll` when a segment begins, so that the owner repeats there
what readers of later segments need. It calls `on_cut` when a full disk undid an append, so that the owner rolls its
views back.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from fairway import limits
from fairway.batch import checksum
from fairway.errors import Code, DiskFull, FairwayError, Refused, WrongDirectory, invariant
from fairway.runtime.clock import AGE_HOLD_MS, HOLD_MS, Clock, HeldJump, Timekeeper
from fairway.runtime.disk import Disk, File, Part, ReadCompletion
from fairway.storage import record, segment
from fairway.storage.flusher import Defer, Durability, Flusher
from fairway.storage.record import BadRecord, Record, RecordHeader, RecordKind
from fairway.storage.segment import Segment

IsAhead: TypeAlias = Callable[[int, int], bool]  # `LogClock.is_ahead`
AHEAD_MS = 60_000  # append times that are ahead by less stand still until the clock has caught up


class LogClock:
    """The clock of a log: dates appended records, as a `Clock`, and says what is old.

    Two times bound the true time where nobody knows when the log was written last. Things are old by the earlier bound.
    Append times are ahead if they exceed the later bound. Both bounds follow the clock after an hour.
    """

    def __init__(
        self,
        clock: Clock,
        newest_ms: int,
        aging_ms: int | None,
        latest_ms: int | None,
        held: HeldJump | None = None,
    ) -> None:
        """`newest_ms`: the last append time of the log. `aging_ms` and `latest_ms`: the earliest and the latest time
        that it can have been when the previous process wrote them down. `held`: the jump that it held back then."""
        self._clock = clock
        self._begin(max(clock.wall_ms(), newest_ms), aging_ms, latest_ms, held)

    def _begin(self, dating_ms: int, aging_ms: int | None, latest_ms: int | None, held: HeldJump | None) -> None:
        hold = partial(Timekeeper, self._clock, hold_ms=AGE_HOLD_MS, holds_back=True, held=held)
        self._dating = Timekeeper(self._clock, holds_back=True, since_ms=dating_ms)
        self._aging, self._latest = hold(since_ms=aging_ms), hold(since_ms=latest_ms)

    def take_over(self, newest_ms: int, written_ms: int) -> None:
        """Continue a log that another process dated until now, by the clock of its machine. `written_ms`: the last time
        that it wrote down. Where the two clocks differ, either may be wrong."""
        bounds = self._bounds(written_ms)
        self._begin(max(self._dating.now_ms(), newest_ms), *bounds, self.held(written_ms))

    def held(self, written_ms: int | None = None) -> HeldJump | None:
        """The jump that a checkpoint records: the earlier bound follows it after an hour in all. `written_ms`: another
        process dates the log, as for `take_over`; then a jump counts as far as its clock confirms it."""
        self._bounds()
        found = self._aging.held()
        if found is None or written_ms is None:
            return found
        return HeldJump(min(found.to_ms, written_ms), found.for_ms)

    def _bounds(self, written_ms: int | None = None) -> tuple[int, int]:
        """The earliest and the latest time that it can be now, by this clock and by the other process's last time. Both
        timekeepers are read together, so that both see the same jumps."""
        aging_ms, latest_ms = self._aging.now_ms(), self._latest.now_ms()
        return (aging_ms, latest_ms) if written_ms is None else (min(aging_ms, written_ms), max(latest_ms, written_ms))

    def wall_ms(self) -> int:
        """The append time of now. A clock jump that is put right within a minute leaves no trace in it."""
        return self._dating.now_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def aging_ms(self) -> int:
        """The time by which things are too old to be kept. A clock that jumps ahead makes nothing old for an hour."""
        return min(self._bounds()[0], self._clock.wall_ms())

    def ages_from_ms(self) -> int:
        """The time from which a thing ages that begins to age now. A clock that is set back makes nothing old either,
        if it is put right within an hour."""
        return max(self._bounds()[0], self._clock.wall_ms())

    def is_ahead(self, appended_ms: int, now_ms: int) -> bool:
        """Whether `appended_ms` is known to come from a clock that was ahead, and `now_ms` is not known to come from a
        clock that is behind."""
        latest_ms = self._bounds()[1]
        return latest_ms + AHEAD_MS < appended_ms and latest_ms - AHEAD_MS <= now_ms

    def vouched_ms(self, segments: Sequence[Segment], written_ms: int | None = None) -> tuple[int, int]:
        """The bounds that a checkpoint records: the earliest and the latest time. The first is 0 where the append times
        give the same, the second where both agree. `written_ms`: another process dates the log, as for `take_over`."""
        aging_ms, latest_ms = self._bounds(written_ms)
        newest_ms = max((each.newest_ms for each in segments), default=0)
        is_apart = latest_ms - aging_ms > HOLD_MS
        return aging_ms if newest_ms - aging_ms > HOLD_MS else 0, latest_ms if is_apart else 0


def effective_ms(segments: Sequence[Segment]) -> list[int]:
    """The effective time of the last record of each segment."""
    times: list[int] = []
    bound_ms: int | None = None
    for each in reversed(segments):
        times.append(each.newest_ms if bound_ms is None else min(each.newest_ms, bound_ms))
        if each.set_back_ms:
            bound_ms = each.set_back_ms if bound_ms is None else min(each.set_back_ms, bound_ms)
    return times[::-1]


def begin_at(segments: Sequence[Segment], time_ms: int) -> int:
    """The position below which every effective time is before `time_ms`. From there on, no append time before `time_ms`
    follows one at or after it."""
    return max((each.base for each in segments if 0 < each.set_back_ms < time_ms), default=0)


def segment_at(segments: Sequence[Segment], time_ms: int) -> Segment | None:
    """The segment of the first record whose effective time is at or after `time_ms`; None: there is none yet."""
    begin = begin_at(segments, time_ms)
    return next((each for each in segments if each.base >= begin and each.newest_ms >= time_ms), None)


_RECORD_BYTES_MAX = record.HEADER_BYTES + record.BODY_BYTES_MAX


@dataclass(slots=True)
class LogState:
    """The state in which recovery leaves a log: enough to continue it."""

    log_id: int
    segments: list[Segment] = field(default_factory=list)
    end: int = 0
    epoch: int = 0
    newest_ms: int = 0


class Damaged(FairwayError):
    """A record that was intact once is damaged. The store goes on without that record."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"the record at position {position} is damaged ({why}): `fairway verify` shows how much is")
        self.position = position
        self.why = why


@dataclass(frozen=True, slots=True)
class LogSetup:
    """What a store gives to each of its logs."""

    disk: Disk
    clock: Clock
    segment_bytes: int
    defer: Defer
    durability: Durability
    is_ahead: IsAhead
    on_progress: Callable[[], None]
    on_synced: Callable[[], None]
    on_cut: Callable[[int], None]  # a full disk undid everything from that position on


class Log:
    """One log, open for appending. Not thread-safe: it lives on the loop of its store."""

    def __init__(
        self,
        setup: LogSetup,
        directory: str,
        state: LogState,
        *,
        on_roll: Callable[[], None],
        on_cut: Callable[[int], None],
        reserved: bool = False,
        release_ballast: Callable[[], bool] = lambda: False,
    ) -> None:
        self.directory = directory
        self.log_id = state.log_id
        self.segments = state.segments
        self.end = state.end
        self.epoch = state.epoch
        self.newest_ms = state.newest_ms  # append time of the last record
        self.flusher = Flusher(
            setup.disk,
            setup.clock,
            state.end,
            defer=setup.defer,
            on_full=self._undo,
            on_progress=setup.on_progress,
            on_synced=setup.on_synced,
            durability=setup.durability,
        )
        self._disk = setup.disk
        self._segment_bytes = setup.segment_bytes
        self._on_roll = on_roll
        self._on_cut = on_cut
        self._reserved = reserved
        self._release_ballast = release_ballast
        self._is_ahead = setup.is_ahead
        self._files: OrderedDict[int, File] = OrderedDict()
        self._must_roll = False  # an undo went back to a segment that its owner may have sealed
        self._easy_end = -1  # a record that ends here or before needs no roll and no epoch first (`_make_way`)
        self._epoch_before = state.epoch
        self._epoch_end: int | None = 0  # where the record that opened this epoch ends; None: a full disk undid it
        self.follows = False  # this log is a replica's: its master writes it

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def first_base(self) -> int:
        """The position where the log begins, after retention."""
        return self.segments[0].base if self.segments else self.end

    @property
    def committed_end(self) -> int:
        """Nobody sees anything at or above this position."""
        return self.flusher.committed_end

    @property
    def synced_end(self) -> int:
        """Everything below this position survives a power cut. It equals the committed end, unless durability is
        `memory` or the log is held."""
        return self.flusher.synced_end

    @property
    def committed_epoch(self) -> int:
        """The epoch of the log at its committed end; an earlier one where a held log was opened with several epochs.
        The record that opens an epoch is synced before it counts."""
        is_committed = self._epoch_end is not None and self._epoch_end <= self.committed_end
        return self.epoch if is_committed else self._epoch_before

    def append(
        self,
        kind: RecordKind,
        body: Part,
        now_ms: int,
        subject_id: int = 0,
        first_sequence: int = 0,
        count: int = 0,
        must_sync: bool = False,
        crc: int = -1,
    ) -> RecordHeader:
        """Gather one record; it is durable once `flusher.durable(header.end)` returns. `must_sync`: by then it is
        synced, whatever the durability. `crc`: of the body; -1: unknown."""
        self.make_room(record.HEADER_BYTES + len(body), now_ms)
        return self.write(kind, body, now_ms, subject_id, first_sequence, count, must_sync, crc)

    def make_room(self, size: int, now_ms: int) -> None:
        """Make sure that the newest segment takes records of `size` bytes together, for `write`. After `Refused` the
        caller writes none of them."""
        flusher = self.flusher
        is_behind = flusher.gathered_end - flusher.written_end > limits.UNSYNCED_BYTES_MAX
        is_late = now_ms < self.newest_ms - AHEAD_MS
        if self.end + size > self._easy_end or size > _RECORD_BYTES_MAX or is_behind or is_late:
            self._make_way(size, now_ms)

    def write(
        self,
        kind: RecordKind,
        body: Part,
        now_ms: int,
        subject_id: int = 0,
        first_sequence: int = 0,
        count: int = 0,
        must_sync: bool = False,
        crc: int = -1,
    ) -> RecordHeader:
        """Gather one record in the newest segment, whatever its size: for records that belong to another one."""
        body_bytes = len(body)
        invariant(not body_bytes % record.ALIGNMENT, "a body is padded")
        position, flusher, newest = self.end, self.flusher, self.segments[-1]
        appended_ms = newest.newest_ms = self.newest_ms = max(now_ms, self.newest_ms)
        synced_end, epoch = flusher.synced_end, self.epoch
        if crc < 0:
            crc = checksum(body)
        packed = record.pack(
            kind,
            subject_id,
            self.log_id,
            position,
            synced_end,
            epoch,
            first_sequence,
            appended_ms,
            count,
            body_bytes,
            crc,
        )
        flusher.add(self.file(newest), packed, body, must_sync)
        self.end = newest.end = position + record.HEADER_BYTES + body_bytes
        return RecordHeader(
            kind, subject_id, position, synced_end, epoch, first_sequence, appended_ms, count, body_bytes, crc
        )

    def open_epoch(self, epoch: int, now_ms: int) -> None:
        """Begin an epoch with a record of its own, which shows where two histories part. On a full disk the record
        waits for the first append that finds room; the log stays readable meanwhile."""
        invariant(epoch > self.epoch, "an epoch is greater than the one before it")
        self._epoch_before = self.committed_epoch
        self.epoch = epoch
        with suppress(Refused):
            self._write_epoch(now_ms)

    def _write_epoch(self, now_ms: int) -> None:
        self._epoch_end = self.end  # not None, so that `append` does not call this method again
        try:
            self._epoch_end = self.append(RecordKind.EPOCH, b"", now_ms, must_sync=True).end
        except FairwayError:
            self._epoch_end = None
            self._easy_end = -1
            raise

    def hold(self, confirmed_end: int, epoch: int) -> None:
        """Commit nothing above `confirmed_end` until the replicas have it too. The epoch there is `epoch` or later."""
        self._epoch_before = min(self._epoch_before, epoch)
        if self._epoch_end is not None:
            self._epoch_end = max(self._epoch_end, self.end)
        self.flusher.hold(confirmed_end)

    def take(self, records: Sequence[RecordHeader], data: bytes, header_bytes: int, *, merged: bool) -> None:
        """Gather what the master wrote, after it was checked: records side by side, behind the header of a new segment
        where there is one. `Refused`: there is no room for that segment, and nothing was taken.

        Only where `merged` does a record join a round that begins below the synced end which it names. Otherwise
        recovery would misread a torn write as bit rot.
        """
        if self.flusher.fault is not None:
            raise self.flusher.fault
        if header_bytes:
            self._begin_segment(data[:header_bytes])
        newest, at, view = self.segments[-1], header_bytes, memoryview(data)
        file = self.file(newest)
        for header in records:
            size = record.HEADER_BYTES + header.body_bytes
            if not merged:
                self.flusher.part(file, header.synced_end)
            self.flusher.add(file, view[at : at + size])
            at += size
            if header.epoch > self.epoch:
                self._epoch_before, self.epoch, self._epoch_end = self.committed_epoch, header.epoch, header.end
            self.end = newest.end = header.end
            if header.appended_ms < self.newest_ms and header.position == newest.base + segment.HEADER_BYTES:
                newest.set_back_ms = self.newest_ms = header.appended_ms
            newest.newest_ms = self.newest_ms = max(header.appended_ms, self.newest_ms)

    def roll(self) -> None:
        """Begin a new segment at the end of the log."""
        self._begin_segment(segment.pack_header(self.log_id, self.end, self.epoch))

    def _begin_segment(self, header: bytes) -> None:
        base = self.end
        self._files[base] = file = self._new_file(base)
        self._close_surplus()
        self.flusher.add(file, header)
        self.end = base + segment.HEADER_BYTES
        is_set_back = bool(self.segments) and self.newest_ms < self.segments[-1].newest_ms
        newest = Segment(base, self.end, self.newest_ms, self.newest_ms if is_set_back else 0)
        self.segments.append(newest)
        self._must_roll = False
        self._on_roll()
        if is_set_back:
            newest.set_back_ms = newest.newest_ms  # of the record that `_on_roll` wrote, if there is one

    def _new_file(self, base: int) -> File:
        name = segment.file_name(self.directory, base)
        file: File | None = None
        try:
            file = self._disk.open(name, create=True)
            if self._reserved:
                self._disk.reserve(file, self._segment_bytes)
        except DiskFull as full:
            if file is not None:
                file.close()
            self._disk.remove(name)
            if self._release_ballast():
                return self._new_file(base)
            raise Refused(Code.READ_ONLY, f"the disk has no room for a new segment ({full})") from full
        invariant(file.size == 0, f"{name} is new")
        return file

    def _make_way(self, size: int, now_ms: int) -> None:
        """Make sure that the newest segment takes the next record of `size` bytes; `Refused` if none can."""
        self._admit(size)
        if self._epoch_end is None:
            self._write_epoch(now_ms)
        self.follow_clock(now_ms)  # before a full segment rolls, or the next segment would be dated ahead too
        if self._is_full(size):
            self.roll()
        self._easy_end = self.segments[-1].base + self._segment_bytes

    def follow_clock(self, now_ms: int) -> None:
        """Begin a segment whose append times follow the clock again, where they are known to be ahead. Without room for
        a segment, append times stand still."""
        if now_ms >= self.newest_ms - AHEAD_MS or self.follows or not self.segments or self.flusher.fault is not None:
            return
        if not self._is_ahead(self.newest_ms, now_ms):
            return
        newest_ms, self.newest_ms = self.newest_ms, now_ms
        try:
            self.roll()
        except Refused:
            self.newest_ms = newest_ms

    def _admit(self, size: int) -> None:
        if self.flusher.fault is not None:
            raise self.flusher.fault
        if self.follows:
            raise Refused(Code.NOT_MASTER, "this is a copy: its master is the one who writes")
        if size > _RECORD_BYTES_MAX:
            raise Refused(Code.TOO_LARGE, f"a record holds at most {record.BODY_BYTES_MAX} bytes, this one has {size}")
        if self.flusher.uncommitted_bytes > limits.UNSYNCED_BYTES_MAX:
            raise Refused(Code.BUSY, "the disk is behind: too many bytes wait for their sync", retry_after_ms=50)

    def _is_full(self, size: int) -> bool:
        """Whether the next record needs a new segment. One record always fits into an empty one, however large."""
        if not self.segments or self._must_roll:
            return True
        newest = self.segments[-1]
        if self.end != newest.end:
            return True  # the log continues behind a part of it that is missing
        used = self.end - newest.base
        return used + size > self._segment_bytes and used > segment.HEADER_BYTES

    def _undo(self, position: int) -> None:
        """Take back everything from `position` on: a full disk undid it."""
        while self.segments and self.segments[-1].base >= position:
            self._forget(self.segments.pop())
            self._must_roll = True
        if self.segments:
            self.segments[-1].end = min(self.segments[-1].end, position)
        self.end = position
        self._easy_end = -1
        if self._epoch_end is not None and self._epoch_end > position:
            self._epoch_end = None
        self._on_cut(position)

    def _forget(self, doomed: Segment) -> None:
        file = self._files.pop(doomed.base, None)
        if file is not None:
            file.close()
        self._disk.remove(segment.file_name(self.directory, doomed.base))

    # --- reading -----------------------------------------------------------------------------------------------------

    def segment_at(self, position: int) -> Segment:
        index = bisect_right(self.segments, position, key=lambda each: each.base) - 1
        if index < 0 or position >= self.segments[index].end:
            raise Damaged(position, "missing")
        return self.segments[index]

    def file(self, of: Segment) -> File:
        """The segment's open file. A bounded number of files stays open, the newest ones among them."""
        file = self._files.get(of.base)
        if file is None:
            file = self._files[of.base] = self._disk.open(segment.file_name(self.directory, of.base))
            self._close_surplus()
        if of is not self.segments[-1]:  # the newest stays open anyway
            self._files.move_to_end(of.base)
        return file

    def _close_surplus(self) -> None:
        surplus = len(self._files) - limits.OPEN_SEGMENTS_MAX
        idle = [each.base for each in self.segments[:-1] if each.end <= self.flusher.synced_end]
        for base in [base for base in self._files if base in idle][: max(surplus, 0)]:
            self._files.pop(base).close()

    def read(self, position: int, size: int) -> bytes:
        """Bytes of one segment, unverified."""
        of = self.segment_at(position)
        return self.file(of).read(position - of.base, size)

    def read_cached(self, position: int, size: int) -> bytes | None:
        """The same bytes as far as memory holds them: all, a prefix, or None."""
        of = self.segment_at(position)
        return self.file(of).read_cached(position - of.base, size)

    def read_recent(self, position: int, size: int) -> bytes | None:
        """The same for bytes written just now: where the disk cannot tell, they count as being in memory."""
        of = self.segment_at(position)
        file, at = self.file(of), position - of.base
        data = file.read_cached(at, size)
        return file.read(at, size) if data is None and file.is_blind else data

    def fetch(self, position: int, size: int, done: ReadCompletion) -> None:
        """Read the same bytes off the loop."""
        of = self.segment_at(position)
        self._disk.fetch(self.file(of), position - of.base, size, done)

    def record_at(self, position: int, size: int) -> Record:
        """One record, verified. `size`: of the whole record, from the consume log."""
        return self.parse(self.read(position, size), 0, position)

    def header_at(self, position: int) -> RecordHeader | None:
        """The header of the record that begins there; None: no record does, or its header is damaged."""
        try:
            return record.parse_header(self.read(position, record.HEADER_BYTES), 0, position, self.log_id)
        except (Damaged, BadRecord, WrongDirectory):
            return None

    def first_appended_ms(self, of: Segment) -> int | None:
        """When the first record of a segment was appended; None: it is damaged, or there is none yet."""
        first = self.header_at(of.base + segment.HEADER_BYTES)
        return None if first is None else first.appended_ms

    def parse(self, data: bytes, offset: int, position: int) -> Record:
        """The record at `offset` of bytes that were read from this log; `Damaged` if it is not intact."""
        try:
            return record.parse(data, offset, position, self.log_id)
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad

    def mend(self, base: int, position: int, data: bytes, newest_ms: int) -> Segment:
        """Write over rotten bytes in the segment with that base; create the segment where it is gone. `newest_ms`: the
        append time of the last record in `data`; 0: there is none."""
        of = next((each for each in self.segments if each.base == base), None)
        file = (
            self.file(of) if of is not None else self._disk.open(segment.file_name(self.directory, base), create=True)
        )
        self._disk.repair(file, position - base, data)
        if of is None:
            of = Segment(base, base)
            insort(self.segments, of, key=lambda each: each.base)
            self._files[base] = file
        of.end, of.newest_ms = max(of.end, position + len(data)), max(of.newest_ms, newest_ms)
        if of is self.segments[-1]:
            self.newest_ms = max(self.newest_ms, of.newest_ms)
        for earlier, later in pairwise(self.segments):
            if of is earlier or of is later:  # the times at both ends of the segment may have changed
                first_ms = self.first_appended_ms(later) or later.set_back_ms or later.newest_ms
                later.set_back_ms = first_ms if first_ms < earlier.newest_ms else 0
        return of

    def drop(self, base: int) -> None:
        """Take the oldest segment off the log. Its file stays until the store has written a checkpoint without it."""
        invariant(len(self.segments) > 1 and self.segments[0].base == base, "only the oldest segment is dropped")
        doomed = self.segments.pop(0)
        file = self._files.pop(doomed.base, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
