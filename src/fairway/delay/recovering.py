"""From a start to where the earlier life ended: buckets are loaded, the rest of the message log is moved, intents that
may have been sent are made again. Messages are scheduled and sent all the while; questions wait until it is done.

    1  buckets are opened, torn tails cut            before the engine is there
    2  buckets are loaded, the nearest first          a step at a time
    3  the message log above `moved_end` is moved     a step at a time, but for what is in a bucket already: its name
                                                      tells
    4  intents that were not noted as sent are made   in their order, as soon as their messages are there; nothing new
       again                                          is intended before that, so that streams go on without a gap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fairway.delay.dispatch_log import DispatchLog, Event, by_subject
from fairway.delay.dispatching import Dispatcher, Intent
from fairway.delay.loader import Loader, catch_up
from fairway.delay.moving import Mover
from fairway.delay.rows import Rows, State
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers
from fairway.storage.log import Damaged
from fairway.storage.record import Kind, Record
from fairway.storage.scan import Scan
from fairway.storage.segment import HEADER_BYTES
from fairway.storage.store import Store

_REMADE_PER_STEP = 4
_RECORD_COST = 16  # messages: what a record costs, however small
_NEVER = (1 << 64) - 1  # a sequence that no message has


class Take(Protocol):
    """Put a batch of the message log on its way to its buckets; `keep`: only those messages."""

    def __call__(
        self, subject_id: int, first_sequence: int, data: bytes, end: int, keep: NDArray[np.bool_] | None = None
    ) -> None: ...


class Recovery:
    """The steps above."""

    def __init__(
        self,
        store: Store,
        log: ScheduleLog,
        rows: Rows,
        mover: Mover,
        journal: DispatchLog,
        dispatcher: Dispatcher,
        *,
        take: Take,
        on_home: Callable[[RowNumbers], None],
        on_damage: Callable[[Damaged], None],
        messages_per_step: int,
    ) -> None:
        self.stuck: list[Event] = []
        self._store = store
        self._rows = rows
        self._mover = mover
        self._journal = journal
        self._dispatcher = dispatcher
        self._take = take
        self._tail_end = store.messages.log.committed_end
        self._tail_start = log.recover(self._tail_end)
        mover.begin_tail(self._tail_start, self._tail_end)
        self._ledger = journal.ledger()
        self._to_remake = [journal.intents[number] for number in sorted(journal.intents)]
        self._messages_per_step = messages_per_step
        self._loader: Loader | None = Loader(list(log), rows, self._ledger, on_home, on_damage, messages_per_step)
        self._tail: Iterator[int] | None = None
        self.is_loaded = False
        self._look_at = 0  # rows

    @property
    def is_remade(self) -> bool:
        return not self._to_remake

    @property
    def is_done(self) -> bool:
        return self.is_loaded and self.is_remade

    def step(self, *, is_quiet: bool) -> list[Intent]:
        """Go on a little; returns intents to send again. `is_quiet`: nothing is on its way into a bucket."""
        if self._loader is not None:
            self._loader.step()
            if self._loader.is_done:
                self._loader, self._tail = None, self._move_tail()
        elif self._tail is not None:
            moved = 0
            while moved < self._messages_per_step and self._tail is not None:
                count = next(self._tail, None)
                if count is None:
                    self._tail = None
                    self._mover.end_tail()
                    self._journal.loaded(self._rows)
                    self.is_loaded = True
                    is_quiet = False
                else:
                    moved += count
        return self._remake(is_quiet)

    # --- the rest of the message log ---------------------------------------------------------------------------------

    def _move_tail(self) -> Iterator[int]:
        """Yields the messages of each record."""
        floors: dict[int, int] = {}
        for found in self._scan_tail():
            floors.setdefault(found.header.subject_id, found.header.first_sequence)
            yield _RECORD_COST
        known = self._known(floors)
        taken = 0
        for found in self._scan_tail():
            header = found.header
            sequences = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
            keep = ~np.isin(sequences, known.get(header.subject_id, sequences[:0]))
            if not taken:
                self._mover.admit()  # what is new is not of the tail
            self._take(header.subject_id, header.first_sequence, found.body, header.end, keep)
            taken += max(header.count, _RECORD_COST)
            if taken >= self._messages_per_step:
                catch_up(self._rows, self._mover.admit(), self._ledger)
                yield taken
                taken = 0
        catch_up(self._rows, self._mover.admit(), self._ledger)

    def _scan_tail(self) -> Iterator[Record]:
        log, start = self._store.messages.log, self._tail_start
        for segment in list(log.segments):
            if segment.end > start and segment.base < self._tail_end:
                begin, limit = max(start, segment.base + HEADER_BYTES), min(segment.end, self._tail_end)
                for found in Scan(log.file(segment), segment.base, begin, log.log_id, limit=limit):
                    if isinstance(found, Record) and found.header.kind == Kind.DATA:
                        yield found

    def _known(self, floors: dict[int, int]) -> dict[int, NDArray[np.uint64]]:
        """The sequences of messages that have rows, by subject, from the first one in the tail on."""
        if not floors:
            return {}
        table, end = self._rows, self._rows.end
        least = np.full(max(int(table.subject_id[:end].max(initial=0)), *floors) + 1, _NEVER, np.uint64)
        least[list(floors)] = list(floors.values())
        is_near = table.sequence[:end] >= least[table.subject_id[:end]]
        rows = table.where(is_near & (table.state[:end] != State.FREE))
        return {subject_id: table.sequence[chosen] for subject_id, chosen in by_subject(table, rows)}

    # --- intents -----------------------------------------------------------------------------------------------------

    def _remake(self, is_quiet: bool) -> list[Intent]:
        remade: list[Intent] = []
        if not self._to_remake or (not self.is_loaded and self._rows.end < self._look_at):
            return remade
        self._look_at = self._rows.end + self._rows.end // 8  # a look is a pass over all rows
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

    def _give_up(self, event: Event) -> None:
        """Some of its messages have rotted, so it cannot be made again. Its stream ends with it: what follows would be
        a gap to a broker that never got it."""
        self.stuck.append(event)
        self._journal.streams.pop((event.subject_id, event.target), None)
