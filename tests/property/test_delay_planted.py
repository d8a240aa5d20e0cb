"""The model finds what it is for: each of these delay servers has one fault, the first two known from QMQ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairway.delay.dispatch.dispatcher import Dispatcher, Intent
from fairway.delay.dispatch.log import EventKind
from fairway.delay.engine import Engine
from fairway.delay.maintenance import BucketSplit, Memory
from fairway.delay.pending_messages import PendingMessages
from fairway.delay.recovery import Loader
from fairway.delay.schedule.append import ScheduleAppender
from fairway.delay.schedule.bucket_file import BucketFile, Catalogue
from fairway.delay.schedule.log import ScheduleLog
from fairway.delay.schedule.manifest import TimeRange
from fairway.delay.schedule.pending_rows import RowNumbers
from fairway.delay.schedule.wheel import DueTimes
from fairway.errors import FairwayError
from fairway.runtime.clock import Timekeeper
from fairway.storage.flusher import Defer
from tests.property.delay_story import Story

SEEDS = 40


class LosesWhatComesWhileLoading(Engine):
    """An append into a bucket that is being loaded is in neither wheel nor file."""

    def _new_appender(self, defer: Defer) -> ScheduleAppender:
        appender = super()._new_appender(defer)
        take_all = appender.take

        def take(*args: Any) -> None:
            take_all(*args)
            if len(args) == 4 and not self.is_loaded:
                self.rows.state[appender.admit()] = 0

        appender.take = take  # type: ignore[assignment,method-assign]
        return appender


class _ToTheEnd(Loader):
    def step(self) -> None:
        self._todo = [(file, file.synced_end, at) for file, _, at in self._todo]
        super().step()


class LoadsWhatCameWhileLoading(Engine):
    """An append into a bucket that is being loaded is in both."""

    def on_time(self) -> list[Intent]:
        if self._recovery._loader is not None:
            self._recovery._loader.__class__ = _ToTheEnd
        return super().on_time()


class SendsBeforeTheSync(Engine):
    def _intended(self, intent: Intent, end: int) -> None:
        self._ready.append(intent)


class _Ahead(Timekeeper):
    def now_ms(self) -> int:
        return super().now_ms() + 20


class IsEarly(Engine):
    def on_time(self) -> list[Intent]:
        self._time.__class__ = _Ahead
        return super().on_time()


class _CancelsInMemory(PendingMessages):
    def _append(self, kind: EventKind, chosen: RowNumbers, time_ms: int) -> int:
        return self._journal.end


class ForgetsCancels(Engine):
    """Cancelled, until the next crash."""

    def _questions(self) -> PendingMessages:
        self._pending.__class__ = _CancelsInMemory
        return super()._questions()


class _CountsAtOnce(ScheduleAppender):
    def _append(self, *args: Any) -> None:
        super()._append(*args)
        if self._moves:
            self.moved_end = self._moves[-1].end


class CountsAsMovedWhatIsNotSynced(Engine):
    def on_time(self) -> list[Intent]:
        self._appender.__class__ = _CountsAtOnce
        return super().on_time()


class _ListsAtOnce(ScheduleLog):
    def create(self, span: TimeRange, *, of_split: bool = False) -> BucketFile:
        return super().create(span)


class ListsBothSidesOfASplit(Engine):
    """The manifest names the new buckets while it still names the old one."""

    def on_time(self) -> list[Intent]:
        self.log.__class__ = _ListsAtOnce
        return super().on_time()


class _Hasty(BucketSplit):
    def step(self, now_ms: int, moved_end: int) -> None:
        super().step(now_ms, moved_end)
        self._todo = self._todo[:0] if self._todo is not None and self._gatherings else self._todo


class SwitchesTooEarly(Engine):
    """A split names the new buckets before everything is in them."""

    def on_time(self) -> list[Intent]:
        if self._housekeeper._split is not None:
            self._housekeeper._split.__class__ = _Hasty
        return super().on_time()


class _OtherBytes(Dispatcher):
    def remade(self, event: Any) -> Intent | None:
        intent = super().remade(event)
        return None if intent is None else intent._replace(producer_id=intent.producer_id ^ 1)


class RemakesIntentsUnderAnotherName(Engine):
    def on_time(self) -> list[Intent]:
        self._dispatcher.__class__ = _OtherBytes
        return super().on_time()


class NotesSentInMemory(Engine):
    def sent(self, number: int) -> DueTimes:
        self._journal.intents.pop(number, None)
        return np.zeros(0, np.int64)


class _Forgetful(Memory):
    def _forget(self, rows: RowNumbers, now_ms: int) -> None:
        super()._forget(rows, now_ms)
        self._journal.gone.clear()


class ForgetsWhatItSent(Engine):
    """A row is freed, and no bit says that its message is done with."""

    def on_time(self) -> list[Intent]:
        self._memory.__class__ = _Forgetful
        return super().on_time()


class _Careless(Memory):
    def note(self, rows: RowNumbers, now_ms: int) -> None:
        super().note(rows, now_ms)
        if self._lots:
            self._lots.append(self._lots.pop()._replace(messages_end=0))


class ForgetsBeforeAManifestSaysSo(Engine):
    """What is freed may be moved once more."""

    def on_time(self) -> list[Intent]:
        self._memory.__class__ = _Careless
        return super().on_time()


class _Skipping(Loader):
    def _load_catalogue(self, file: BucketFile, known: Catalogue) -> int:
        return super()._load_catalogue(file, known._replace(previous_at=0)) if known.previous_at else 0


class BelievesInOneCatalogue(Engine):
    """The pieces of the oldest catalogue are never loaded."""

    def on_time(self) -> list[Intent]:
        if self._recovery._loader is not None:
            self._recovery._loader.__class__ = _Skipping
        return super().on_time()


class _GivesUp(ScheduleAppender):
    def _refuse(self, gathering: Any, now_ms: int) -> None:
        self._is_home(dict.fromkeys(self._young, 0), self._log.file_for(gathering.span))


class LosesWhatFindsNoRoom(Engine):
    def on_time(self) -> list[Intent]:
        self._appender.__class__ = _GivesUp
        return super().on_time()


@pytest.mark.parametrize(
    "planted",
    [
        LosesWhatComesWhileLoading,
        LoadsWhatCameWhileLoading,
        SendsBeforeTheSync,
        IsEarly,
        ForgetsCancels,
        CountsAsMovedWhatIsNotSynced,
        ListsBothSidesOfASplit,
        SwitchesTooEarly,
        RemakesIntentsUnderAnotherName,
        NotesSentInMemory,
        ForgetsWhatItSent,
        ForgetsBeforeAManifestSaysSo,
        BelievesInOneCatalogue,
        LosesWhatFindsNoRoom,
    ],
)
def test_a_planted_fault_is_found(planted: type[Engine]) -> None:
    for seed in range(SEEDS):
        try:
            Story(seed, planted).run(steps=120)
        except (AssertionError, FairwayError, KeyError, IndexError):
            return
    raise AssertionError(f"{planted.__name__} passes {SEEDS} stories")


def test_the_stories_go_through_what_they_are_about() -> None:
    stories = [Story(seed) for seed in range(6)]
    for each in stories:
        each.run(steps=120)
    assert sum(each.world.engine._housekeeper.splits for each in stories) > 0
    assert sum(each.refusals for each in stories) > 0
    assert sum(broker.repeats for each in stories for broker in each.world.brokers.values()) > 0
