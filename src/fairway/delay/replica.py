"""State of a delay server's replica: rows and buckets made from the master's logs, ready to lead at any time.

Messages. The replica reads them from its own message log and moves them into its own buckets once they are committed:
an uncommitted message may be cut off later, and a bucket cannot be undone. As at a start, the replica leaves out
messages that an earlier run put into buckets; it knows them by subject and sequence. Where the message log is rotten,
the replica waits up to 10 minutes, because another copy may repair it.

Decisions. The dispatch log collects the master's decisions in `heard`, committed or not. If the log is cut, the copy is
closed; and a checkpoint waits until its decisions are final. The replica applies decisions to rows together, every
second or every 4,096 decisions, because a look-up walks over all rows. It applies a slice at a time, or everything at
once in `finish`. The two logs arrive independently, so a decision may be about a message without a row. Such a decision
waits in the decision index until the message log was taken beyond that message; code that creates rows asks the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from fairway import limits
from fairway.delay.dispatch.log import DispatchEvent, EventKind, MasterDecision
from fairway.delay.engine_part import EngineData, EnginePart
from fairway.delay.recovery import RECORD_COST, Recovery, batches, catch_up, known_from
from fairway.delay.schedule.pending_rows import DecisionIndex, RowNumbers, Rows, RowState
from fairway.storage.log import Damaged
from fairway.storage.record import Record
from fairway.storage.segment import Damage

_EVERY_MS = 1_000  # between two applications of decisions to rows
_HEARD_MAX = 4_096  # or when there are so many decisions
_SLICE_ROWS = 500_000  # about 5 ms
_LOOK_MS = 1_000  # between two tries to read a rotten part
_MENDED_MS = 600_000  # a rotten part that is not repaired after so long is left out
_HASH_BITS = 20
_SEQUENCE_FACTOR, _SUBJECT_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, and random
_NOTHING: NDArray[np.uint64] = np.zeros(0, np.uint64)


class DelayReplica(EnginePart):
    """The state of a copy that does not lead. `at`: the message log was taken up to here."""

    def __init__(self, data: EngineData, recovery: Recovery) -> None:
        super().__init__(data)
        self.at = recovery.tail_start
        self._decision_index = recovery.decision_index
        self._known_end = self._store.messages.log.end  # below it, a message may be in a bucket before it is taken
        self._ceilings: NDArray[np.uint64] = np.zeros(1, np.uint64)  # by subject: behind the last loaded one
        self._loaded_end = 0
        self._known: dict[int, NDArray[np.uint64]] = {}
        self._is_loaded = False
        self._heard_ms = 0  # when decisions were last applied to rows
        self._rot: tuple[int, int] | None = None  # where the message log is rotten, and since when that is known
        self._looked_ms: int | None = None  # the last try to read it
        self._applying: _Batch | None = None
        self._is_stale = True  # the decision index has decisions about messages with rows
        self._journal.heard = []
        self._journal.unmatched = self._unmatched

    def loaded(self) -> None:
        """Every bucket is loaded: messages can be taken."""
        table, end = self._rows, self._rows.end
        self._is_loaded = True
        self._ceilings = np.zeros(int(table.subject_id[:end].max(initial=0)) + 1, np.uint64)
        rows = table.where(table.state[:end] != RowState.FREE)
        np.maximum.at(self._ceilings, table.subject_id[rows], table.sequence[rows] + np.uint64(1))
        self._loaded_end = max((self._end_of(int(each)) for each in np.flatnonzero(self._ceilings)), default=0)

    def _end_of(self, subject_id: int) -> int:
        """Where a subject's last loaded message ends in the message log, or 0 if it was taken already. If the message
        log does not know the message, the end of the log."""
        log, views = self._store.messages.log, self._store.messages.views
        sequence = int(self._ceilings[subject_id]) - 1
        if subject_id not in views.subjects or sequence >= views.subjects.by_id(subject_id).next_sequence:
            return log.end
        first = views.entries.first_sequence_from(subject_id, self.at)
        if first is None or sequence < first:
            return 0
        found = next(views.entries.entries(subject_id, sequence, log.end), None)
        return log.end if found is None else found.position + found.size

    @property
    def derived_end(self) -> int:
        """Everything in buckets lies before this position of the message log. Known once the buckets are loaded."""
        return max(self.at, self._loaded_end)

    @property
    def is_behind(self) -> bool:
        """Whether there are committed messages to take, and room for them."""
        is_blocked = self._appender.is_full or self._appender.unmoved_bytes > limits.DELAY_UNMOVED_BYTES_MAX
        return self._is_loaded and self._store.messages.log.committed_end > self.at and not is_blocked

    @property
    def is_busy(self) -> bool:
        return self.is_behind or self._applying is not None or bool(self._journal.heard)

    def step(self, now_ms: int) -> None:
        """Go on a little. The engine calls this in every turn, once the buckets are loaded."""
        if self._looked_ms is None or not 0 <= now_ms - self._looked_ms < _LOOK_MS:
            self._take_some(now_ms)
        heard = self._journal.heard
        is_time = not 0 <= now_ms - self._heard_ms < _EVERY_MS
        if self._applying is None and heard and (is_time or len(heard) >= _HEARD_MAX):
            self._heard_ms = now_ms
            self._begin()
        self._apply_some()
        self._prune()

    def finish(self) -> None:
        """Apply every decision so far to the existing rows."""
        while self._applying is not None or self._journal.heard:
            if self._applying is None:
                self._begin()
            self._apply_some()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _take_some(self, now_ms: int) -> None:
        if not self.is_behind:
            return
        found, end = self._next(now_ms)
        known = self._known_of(found)
        self._appender.admit()
        for each in found:
            header = each.header
            keep = None
            if header.subject_id in known:
                sequences = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
                keep = ~np.isin(sequences, known[header.subject_id])
            self._appender.take(header.subject_id, header.first_sequence, each.body, header.end, keep)
        self._appender.pass_by(end)
        self.at = end
        self._note_done(catch_up(self._rows, self._appender.admit(), self._decision_index))

    def _next(self, now_ms: int) -> tuple[list[Record], int]:
        """The next batches to take, and where the part that was read ends."""
        found: list[Record] = []
        self._looked_ms = None
        cost, limit = 0, self._store.messages.log.committed_end
        for each in batches(self._store.messages.log, self.at, limit):
            if not isinstance(each, Record):
                if not self._is_given_up(each, now_ms):
                    self._looked_ms = now_ms
                    return found, each.start
                continue
            found.append(each)
            cost += max(each.header.count, RECORD_COST)
            if cost >= self._messages_per_step:
                return found, each.header.end
        return found, limit

    def _is_given_up(self, rot: Damage, now_ms: int) -> bool:
        """Whether to go on without the rotten part."""
        if self._rot is None or self._rot[0] != rot.start:
            self._rot = rot.start, now_ms
            self._on_damage(Damaged(rot.start, rot.why))
            with suppress(Damaged):
                self._store.read_chunk(0, rot.start, 1)  # so that the repair of the store knows of it
        return not 0 <= now_ms - self._rot[1] < _MENDED_MS

    def _known_of(self, found: Iterable[Record]) -> dict[int, NDArray[np.uint64]]:
        """By subject, the sequences of loaded messages, so that none of these batches gets a second row."""
        if self.at >= self._known_end:
            self._known = {}
            return self._known
        floors: dict[int, int] = {}
        for each in found:
            subject_id, first = each.header.subject_id, each.header.first_sequence
            is_loaded = subject_id < len(self._ceilings) and first < int(self._ceilings[subject_id])
            if is_loaded and subject_id not in self._known:
                floors.setdefault(subject_id, first)
        found_known = known_from(self._rows, floors)
        self._known |= {subject_id: found_known.get(subject_id, _NOTHING) for subject_id in floors}
        return self._known

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Move the heard decisions into the decision index, and begin to apply them to the existing rows."""
        heard, self._journal.heard = self._journal.heard or [], []
        batch = DecisionIndex()
        for decision_index in (batch, self._decision_index):
            _note(decision_index, heard)
        self._applying = _Batch(batch, self._rows)

    def _apply_some(self) -> None:
        if self._applying is None:
            return
        self._note_done(self._applying.step())
        if self._applying.is_done:
            self._applying = None
            self._is_stale = True

    def _note_done(self, changed: RowNumbers) -> None:
        self._on_done(changed[self._rows.state[changed] >= RowState.DISPATCHED])

    def _prune(self) -> None:
        """Forget decisions about messages before `at`: these messages have rows, or had."""
        if not self._is_stale or self._applying is not None or self.at < self._known_end or not self._is_loaded:
            return
        self._is_stale = False
        views, taken = self._store.messages.views, self.at
        for subject_id in self._decision_index.subjects:
            if subject_id in views.subjects:
                first = views.entries.first_sequence_from(subject_id, taken)
                below = views.subjects.by_id(subject_id).next_sequence if first is None else first
                self._decision_index.prune(subject_id, below)

    def _unmatched(self) -> Iterator[DispatchEvent]:
        """For the checkpoint, which has rows and intents already: decisions about messages without rows."""
        self.finish()
        self._prune()
        for subject_id in sorted(self._decision_index.subjects):
            for kind, state in ((EventKind.DISPATCHED, RowState.DISPATCHED), (EventKind.CANCEL, RowState.CANCELLED)):
                ranges = self._decision_index.ranges(subject_id, state)
                if len(ranges):
                    yield DispatchEvent(kind, subject_id, tuple(map(tuple, ranges.tolist())))
            pairs = self._decision_index.due_times(subject_id)
            if len(pairs):
                yield DispatchEvent(EventKind.PUT_OFF, subject_id, tuple(map(tuple, pairs.tolist())))


class _Batch:
    """Applies decisions to rows, slice by slice. A row that is created meanwhile asks the decision index, and a second
    application does no harm.

    A hash of subject and sequence finds the rows of a slice; few other rows share a hash."""

    def __init__(self, decision_index: DecisionIndex, rows: Rows) -> None:
        self._decision_index = decision_index
        self._rows = rows
        self._at = 0
        self._end = rows.end
        self._is_named = np.zeros(1 << _HASH_BITS, np.bool_)
        for subject_id, sequences in decision_index.named():
            self._is_named[_hashed(np.full(len(sequences), subject_id, np.uint32), sequences)] = True

    @property
    def is_done(self) -> bool:
        return self._at >= self._end

    def step(self) -> RowNumbers:
        """Apply the decisions to the next slice. Return the changed rows."""
        table, start = self._rows, self._at
        self._at = end = min(start + _SLICE_ROWS, self._end)
        is_near = self._is_named[_hashed(table.subject_id[start:end], table.sequence[start:end])]
        rows = start + np.flatnonzero(is_near)
        states = table.state[rows]
        rows = rows[(states == RowState.PENDING) | (states == RowState.INTENDED)]
        return catch_up(table, rows, self._decision_index)


def _hashed(subject_ids: NDArray[np.uint32], sequences: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash subjects and sequences, neighbours far apart."""
    return (sequences * _SEQUENCE_FACTOR + subject_ids * _SUBJECT_FACTOR) >> np.uint64(64 - _HASH_BITS)


def _note(decision_index: DecisionIndex, heard: Iterable[MasterDecision]) -> None:
    """Note the decisions by state: intended comes before sent, and a cancelled message is neither."""
    by_state: dict[RowState, dict[int, list[tuple[int, int]]]] = {
        state: {} for state in (RowState.CANCELLED, RowState.INTENDED, RowState.DISPATCHED)
    }
    for event, state in heard:
        if state is RowState.PENDING:
            decision_index.note_due(event.subject_id, event.ranges, event.time_ms)
        else:
            by_state[state].setdefault(event.subject_id, []).extend(event.ranges)
    for state, by_subject in by_state.items():
        for subject_id, ranges in by_subject.items():
            decision_index.note(subject_id, tuple(ranges), state)
