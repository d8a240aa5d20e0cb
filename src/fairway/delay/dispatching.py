"""From due rows to intents: which messages go out together, where to, and under which name.

Messages of one subject that are due together make one batch, in the order of their sequences, bounded in number and
bytes. The route names the target, a broker group; where it names none (the group is down), or where too many intents
of that stream are under way, the subject's messages wait, and hold back nobody else.

A stream has one subject and one target, and its sequences have no gaps. One that was idle for a day is left, while
nothing of it is under way, for a new one: a broker forgets idle streams after a week.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from fairway import batch, limits
from fairway.delay.buckets import DAY_MS
from fairway.delay.dispatch_log import DispatchLog, Event, EventKind, Stream, ranges_of
from fairway.delay.letters import Letters
from fairway.delay.rows import Rows, State
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers
from fairway.errors import Refused
from fairway.names import Subject
from fairway.storage.log import Damaged
from fairway.world.rng import Rng

Route: TypeAlias = Callable[[Subject], str | None]
_PRODUCER_BITS = 63


class Intent(NamedTuple):
    """A batch to be produced. The same number always comes with the same bytes."""

    number: int
    target: str
    subject: Subject
    producer_id: int
    first_sequence: int
    messages: int
    data: bytes


class Dispatcher:
    """Makes intents. `on_intent(intent, end)`: it may be sent once the dispatch log is synced to `end`."""

    def __init__(
        self,
        rows: Rows,
        log: ScheduleLog,
        journal: DispatchLog,
        rng: Rng,
        *,
        route: Route,
        name: Callable[[int], Subject],
        on_intent: Callable[[Intent, int], None],
        on_damage: Callable[[Damaged], None],
    ) -> None:
        self._rows = rows
        self._log = log
        self._journal = journal
        self._rng = rng
        self._route = route
        self._name = name
        self._on_intent = on_intent
        self._on_damage = on_damage
        self._rows_of: dict[int, RowNumbers] = {}  # by intent
        self.waiting: dict[int, RowNumbers] = {}  # due, by subject: their target is down or has enough to do

    def dispatch(self, due: RowNumbers, now_ms: int) -> None:
        """Make intents of rows that are due, and of those that waited."""
        table = self._rows
        for subject_id in np.unique(table.subject_id[due]).tolist():
            fresh = due[table.subject_id[due] == subject_id]
            waiting = self.waiting.get(subject_id)
            self.waiting[subject_id] = fresh if waiting is None else np.concatenate((waiting, fresh))
        for subject_id in list(self.waiting):
            self._dispatch_subject(subject_id, self.waiting.pop(subject_id), now_ms)

    def _dispatch_subject(self, subject_id: int, rows: RowNumbers, now_ms: int) -> None:
        subject = self._name(subject_id)
        target = self._route(subject)
        is_due = self._rows.due_ms[rows] <= now_ms  # the clock may have gone back since they came off the wheel
        rows, early = rows[is_due], rows[~is_due]
        rows = rows[np.argsort(self._rows.sequence[rows], kind="stable")]
        while target is not None and len(rows):
            stream = self._stream(subject_id, target, now_ms)
            if stream.outstanding >= limits.INTENTS_PER_STREAM_MAX:
                break
            taken, letters = self._gather(rows)
            whole = taken[self._rows.state[taken] == State.PENDING]  # but for those that are lost
            try:
                if len(whole):
                    self._intend(subject, subject_id, target, stream, whole, letters, now_ms)
            except Refused:  # the dispatch log is behind: they wait like the others
                break
            rows = rows[len(taken) :]
        left = np.concatenate((rows[self._rows.state[rows] == State.PENDING], early))
        if len(left):
            self.waiting[subject_id] = left

    def drop_waiting(self, row: int) -> bool:
        """A row is cancelled or put off; whether it was waiting."""
        subject_id = int(self._rows.subject_id[row])
        waiting = self.waiting.get(subject_id)
        if waiting is None or row not in waiting:
            return False
        self.waiting[subject_id] = waiting[waiting != row]
        if not len(self.waiting[subject_id]):
            del self.waiting[subject_id]
        return True

    def _stream(self, subject_id: int, target: str, now_ms: int) -> Stream:
        stream = self._journal.streams.get((subject_id, target))
        is_stale = stream is not None and stream.outstanding == 0 and now_ms - stream.used_ms > DAY_MS
        if stream is None or is_stale:
            return Stream(1 + self._rng.below((1 << _PRODUCER_BITS) - 1), 0, now_ms)
        return stream

    def _intend(
        self,
        subject: Subject,
        subject_id: int,
        target: str,
        stream: Stream,
        rows: RowNumbers,
        letters: Letters,
        now_ms: int,
    ) -> None:
        number, first = self._journal.next_number, stream.next_sequence
        data = letters.encode(stream.producer_id, first)
        event = Event(
            EventKind.INTENT,
            subject_id,
            ranges_of(self._rows.sequence[rows]),
            number,
            stream.producer_id,
            first,
            now_ms,
            batch.peek(data).crc,
            target,
        )
        end = self._journal.append([event])
        self._rows.become(rows, State.INTENDED)
        self._rows.in_wheel[rows] = False
        self._rows_of[number] = rows
        self._on_intent(Intent(number, target, subject, stream.producer_id, first, len(rows), data), end)

    def _gather(self, rows: RowNumbers) -> tuple[RowNumbers, Letters]:
        """As many of the first rows as go into one intent."""
        letters = Letters()
        taken = 0
        for run in self._runs(rows[: limits.INTENT_MESSAGES_MAX]):
            before = len(letters), letters.bytes
            if not self._take(letters, run):
                taken += len(run)
                continue
            if before[0] and letters.bytes > limits.INTENT_BYTES_MAX:
                letters.keep(*before)
                break
            taken += len(run)
        return rows[:taken], letters

    def _runs(self, rows: RowNumbers) -> Iterator[RowNumbers]:
        """Neighbours that lie in one piece."""
        file, position = self._rows.file[rows], self._rows.position[rows]
        breaks = np.flatnonzero((np.diff(file.astype(np.int64)) != 0) | (np.diff(position) != 0)) + 1
        yield from np.split(rows, breaks)

    def _take(self, letters: Letters, run: RowNumbers) -> bool:
        place = self._rows.place(int(run[0]))
        try:
            _, opened = self._log.read(place.file, place.position)
        except Damaged as damaged:
            self._rows.become(run, State.LOST)
            self._on_damage(damaged)
            return False
        letters.take(opened, self._rows.index[run].tolist())
        return True

    # --- the way back ------------------------------------------------------------------------------------------------

    def sent(self, number: int) -> None:
        """The target has the intent's batch."""
        if number in self._rows_of:
            self._journal.append([Event(EventKind.SENT, number=number)])
            self._rows.become(self._rows_of.pop(number), State.DISPATCHED)

    def remade(self, event: Event) -> Intent | None:
        """An intent of an earlier life, made again byte for byte; None as long as not all of its messages are there."""
        rows = self._rows.find(event.subject_id, event.sequences())
        if len(rows) < event.messages or not (self._rows.file[rows] != 0).all():
            return None
        letters = Letters()
        if not all(self._take(letters, run) for run in self._runs(rows)):
            return None
        data = letters.encode(event.producer_id, event.first_sequence)
        if batch.peek(data).crc != event.crc:
            return None
        self._rows_of[event.number] = rows
        subject = self._name(event.subject_id)
        return Intent(
            event.number, event.target, subject, event.producer_id, event.first_sequence, event.messages, data
        )
