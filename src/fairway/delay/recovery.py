"""Recovery of the delay server, from a start to normal work.

    1  open the buckets, cut torn tails             while the engine is created
    2  load the buckets, the nearest first          step by step
    3  move the message log above `moved_end`       step by step, except messages that are in a bucket already: their
       into buckets                                 subject numbers and sequences tell
    4  make the intents without SENT again          in order, as soon as their messages are there. No new intent is made
                                                    before that, so that streams have no gap

Messages are scheduled and sent meanwhile. Questions about pending messages wait until step 3 is done.

A replica stops after step 2 and applies its master's logs (`DelayReplica`). When the replica comes to lead, the rest of
the message log is the tail of step 3, and step 4 follows as after a start.

`Loader` reads each bucket once, the nearest first, a few thousand messages at a time, while messages are scheduled and
sent. Messages may be appended to a bucket that is being loaded. Therefore a position decides: the loader reads what
lies below the bucket's end as it was opened; a message appended later has its row already. Every message thus gets
exactly one row. Of each bucket, the loader reads the records behind the newest catalogue, then that catalogue and the
earlier ones. If a catalogue is damaged, the loader reads its records instead. Damaged records come last, with what the
message log has of them (`bucket_record.salvage`), because by then it is known which of their messages have a row
already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fairway.delay.dispatch.dispatcher import Dispatcher, Intent
from fairway.delay.dispatch.log import DispatchEvent, by_subject
from fairway.delay.engine_part import EngineData, EnginePart
from fairway.delay.schedule import bucket_file, bucket_record
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.bucket_record import BucketIndex, BucketRecord, Sequences
from fairway.delay.schedule.pending_rows import DecisionIndex, RowNumbers, Rows, RowState, joined
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.storage import record
from fairway.storage.log import Damaged, Log
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import HEADER_BYTES, MISSING, Damage, SegmentScan

_REMADE_PER_STEP = 4
RECORD_COST = 16  # in messages: the cost of reading a record, however small
_MESSAGE_BYTES = 200  # of a bucket, for one of 100 bytes with a key: a guess, to reserve rows
_NEVER = (1 << 64) - 1  # a sequence that no message has


class Loader(EnginePart):
    """Reads every bucket once."""

    def __init__(self, data: EngineData, decision_index: DecisionIndex, on_home: Callable[[RowNumbers], None]) -> None:
        super().__init__(data)
        files = list(data.log)
        self._damaged: list[tuple[BucketFile, Damaged]] = []  # bucket records
        nearest_last = sorted(files, key=lambda each: each.span.start_ms, reverse=True)
        self._todo = [(each, each.end, each.catalogue_at) for each in nearest_last]
        self._rows.reserve(sum(each.end for each in files) // _MESSAGE_BYTES)
        self._decision_index = decision_index
        self._on_home = on_home
        self._current: Iterator[int] | None = None

    @property
    def is_done(self) -> bool:
        return not self._todo and self._current is None and not self._damaged

    def step(self) -> None:
        """Go on a little. Call again until `is_done`."""
        loaded = 0
        while loaded < self._messages_per_step and not self.is_done:
            if self._current is None and not self._todo:
                loaded += self._salvage(*self._damaged.pop(0))
                continue
            if self._current is None:
                self._current = self._load(*self._todo.pop())
            count = next(self._current, None)
            if count is None:
                self._current = None
            else:
                loaded += count

    def _load(self, file: BucketFile, end: int, catalogue_at: int) -> Iterator[int]:
        """Load one bucket. Yields how many messages each record has."""
        known, start = self._catalogue(file, catalogue_at) if catalogue_at else (None, HEADER_BYTES)
        for found in self._scan(file, start, end):
            yield self._load_found(file, found, is_noted=True)
        file.loaded(start)
        while known is not None:
            yield self._load_catalogue(file, known)
            catalogue_at = known.previous_at
            if not catalogue_at:
                return
            known, _ = self._catalogue(file, catalogue_at)
            if known is None:
                self._on_damage(Damaged(catalogue_at, "unreadable catalogue"))
                for each in self._scan(file, HEADER_BYTES, catalogue_at):
                    yield self._load_found(file, each, is_noted=False)

    def _catalogue(self, file: BucketFile, position: int) -> tuple[bucket_file.Catalogue | None, int]:
        """The catalogue at a position, and where the next record begins. None if the catalogue is damaged: then the
        caller reads all records, from the first."""
        try:
            self._repair_catalogue(file, position)
            found = file.parse_record(file.read_record(position), 0, position)
            return bucket_file.unpack(found.body), found.header.end
        except (Damaged, RemoteProtocolError):
            file.give_up_catalogue()
            return None, HEADER_BYTES

    def _repair_catalogue(self, file: BucketFile, position: int) -> None:
        """Repair a catalogue if only its header is damaged."""
        try:
            file.body_bytes(file.read_raw(position, record.HEADER_BYTES), 0, position)
        except Damaged:
            self._repairs.repair(file, position)

    def _scan(self, file: BucketFile, start: int, end: int) -> Iterator[Record | Damage]:
        """Every record between two positions, and the damage that cannot be repaired.

        One `Damage` may cover several records, because a scan cannot tell where a record with a damaged header ends. So
        the scan begins again at each repaired record, and finds the damage behind it."""
        repaired_at = -1
        while True:
            for found in file.scan(start, end):
                if (
                    isinstance(found, Record)
                    or found.start == repaired_at
                    or not self._repairs.repair(file, found.start)
                ):
                    yield found
                else:
                    start = repaired_at = found.start
                    break
            else:
                return

    def _load_found(self, file: BucketFile, found: Record | Damage, *, is_noted: bool) -> int:
        if isinstance(found, Damage):
            file.give_up_catalogue()
            self._damaged.append((file, Damaged(found.start, found.why)))
            return 0
        if found.header.kind == RecordKind.CATALOGUE:
            return 0
        try:
            opened = bucket_record.unpack(found)
            index = bucket_record.index_of(opened.data)
        except RemoteProtocolError as error:
            file.give_up_catalogue()
            self._on_damage(Damaged(found.header.position, str(error)))
            return 0
        position = found.header.position
        if is_noted:
            file.note(position, opened.subject, opened.subject_id, opened.sequences, index)
        self._rows.names[opened.subject_id] = opened.subject
        count = len(opened.sequences)
        gone = self._decision_index.gone(file.number, position, count)
        self._add_record(file, position, opened, index, gone)
        return count

    def _salvage(self, file: BucketFile, damaged: Damaged) -> int:
        """Load what is left of a damaged record. Return how many messages."""
        (found, is_news), position = self._repairs.salvage(file, damaged.position), damaged.position
        if is_news:
            self._on_damage(damaged)
        if found is None:
            return 0
        subject_id, sequences = found.piece.subject_id, found.piece.sequences
        self._rows.names[subject_id] = found.piece.subject
        known = self._rows.sequence[self._rows.find(subject_id, sequences)]
        gone = ~found.is_there | np.isin(sequences, known)
        done = self._decision_index.gone(file.number, position, len(sequences))
        index = bucket_record.index_of(found.piece.data)
        self._add_record(file, position, found.piece, index, gone if done is None else gone | done)
        return len(sequences)

    def _load_catalogue(self, file: BucketFile, known: bucket_file.Catalogue) -> int:
        self._rows.names.update(known.names)
        counts = known.counts.astype(np.int64)
        ends = np.cumsum(counts)
        gone: NDArray[np.bool_] | None = None
        for position, count, end in zip(known.positions.tolist(), counts.tolist(), ends.tolist(), strict=True):
            mask = self._decision_index.gone(file.number, position, count)
            if mask is not None:
                gone = np.zeros(len(known.sequences), np.bool_) if gone is None else gone
                gone[end - count : end] = mask
        self._add(
            file,
            np.repeat(known.subject_ids, counts),
            known.sequences,
            known.columns,
            np.repeat(known.positions.astype(np.int64), counts),
            np.arange(len(known.sequences)) - np.repeat(ends - counts, counts),
            gone,
        )
        return len(known.sequences)

    def _add_record(
        self, file: BucketFile, position: int, of: BucketRecord, index: BucketIndex, gone: NDArray[np.bool_] | None
    ) -> None:
        count = len(of.sequences)
        subject_ids = np.full(count, of.subject_id, np.uint32)
        self._add(file, subject_ids, of.sequences, index, np.full(count, position, np.int64), np.arange(count), gone)

    def _add(
        self,
        file: BucketFile,
        subject_ids: NDArray[np.uint32],
        sequences: Sequences,
        index: BucketIndex,
        positions: NDArray[np.int64],
        at: NDArray[np.int64],
        gone: NDArray[np.bool_] | None,
    ) -> None:
        """Add rows of messages, except those that are finished and forgotten."""
        if gone is not None:
            here = np.flatnonzero(~gone)
            subject_ids, sequences, index = subject_ids[here], sequences[here], index.only(here)
            positions, at = positions[here], at[here]
        if not len(sequences):
            return
        rows = self._rows.add(subject_ids, sequences, index)
        self._rows.put_each(rows, file.number, positions, at)
        catch_up(self._rows, rows, self._decision_index)
        self._on_home(rows)


def catch_up(table: Rows, rows: RowNumbers, decision_index: DecisionIndex) -> RowNumbers:
    """Apply decisions to rows, from before the start or from a master. Return the rows whose states changed."""
    changed: list[RowNumbers] = []
    subject_ids = table.subject_id[rows]
    for subject_id in sorted(decision_index.subjects.intersection(np.unique(subject_ids).tolist())):
        chosen = rows[subject_ids == subject_id]
        sequences = table.sequence[chosen]
        states = decision_index.states(subject_id, sequences)
        is_said = np.flatnonzero(states != RowState.PENDING)
        table.become(chosen[is_said], states[is_said])
        changed.append(chosen[is_said])
        which, due_ms = decision_index.dues(subject_id, sequences)
        table.due_ms[chosen[which]] = due_ms
        table.is_rescheduled[chosen[which]] = True
    return joined(changed)


class Recovery(EnginePart):
    """Runs the steps above."""

    def __init__(self, data: EngineData, dispatcher: Dispatcher, on_home: Callable[[RowNumbers], None]) -> None:
        super().__init__(data)
        self.stuck: list[DispatchEvent] = []
        store = data.store
        self._is_leading = not store.follows
        self._dispatcher = dispatcher
        messages = store.messages.log
        # In a replica, buckets may hold messages that were committed before the restart. The new commit position is not
        # known yet.
        self._tail_end = messages.end if store.follows else messages.committed_end
        self.tail_start = data.log.recover(messages.first_base, self._tail_end)
        if store.follows and self.tail_start > self._tail_end:
            raise WrongDirectory(
                f"buckets have messages up to {self.tail_start} of a message log that ends at {self._tail_end}: "
                "restore the message log, or begin this copy anew with an empty directory"
            )
        self._appender.begin(self.tail_start, self._tail_end)
        self.decision_index = self._journal.decision_index()
        self._to_remake: list[DispatchEvent] = []
        if self._is_leading:
            self._begin_to_lead()
        self._loader: Loader | None = Loader(data, self.decision_index, on_home)
        self._tail: Iterator[int] | None = None
        self.is_loaded = False
        self._look_at = 0  # rows; fewer are not worth another pass

    @property
    def is_remade(self) -> bool:
        return not self._to_remake

    @property
    def is_done(self) -> bool:
        return self.is_loaded and self.is_remade

    def lead(self, start: int) -> None:
        """A copy comes to lead: move the message log from `start` on into buckets."""
        self._is_leading = True
        self.tail_start, self._tail_end = start, self._store.messages.log.end
        self._begin_to_lead()
        if self.is_loaded:
            self.is_loaded = False
            self._tail = self._move_tail()

    def _begin_to_lead(self) -> None:
        self._appender.begin_tail(self._tail_end)
        self._to_remake = [self._journal.intents[number] for number in sorted(self._journal.intents)]

    def step(self, *, is_quiet: bool) -> list[Intent]:
        """Go on a little. Return intents to send again. `is_quiet`: nothing is on its way into a bucket."""
        if self._loader is not None:
            self._loader.step()
            if self._loader.is_done:
                self._loader = None
                self.decision_index.loaded()
                if self._is_leading:
                    self._tail = self._move_tail()
                else:
                    self._is_loaded()
        elif self._tail is not None:
            moved = 0
            while moved < self._messages_per_step and self._tail is not None:
                count = next(self._tail, None)
                if count is None:
                    self._tail = None
                    self._appender.end_tail()
                    self.decision_index = DecisionIndex()
                    self._is_loaded()
                    is_quiet = False
                else:
                    moved += count
        return self._remake(is_quiet)

    def _is_loaded(self) -> None:
        self._journal.loaded(self._rows)
        self.is_loaded = True

    # --- the tail of the message log ---------------------------------------------------------------------------------

    def _move_tail(self) -> Iterator[int]:
        """Move the tail. Yields the cost of each step, in messages."""
        floors: dict[int, int] = {}
        for found in self._scan_tail():
            floors.setdefault(found.header.subject_id, found.header.first_sequence)
            yield RECORD_COST
        known = known_from(self._rows, floors)
        taken = 0
        for found in self._scan_tail():
            header = found.header
            sequences = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
            keep = ~np.isin(sequences, known.get(header.subject_id, sequences[:0]))
            if not taken:
                self._appender.admit()  # Rows that are waiting in the appender are not of the tail.
            self._appender.take(header.subject_id, header.first_sequence, found.body, header.end, keep)
            taken += max(header.count, RECORD_COST)
            if taken >= self._messages_per_step:
                catch_up(self._rows, self._appender.admit(), self.decision_index)
                yield taken
                taken = 0
        catch_up(self._rows, self._appender.admit(), self.decision_index)

    def _scan_tail(self) -> Iterator[Record]:
        for found in batches(self._store.messages.log, self.tail_start, self._tail_end):
            if isinstance(found, Record):
                yield found

    # --- intents -----------------------------------------------------------------------------------------------------

    def _remake(self, is_quiet: bool) -> list[Intent]:
        remade: list[Intent] = []
        if not self._to_remake or (not self.is_loaded and self._rows.end < self._look_at):
            return remade
        self._look_at = self._rows.end + self._rows.end // 8  # a try walks over all rows
        while self._to_remake and len(remade) < _REMADE_PER_STEP:
            intent = self._dispatcher.remade(self._to_remake[0])
            if intent is not None:
                remade.append(intent)
            elif self.is_loaded and is_quiet:
                self._give_up(self._to_remake[0])
            else:
                break
            self._to_remake.pop(0)
        if remade:
            self._look_at = 0
        return remade

    def _give_up(self, event: DispatchEvent) -> None:
        """Some of the intent's messages are rotten, so the intent cannot be made again. Its stream ends with it: to a
        broker that never got the intent, the next batch would be a gap."""
        self.stuck.append(event)
        self._journal.streams.pop((event.subject_id, event.target), None)


def batches(log: Log, start: int, end: int) -> Iterator[Record | Damage]:
    """The batches between two positions of a message log, and the damage. Other records are left out."""
    segments = [each for each in log.segments if each.end > start and each.base < end]
    at = max(start, segments[0].base) if segments else end  # older parts were dropped
    for segment in segments:
        if segment.base > at:
            yield Damage(at, segment.base, MISSING)
        begin, limit = max(start, segment.base + HEADER_BYTES), min(segment.end, end)
        for found in SegmentScan(log.file(segment), segment.base, begin, log.log_id, limit=limit):
            if isinstance(found, Damage) or found.header.kind == RecordKind.DATA:
                yield found
        at = segment.end


def known_from(table: Rows, floors: dict[int, int]) -> dict[int, NDArray[np.uint64]]:
    """The sequences of messages that have rows, by subject, from the subject's floor on."""
    if not floors:
        return {}
    end = table.end
    least = np.full(max(int(table.subject_id[:end].max(initial=0)), *floors) + 1, _NEVER, np.uint64)
    least[list(floors)] = list(floors.values())
    is_near = table.sequence[:end] >= least[table.subject_id[:end]]
    rows = table.where(is_near & (table.state[:end] != RowState.FREE))
    return {subject_id: table.sequence[chosen] for subject_id, chosen in by_subject(table, rows)}
