"""What is done every so often: split what comes near, delete what is done, let the message log go."""

from __future__ import annotations

import numpy as np

from fairway import limits
from fairway.delay.bucket_file import BucketFile
from fairway.delay.bucket_repair import BucketRepair
from fairway.delay.buckets import DAY_MS, is_to_split
from fairway.delay.dispatch_log import DispatchLog
from fairway.delay.forgetting import KEEP_MS, Memory
from fairway.delay.moving import ScheduleAppender
from fairway.delay.rows import Rows, RowState
from fairway.delay.schedule_log import ScheduleLog
from fairway.delay.shelf import BucketRecordCache
from fairway.delay.splitting import BucketSplit, live_rows
from fairway.storage.store import Store

EVERY_MS = 60_000
_STATED_BYTES = 4 * limits.MIB  # of message log moved since the last manifest: a start reads about so much again
_CATALOGUES_PER_STEP = 2
_ACTIONS_BYTES = 16 * limits.MIB  # of dispatch log since the last checkpoint: what a start reads of it


class DelayMaintenance:
    """Looks round every minute, and goes on with a split at every step."""

    def __init__(
        self,
        store: Store,
        log: ScheduleLog,
        shelf: BucketRecordCache,
        rows: Rows,
        mover: ScheduleAppender,
        journal: DispatchLog,
        memory: Memory,
        repairs: BucketRepair,
        *,
        messages_per_step: int,
        every_ms: int | None = None,
    ) -> None:
        self._store = store
        self._log = log
        self._shelf = shelf
        self._rows = rows
        self._mover = mover
        self._journal = journal
        self._memory = memory
        self._repairs = repairs
        self._messages_per_step = messages_per_step
        self._given_every_ms = every_ms
        self._split: BucketSplit | None = None
        self._looked_ms: int | None = None
        self._to_catalogue: list[BucketFile] = []
        self._actions_end = 0
        self._dead: dict[int, int] = {}  # by bucket that nobody needs any more: where the decisions end that say so
        self.splits = 0

    @property
    def _every_ms(self) -> int:
        return EVERY_MS if self._given_every_ms is None else self._given_every_ms

    @property
    def is_busy(self) -> bool:
        return self._split is not None

    def wait_ms(self, now_ms: int) -> int:
        """Until the next look round; a clock that has gone back does not put it off."""
        return 0 if self._looked_ms is None else max(0, min(self._looked_ms + self._every_ms - now_ms, self._every_ms))

    def step(self, now_ms: int) -> None:
        """To be called every tick."""
        self._memory.step(now_ms)
        for file in [self._to_catalogue.pop() for _ in self._to_catalogue[-_CATALOGUES_PER_STEP:]]:
            if not file.is_retired:
                file.catalogue(now_ms, self._log.catalogue_messages // 4)
        if self._mover.moved_end - self._log.stated_end >= _STATED_BYTES:
            self._log.state(self._mover.moved_end)
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
        self._store.retain(owed_from=min(self._mover.moved_end, self._repairs.needed_from))
        if self._store.actions.log.end - self._actions_end >= _ACTIONS_BYTES:
            self._actions_end = self._store.actions.log.end
            self._store.checkpoint()

    def _begin_split(self, file: BucketFile) -> BucketSplit:
        return BucketSplit(
            self._log, self._shelf, self._rows, file, self._messages_per_step, self._forget, lambda: self._journal.end
        )

    def _look_at_past(self, file: BucketFile, now_ms: int) -> None:
        live = live_rows(self._rows, file)
        if len(live):
            is_put_off = (self._rows.state[live] == RowState.PENDING) & (self._rows.due_ms[live] > now_ms + DAY_MS)
            if self._split is None and np.any(is_put_off):
                self._split = self._begin_split(file)
        elif file.synced_end == file.end and file.source_end <= self._mover.moved_end and self._is_dead(file):
            self._log.switch([file], [], lambda: self._delete(file))

    def _is_dead(self, file: BucketFile) -> bool:
        """Nobody needs it any more, and what was decided about its messages is settled: else they might be wanted once
        more, to be sent."""
        return self._dead.setdefault(file.number, self._journal.end) <= self._settled_end()

    def _delete(self, file: BucketFile) -> None:
        self._rows.free(self._rows.of_file(file.number))
        self._forget(file.number)

    def _forget(self, number: int) -> None:
        self._journal.gone.pop(number, None)
        self._dead.pop(number, None)
        self._repairs.forget(number)

    def _settled_end(self) -> int:
        """What was decided before it stays decided: neither a crash nor another master undoes it."""
        log = self._store.actions.log
        return min(log.synced_end, log.committed_end)
