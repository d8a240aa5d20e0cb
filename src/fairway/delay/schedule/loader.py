"""Loader: reads buckets into rows after a start, and puts rows onto the wheel every hour.

`Loader` reads each bucket once, the nearest first, a few thousand messages at a time, while messages are scheduled and
sent. Messages may be appended to a bucket that is being loaded. Therefore a position decides: the loader reads what
lies below the bucket's end as it was opened; a message appended later has its row already. Every message thus gets
exactly one row. Of each bucket, the loader reads the records behind the newest catalogue, then that catalogue and the
earlier ones. If a catalogue is damaged, the loader reads its records instead. Damaged records come last, with what the
message log has of them (`bucket_record.salvage`), because by then it is known which of their messages have a row
already.

`Sweeper` moves the end of the wheel on every hour, then adds the rows below that end, a slice at a time. A row that
gets its place or a new due time meanwhile is compared with the new end. A flag in the row says whether it is on the
wheel, so each row is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fairway.delay.schedule import bucket_file, bucket_record
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.bucket_record import BucketIndex, Sequences
from fairway.delay.schedule.manifest import HOUR_MS
from fairway.delay.schedule.pending_rows import DecisionIndex, Rows, RowState
from fairway.delay.schedule.repair import BucketRepair
from fairway.delay.schedule.wheel import RowNumbers, Wheel
from fairway.errors import RemoteProtocolError
from fairway.storage import record, segment
from fairway.storage.log import Damaged
from fairway.storage.record import Record, RecordKind
from fairway.storage.segment import Damage

_SWEEP_ROWS = 500_000  # about 2 ms
_NOTHING_NEAR_MS = -(1 << 63)
_MESSAGE_BYTES = 200  # of a bucket, for one of 100 bytes with a key: a guess, to reserve rows


class Loader:
    """Reads every bucket once."""

    def __init__(
        self,
        files: list[BucketFile],
        rows: Rows,
        decision_index: DecisionIndex,
        on_home: Callable[[RowNumbers], None],
        on_damage: Callable[[Damaged], None],
        messages_per_step: int,
        repairs: BucketRepair,
    ) -> None:
        self._repairs = repairs
        self._damaged: list[tuple[BucketFile, Damaged]] = []  # bucket records
        nearest_last = sorted(files, key=lambda each: each.span.start_ms, reverse=True)
        self._todo = [(each, each.end, each.catalogue_at) for each in nearest_last]
        rows.reserve(sum(each.end for each in files) // _MESSAGE_BYTES)
        self._rows = rows
        self._decision_index = decision_index
        self._on_home = on_home
        self._on_damage = on_damage
        self._messages_per_step = messages_per_step
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
        known, start = self._catalogue(file, catalogue_at) if catalogue_at else (None, segment.HEADER_BYTES)
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
                for each in self._scan(file, segment.HEADER_BYTES, catalogue_at):
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
            return None, segment.HEADER_BYTES

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
        self._add(
            file,
            np.full(count, opened.subject_id, np.uint32),
            opened.sequences,
            index,
            np.full(count, position, np.int64),
            np.arange(count),
            gone,
        )
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
        self._add(
            file,
            np.full(len(sequences), subject_id, np.uint32),
            sequences,
            bucket_record.index_of(found.piece.data),
            np.full(len(sequences), position, np.int64),
            np.arange(len(sequences)),
            gone if done is None else gone | done,
        )
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
    return np.concatenate(changed) if changed else np.zeros(0, np.int64)


class Sweeper:
    """Keeps the wheel filled with this hour and the next. In a replica the wheel stays empty until the first step as
    master."""

    def __init__(self, rows: Rows, wheel: Wheel, now_ms: int | None) -> None:
        """`now_ms` None: no row is near before the first step."""
        self._rows = rows
        self._wheel = wheel
        self._end_ms = _NOTHING_NEAR_MS if now_ms is None else _end_ms(now_ms)
        self._at = 0
        self._until = 0

    def step(self, now_ms: int) -> None:
        """Go on a little. The engine calls this in every turn."""
        if _end_ms(now_ms) > self._end_ms:
            self._end_ms = _end_ms(now_ms)
            self._at, self._until = 0, self._rows.end
        if self._at < self._until:
            end = min(self._at + _SWEEP_ROWS, self._until)
            is_near = self._rows.due_ms[self._at : end] < self._end_ms
            self.home(self._at + np.flatnonzero(is_near & (self._rows.state[self._at : end] == RowState.PENDING)))
            self._at = end

    @property
    def is_sweeping(self) -> bool:
        return self._at < self._until

    def home(self, rows: RowNumbers) -> None:
        """These rows have a place or a new due time: put those that are near onto the wheel."""
        table = self._rows
        is_wanted = (
            (table.due_ms[rows] < self._end_ms)
            & (table.state[rows] == RowState.PENDING)
            & (table.file[rows] != 0)
            & ~table.in_wheel[rows]
        )
        chosen = rows[is_wanted]
        table.in_wheel[chosen] = True
        self._wheel.add(chosen, table.due_ms[chosen])


def _end_ms(now_ms: int) -> int:
    return now_ms - now_ms % HOUR_MS + 2 * HOUR_MS
