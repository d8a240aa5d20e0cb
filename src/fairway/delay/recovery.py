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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fairway.delay.dispatch.dispatcher import Dispatcher, Intent
from fairway.delay.dispatch.log import DispatchEvent, DispatchLog, by_subject
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.loader import Loader, catch_up
from fairway.delay.schedule.log import ScheduleLog
from fairway.delay.schedule.pending_rows import DecisionIndex, Rows, RowState
from fairway.delay.schedule.repair import BucketRepair
from fairway.delay.schedule.wheel import RowNumbers
from fairway.errors import WrongDirectory
from fairway.storage.log import Damaged, Log
from fairway.storage.record import Record, RecordKind
from fairway.storage.replicated_store import first_base
from fairway.storage.segment import HEADER_BYTES, MISSING, Damage, SegmentScan
from fairway.storage.store import Store

_REMADE_PER_STEP = 4
RECORD_COST = 16  # in messages: the cost of reading a record, however small
_NEVER = (1 << 64) - 1  # a sequence that no message has


class Take(Protocol):
    """Send a batch of the message log on to its buckets; `keep`: only these messages."""

    def __call__(
        self, subject_id: int, first_sequence: int, data: bytes, end: int, keep: NDArray[np.bool_] | None = None
    ) -> None: ...


class Recovery:
    """Runs the steps above."""

    def __init__(
        self,
        store: Store,
        log: ScheduleLog,
        rows: Rows,
        appender: ScheduleAppender,
        journal: DispatchLog,
        dispatcher: Dispatcher,
        *,
        take: Take,
        on_home: Callable[[RowNumbers], None],
        on_damage: Callable[[Damaged], None],
        messages_per_step: int,
        repairs: BucketRepair,
    ) -> None:
        self.stuck: list[DispatchEvent] = []
        self._is_leading = not store.follows
        self._store = store
        self._rows = rows
        self._appender = appender
        self._journal = journal
        self._dispatcher = dispatcher
        self._take = take
        messages = store.messages.log
        # In a replica, buckets may hold messages that were committed before the restart. The new commit position is not
        # known yet.
        self._tail_end = messages.end if store.follows else messages.committed_end
        self.tail_start = log.recover(first_base(messages), self._tail_end)
        if store.follows and self.tail_start > self._tail_end:
            raise WrongDirectory(
                f"buckets have messages up to {self.tail_start} of a message log that ends at {self._tail_end}: "
                "restore the message log, or begin this copy anew with an empty directory"
            )
        appender.begin(self.tail_start, self._tail_end)
        self.decision_index = journal.decision_index()
        self._to_remake: list[DispatchEvent] = []
        if self._is_leading:
            self._begin_to_lead()
        self._messages_per_step = messages_per_step
        self._loader: Loader | None = Loader(
            list(log), rows, self.decision_index, on_home, on_damage, messages_per_step, repairs
        )
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
            self._take(header.subject_id, header.first_sequence, found.body, header.end, keep)
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
