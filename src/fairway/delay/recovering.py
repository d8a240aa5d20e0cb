"""From a start to where the earlier life ended: buckets are loaded, the rest of the message log is moved, intents that
may have been sent are made again. Messages are scheduled and sent all the while; questions wait until it is done.

    1  buckets are opened, torn tails cut            before the engine is there
    2  buckets are loaded, the nearest first          a step at a time
    3  the message log above `moved_end` is moved     but for what is in a bucket already: its name tells
    4  intents that were not noted as sent are made   in their order, as soon as their messages are there; nothing new
       again                                          is intended before that, so that streams go on without a gap
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fairway.delay.dispatch_log import DispatchLog, Event
from fairway.delay.dispatching import Dispatcher, Intent
from fairway.delay.loader import Loader
from fairway.delay.moving import Mover
from fairway.delay.rows import Rows
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.wheel import RowNumbers
from fairway.storage.log import Damaged
from fairway.storage.record import Kind, Record
from fairway.storage.scan import Scan
from fairway.storage.segment import HEADER_BYTES
from fairway.storage.store import Store


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
        mover.begin_tail(log.recover(self._tail_end), self._tail_end)
        self._ledger = journal.ledger()
        self._to_remake = [journal.intents[number] for number in sorted(journal.intents)]
        self._loader: Loader | None = Loader(list(log), rows, self._ledger, on_home, on_damage, messages_per_step)

    @property
    def is_loaded(self) -> bool:
        return self._loader is None

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
                self._move_tail()
                self._loader = None
                self._journal.loaded(self._rows)
                is_quiet = False
        return self._remake(is_quiet)

    # --- the rest of the message log ---------------------------------------------------------------------------------

    def _move_tail(self) -> None:
        log, start = self._store.messages.log, self._mover.moved_end
        for segment in log.segments:
            if segment.end > start and segment.base < self._tail_end:
                begin, limit = max(start, segment.base + HEADER_BYTES), min(segment.end, self._tail_end)
                for found in Scan(log.file(segment), segment.base, begin, log.log_id, limit=limit):
                    if isinstance(found, Record) and found.header.kind == Kind.DATA:
                        self._move(found)
        self._mover.end_tail()

    def _move(self, found: Record) -> None:
        header = found.header
        sequences = np.arange(header.first_sequence, header.first_sequence + header.count, dtype=np.uint64)
        known = self._rows.sequence[self._rows.find(header.subject_id, sequences)]
        keep = ~np.isin(sequences, known)
        self._take(header.subject_id, header.first_sequence, found.body, header.end, keep)
        rows = self._rows.find(header.subject_id, sequences[keep])
        for row in rows.tolist():
            self._catch_up(header.subject_id, row)

    def _catch_up(self, subject_id: int, row: int) -> None:
        """What was decided about it before it was in a bucket."""
        sequence = self._rows.sequence[row : row + 1]
        self._rows.become(np.array([row]), self._ledger.states(subject_id, sequence))
        due_ms = self._ledger.due_ms.get((subject_id, int(sequence[0])))
        if due_ms is not None:
            self._rows.due_ms[row], self._rows.is_rescheduled[row] = due_ms, True

    # --- intents -----------------------------------------------------------------------------------------------------

    def _remake(self, is_quiet: bool) -> list[Intent]:
        remade: list[Intent] = []
        while self._to_remake:
            intent = self._dispatcher.remade(self._to_remake[0])
            if intent is not None:
                remade.append(intent)
            elif self.is_loaded and is_quiet:
                self._give_up(self._to_remake[0])
            else:
                break
            self._to_remake.pop(0)
        return remade

    def _give_up(self, event: Event) -> None:
        """Some of its messages have rotted, so it cannot be made again. Its stream ends with it: what follows would be
        a gap to a broker that never got it."""
        self.stuck.append(event)
        self._journal.streams.pop((event.subject_id, event.target), None)
