"""Two copies of a delay server against a model, on virtual time; and the model finds what it is for: each of the
planted delay servers follows, or comes to lead, with one fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.engine import Engine
from fairway.delay.maintenance import DelayMaintenance
from fairway.delay.recovery import Recovery
from fairway.delay.replica import DelayReplica
from fairway.delay.schedule.pending_rows import RowState
from fairway.errors import FairwayError
from fairway.storage.record import Record
from tests.property.delay_pair_story import PairStory
from tests.unit.delay.test_replica import cancel_alone, change_masters, follow_without_room

SEEDS = 60


@pytest.mark.parametrize("seed", range(3))
def test_each_message_goes_out_once_never_early_and_never_after_cancelled(seed: int) -> None:
    PairStory(seed).run(steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 60))
def test_the_same_in_longer_lives(seed: int) -> None:
    PairStory(seed).run(steps=150)


class _ImpatientFollowing(DelayReplica):
    def _next(self, now_ms: int) -> tuple[list[Record], int]:
        log = self._store.messages.log
        committed_end, log.flusher.committed_end = log.committed_end, log.synced_end
        try:
            return super()._next(now_ms)
        finally:
            log.flusher.committed_end = committed_end

    @property
    def is_behind(self) -> bool:
        return self._is_loaded and self._store.messages.log.synced_end > self.at


class MovesWhatIsNotCommitted(Engine):
    def on_time(self) -> list[Intent]:
        if self._following is not None:
            self._following.__class__ = _ImpatientFollowing
        return super().on_time()


class _Hasty(DelayReplica):
    def _prune(self) -> None:
        for subject_id in self._decision_index.subjects:
            self._decision_index.prune(subject_id, 1 << 62)


class DropsDecisionsWhoseMessagesAreNotHere(Engine):
    def on_time(self) -> list[Intent]:
        if self._following is not None:
            self._following.__class__ = _Hasty
        return super().on_time()


class _Twice(DelayReplica):
    def _known_of(self, found: Iterable[Record]) -> dict[int, NDArray[np.uint64]]:
        return {}


class MovesWhatIsInABucketAlready(Engine):
    def on_time(self) -> list[Intent]:
        if self._following is not None:
            self._following.__class__ = _Twice
        return super().on_time()


class LeadsBeforeItKnowsWhatWasDecided(Engine):
    def lead(self) -> None:
        self._journal.heard = []
        super().lead()


class _Forgetful(Recovery):
    def _begin_to_lead(self) -> None:
        self._appender.begin_tail(self._tail_end)


class RemakesNoIntents(Engine):
    def lead(self) -> None:
        self._recovery.__class__ = _Forgetful
        super().lead()


class SendsBeforeTheCopyHasIt(Engine):
    """An intent goes out when it is synced here."""

    def _intended(self, intent: Intent, end: int) -> None:
        def synced(outcome: FairwayError | None) -> None:
            if outcome is None:
                self._ready.append(intent)

        self.store.actions.log.flusher.when_synced(end, synced)


class _Trusting(DelayMaintenance):
    def _settled_end(self) -> int:
        return self._store.actions.log.end


class DropsDataByWhatMayBeUndone(Engine):
    def on_time(self) -> list[Intent]:
        self._housekeeper.__class__ = _Trusting
        return super().on_time()


class LetsGoOfWhatIsInNoBucket(Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store.keeps_from = lambda: None


class LosesWhatWasLeftToTake(Engine):
    """The tail of the message log is not moved when it comes to lead."""

    def lead(self) -> None:
        if self._following is not None:
            self._following.at = self.store.messages.log.end
        super().lead()


class PicturesOnlyRows(Engine):
    """A checkpoint says nothing of messages that have no row yet."""

    def on_time(self) -> list[Intent]:
        self._journal.unmatched = tuple
        return super().on_time()


class _Deaf(DelayReplica):
    def _begin(self) -> None:
        self._journal.heard = [each for each in self._journal.heard or () if each.state is not RowState.PENDING]
        super()._begin()


class ForgetsNewDueTimes(Engine):
    def on_time(self) -> list[Intent]:
        if self._following is not None:
            self._following.__class__ = _Deaf
        return super().on_time()


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [
        MovesWhatIsNotCommitted,
        DropsDecisionsWhoseMessagesAreNotHere,
        MovesWhatIsInABucketAlready,
        LeadsBeforeItKnowsWhatWasDecided,
        RemakesNoIntents,
        SendsBeforeTheCopyHasIt,
        LosesWhatWasLeftToTake,
        PicturesOnlyRows,
    ],
)
def test_a_planted_fault_is_found(planted: type[Engine]) -> None:
    for seed in range(SEEDS):
        try:
            PairStory(seed, planted).run(steps=120)
        except (AssertionError, FairwayError, KeyError, IndexError):
            return
    raise AssertionError(f"{planted.__name__} passes {SEEDS} stories")


@pytest.mark.parametrize(
    ("planted", "scene"),
    [
        (DropsDataByWhatMayBeUndone, cancel_alone),
        (LetsGoOfWhatIsInNoBucket, follow_without_room),
        (ForgetsNewDueTimes, change_masters),
    ],
)
def test_a_planted_fault_that_needs_a_history_of_its_own_is_found(
    planted: type[Engine], scene: Callable[[type[Engine]], None]
) -> None:
    with pytest.raises(AssertionError):
        scene(planted)


@pytest.mark.slow
def test_the_stories_go_through_what_they_are_about() -> None:
    stories = [PairStory(seed) for seed in range(8)]  # repeats come with the fifth
    for each in stories:
        each.run(steps=60)
    assert sum(each.reigns for each in stories) > 10
    assert sum(each.pair.cuts for each in stories) > 0
    assert sum(each.pair.splits for each in stories) > 0
    assert sum(side.refills for each in stories for side in (each.pair.master, each.pair.copy)) > 0
    assert sum(broker.repeats for each in stories for broker in each.pair.brokers.values()) > 0
