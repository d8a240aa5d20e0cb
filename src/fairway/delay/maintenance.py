"""Maintenance of the delay server: frees the rows of finished messages, and tends the buckets once a minute.

`Memory` keeps the row of a sent or cancelled message for an hour, so that `cancel` can tell what became of the message.
It keeps at most about a million such rows: at 20,000 messages a second, the last minute. Then it frees the row and sets
one bit for the message's place in its bucket (`DispatchLog.gone`). The checkpoint holds these bits, because a start
must not send the message again. The bits go when the bucket goes.

A row is freed only once a manifest on disk covers its message. Otherwise a start would move the message into a bucket
again and find no row with its state. Nor is a row freed while its bucket is being split, because its place is about to
change.

`DelayMaintenance` splits buckets whose time comes near, deletes buckets that nobody needs, writes catalogues, and lets
the store drop old parts of the logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fairway import limits
from fairway.delay.dispatch.log import DispatchLog
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.bucket_file import BucketFile
from fairway.delay.schedule.log import BucketRecordCache, ScheduleLog
from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS, is_to_split
from fairway.delay.schedule.pending_rows import Rows, RowState, record_key_of
from fairway.delay.schedule.repair import BucketRepair
from fairway.delay.schedule.split import BucketSplit, live_rows
from fairway.delay.schedule.wheel import RowNumbers
from fairway.storage.store import Store

KEEP_MS = HOUR_MS
_LOT_ROWS = 8_192  # freed at a time


class _ForgottenLot(NamedTuple):
    done_ms: int
    messages_end: int  # of what was appended to buckets by then
    rows: RowNumbers


class Memory:
    """Rows of finished messages, the oldest first."""

    def __init__(
        self, rows: Rows, log: ScheduleLog, journal: DispatchLog, messages_end: Callable[[], int], rows_max: int
    ) -> None:
        self._rows = rows
        self._log = log
        self._journal = journal
        self._messages_end = messages_end
        self._rows_max = rows_max
        self._lots: deque[_ForgottenLot] = deque()
        self.count = 0

    def begin(self, now_ms: int) -> None:
        """Every row is loaded: count all finished rows as finished now, for their real times are unknown."""
        self._lots.clear()
        self.count = 0
        for state in (RowState.DISPATCHED, RowState.CANCELLED):
            self.note(self._rows.in_state(state), now_ms)

    def note(self, rows: RowNumbers, now_ms: int) -> None:
        """These rows were sent or cancelled."""
        if len(rows):
            self._lots.append(_ForgottenLot(now_ms, self._messages_end(), rows))
            self.count += len(rows)

    def step(self, now_ms: int) -> None:
        """Free some rows that are too many or too old. The engine calls this in every turn."""
        taken: list[RowNumbers] = []
        count = 0
        while self._lots and count < _LOT_ROWS and self._is_surplus(self._lots[0], now_ms):
            if self._lots[0].messages_end > self._log.stated_end:
                self._log.state(self._lots[0].messages_end)
                break
            taken.append(self._lots[0].rows)
            count += len(taken[-1])
            self.count -= len(self._lots.popleft().rows)
        if taken:
            self._forget(np.concatenate(taken), now_ms)

    def _is_surplus(self, oldest: _ForgottenLot, now_ms: int) -> bool:
        return self.count > self._rows_max + min(_LOT_ROWS, self._rows_max) or now_ms - oldest.done_ms > KEEP_MS

    def _forget(self, rows: RowNumbers, now_ms: int) -> None:
        table = self._rows
        rows = np.unique(rows)  # A row freed with its bucket may belong to another message by now, and appear twice.
        rows = rows[np.isin(table.state[rows], (RowState.DISPATCHED, RowState.CANCELLED))]
        files = np.array([each.number for each in self._log if each.is_listed and not each.is_retired], np.uint32)
        is_settled = np.isin(table.file[rows], files)
        self.note(rows[~is_settled], now_ms)
        rows = rows[is_settled]
        spots = table.spots(rows)
        order = np.argsort(spots, kind="stable")
        rows, spots = rows[order], spots[order]
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(spots)) + 1) if len(rows) else ():
            file, position = record_key_of(int(spots[part[0]]))
            bits = np.zeros(limits.BATCH_MESSAGES_MAX, np.bool_)
            bits[table.index[rows[part]]] = True
            pieces = self._journal.gone.setdefault(file, {})
            mask = int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
            pieces[position] = pieces.get(position, 0) | mask
        table.free(rows)


EVERY_MS = 60_000
_STATED_BYTES = 4 * limits.MIB  # of message log moved since the last manifest: a start reads about so much again
_CATALOGUES_PER_STEP = 2
_ACTIONS_BYTES = 16 * limits.MIB  # of dispatch log since the last checkpoint: a start reads so much of it


class DelayMaintenance:
    """Tends the buckets every minute, and continues a split in every step."""

    def __init__(
        self,
        store: Store,
        log: ScheduleLog,
        record_cache: BucketRecordCache,
        rows: Rows,
        appender: ScheduleAppender,
        journal: DispatchLog,
        memory: Memory,
        repairs: BucketRepair,
        *,
        messages_per_step: int,
        every_ms: int | None = None,
    ) -> None:
        self._store = store
        self._log = log
        self._record_cache = record_cache
        self._rows = rows
        self._appender = appender
        self._journal = journal
        self._memory = memory
        self._repairs = repairs
        self._messages_per_step = messages_per_step
        self._given_every_ms = every_ms
        self._split: BucketSplit | None = None
        self._looked_ms: int | None = None
        self._to_catalogue: list[BucketFile] = []
        self._actions_end = 0
        self._dead: dict[int, int] = {}  # by dead bucket: the end of the decisions it rests on
        self.splits = 0

    @property
    def _every_ms(self) -> int:
        return EVERY_MS if self._given_every_ms is None else self._given_every_ms

    @property
    def is_busy(self) -> bool:
        return self._split is not None

    def wait_ms(self, now_ms: int) -> int:
        """Time to the next round. A clock that went back does not put the round off."""
        return 0 if self._looked_ms is None else max(0, min(self._looked_ms + self._every_ms - now_ms, self._every_ms))

    def step(self, now_ms: int) -> None:
        """Do the work of one turn. The engine calls this in every turn."""
        self._memory.step(now_ms)
        for file in [self._to_catalogue.pop() for _ in self._to_catalogue[-_CATALOGUES_PER_STEP:]]:
            if not file.is_retired:
                file.catalogue(now_ms, self._log.catalogue_messages // 4)
        if self._appender.moved_end - self._log.stated_end >= _STATED_BYTES:
            self._log.state(self._appender.moved_end)
        self._log.retry(now_ms)
        if self._split is not None:
            self._split.step(now_ms, self._settled_end())
            if self._split.is_done:
                self._split = None
                self.splits += 1
                self._looked_ms = None  # there may be more to split
        elif self._looked_ms is None or not 0 <= now_ms - self._looked_ms < self._every_ms:
            self._looked_ms = now_ms
            self._look(now_ms)

    def _look(self, now_ms: int) -> None:
        self._to_catalogue = []
        for file in list(self._log):
            if file.is_of_split:
                continue
            if self._split is None and (is_to_split(file.span, now_ms) or self._repairs.is_to_evacuate(file)):
                self._split = self._begin_split(file)
            elif file.span.end_ms + KEEP_MS <= now_ms:
                self._look_at_past(file, now_ms)
            else:
                self._to_catalogue.append(file)
        self._store.follow_clock()
        self._store.retain(owed_from=min(self._appender.moved_end, self._repairs.needed_from))
        if self._store.actions.log.end - self._actions_end >= _ACTIONS_BYTES:
            self._actions_end = self._store.actions.log.end
            self._store.checkpoint()

    def _begin_split(self, file: BucketFile) -> BucketSplit:
        return BucketSplit(
            self._log,
            self._record_cache,
            self._rows,
            file,
            self._messages_per_step,
            self._forget,
            lambda: self._journal.end,
        )

    def _look_at_past(self, file: BucketFile, now_ms: int) -> None:
        live = live_rows(self._rows, file)
        if len(live):
            is_put_off = (self._rows.state[live] == RowState.PENDING) & (self._rows.due_ms[live] > now_ms + DAY_MS)
            if self._split is None and np.any(is_put_off):
                self._split = self._begin_split(file)
        elif file.synced_end == file.end and file.source_end <= self._appender.moved_end and self._is_dead(file):
            self._log.switch([file], [], lambda: self._delete(file))

    def _is_dead(self, file: BucketFile) -> bool:
        """Whether nobody needs the bucket any more, and the decisions about its messages are final. Before that, a
        message might have to be sent again."""
        return self._dead.setdefault(file.number, self._journal.end) <= self._settled_end()

    def _delete(self, file: BucketFile) -> None:
        self._rows.free(self._rows.of_file(file.number))
        self._forget(file.number)

    def _forget(self, number: int) -> None:
        self._journal.gone.pop(number, None)
        self._dead.pop(number, None)
        self._repairs.forget(number)

    def _settled_end(self) -> int:
        """Decisions before this position are final: neither a crash nor a change of masters undoes them."""
        log = self._store.actions.log
        return min(log.synced_end, log.committed_end)
