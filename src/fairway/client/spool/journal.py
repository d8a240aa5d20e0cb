"""One journal on disk: entries are appended and synced at one end, and leave in order at the other.

    journal = Journal(disk, number, clock)     a new journal; `Journal.open` for one that a dead process left behind
    journal.keep(handed, done)                 append and sync; many calls share one sync
    journal.load(found)                        read the next entries, off the caller's thread
    journal.mark_sent(number, done)            record that entries below `number` are about to be sent
    journal.place(placed, done)                the same in a cluster: record each entry's broker group and number
    journal.note_done(number)                  the broker has the entry; recorded with a later sync

A journal is a row of segments of bounded size. A segment goes when its entries are all done, so nothing grows with the
age of a journal. Each segment reserves room for marks: a full disk refuses new entries, and the drain still goes on.

The caller holds its owner's lock, or calls from one loop. The disk brings its completions to the same place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fairway import limits
from fairway.batch.identity import derived_secret
from fairway.batch.layout import is_delayed
from fairway.client.spool import journal_files as files
from fairway.errors import DiskFull, StorageFault, invariant
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Completion, Disk

SEGMENT_BYTES = 4 * limits.MIB
MARK_ROOM_BYTES = 64 * limits.KIB  # reserved behind each segment: some hundred marks, each for up to a MiB of entries
PLACES_PART = 4  # a quarter of a segment, in a cluster: an entry has 192 bytes or more, its place and end 25 to 45
DONE_NOTED_EVERY = 16  # entries; far fewer than the broker remembers of a stream

OnRecovered: TypeAlias = Callable[[list[files.SpoolEntry]], None]


class Journal:
    """One journal, owned by this process."""

    def __init__(
        self,
        disk: Disk,
        number: int,
        clock: Clock,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        is_synced: bool = True,
        is_cluster: bool = False,
        key: bytes = b"",
    ) -> None:
        """The secrets of the journal's streams derive from `key`. Without a key they have no secrets."""
        self.disk = disk
        self.key = key
        self.is_keyed = bool(key)
        self.is_cluster = is_cluster  # its writer is or was a cluster client: the journal records each entry's place
        self.number = number
        self.fault: StorageFault | None = None
        self.messages = 0  # not done
        self.sent = 0  # entries with smaller numbers may have been sent
        self.sent_before = 0  # entries with smaller numbers may have been sent by an earlier owner
        self.since_ms = clock.wall_ms()  # when the oldest entry that is left was written
        self.damages: list[files.SpoolDamage] = []
        self.murky: set[int] = set()  # streams with a set-aside entry whose fate is unknown; never iterated
        self.placed: dict[int, files.PlacementRecord] = {}  # the last recorded place of each entry that is not done
        self.doubts: set[int] = set()  # of the placed entries, those that may be stored there; never iterated
        self.held: Counter[str] = Counter()  # entries that are not done, by group
        self.unplaced: Counter[tuple[str, bool]] = Counter()  # entries without a group, by subject and due later or not
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._is_synced = is_synced
        self._segments: deque[files.JournalSegment] = deque()
        self._pending: dict[int, files.PendingEntry] = {}  # entries that are not done
        self._next = 0  # number of the next entry
        self._end = 0
        self._synced_end = 0
        self._cursor = 0  # entries before this position are loaded
        self._restreams: list[files.Restream] = []
        self._replaced: set[int] = set()  # entries that another entry replaces: no longer set aside; never iterated
        self._done_unnoted: list[int] = []  # done, not yet recorded
        self._are_marks_due = False
        self._jobs: list[files.JournalWrite] = []
        self._is_committing = False
        self._is_loading = False
        self._is_rewound = False  # `rewind` was called during a load

    # --- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls, disk: Disk, number: int, clock: Clock, *, segment_bytes: int = SEGMENT_BYTES, is_synced: bool = True
    ) -> Journal:
        """A journal that a dead process left behind. The caller has locked its disk. Blocks until all of it is read."""
        journal = cls(disk, number, clock, segment_bytes=segment_bytes, is_synced=is_synced)
        survey = files.JournalSurvey(disk, number)
        journal._read(survey)
        survey.mend()
        journal.clear_asides()
        journal._begin(survey)
        return journal

    @classmethod
    def look(cls, disk: Disk, number: int, clock: Clock) -> Journal:
        """Read a journal for a report, without changing it. The journal may be in use."""
        journal = cls(disk, number, clock)
        journal._read(files.JournalSurvey(disk, number))
        return journal

    def _read(self, survey: files.JournalSurvey) -> None:
        for base, record in survey.walk():
            segment = self._segments[-1] if self._segments else None
            if segment is None or segment.base != base:
                segment = files.JournalSegment(base, base, self.disk.open(files.segment_name(base)))
                self._segments.append(segment)
                self.since_ms = min(self.since_ms, record.time_ms)
            segment.end = record.end
            self._take(record, segment)
        self._end = self._synced_end = survey.end
        self.damages = survey.damages
        self.doubts = set(self.placed)
        for aside in self.asides():
            self._forget(aside.number)  # whether or not a mark recorded its end
            self._next = max(self._next, aside.number + 1)  # also where no segment is left
            self.is_cluster |= aside.is_cluster
            if aside.is_unknown:
                self.murky.add(aside.producer_id)

    def _take(self, record: files.SpoolRecord, segment: files.JournalSegment) -> None:
        self.is_keyed, self.is_cluster = files.VERSIONS[record.version]
        if record.kind == files.SpoolRecordKind.ENTRY:
            number, subject, messages, was_sent, data, group, instead = files.entry_of(record.body)
            self._replace(instead)
            self._add(number, files.PendingEntry(messages, segment, subject, is_delayed(data), was_sent, group))
            self._next = max(self._next, number + 1)
            return
        marks = files.marks_of(record.body)
        self.key = marks.key or self.key
        for number in marks.done:
            self._forget(number)
        self.sent = self.sent_before = max(self.sent, marks.sent)
        self._next = max(self._next, marks.sent)
        if marks.restreams:
            self._restreams = marks.restreams
        self._note_placed(marks.placed)

    def _begin(self, survey: files.JournalSurvey) -> None:
        kept = frozenset(survey.bases)
        self._segments = deque(each for each in self._segments if each.base in kept)
        for segment in self._segments:
            segment.end = segment.base + segment.file.size
        self._cursor = self._segments[0].base if self._segments else self._end
        self._sweep()

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return f"{self.number:016x}"

    @property
    def is_empty(self) -> bool:
        """Whether every entry is done."""
        return not self._pending

    @property
    def is_busy(self) -> bool:
        """Whether a read or a write is under way."""
        return self._is_loading or self._is_committing or bool(self._jobs)

    @property
    def entries(self) -> int:
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(segment.end - segment.base for segment in tuple(self._segments))  # a copy: other threads call this

    @property
    def has_more(self) -> bool:
        """Whether entries are left to load."""
        return self._cursor < self._synced_end and bool(self._pending)

    def holds(self, number: int) -> bool:
        """Whether the entry is not done."""
        return number in self._pending

    def doubtful(self) -> dict[int, str]:
        """Entries that were sent before and may be stored. In a cluster, each with the broker group that would know."""
        doubts, placed, before = self.doubts, self.placed, self.sent_before
        return {
            number: kept.group
            for number, kept in self._pending.items()
            if number in doubts or number < before or (kept.was_sent and number not in placed)
        }

    def pinned(self) -> dict[str, int]:
        """In a cluster: the number of doubtful messages by group. Empty elsewhere."""
        found: Counter[str] = Counter()
        for number, group in self.doubtful().items():
            found[group] += self._pending[number].messages
        return dict(sorted(found.items())) if self.is_cluster else {}

    def asides(self) -> list[files.Aside]:
        """The notes of the batches that were set aside; blocks."""
        names = [name for name in self.disk.listing(files.ASIDE) if not name.endswith(".tmp")]
        return [self.read_aside(name)[0] for name in names if int(name, 16) not in self._replaced]

    def read_aside(self, name: str) -> tuple[files.Aside, bytes]:
        return files.read_aside(self.disk, name, self.name)

    # --- writing -----------------------------------------------------------------------------------------------------

    def keep(self, handed: Sequence[Handed], done: Completion) -> None:
        """Append these batches. `done(None)`: all are synced; `DiskFull`: none is kept; another fault: nobody knows."""
        *first, last = handed
        self._write(*(files.JournalWrite(each, files.nobody) for each in first), files.JournalWrite(last, done))

    def keep_one(self, handed: Handed, numbered: Callable[[int], None], done: Completion) -> None:
        """Append one batch. `numbered` gets its number when the batch is synced."""
        self._write(files.JournalWrite(handed, done, numbered))

    def mark_sent(self, number: int, done: Completion) -> None:
        """Record that entries with smaller numbers are about to be sent."""
        if number <= self.sent:
            done(None)
            return
        self.sent = number
        self._mark(done)

    def restream(self, old_id: int, first: int, new_id: int, done: Completion) -> None:
        """Record that a stream goes on as another from `first` on."""
        self._restreams = [*self._restreams, files.Restream(old_id, first, new_id)]
        self._mark(done)

    def place(self, placed: Sequence[files.PlacementRecord], done: Completion) -> None:
        """Record where these entries are about to be sent. The caller sends them after `done(None)`, and only then."""
        self._write(files.JournalWrite(None, done, placed=placed))

    def put_back(self, handed: Handed, instead: int, done: Completion) -> None:
        """Append a batch that replaces the entry `instead`, in one record. Then `clear_asides` removes its old file."""
        self._write(files.JournalWrite(handed, done, instead=instead))

    def give_up(self, numbers: Sequence[int], done: Completion) -> None:
        """Record the end of set-aside entries. If a file went before `done(None)`, its entry might come back."""
        if not self._segments:
            self.disk.remove_later(
                files.segment_name(self._end), done
            )  # no such file: `done` after the removals under way
            return
        self._done_unnoted += numbers
        self._write(files.JournalWrite(None, done, is_needed=True))

    def clear_asides(self) -> None:
        """Remove the set-aside files of entries that another entry replaces; blocks."""
        for name in self.disk.listing(files.ASIDE):
            if int(name, 16) in self._replaced:
                self.disk.remove(f"{files.ASIDE}/{name}")

    def may_be_stored(self, entry: files.SpoolEntry) -> bool:
        """In a cluster: whether the entry may be stored at the place that was last recorded for it."""
        return entry.number in self.doubts or (entry.was_sent and entry.number not in self.placed)

    def identity(self, producer_id: int, sequence: int) -> tuple[int, int]:
        """The producer id and sequence under which a batch goes out that was written under these."""
        for each in self._restreams:  # in the order of their creation: one may lead to the next
            if each.old_id == producer_id and sequence >= each.first:
                producer_id, sequence = each.new_id, sequence - each.first
        return producer_id, sequence

    def secret(self, producer_id: int) -> bytes:
        """The secret of a stream of this journal; empty if its streams have no secrets."""
        return derived_secret(self.key, producer_id)

    def forget_streams(self) -> None:
        """Forget the restreams. The journal is empty, and nobody will write under the old numbers again."""
        invariant(self.is_empty, "streams are forgotten when all that was in them is where it belongs")
        self._restreams = []

    def note_done(self, number: int) -> None:
        """The entry is done: the broker has it, or it was set aside."""
        self._forget(number)
        self._done_unnoted.append(number)
        if not self._pending:
            self._sweep()
        elif len(self._done_unnoted) >= DONE_NOTED_EVERY:
            self._sweep()
            self._mark(files.nobody)

    def set_aside(
        self, entry: files.SpoolEntry, reason: str, producer_id: int, is_unknown: bool, done: Completion
    ) -> None:
        """Move an entry that the broker will never take, or whose fate is unknown, to a file in `aside`."""
        now_ms, is_cluster = self._clock.wall_ms(), self.is_cluster
        note = files.Aside(
            entry.number, entry.subject, entry.messages, reason, is_unknown, producer_id, now_ms, is_cluster
        )

        def published(fault: StorageFault | None) -> None:
            if fault is None:
                if is_unknown:
                    self.murky.add(producer_id)
                self.note_done(entry.number)
            done(fault)

        self.disk.publish_later(files.aside_name(entry.number), files.aside_parts(note, entry.data), published)

    def _mark(self, done: Completion) -> None:
        self._are_marks_due = True
        self._write(files.JournalWrite(None, done))

    def _add(self, number: int, kept: files.PendingEntry) -> None:
        self._pending[number] = kept
        kept.segment.pending += 1
        self.messages += kept.messages
        self._count(kept, 1)

    def _forget(self, number: int) -> None:
        kept = self._pending.pop(number, None)
        self.placed.pop(number, None)
        self.doubts.discard(number)
        if kept is not None:
            self.messages -= kept.messages
            kept.segment.pending -= 1
            self._count(kept, -1)

    def _replace(self, number: int | None) -> None:
        if number is not None:
            self._forget(number)
            self._replaced.add(number)

    def _note_placed(self, placed: Sequence[files.PlacementRecord]) -> None:
        for each in placed:
            kept = self._pending.get(each.number)
            if kept is not None:  # None: the entry is done, or unreadable
                self.placed[each.number] = each
                self._count(kept, -1)
                kept = self._pending[each.number] = kept._replace(group=each.group)
                self._count(kept, 1)

    def _count(self, kept: files.PendingEntry, step: int) -> None:
        if kept.group:
            self.held[kept.group] += step
        else:
            self.unplaced[kept.subject, kept.is_due] += step

    # --- commits -----------------------------------------------------------------------------------------------------

    def _write(self, *jobs: files.JournalWrite) -> None:
        self._jobs += jobs
        self._commit()

    def _commit(self) -> None:
        """Commit the waiting writes, one commit at a time. Writes that come meanwhile share the next sync."""
        if self._is_committing or not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        if self.fault is not None:
            files.tell_all(jobs, self.fault)
            return
        try:
            segment = self._active(sum(len(job.entry.data) for job in jobs if job.entry is not None))
        except StorageFault as fault:
            self._fail(jobs, fault)
            return
        parts, numbers = self._packed(segment, jobs)
        done_noted, self._done_unnoted, self._are_marks_due = self._done_unnoted, [], False
        self._is_committing = True

        def committed(fault: StorageFault | None) -> None:
            self._is_committing = False
            if fault is None:
                self._committed(segment, sum(map(len, parts)), numbers)
                entries = [job for job in jobs if job.entry is not None]
                for job, (number, _) in zip(entries, numbers, strict=True):
                    self._replace(job.instead)
                    if job.numbered is not None:
                        job.numbered(number)
                for job in jobs:
                    self._note_placed(job.placed)
                files.tell_all(jobs, None)
            else:
                self._done_unnoted = done_noted + self._done_unnoted
                self._are_marks_due = True
                self._fail(jobs, fault)
            self._commit()

        self.disk.commit(segment.file, parts, committed, sync=self._is_synced)

    def _active(self, entry_bytes: int) -> files.JournalSegment:
        """The segment to append to. If the disk has no room for a new one, marks alone go into the last."""
        last = self._segments[-1] if self._segments else None
        is_full = last is None or last.end - last.base >= self._segment_bytes
        if last is not None and not is_full:
            return last
        name = files.segment_name(self._end)
        file = self.disk.open(name, create=True)
        try:
            size_bytes = max(self._segment_bytes, entry_bytes)
            places_bytes = size_bytes // PLACES_PART if self.is_cluster else 0
            self.disk.reserve(file, size_bytes + places_bytes + MARK_ROOM_BYTES)
        except DiskFull:
            file.close()
            self.disk.remove(name)  # the last segment may grow past this empty file's base
            if last is None or entry_bytes:
                raise
            return last
        self._segments.append(files.JournalSegment(self._end, self._end, file))
        return self._segments[-1]

    def _packed(
        self, segment: files.JournalSegment, jobs: Sequence[files.JournalWrite]
    ) -> tuple[list[bytes], list[tuple[int, files.PendingEntry]]]:
        """The records of a commit, and the entries among them with their numbers."""
        parts: list[bytes] = []
        numbers: list[tuple[int, files.PendingEntry]] = []
        position, now_ms = self._end, self._clock.wall_ms()
        version = next(each for each, kind in files.VERSIONS.items() if kind == (self.is_keyed, self.is_cluster))

        def add(kind: files.SpoolRecordKind, body: bytes) -> None:
            nonlocal position
            parts.append(files.pack(kind, self.number, position, self._synced_end, now_ms, body, version))
            position += len(parts[-1])

        placed = [each for job in jobs for each in job.placed]
        if segment.end == segment.base:
            add(files.SpoolRecordKind.HEAD, files.marks_body(self._marks([*self.placed.values(), *placed])))
        elif self._are_marks_due or self._done_unnoted or placed:
            add(files.SpoolRecordKind.MARKS, files.marks_body(self._marks(placed)))
        for job in jobs:
            if job.entry is not None:
                number = self._next + len(numbers)
                subject, messages, was_sent, data, group = job.entry
                add(
                    files.SpoolRecordKind.ENTRY,
                    files.entry_body(files.SpoolEntry(number, subject, messages, was_sent, data, group, job.instead)),
                )
                numbers.append(
                    (number, files.PendingEntry(messages, segment, subject, is_delayed(data), was_sent, group))
                )
        return parts, numbers

    def _marks(self, placed: list[files.PlacementRecord]) -> files.Marks:
        marks = files.Marks(self._done_unnoted, self.sent, self._restreams)
        if self.is_keyed:
            return files.KeyedMarks(marks.done, marks.sent, marks.restreams, placed, self.key)
        return files.ClusterMarks(marks.done, marks.sent, marks.restreams, placed) if self.is_cluster else marks

    def _committed(
        self, segment: files.JournalSegment, size: int, numbers: Sequence[tuple[int, files.PendingEntry]]
    ) -> None:
        self._end += size
        segment.end = self._synced_end = self._end
        for number, kept in numbers:
            self._add(number, kept)
            self._next = number + 1
        if not self._pending:
            self._sweep()

    def _fail(self, jobs: Sequence[files.JournalWrite], fault: StorageFault) -> None:
        """A full disk refuses entries, places and needed marks; other marks wait. Any other fault ends the journal."""
        if isinstance(fault, DiskFull):
            for job in jobs:
                job.done(fault if job.entry is not None or job.placed or job.is_needed else None)
            return
        self.fault = fault
        files.tell_all(jobs, fault)

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, found: OnRecovered, size_bytes: int = files.CHUNK_BYTES) -> None:
        """Read the next entries that are not done, one load at a time. After `found([])` look at `has_more` again."""
        invariant(not self._is_loading, "a journal is read from one place at a time")
        segment = self._segment_at(self._cursor)
        if segment is None or self.fault is not None:
            found([])
            return
        start = self._cursor
        self._is_loading = True

        def fetched(data: bytes | StorageFault) -> None:
            self._is_loading = False
            if self._is_rewound and isinstance(data, bytes):
                self.rewind()
                found([])
            elif isinstance(data, bytes):
                self._loaded(segment, start, data, found)
            else:
                self.fault = data
                found([])

        end = min(segment.end, self._synced_end)
        self.disk.fetch(segment.file, start - segment.base, min(size_bytes, end - start), fetched)

    def rewind(self) -> None:
        """Load all entries that are not done once more, from the first on."""
        self._is_rewound = self._is_loading
        if not self._is_loading:
            self._cursor = self._segments[0].base if self._segments else self._end

    def _loaded(self, segment: files.JournalSegment, start: int, data: bytes, found: OnRecovered) -> None:
        entries: list[files.SpoolEntry] = []
        position = start
        damaged = {each.position: each.size_bytes for each in self.damages if each.kind == "rotten"}
        while position < start + len(data):
            if position in damaged:
                position += damaged[position]
                continue
            try:
                record = files.parse(data, position - start, position, self.number)
            except files.CutShort as short:
                if position == start and short.size_bytes <= segment.end - start:
                    self.load(found, short.size_bytes)
                    return
                if position > start:
                    break
                self.fault = StorageFault(f"{segment.file.name} of journal {self.name} ends at {start}, too early")
                break
            except files.BadSpoolRecord as error:
                sentence = f"{segment.file.name} of journal {self.name} is damaged at {position} ({error})"
                self.fault = StorageFault(f"{sentence} since it was opened: start again, and it is mended")
                break
            if record.kind == files.SpoolRecordKind.ENTRY:
                entry = files.entry_of(record.body)
                if entry.number in self._pending:
                    entries.append(entry)
            position = record.end
        self._cursor = max(self._cursor, position)
        found(entries)

    def _segment_at(self, position: int) -> files.JournalSegment | None:
        """The segment to load from `position` on. Moves the cursor there, past a gap if need be."""
        for segment in self._segments:
            if position < min(segment.end, self._synced_end):
                self._cursor = max(position, segment.base)
                return segment
        return None

    # --- removal -----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Remove segments whose entries are all done, from the front. The last one goes when the journal is idle."""
        is_idle = not self._pending and not self._is_committing and not self._jobs
        while self._segments and not self._segments[0].pending and (len(self._segments) > 1 or is_idle):
            segment = self._segments.popleft()
            self._cursor = max(self._cursor, segment.end)
            self._done_unnoted = [] if is_idle else self._done_unnoted
            segment.file.close()
            self.disk.remove_later(segment.file.name, files.nobody)

    def close(self) -> None:
        """Close the disk, after all writes that were given. The caller holds no lock that completions need."""
        self.disk.close()
