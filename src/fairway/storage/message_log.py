"""The message log: every batch of every subject, in the order of arrival, and the views built from it.

`Views` holds what a restart can rebuild from the log: subjects, consume log, dedupe window. A restart passes each
record once, in order, to `Views.apply`. An append makes the same calls for its own records. A repair (`mended`) applies
old records late, so it changes only what the views still lack.

`MessageLog.append` assigns sequences and returns a receipt at once. The receipt counts once
`flusher.durable(receipt.end)` has returned. Readers then find the batch through the consume log.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import msgspec

from fairway import batch, limits
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError, StorageFault, StoredRange, invariant
from fairway.names import Subject
from fairway.runtime.disk import Disk, Part
from fairway.storage import index_file, log, record, segment
from fairway.storage.consume_log import ConsumeLog, ConsumeLogEntry
from fairway.storage.dedupe import STATEMENT_BYTES, DedupeEntry, DedupeWindow, PlaceTaken
from fairway.storage.flusher import Durability
from fairway.storage.index_file import ENTRY
from fairway.storage.log import Damaged, Log, LogSetup, LogState
from fairway.storage.record import HEADER_BYTES, BadRecord, Record, RecordHeader, RecordKind
from fairway.storage.segment import Segment, SegmentScan
from fairway.storage.subjects import SubjectState, SubjectTable


class Views:
    """The views: everything that can be rebuilt from the message log."""

    def __init__(self, subjects: SubjectTable, entries: ConsumeLog, dedupe: DedupeWindow) -> None:
        self.subjects = subjects
        self.entries = entries
        self.dedupe = dedupe

    def apply(self, record: Record) -> None:
        """Apply one record of the log."""
        header = record.header
        if header.kind == RecordKind.DATA:
            self.note_batch(header, batch.peek(record.body))
        elif header.kind == RecordKind.SUBJECT:
            self.subjects.restate(record.body, header.position)
        elif header.kind == RecordKind.STREAM:
            self.dedupe.state(record.body, header.subject_id, header.position)
        elif header.kind == RecordKind.REMOVED:
            self.subjects.take_removal(record.body, header.end)

    def note_batch(self, header: RecordHeader, of: batch.BatchHeader) -> None:
        """Apply a DATA record whose batch header is parsed already."""
        subject_id, first_sequence = header.subject_id, header.first_sequence
        self.entries.append_packed(subject_id, packed_entry(header, of))
        subject = self.subjects.advance(subject_id, first_sequence + header.count)
        if subject.is_deduped:
            self.dedupe.note(of, subject_id, first_sequence, header.end, header.appended_ms)

    def settle(self, settled_end: int) -> list[SubjectState]:
        """Forget the subjects whose removal can no longer be undone, with their entries; return them."""
        gone = self.subjects.settle(settled_end)
        for each in gone:
            self.entries.drop(each.id)
        return gone

    def cut(self, position: int) -> None:
        """Undo everything from `position` on: nothing there was ever committed."""
        self.subjects.cut(position)
        self.dedupe.cut(position, partial(self.entries.first_places_from, position))
        for subject_id, first_sequence in self.entries.first_sequences_from(position).items():
            if subject_id in self.subjects:
                self.subjects.rewind(subject_id, first_sequence)
        self.entries.cut(position)


def packed_entry(header: RecordHeader, of: batch.BatchHeader) -> bytes:
    """The packed consume log entry of a DATA record, without a `ConsumeLogEntry` in between."""
    return ENTRY.pack(
        header.first_sequence,
        header.count,
        HEADER_BYTES + header.body_bytes,
        header.position,
        header.appended_ms,
        of.tag_filter,
        of.producer_id,
        of.first_sequence,
        0,
    )


def entries_of_segment(disk: Disk, directory: str, log_id: int, base: int) -> dict[int, bytes]:
    """The consume log's entries for one segment, read from the segment itself."""
    entries: dict[int, bytearray] = {}
    with closing(disk.open(segment.file_name(directory, base))) as file:
        damage = segment.check_segment_header(file, base, log_id)
        start = base + segment.HEADER_BYTES if damage is None else damage.end
        for found in SegmentScan(file, base, start, log_id):
            if isinstance(found, Record) and found.header.kind == RecordKind.DATA:
                entry = packed_entry(found.header, batch.peek(found.body))
                entries.setdefault(found.header.subject_id, bytearray()).extend(entry)
    return {subject_id: bytes(data) for subject_id, data in entries.items()}


DIRECTORY = "messages"
_SIZE = attrgetter("size")
_STATED_BYTES = 3 * record.HEADER_BYTES + 2 * STATEMENT_BYTES  # a batch's header, and its stream stated twice
_REMOVAL_MS = 100  # for a sender to wait: a removal takes one sync, and a round trip to the replicas
_FULL_MS = 60_000  # unused subjects go within the hour, others when somebody removes them
_AWAITED = Refused(
    Code.BUSY, "a message has rotted here, and is being fetched from another copy: ask again", retry_after_ms=100
)


class AppendReceipt(msgspec.Struct, frozen=True, gc=False):
    """Where a batch is stored. The batch is durable once the flusher has passed `end`."""

    subject_id: int
    first_sequence: int
    count: int
    end: int
    appended_ms: int
    undos: int  # of the log when the receipt was made: tells it from a later receipt with the same end
    is_duplicate: bool = False


OnTaken: TypeAlias = Callable[[FairwayError | None, AppendReceipt | PlaceTaken], None]


class StoredBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch as read: its entry in the consume log, and its bytes."""

    entry: ConsumeLogEntry
    data: bytes


class MessageLog:
    """Stores and reads batches. Lives on the loop of its store."""

    def __init__(
        self,
        setup: LogSetup,
        state: LogState,
        views: Views,
        unsealed_from: int,
        on_damage: Callable[[Damaged], None],
    ) -> None:
        self.views = views
        self._on_cut = setup.on_cut
        self.log = Log(setup, DIRECTORY, state, on_roll=self._restate_subjects, on_cut=self._cut)
        self.subjects_max = limits.SUBJECTS_MAX  # fewer where memory is short
        self._is_lazy = setup.durability is Durability.MEMORY
        self._disk = setup.disk
        self._clock = setup.clock
        self._report_damage = on_damage
        self._damaged: set[int] = set()  # positions of records that can no longer be read
        self.is_awaited: Callable[[int], bool] = lambda _: False  # whether another copy may send the record lost there
        self.on_removed: Callable[[list[SubjectState]], None] = lambda _: None  # these subjects are removed for good
        self._unsealed = [each for each in state.segments if each.base >= unsealed_from]

    def bound(self, subjects_max: int, streams_bytes_max: int) -> None:
        """Set the bounds. Existing subjects stay; streams beyond the bound go as others arrive."""
        self.subjects_max = min(subjects_max, limits.SUBJECTS_MAX)
        self.views.dedupe.bytes_max = streams_bytes_max

    # --- writing -----------------------------------------------------------------------------------------------------

    def append(
        self, subject: Subject, data: Part, header: batch.BatchHeader, secret: bytes = b"", crc: int = -1
    ) -> AppendReceipt:
        """Store a batch that `batch.check` has passed; after `Refused` nothing was appended. `secret`: of the stream,
        from the sender. `crc`: of the whole batch; -1: unknown."""
        state = self.views.subjects.find(subject)
        if state is not None and state.is_shut:
            raise _shut(state)
        original = self.views.dedupe.judge(header, state.id if state else 0, secret, self.views.subjects)
        if original is not None and state is not None:
            return self._receipt(state.id, original, original.end, is_duplicate=True)
        return self._append(subject, state, data, header, secret, crc)

    def append_own(self, subject: Subject, data: bytes, header: batch.BatchHeader) -> AppendReceipt:
        """Store a batch of the broker's own making. The dedupe window does not judge it."""
        invariant(subject.is_internal, "the broker's own batches go to subjects of its own")
        return self._append(subject, self.views.subjects.find(subject), data, header)

    def _append(
        self,
        subject: Subject,
        state: SubjectState | None,
        data: Part,
        header: batch.BatchHeader,
        secret: bytes = b"",
        crc: int = -1,
    ) -> AppendReceipt:
        known = state or self.introduce(subject)
        if known.removed_end is not None:
            raise _shut(known)
        if self._is_lazy and known.next_sequence + header.count > known.ceiling:
            self._raise_ceiling(known)
        now_ms, log = self._clock.wall_ms(), self.log
        statement = None
        if secret:
            log.make_room(len(data) + _STATED_BYTES, now_ms)
            statement = self.views.dedupe.statement(header.producer_id, secret, log.segments[-1].base)
            if statement is not None:
                self._state_stream(statement, known.id, now_ms)
            written = log.write(RecordKind.DATA, data, now_ms, known.id, known.next_sequence, header.count, crc=crc)
        else:
            written = log.append(RecordKind.DATA, data, now_ms, known.id, known.next_sequence, header.count, crc=crc)
        self.views.note_batch(written, header)
        if statement is not None:
            self._state_stream(statement, known.id, now_ms)
        if state is None:
            # Repeat the name: otherwise a single flipped bit could hide the messages from readers who know the name.
            self.log.write(RecordKind.SUBJECT, self.views.subjects.pack_one(known), self._clock.wall_ms(), known.id)
        return self._receipt(known.id, written, written.end, is_duplicate=False)

    def resolve(self, taken: PlaceTaken) -> AppendReceipt | PlaceTaken:
        """Compare a refused batch with the committed records in its place. Return the receipt of the same batch, which
        had left the dedupe window; else the conflict, with what the log has there as far as that can be read."""
        header = taken.header
        if taken.stored is not None or not taken.subject_id:
            return taken
        end = header.first_sequence + header.count
        entries = self.views.entries.look_back(taken.subject_id, header.producer_id, header.first_sequence, end)
        ranges = [self._stored_range(entry) for entry in entries or ()]
        if not ranges or None in ranges:
            return taken
        taken.stored = tuple(each for each in ranges if each is not None)
        if entries is not None and taken.stored == (StoredRange(header.first_sequence, header.count, header.crc),):
            [entry] = entries
            return self._receipt(taken.subject_id, entry, entry.position + entry.size, is_duplicate=True)
        return taken

    def _stored_range(self, entry: ConsumeLogEntry) -> StoredRange | None:
        """The producer's range, from the batch header; None: unreadable, or the entry contradicts the headers."""
        try:
            data = self.log.read(entry.position, record.HEADER_BYTES + batch.HEADER_BYTES)
            there = record.parse_header(data, 0, entry.position, self.log.log_id)
            of = batch.peek(data[record.HEADER_BYTES :])
        except (Damaged, BadRecord, RemoteProtocolError):
            return None
        is_right = (of.producer_id, of.first_sequence) == (entry.producer_id, entry.producer_sequence)
        is_right &= (there.first_sequence, there.count) == (entry.first_sequence, entry.count)
        is_right &= (there.end, there.appended_ms) == (entry.position + entry.size, entry.appended_ms)
        return StoredRange(of.first_sequence, of.count, of.crc) if is_right else None

    def _receipt(
        self, subject_id: int, of: RecordHeader | DedupeEntry | ConsumeLogEntry, end: int, *, is_duplicate: bool
    ) -> AppendReceipt:
        undos = len(self.log.flusher.undone_from)
        return AppendReceipt(subject_id, of.first_sequence, of.count, end, of.appended_ms, undos, is_duplicate)

    def ensure(self, subject: Subject) -> SubjectState:
        """Return the subject; introduce it where it is new."""
        known = self.views.subjects.find(subject)
        if known is not None and known.removed_end is not None:
            raise _shut(known)
        return known or self.introduce(subject)

    def introduce(self, subject: Subject) -> SubjectState:
        if len(self.views.subjects) >= self.subjects_max and not subject.is_internal:
            raise _full(self.subjects_max)
        if why := subject.why_not_new:
            raise Refused(Code.BAD_NAME, why)
        state = self.views.subjects.introduce(subject, self.log.end)
        try:
            body = self.views.subjects.pack_one(state)
            self.log.append(RecordKind.SUBJECT, body, self._clock.wall_ms(), subject_id=state.id, must_sync=True)
        except FairwayError:
            self.views.subjects.take_back(state)
            raise
        return state

    def remove(self, states: Sequence[SubjectState]) -> RecordHeader:
        """Write down that all of these subjects are removed. They are shut at once, and gone when the record is settled
        (`settle_removals`)."""
        invariant(bool(states) and all(each.removed_end is None for each in states), "a subject is removed once")
        body = self.views.subjects.pack_removal(states)
        now_ms, size = self._clock.wall_ms(), record.HEADER_BYTES + len(body)
        self.log.make_room(2 * size, now_ms)
        written = self.log.write(RecordKind.REMOVED, body, now_ms, must_sync=True)
        self.views.subjects.take_removal(body, written.end)
        # The second record keeps a single flipped bit from undoing the removal.
        return self.log.write(RecordKind.REMOVED, body, now_ms, must_sync=True)

    def settle_removals(self) -> None:
        """Forget the subjects whose removal can no longer be undone."""
        gone = self.views.settle(self.settled_end)
        if gone:
            self.on_removed(gone)

    def _raise_ceiling(self, state: SubjectState) -> None:
        """Durability `memory`: record, synced, that the next sequences may be in use. A power cut may take messages
        that consumers have seen. Their sequences are skipped, never given to other messages (ADR 0007)."""
        before, state.ceiling = state.ceiling, state.next_sequence + limits.SEQUENCES_AHEAD
        try:
            body = self.views.subjects.pack_one(state)
            self.log.append(RecordKind.SUBJECT, body, self._clock.wall_ms(), subject_id=state.id, must_sync=True)
        except FairwayError:
            state.ceiling = before
            raise

    def _state_stream(self, statement: bytes, subject_id: int, now_ms: int) -> None:
        """Write the verifier before the first batch of a stream in a segment, and again behind it: otherwise a single
        flipped bit could open the stream to any sender."""
        written = self.log.write(RecordKind.STREAM, statement, now_ms, subject_id=subject_id)
        self.views.dedupe.state(statement, subject_id, written.position)

    def _restate_subjects(self) -> None:
        self._unsealed.append(self.log.segments[-1])
        if len(self.views.subjects) and not self.log.follows:  # a replica has its master's records
            self.log.write(RecordKind.SUBJECT, self.views.subjects.pack(), self._clock.wall_ms())

    def _cut(self, position: int) -> None:
        self.views.cut(position)
        self._unsealed = [each for each in self._unsealed if each.base < position]
        self._on_cut(position)

    @property
    def sealed_end(self) -> int:
        """Every segment that ends here or before has its index file, or is about to."""
        return self._unsealed[0].base if self._unsealed else self.log.end

    def open_segment(self, end: int) -> Segment | None:
        """The segment that holds the last byte below `end`, if it is the first unsealed one. Entries of earlier
        segments are not in memory."""
        first = self._unsealed[0] if self._unsealed else None
        return first if first is not None and first.base < end <= first.end else None

    @property
    def settled_end(self) -> int:
        """Everything below is synced and committed, and is never undone."""
        return min(self.log.synced_end, self.log.committed_end)

    def seal_complete_segments(self, on_fault: Callable[[StorageFault], None]) -> None:
        """Write the index file of each segment that is complete and settled."""
        while len(self._unsealed) > 1 and self._unsealed[0].end <= self.settled_end:
            self._seal(self._unsealed.pop(0), on_fault)

    def use_memory(self) -> None:
        """Switch to durability `memory`."""
        self._is_lazy = True
        self.log.flusher.use_memory()

    def _seal(self, complete: Segment, on_fault: Callable[[StorageFault], None]) -> None:
        parts, release = self.views.entries.seal(complete.base, complete.end)

        def done(fault: StorageFault | None) -> None:
            if fault is None:
                release()
            else:
                on_fault(fault)

        self._disk.publish_later(index_file.file_name(complete.base), parts, done)

    def check_mended(self, records: Iterable[Record]) -> None:
        """Raise `RemoteProtocolError` where the consume log has other batches at these sequences or positions."""
        for found in records:
            header = found.header
            if header.kind != RecordKind.DATA:
                continue
            entry = next(self.views.entries.entries(header.subject_id, header.first_sequence, self.log.end), None)
            if entry is None or entry.first_sequence >= header.first_sequence + header.count:
                continue
            known = (entry.position, entry.first_sequence, entry.count, entry.position + entry.size)
            if known != (header.position, header.first_sequence, header.count, header.end):
                raise RemoteProtocolError(f"another batch than the one that was lost came for {header.position}")

    def mended(self, of: Segment, records: Iterable[Record], on_fault: Callable[[StorageFault], None]) -> None:
        """Apply repaired records: batches, names of subjects, verifiers of streams, removals. The views know all later
        records already."""
        entries: dict[int, bytearray] = {}
        for found in records:
            header = found.header
            self._damaged.discard(header.position)
            if self.views.subjects.is_removed(header.subject_id):
                continue
            if header.kind == RecordKind.DATA:
                self.views.subjects.advance(header.subject_id, header.first_sequence + header.count)
                entry = packed_entry(header, batch.peek(found.body))
                entries.setdefault(header.subject_id, bytearray()).extend(entry)
            elif header.kind == RecordKind.SUBJECT:
                self.views.subjects.restate(found.body, header.position)
            elif header.kind == RecordKind.STREAM:
                self.views.dedupe.restate(found.body)
            elif header.kind == RecordKind.REMOVED:
                self.views.subjects.take_removal(found.body, header.end)
        if of.base >= self.sealed_end or of is self.log.segments[-1]:
            if of not in self._unsealed:
                insort(self._unsealed, of, key=lambda each: each.base)
            self.views.entries.insert(entries)
            return
        try:
            self.views.entries.insert_sealed(of.base, of.end, entries)
        except StorageFault as fault:
            on_fault(fault)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, subject_id: int, sequence: int, *, messages_max: int, bytes_max: int) -> list[StoredBatch]:
        """Whole committed batches from `sequence` on, at least one if there is any. Damaged ones are only reported."""
        while True:
            stretches = self._choose(subject_id, sequence, messages_max, bytes_max)
            found = [stored for stretch in stretches for stored in self._read_stretch(subject_id, stretch)]
            if found or not stretches:
                return found
            sequence = stretches[-1][-1].end_sequence  # all are damaged: the reader goes on behind them

    def readable(self, subject_id: int, sequence: int) -> Iterator[ConsumeLogEntry]:
        """Entries of the committed batches from `sequence` on, without those found damaged."""
        for entry in self.views.entries.entries(subject_id, sequence, self.log.committed_end):
            if entry.position not in self._damaged:
                yield entry

    def is_damaged(self, position: int) -> bool:
        """Whether a reader found that the batch at this position can no longer be read."""
        return position in self._damaged

    def read_entries(
        self, subject_id: int, entries: Iterable[ConsumeLogEntry], read: Callable[[int, int], bytes] | None = None
    ) -> list[StoredBatch]:
        """Read these batches. Damaged ones are left out and reported, and `readable` skips them from then on.

        `read` returns a stretch of the log by position and size. Without it, the read waits for the device.
        """
        stretches = side_by_side(entries)
        return [stored for stretch in stretches for stored in self._read_stretch(subject_id, stretch, read)]

    def first_sequence(self, subject_id: int) -> int:
        """The oldest sequence that is still stored; the end sequence, if nothing is."""
        first = self.views.entries.first_sequence(subject_id)
        return self.end_sequence(subject_id) if first is None else min(first, self.end_sequence(subject_id))

    def end_sequence(self, subject_id: int) -> int:
        """The sequence after the last committed message."""
        uncommitted = self.views.entries.first_sequence_from(subject_id, self.log.committed_end)
        return self.next_sequence(subject_id) if uncommitted is None else uncommitted

    def next_sequence(self, subject_id: int) -> int:
        """The sequence of the next message; 0 for a subject that was removed a moment ago."""
        subjects = self.views.subjects
        return subjects.by_id(subject_id).next_sequence if subject_id in subjects else 0

    def sequence_at(self, subject_id: int, time_ms: int) -> int | None:
        """The first sequence whose effective time (`log`) is at or after `time_ms`; None if there is none yet."""
        above = log.begin_at(self.log.segments, time_ms)
        return self.views.entries.sequence_at(subject_id, time_ms, self.log.committed_end, above)

    def _choose(self, subject_id: int, sequence: int, messages_max: int, bytes_max: int) -> list[list[ConsumeLogEntry]]:
        """The entries within the bounds, at least one, grouped into stretches without gaps."""
        below = self.log.committed_end
        return side_by_side(
            self.views.entries.some(subject_id, sequence, below, messages_max=messages_max, bytes_max=bytes_max)
        )

    def _on_damage(self, found: Iterable[Damaged]) -> None:
        """Report damage. `Refused` where another copy may send a lost record: a reader that skips it loses messages."""
        is_awaited = False
        for damaged in found:
            self._report_damage(damaged)
            if self.is_awaited(damaged.position):
                is_awaited = True
            else:
                self._damaged.add(damaged.position)
        if is_awaited:
            raise _AWAITED

    def _read_stretch(
        self, subject_id: int, stretch: list[ConsumeLogEntry], read: Callable[[int, int], bytes] | None = None
    ) -> list[StoredBatch]:
        """Read entries that lie side by side, with one read."""
        start = stretch[0].position
        found: list[StoredBatch] = []
        try:
            data = (read or self.log.read)(start, stretch[-1].position + stretch[-1].size - start)
        except Damaged as damaged:
            self._on_damage([Damaged(entry.position, damaged.why) for entry in stretch])
            return found
        bodies = record.batches(data, start, stretch, self.log.log_id, subject_id)
        if all(bodies):
            return list(map(StoredBatch, stretch, bodies))  # type: ignore[arg-type]  # not one is None
        damages: list[Damaged] = []
        for entry, seen in zip(stretch, bodies, strict=True):
            body = seen or self._read_again(subject_id, entry)
            if body is not None:
                found.append(StoredBatch(entry, body))
            else:
                damages.append(self._what_is_wrong(data, entry.position - start, entry.position))
        self._on_damage(damages)
        return found

    def _read_again(self, subject_id: int, entry: ConsumeLogEntry) -> bytes | None:
        """Read a record from the log again: fetched bytes may be older than a repair, and a device may err once."""
        try:
            data = self.log.read(entry.position, entry.size)
        except Damaged:
            return None
        return record.batches(data, entry.position, [entry], self.log.log_id, subject_id)[0]

    def _what_is_wrong(self, data: bytes, offset: int, position: int) -> Damaged:
        try:
            self.log.parse(data, offset, position)
        except Damaged as damaged:
            return damaged
        return Damaged(position, "its index says otherwise")


def _shut(state: SubjectState) -> Refused:
    if state.nameless:
        return Refused(Code.BAD_NAME, f"{state.name} stands for a subject whose name is lost: it can only be read")
    return Refused(Code.BUSY, f"subject {state.name} is being removed: ask again", retry_after_ms=_REMOVAL_MS)


def _full(subjects_max: int) -> Refused:
    sentence = (
        f"there are {subjects_max:,} subjects, and there is room for no more: "
        "remove some (fairway subject remove SUBJECT)"
    )
    return Refused(Code.BUSY, sentence, retry_after_ms=_FULL_MS)


def side_by_side(entries: Iterable[ConsumeLogEntry]) -> list[list[ConsumeLogEntry]]:
    """Group the entries, in the order of the log, into stretches without gaps: one read each."""
    entries = list(entries)
    if entries and entries[-1].position + entries[-1].size - entries[0].position == sum(map(_SIZE, entries)):
        return [entries]
    stretches: list[list[ConsumeLogEntry]] = []
    end = -1
    for entry in entries:
        if entry.position == end:
            stretches[-1].append(entry)
        else:
            stretches.append([entry])
        end = entry.position + entry.size
    return stretches
