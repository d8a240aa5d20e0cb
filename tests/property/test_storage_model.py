"""The store against a naive model: whatever is done to it, in whatever order, and however often its power is cut.

The model is a list of payloads per subject. A batch is *sent* when `produce` has returned, *confirmed* when its receipt
was durable. After a power cut the store must hold all that was confirmed, may hold what was sent, and holds nothing
else; what it holds once it has recovered is there for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fairway.errors import Code, FairwayError, Refused
from fairway.names import Subject
from fairway.storage.action_log import Action
from fairway.storage.record import Record
from fairway.storage.recovery import DamageVerdict
from tests.unit.storage.helpers import SMALL, World, ack, actions_in, batch_of, messages, names, records_of

SUBJECTS = [Subject(name) for name in ("orders", "bills", "letters")]
PRODUCERS = range(1, 5)  # each feeds one subject


class Model(RuleBasedStateMachine):
    """One data directory, and what it should hold."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.world = self.made(seed)
        self.sent: dict[Subject, list[bytes]] = {subject: [] for subject in SUBJECTS}
        self.confirmed: dict[Subject, int] = dict.fromkeys(SUBJECTS, 0)
        self.batches: dict[int, list[tuple[int, list[bytes]]]] = {producer: [] for producer in PRODUCERS}
        self.acts: list[Action] = []
        self.acted = 0

    def made(self, seed: int) -> World:
        return World(f"model {seed}", options=SMALL)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.sim.close()

    # --- what a client does ----------------------------------------------------------------------------------------

    @rule(producer=st.sampled_from(PRODUCERS), sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4))
    def produce(self, producer: int, sizes: list[int]) -> None:
        subject = _subject(producer)
        first = self._next(producer)
        payloads = [b"%d/%d/" % (producer, first + index) + b"x" * size for index, size in enumerate(sizes)]
        receipt = self.world.store.produce(subject, batch_of(payloads, producer=producer, first=first))
        assert (receipt.first_sequence, receipt.is_duplicate) == (len(self.sent[subject]), False)
        self.batches[producer].append((receipt.first_sequence, payloads))
        self.sent[subject] += payloads

    @rule(producer=st.sampled_from(PRODUCERS), which=st.integers(0, 63))
    def send_again(self, producer: int, which: int) -> None:
        stored = self.batches[producer]
        if stored:
            index = max(len(stored) - 1 - which % 8, 0)
            first = sum(len(payloads) for _, payloads in stored[:index])
            data = batch_of(stored[index][1], producer=producer, first=first)
            receipt = self.world.store.produce(_subject(producer), data)
            assert (receipt.first_sequence, receipt.is_duplicate) == (stored[index][0], True)

    @rule(producer=st.sampled_from(PRODUCERS), skip=st.integers(1, 5))
    def leave_a_gap(self, producer: int, skip: int) -> None:
        data = batch_of([b"?"], producer=producer, first=self._next(producer) + skip)
        with pytest.raises(Refused) as caught:
            self.world.store.produce(_subject(producer), data)
        assert caught.value.code is (Code.SEQUENCE_GAP if self.batches[producer] else Code.UNKNOWN_PRODUCER)

    @rule(count=st.integers(1, 3), size=st.integers(0, 200))
    def act(self, count: int, size: int) -> None:
        actions = [ack(len(self.acts) + index, detail=b"d" * size) for index in range(count)]
        self.world.store.act(actions)
        self.acts += actions

    # --- what time does ----------------------------------------------------------------------------------------------

    @rule(ms=st.floats(0, 3))
    def wait(self, ms: float) -> None:
        self.world.run(asyncio.sleep(ms / 1_000))
        self._note_confirmed()

    @rule()
    def flush(self) -> None:
        self.world.settle()
        self._note_confirmed()
        assert self.confirmed == {subject: len(payloads) for subject, payloads in self.sent.items()}
        assert self.acted == len(self.acts)

    @rule()
    def checkpoint(self) -> None:
        self.world.store.checkpoint()

    @precondition(lambda self: any(self.sent.values()))
    @rule(lost=st.sampled_from(["checkpoints", "index"]))
    def lose_a_view(self, lost: str) -> None:
        """Between two lives somebody deletes what can be made again."""
        self.flush()
        self.world.close()
        for name in names(self.world.disk, lost):
            self.world.disk.remove(name)
        self.world.open()
        assert self.world.store.findings == []

    # --- lives -------------------------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.world.reopen()
        assert self.world.store.findings == []
        self._reconcile()
        assert self.confirmed == {subject: len(payloads) for subject, payloads in self.sent.items()}

    @rule(end=st.sampled_from([World.crash, World.kill]))
    def die(self, end: Callable[[World], None]) -> None:
        self._note_confirmed()
        end(self.world)
        self.world.open()
        assert all(each.verdict is DamageVerdict.TORN for each in self.world.store.findings)
        self._reconcile()

    @rule()
    def find_no_room(self) -> None:
        """The next write finds no room: what was not committed is undone, and nothing else."""
        self.world.settle()
        self._note_confirmed()
        self.world.disk.fail_write()
        self.produce(1, [10])
        self.world.settle_undone()
        self.world.disk.fail_write(0)
        self._reconcile()

    @invariant()
    def shows_what_is_committed(self) -> None:
        if hasattr(self, "world"):
            for subject in SUBJECTS:
                shown = messages(self.world.store, subject)
                assert list(shown) == list(range(len(shown)))
                assert list(shown.values()) == self.sent[subject][: len(shown)]
                assert len(shown) >= self.confirmed[subject]

    # --- the model ---------------------------------------------------------------------------------------------------

    def _next(self, producer: int) -> int:
        return sum(len(payloads) for _, payloads in self.batches[producer])

    def _note_confirmed(self) -> None:
        for subject in SUBJECTS:
            self.confirmed[subject] = max(self.confirmed[subject], len(messages(self.world.store, subject)))
        committed = self.world.store.actions.log.committed_end
        self.acted = max(self.acted, len(self._acts_on_disk(committed)))

    def _acts_on_disk(self, below: int) -> list[Action]:
        disk, log_id = self.world.disk, self.world.store.identity.actions_id
        found: list[Record] = []
        for name in names(disk, "actions"):
            if name.endswith(".log"):
                found += records_of(disk, name, log_id)
        return actions_in(each for each in found if each.header.end <= below)

    def _reconcile(self) -> None:
        """Something ended: what is left is what the model goes on with, if it may be left."""
        self.world.settle_undone()
        acts = self._acts_on_disk(self.world.store.actions.log.committed_end)
        assert acts == self.acts[: len(acts)]
        assert len(acts) >= self.acted
        self.acts, self.acted = acts, len(acts)
        for subject in SUBJECTS:
            left = list(messages(self.world.store, subject).values())
            assert left == self.sent[subject][: len(left)]
            assert len(left) >= self.confirmed[subject]
            self.sent[subject], self.confirmed[subject] = left, len(left)
        for producer, stored in self.batches.items():
            count = len(self.sent[_subject(producer)])
            self.batches[producer] = [(first, payloads) for first, payloads in stored if first < count]


def _subject(producer: int) -> Subject:
    return SUBJECTS[producer % len(SUBJECTS)]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Unsynced(Model):
    """The planted bug: a disk that says that it has synced, and has not."""

    def made(self, seed: int) -> World:
        world = super().made(seed)
        world.disk.syncing = False
        return world


def test_the_model_notices_a_disk_that_lies() -> None:
    # The failures of one run differ in kind: messages that are lost, a directory that is not ours any more.
    with pytest.raises((AssertionError, FairwayError, ExceptionGroup)):
        run_state_machine_as_test(
            Unsynced, settings=settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate], database=None)
        )
