"""Dispatcher of a delay server: groups due messages into intents, each with a target and a producer stream.

Due messages of one subject go into one batch, in the order of their sequences. A batch is bounded in messages and in
bytes. The route names the target, a broker group. The messages of a subject wait if the route names no target (the
group is down) or if the stream has too many intents outstanding; other subjects do not wait. If a subject is ordered by
key, each key has its own target, and a batch holds only messages whose keys share a target.

A stream has one subject and one target, and its producer sequences have no gaps. The dispatcher replaces a stream that
was idle for a day, if nothing of it is outstanding, because a broker forgets idle streams after a week. Each run of the
process begins new streams for new intents. If the disk was restored from a backup, the dispatch log is older than what
was sent, and the broker already holds later sequences of the old streams. Intents from before a restart keep their
streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from fairway import batch, limits
from fairway.batch.identity import derived_secret, new_secret
from fairway.delay.dispatch.log import (
    DispatchEvent,
    DispatchStream,
    EventKind,
    by_subject,
    key_event,
    ranges_of,
)
from fairway.delay.engine_part import EngineData, EnginePart
from fairway.delay.schedule.batch_arrays import BatchArrays, BatchComposer
from fairway.delay.schedule.log import OpenBucketRecord
from fairway.delay.schedule.manifest import DAY_MS
from fairway.delay.schedule.pending_rows import RowNumbers, RowState, record_key_of
from fairway.delay.schedule.wheel import DueTimes
from fairway.errors import Refused
from fairway.lookup.routes import home
from fairway.names import Subject
from fairway.runtime.rng import Rng

RouteLookup: TypeAlias = Callable[[Subject], str | None]
_PRODUCER_BITS = 63
_MESSAGES_PER_STEP = 4_096  # 10 ms
_SUBJECTS_PER_STEP = 256  # looked at again per call, in turn: their targets may be down for hours
_AHEAD_PIECES = 256  # bucket records fetched before their messages are due
_SHARED_OUT_MAX = 2_048  # messages whose keys are read in one call: 5 ms


class Homes(Protocol):
    """Knows which broker group takes each key of an ordered subject."""

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that share the subject's keys. With fewer than two, all messages follow the route."""

    def takes(self, target: str, subject: Subject) -> bool:
        """Whether this target takes messages of the subject now."""


class Intent(NamedTuple):
    """A batch to be produced. With the same number and target, the bytes are always the same."""

    number: int
    target: str
    subject: Subject
    producer_id: int
    first_sequence: int
    messages: int
    data: bytes
    secret: bytes = b""  # of its stream

    def __repr__(self) -> str:
        """Leaves out the secret, which must not appear in logs, and the messages."""
        return (
            f"Intent(number={self.number}, target={self.target!r}, subject={self.subject!r}, "
            f"producer_id={self.producer_id}, first_sequence={self.first_sequence}, messages={self.messages}, "
            f"data=<{len(self.data)} bytes>, secret=<{len(self.secret)} bytes>)"
        )


class Redirected(NamedTuple):
    """Intents that were given another target. The change is durable once the dispatch log is synced to `end`."""

    numbers: frozenset[int]  # of the intents that were replaced
    messages: int  # messages that were readable and go to other targets
    left: int  # messages that wait for their target as before
    end: int


class Dispatcher(EnginePart):
    """Makes intents. `on_intent(intent, end)`: the intent may be sent once the dispatch log is synced to `end`."""

    def __init__(
        self,
        data: EngineData,
        rng: Rng,
        *,
        route: RouteLookup,
        name: Callable[[int], Subject],
        on_intent: Callable[[Intent, int], None],
        homes: Homes | None = None,
    ) -> None:
        super().__init__(data)
        self._rng = rng
        self._route = route
        self._name = name
        self._on_intent = on_intent
        self._homes = homes
        self._begun: dict[tuple[int, str], int] = {}  # producer ids of the streams begun since the start
        self._stretches: dict[int, int] = {}  # by ordered subject: the first waiting row whose key is not read yet
        self._rows_of: dict[int, tuple[str, int, RowNumbers]] = {}  # by intent number: target, bytes, rows
        self.outstanding_bytes: Counter[str] = Counter()  # of intents not stored yet, by target
        self.waiting: dict[int, RowNumbers] = {}  # due rows by subject; their target is down or has enough outstanding
        self.has_more = False  # more could go out at once: this call has used up its budget

    @property
    def due(self) -> int:
        """Messages that are due and in no intent yet."""
        return sum(map(len, self.waiting.values()))

    def dispatch(self, due: RowNumbers, now_ms: int) -> None:
        """Make intents of these due rows and of waiting rows, at most as many as a few milliseconds allow."""
        fresh = list(by_subject(self._rows, due))
        for subject_id, rows in fresh:
            waiting = self.waiting.get(subject_id)
            self.waiting[subject_id] = rows if waiting is None else np.concatenate((waiting, rows))
        self.has_more = False
        budget = _MESSAGES_PER_STEP
        looked_at = [subject_id for subject_id, _ in fresh]
        looked_at += [each for each in list(self.waiting)[:_SUBJECTS_PER_STEP] if each not in set(looked_at)]
        for subject_id in looked_at:
            if budget <= 0:
                self.has_more = True
                break
            budget -= self._dispatch_subject(subject_id, self.waiting.pop(subject_id), now_ms, budget)

    def _dispatch_subject(self, subject_id: int, rows: RowNumbers, now_ms: int, budget: int) -> int:
        """Return how many messages were put into intents. The others join the end of `waiting`."""
        subject = self._name(subject_id)
        is_due = self._rows.due_ms[rows] <= now_ms  # the clock may have gone back since the wheel gave them out
        kept = [rows[~is_due]]
        rows = rows[is_due]
        rows = rows[np.argsort(self._rows.sequence[rows], kind="stable")]
        gone_out = 0
        for home_of_share, share in self._shares(subject, subject_id, rows, kept):
            rest = share
            while len(rest) and (target := self._target(subject, home_of_share)) is not None:
                stream = self._stream(subject_id, target, now_ms)
                if stream.outstanding >= limits.INTENTS_PER_STREAM_MAX:
                    break
                if gone_out >= budget:
                    self.has_more = True
                    break
                taken, missing, rest, composer = self._gather(rest)
                kept.append(missing)
                if not len(taken):
                    continue
                data = composer.encode(stream.producer_id, stream.next_sequence)
                event = DispatchEvent(
                    EventKind.INTENT,
                    subject_id,
                    ranges_of(self._rows.sequence[taken]),
                    self._journal.next_number,
                    stream.producer_id,
                    stream.next_sequence,
                    now_ms,
                    batch.peek(data).crc,
                    target,
                )
                try:
                    self._commit(subject, [(event, taken, data)])
                except Refused:  # the dispatch log is behind: these rows wait, too
                    kept.append(taken)
                    break
                self._rows.become(taken, RowState.INTENDED)
                self._rows.in_wheel[taken] = False
                gone_out += len(taken)
            kept.append(rest)
        left = np.concatenate(kept)
        if len(left):
            self.waiting[subject_id] = left
        return gone_out

    # --- keys --------------------------------------------------------------------------------------------------------

    def _target(self, subject: Subject, home: str | None) -> str | None:
        """The target that takes these messages now; None: none does."""
        if home is None or self._homes is None:
            return self._route(subject)
        return home if self._homes.takes(home, subject) else None

    def _shares(
        self, subject: Subject, subject_id: int, rows: RowNumbers, kept: list[RowNumbers]
    ) -> Iterator[tuple[str | None, RowNumbers]]:
        """Divide the rows by target. The target None stands for the route."""
        names = () if self._homes is None else self._homes.homes_of(subject)
        if len(names) < 2:
            yield None, rows
            return
        shares: dict[str | None, list[int]] = {}
        for row in self._next_stretch(subject_id, rows, kept).tolist():
            is_there, key = self._key_of(row)
            if is_there:
                shares.setdefault(None if key is None else names[home(key, names)], []).append(row)
            else:
                kept.append(np.array([row], np.int64))
        for name, share in shares.items():
            yield name, np.array(share, np.int64)

    def _next_stretch(self, subject_id: int, rows: RowNumbers, kept: list[RowNumbers]) -> RowNumbers:
        """Take at most 2,048 rows, and go on behind them in the next call: the first rows may wait for a target for
        hours."""
        start = self._stretches.pop(subject_id, 0)
        start = start if start < len(rows) else 0
        end = start + _SHARED_OUT_MAX
        if end < len(rows):
            self._stretches[subject_id] = end
            self.has_more = True
        kept += [rows[:start], rows[end:]]
        return rows[start:end]

    def _key_of(self, row: int) -> tuple[bool, str | None]:
        """Return whether the row can be placed, and its key. A row can be placed if its bucket record is open or
        damaged; `_gather` deals with the damage."""
        record_key = record_key_of(int(self._rows.spots(np.array([row]))[0]))
        opened = self._record_cache.get(record_key)
        if opened is None:
            is_damaged = self._record_cache.is_damaged(record_key)
            if not is_damaged:
                self._record_cache.want([record_key])
            return is_damaged, None
        return True, opened.sheet.key(int(self._rows.index[row]))

    def prepare(self, rows: RowNumbers) -> None:
        """Fetch the bucket records of rows that will be due soon."""
        self._record_cache.want(
            record_key_of(each) for each in np.unique(self._rows.spots(rows)).tolist()[:_AHEAD_PIECES]
        )

    def _gather(self, rows: RowNumbers) -> tuple[RowNumbers, RowNumbers, RowNumbers, BatchComposer]:
        """Collect the rows of one intent. Return the rows taken, the rows whose bucket records are still being fetched,
        the remaining rows, and the composer with the contents of the rows taken."""
        table = self._rows
        near, rest = rows[: limits.INTENT_MESSAGES_MAX], rows[limits.INTENT_MESSAGES_MAX :]
        spots = table.spots(near)
        ends = np.append(np.flatnonzero(np.diff(spots)) + 1, len(near)).tolist()
        indices = table.index[near].astype(np.int64)
        composer = BatchComposer()
        taken: list[RowNumbers] = []
        missing: list[RowNumbers] = []
        start = 0
        for number, end in zip(spots[np.array(ends) - 1].tolist(), ends, strict=True):
            opened = self._record_cache.get(record_key_of(number))
            if opened is not None:
                fitting = _fitting(opened.sheet, indices[start:end], composer)
                if fitting:
                    composer.take(opened.sheet, indices[start : start + fitting])
                    taken.append(near[start : start + fitting])
                if start + fitting < end:  # the intent is full
                    rest = np.concatenate((near[start + fitting :], rest))
                    break
            elif self._record_cache.is_damaged(record_key_of(number)):
                table.become(near[start:end], RowState.LOST)
            else:
                missing.append(near[start:end])
                self._record_cache.want([record_key_of(number)])
            start = end
        return _joined(taken), _joined(missing), rest, composer

    def drop_waiting(self, row: int) -> bool:
        """Remove a row that was cancelled or rescheduled. Return whether the row was waiting."""
        is_waiting = row in self.waiting.get(int(self._rows.subject_id[row]), ())
        self._drop(np.array([row]))
        return is_waiting

    def drop_lost(self, rows: RowNumbers) -> None:
        """Remove rows whose messages are lost. The caller has taken them off the wheel."""
        self._rows.in_wheel[rows] = False
        self._drop(rows)

    def _drop(self, rows: RowNumbers) -> None:
        for subject_id, gone in by_subject(self._rows, rows):
            waiting = self.waiting.get(subject_id, gone)
            left = waiting[~np.isin(waiting, gone)]
            if len(left):
                self.waiting[subject_id] = left
            else:
                self.waiting.pop(subject_id, None)

    def _stream(self, subject_id: int, target: str, now_ms: int) -> DispatchStream:
        """The stream for the next intent: the current one if this run began it and it is not stale, else a new one."""
        stream = self._journal.streams.get((subject_id, target))
        if stream is not None and stream.producer_id != self._begun.get((subject_id, target)):
            stream = None
        is_stale = stream is not None and stream.outstanding == 0 and now_ms - stream.used_ms > DAY_MS
        if stream is None or is_stale:
            return DispatchStream(1 + self._rng.below((1 << _PRODUCER_BITS) - 1), 0, now_ms)
        return stream

    def _commit(self, subject: Subject, made: list[tuple[DispatchEvent, RowNumbers, bytes]]) -> int:
        """Append intents in one record, and give them out. Return where the record ends."""
        key = [] if self._journal.key else [key_event(new_secret(self._rng))]  # once, before the first intent
        end = self._journal.append([*key, *(event for event, _, _ in made)])
        for event, rows, data in made:
            self._begun[event.subject_id, event.target] = event.producer_id
            self._outstanding(event.number, event.target, rows, data)
            self._on_intent(self._intent(event, subject, data), end)
        return end

    # --- another target ----------------------------------------------------------------------------------------------

    def redirect(self, event: DispatchEvent, intended: RowNumbers, now_ms: int) -> tuple[int, int] | None:
        """Replace an intent by intents for other targets, made of the messages that can be read. One record of the
        dispatch log holds all of them. The other messages become `LOST` once that record is appended. `intended`: all
        rows that are in intents. Return how many messages go elsewhere, and where the record ends. Return None if no
        other target takes the messages now, or if no message can be read."""
        table, subject = self._rows, self._name(event.subject_id)
        rows = intended
        is_meant = (table.subject_id[rows] == event.subject_id) & (table.file[rows] != 0)
        rows = rows[is_meant & np.isin(table.sequence[rows], event.sequences())]
        rows = rows[np.argsort(table.sequence[rows], kind="stable")]
        spots = table.spots(rows).tolist()
        opened = {each: self._record_cache.read(record_key_of(each)) for each in set(spots)}
        is_lost = np.array(
            [self._is_lost(opened[record_key], row) for row, record_key in zip(rows.tolist(), spots, strict=True)]
        )
        names = () if self._homes is None else self._homes.homes_of(subject)
        shares: dict[str, list[tuple[int, BatchArrays]]] = {}
        for row, record_key, is_gone in zip(rows.tolist(), spots, is_lost.tolist(), strict=True):
            found = opened[record_key]
            if found is None or is_gone:
                continue
            key = found.sheet.key(int(table.index[row])) if len(names) > 1 else None
            target = self._target(subject, None if key is None else names[home(key, names)])
            if target is None or target == event.target:
                return None
            shares.setdefault(target, []).append((row, found.sheet))
        streams = {target: self._stream(event.subject_id, target, now_ms) for target in shares}
        if not shares or any(each.outstanding >= limits.INTENTS_PER_STREAM_MAX for each in streams.values()):
            return None
        made: list[tuple[DispatchEvent, RowNumbers, bytes]] = []
        for target, chosen in shares.items():
            composer = BatchComposer(is_copying=True)
            for row, sheet in chosen:
                composer.take(sheet, table.index[[row]].astype(np.int64))
            chosen_rows = np.array([row for row, _ in chosen], np.int64)
            data = composer.encode(streams[target].producer_id, streams[target].next_sequence)
            part = event._replace(
                ranges=ranges_of(table.sequence[chosen_rows]),
                number=self._journal.next_number + len(made) - 1 if made else event.number,
                producer_id=streams[target].producer_id,
                first_sequence=streams[target].next_sequence,
                time_ms=now_ms,
                crc=batch.peek(data).crc,
                target=target,
            )
            made.append((part, chosen_rows, data))
        end = self._commit(subject, made)
        table.become(rows[is_lost], RowState.LOST)
        return sum(len(chosen) for _, chosen, _ in made), end

    def _is_lost(self, opened: OpenBucketRecord | None, row: int) -> bool:
        return opened is None or bool(opened.lacks(self._rows.index[[row]].astype(np.int64))[0])

    # --- the way back ------------------------------------------------------------------------------------------------

    def _outstanding(self, number: int, target: str, rows: RowNumbers, data: bytes) -> None:
        if number in self._rows_of:  # it had another target
            before, size, _ = self._rows_of[number]
            self.outstanding_bytes[before] -= size
        self._rows_of[number] = target, len(data), rows
        self.outstanding_bytes[target] += len(data)

    def sent(self, number: int) -> DueTimes:
        """Note that the target has stored the intent's batch. Return when its messages were due."""
        if number not in self._rows_of:
            return np.zeros(0, np.int64)
        self._journal.append([DispatchEvent(EventKind.SENT, number=number)])
        target, size, rows = self._rows_of.pop(number)
        self.outstanding_bytes[target] -= size
        self._rows.become(rows, RowState.DISPATCHED)
        self._on_done(rows)
        return self._rows.due_ms[rows]

    def remade(self, event: DispatchEvent) -> Intent | None:
        """Encode an intent from before the restart again, byte for byte. Return None while some of its messages are not
        loaded, or if they do not give the same batch."""
        table = self._rows
        rows = table.in_state(RowState.INTENDED)
        rows = rows[table.subject_id[rows] == event.subject_id]
        rows = rows[np.isin(table.sequence[rows], event.sequences())]
        if len(rows) < event.messages or not (table.file[rows] != 0).all():
            return None
        rows = rows[np.argsort(table.sequence[rows], kind="stable")]
        composer = BatchComposer(is_copying=True)
        spots, indices = table.spots(rows), table.index[rows].astype(np.int64)
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(spots)) + 1):
            opened = self._record_cache.read(record_key_of(int(spots[part[0]])))
            is_lost = np.ones(len(part), np.bool_) if opened is None else opened.lacks(indices[part])
            if opened is None or is_lost.any():
                table.become(rows[part[is_lost]], RowState.LOST)
                return None
            composer.take(opened.sheet, indices[part])
        data = composer.encode(event.producer_id, event.first_sequence)
        if batch.peek(data).crc != event.crc:
            return None
        self._outstanding(event.number, event.target, rows, data)
        return self._intent(event, self._name(event.subject_id), data)

    def _intent(self, event: DispatchEvent, subject: Subject, data: bytes) -> Intent:
        secret = derived_secret(self._journal.key, event.producer_id)
        return Intent(
            event.number, event.target, subject, event.producer_id, event.first_sequence, event.messages, data, secret
        )


def _fitting(sheet: BatchArrays, messages: RowNumbers, composer: BatchComposer) -> int:
    """How many of these messages an intent can take. A message over the limit gets an intent of its own."""
    room = limits.INTENT_BYTES_MAX - composer.bytes
    if len(sheet.payloads.data) <= room:
        return len(messages)
    ends = np.cumsum(sheet.payloads.lengths(messages), dtype=np.int64)
    fitting = int(np.searchsorted(ends, room, side="right"))
    return fitting if fitting or len(composer) else 1


def _joined(parts: list[RowNumbers]) -> RowNumbers:
    """A copy of all parts, which keeps no larger array alive."""
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
