"""Engine part: what the larger parts of an engine share, the data that all of them work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fairway.delay.dispatch.log import DispatchLog
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.log import BucketRecordCache, ScheduleLog
from fairway.delay.schedule.pending_rows import RowNumbers, Rows
from fairway.delay.schedule.repair import BucketRepair
from fairway.storage.log import Damaged
from fairway.storage.store import Store


@dataclass(frozen=True, slots=True)
class EngineData:
    """The data of an engine, and where its parts report what happens to messages."""

    store: Store
    rows: Rows
    log: ScheduleLog
    journal: DispatchLog
    appender: ScheduleAppender
    record_cache: BucketRecordCache
    repairs: BucketRepair
    messages_per_step: int
    on_done: Callable[[RowNumbers], None]  # these rows are finished
    on_damage: Callable[[Damaged], None]


class EnginePart:
    def __init__(self, data: EngineData) -> None:
        self._data = data
        self._store = data.store
        self._rows = data.rows
        self._log = data.log
        self._journal = data.journal
        self._appender = data.appender
        self._record_cache = data.record_cache
        self._repairs = data.repairs
        self._messages_per_step = data.messages_per_step
        self._on_done = data.on_done
        self._on_damage = data.on_damage
