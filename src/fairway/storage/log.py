"""A log: a chain of segments that only grows at its end.

The message log and the action log are both this. A log knows bytes, positions and records; what they mean is the
business of its owner, which is told when a new segment begins (`on_roll`: to restate there what readers of later
segments need) and when a full disk undid an append (`on_cut`: to roll its views back)."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from fairway import limits
from fairway.batch import checksum
from fairway.errors import Code, DiskFull, FairwayError, Refused, invariant
from fairway.storage import record, segment
from fairway.storage.flusher import Defer, Durability, Flusher
from fairway.storage.log_time import AHEAD_MS, IsAhead
from fairway.storage.record import BadRecord, Record, RecordHeader, RecordKind
from fairway.storage.segment import Segment
from fairway.world.clock import Clock
from fairway.world.disk import Disk, File, Part, ReadCompletion

_RECORD_BYTES_MAX = record.HEADER_BYTES + record.BODY_BYTES_MAX


@dataclass(slots=True)
class LogState:
    """What recovery found of a log: enough to go on writing it."""

    log_id: int
    segments: list[Segment] = field(default_factory=list)
    end: int = 0
    epoch: int = 0
    newest_ms: int = 0


class Damaged(FairwayError):
    """A record that was intact once no longer is. No fault of the store: it goes on without that record."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"the record at position {position} is damaged ({why}): `fairway verify` shows how much is")
        self.position = position
        self.why = why


class Log:
    """One log, open for appending. Not thread-safe: it lives on the loop of its store."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: str,
        state: LogState,
        *,
        segment_bytes: int,
        defer: Defer,
        on_roll: Callable[[], None],
        on_cut: Callable[[int], None],
        on_progress: Callable[[], None],
        durability: Durability = Durability.SYNC,
        reserved: bool = False,
        release_ballast: Callable[[], bool] = lambda: False,
        is_ahead: IsAhead = lambda *_: False,
    ) -> None:
        self.directory = directory
        self.log_id = state.log_id
        self.segments = state.segments
        self.end = state.end
        self.epoch = state.epoch
        self.newest_ms = state.newest_ms  # append time of the last record: within a segment they never decrease
        self.flusher = Flusher(
            disk, clock, state.end, defer=defer, on_full=self._undo, on_progress=on_progress, durability=durability
        )
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._on_roll = on_roll
        self._on_cut = on_cut
        self._reserved = reserved
        self._release_ballast = release_ballast
        self._is_ahead = is_ahead
        self._files: OrderedDict[int, File] = OrderedDict()
        self._must_roll = False  # the newest segment was complete once, and its owner may have sealed it
        self._easy_end = -1  # what ends here or before needs no roll and no epoch first; `_make_way` has the cases
        self._epoch_before = state.epoch
        self._epoch_end: int | None = 0  # where the record that opened this epoch ends; None: a full disk undid it
        self.follows = False  # another writes this log, and here is a copy

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def committed_end(self) -> int:
        """Nothing at or above this position is shown to anybody."""
        return self.flusher.committed_end

    @property
    def synced_end(self) -> int:
        """Everything below this position survives a power cut; the committed end, unless durability is `memory`."""
        return self.flusher.synced_end

    @property
    def committed_epoch(self) -> int:
        """The epoch of the log at its committed end, or an earlier one where a held log was opened with several; the
        record that opens one is synced before it counts."""
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
        """Gather one record; it is durable once `flusher.durable(header.end)` says so. `must_sync`: synced by then,
        whatever the durability. `crc`: of the body; -1: not known."""
        self.make_room(record.HEADER_BYTES + len(body), now_ms)
        return self.write(kind, body, now_ms, subject_id, first_sequence, count, must_sync, crc)

    def make_room(self, size: int, now_ms: int) -> None:
        """See to it that the newest segment takes records of that many bytes together, for `write`. `Refused`: none is
        to be written."""
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
        """Gather one record in the newest segment, whatever its size: for what belongs to the record that follows."""
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
        """Begin an epoch: a record of its own, so that two histories can be told apart where they part. On a full disk
        it has to wait for the first append that finds room: what is there can be read meanwhile."""
        invariant(epoch > self.epoch, "an epoch is greater than the one before it")
        self._epoch_before = self.committed_epoch
        self.epoch = epoch
        with suppress(Refused):
            self._write_epoch(now_ms)

    def _write_epoch(self, now_ms: int) -> None:
        self._epoch_end = self.end  # not None, so that this append does not come here again
        try:
            self._epoch_end = self.append(RecordKind.EPOCH, b"", now_ms, must_sync=True).end
        except FairwayError:
            self._epoch_end = None
            self._easy_end = -1
            raise

    def hold(self, confirmed_end: int, epoch: int) -> None:
        """Commit nothing above `confirmed_end`, where the epoch was at least this one, before copies have it too."""
        self._epoch_before = min(self._epoch_before, epoch)
        if self._epoch_end is not None:
            self._epoch_end = max(self._epoch_end, self.end)
        self.flusher.hold(confirmed_end)

    def take(self, records: Sequence[RecordHeader], data: bytes, header_bytes: int, *, merged: bool) -> None:
        """Gather what another wrote, which was found to fit: records side by side, behind the header of a new segment
        where there is one. `Refused` if there is no room for that segment: then nothing was taken.

        A record goes into a round that begins below the synced end which it names only if that is `merged`: there,
        damage below such a name would pass for rot.
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
        """Begin a new segment where the log ends."""
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
            newest.set_back_ms = newest.newest_ms  # of the record that opens the segment, if there is one

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
        """See to it that the newest segment takes the next record of `size` bytes; `Refused` if none can."""
        self._admit(size)
        if self._epoch_end is None:
            self._write_epoch(now_ms)
        self.follow_clock(now_ms)  # first: a segment that is full is no reason to date one more record ahead
        if self._is_full(size):
            self.roll()
        self._easy_end = self.segments[-1].base + self._segment_bytes

    def follow_clock(self, now_ms: int) -> None:
        """Where append times are known to be ahead, begin a segment in which they follow the clock again. Without room
        for it they stand still."""
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
            return True  # the log goes on behind a part of it that is missing
        used = self.end - newest.base
        return used + size > self._segment_bytes and used > segment.HEADER_BYTES

    def _undo(self, position: int) -> None:
        """A full disk undid everything from `position` on."""
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
        """The segment's open file. A bounded number is kept open; the newest ones are always among them."""
        file = self._files.get(of.base)
        if file is None:
            file = self._files[of.base] = self._disk.open(segment.file_name(self.directory, of.base))
            self._close_surplus()
        if of is not self.segments[-1]:  # which stays open anyway
            self._files.move_to_end(of.base)
        return file

    def _close_surplus(self) -> None:
        surplus = len(self._files) - limits.OPEN_SEGMENTS_MAX
        idle = [each.base for each in self.segments[:-1] if each.end <= self.flusher.synced_end]
        for base in [base for base in self._files if base in idle][: max(surplus, 0)]:
            self._files.pop(base).close()

    def read(self, position: int, size: int) -> bytes:
        """Bytes of one segment, as they are."""
        of = self.segment_at(position)
        return self.file(of).read(position - of.base, size)

    def read_cached(self, position: int, size: int) -> bytes | None:
        """The same, as far as memory holds it: all, a prefix, or None."""
        of = self.segment_at(position)
        return self.file(of).read_cached(position - of.base, size)

    def read_recent(self, position: int, size: int) -> bytes | None:
        """The same for what was written just now: where nobody can tell, it is taken to be in memory."""
        of = self.segment_at(position)
        file, at = self.file(of), position - of.base
        data = file.read_cached(at, size)
        return file.read(at, size) if data is None and file.is_blind else data

    def fetch(self, position: int, size: int, done: ReadCompletion) -> None:
        """The same, off the loop."""
        of = self.segment_at(position)
        self._disk.fetch(self.file(of), position - of.base, size, done)

    def record_at(self, position: int, size: int) -> Record:
        """One record, verified. `size` is its whole length, as the consume log has it."""
        return self.parse(self.read(position, size), 0, position)

    def first_appended_ms(self, of: Segment) -> int | None:
        """When the first record of a segment was appended; None: it is damaged, or there is none yet."""
        position = of.base + segment.HEADER_BYTES
        try:
            return record.parse_header(self.read(position, record.HEADER_BYTES), 0, position, self.log_id).appended_ms
        except (BadRecord, Damaged):
            return None

    def parse(self, data: bytes, offset: int, position: int) -> Record:
        """The record at `offset` of bytes that were read from this log; `Damaged` if it is not intact."""
        try:
            header = record.parse_header(data, offset, position, self.log_id)
            body_at = offset + record.HEADER_BYTES
            body = data[body_at : body_at + header.body_bytes]
            record.check_body(header, body)
        except BadRecord as bad:
            raise Damaged(position, bad.why) from bad
        return Record(header, body)

    def mend(self, base: int, position: int, data: bytes, newest_ms: int) -> Segment:
        """Write over what has rotted, in the segment with that base, which is made where there is none. `newest_ms`:
        the append time of the last record in these bytes; 0: there is none."""
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
            if of is earlier or of is later:  # the times at both ends of the segment may be others than before
                first_ms = self.first_appended_ms(later) or later.set_back_ms or later.newest_ms
                later.set_back_ms = first_ms if first_ms < earlier.newest_ms else 0
        return of

    def drop(self, base: int) -> None:
        """Delete the oldest segment; retention has decided, and a checkpoint already says so."""
        invariant(len(self.segments) > 1 and self.segments[0].base == base, "only the oldest segment is dropped")
        doomed = self.segments.pop(0)
        file = self._files.pop(doomed.base, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
