"""Two stores, one of which follows the other through its bytes, whatever happens to either.

The model is what clients were told: a message is *confirmed* once the master answered. Whoever leads has all of that,
for ever; a copy that has caught up has the same bytes, the same views and the same groups.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fairway.errors import DiskFull, StorageFault
from fairway.names import Subject
from fairway.simulation.disk import SimDisk
from fairway.storage.flusher import Flusher
from fairway.storage.recovery import DamageVerdict
from fairway.storage.store import Store
from tests.simulation.checks import picture
from tests.simulation.planted import swapped
from tests.unit.storage.copies import LOGS, Pair, Side, bytes_of
from tests.unit.storage.helpers import messages

SUBJECTS = [Subject(name) for name in ("orders", "bills")]
ENDS = st.sampled_from([SimDisk.crash, SimDisk.crash_process])


class Model(RuleBasedStateMachine):
    """A master and its copy; the copy is in sync whenever it says so."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.pair = Pair(f"copies {seed}")
        self.number = 0
        self.confirmed: dict[Subject, list[bytes]] = {subject: [] for subject in SUBJECTS}
        self.acted: list[int] = []
        self.epoch = 1

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.sim.close()

    # --- what clients do ---------------------------------------------------------------------------------------------

    @rule(which=st.sampled_from([0, 1]), sizes=st.lists(st.integers(0, 400), min_size=1, max_size=3))
    def produce(self, which: int, sizes: list[int]) -> None:
        self.number += 1
        payloads = [b"%d/%d/" % (self.number, index) + b"x" * size for index, size in enumerate(sizes)]
        self.pair.send(payloads, SUBJECTS[which], which + 1)

    @rule(count=st.integers(1, 3))
    def act(self, count: int) -> None:
        numbers = list(range(self.number + 1, self.number + 1 + count))
        self.number += count
        self.pair.act(*numbers)

    # --- what copies do ----------------------------------------------------------------------------------------------

    @rule(ms=st.floats(0, 3))
    def wait(self, ms: float) -> None:
        self.pair.wait(ms / 1_000)

    @rule(bytes_max=st.sampled_from([1, 600, 1 << 20]), chunks=st.integers(1, 8))
    def pass_on(self, bytes_max: int, chunks: int) -> None:
        self.pair.pass_on(bytes_max, chunks)

    @rule()
    def confirm(self) -> None:
        self.pair.confirm()
        self._note_confirmed()

    @rule()
    def begin_catch_up(self) -> None:
        catch_up = self.pair.copy.store._catch_up
        if not catch_up.is_on:
            self.pair.copy.store.begin_catch_up()

    @rule()
    def end_catch_up(self) -> None:
        self.pair.copy.store.end_catch_up()

    @rule(of_copy=st.booleans())
    def checkpoint(self, of_copy: bool) -> None:
        (self.pair.copy if of_copy else self.pair.master).store.checkpoint()

    @rule()
    def catch_up_for_good(self) -> None:
        self.pair.settle()
        self._note_confirmed()
        self._check_same()

    @rule(segments=st.integers(0, 2))
    def let_go(self, segments: int) -> None:
        """The master lets go of its oldest segments, and the copy of the same."""
        self.catch_up_for_good()
        log = self.pair.master.store.messages.log
        base = log.segments[min(segments, len(log.segments) - 1)].base
        for side in (self.pair.master, self.pair.copy):
            side.store.retain_from(base, 0)
        for subject in SUBJECTS:
            left = len(messages(self.pair.master.store, subject))
            kept = self.confirmed[subject]
            self.confirmed[subject] = kept[len(kept) - left :]
        self.pair.wait()
        self._check_same()

    # --- lives -------------------------------------------------------------------------------------------------------

    @rule(rounds=st.integers(2, 8), ms=st.floats(0, 2))
    def copy_dies_with_many_rounds_at_hand(self, rounds: int, ms: float) -> None:
        for number in range(rounds):
            self.produce(number % 2, [300, 300])
            self.pair.wait(0.01)
        self.pair.pass_on(1 << 20)
        self.pair.wait(ms / 1_000)
        self.copy_dies(SimDisk.crash)

    @rule(how=ENDS)
    def copy_dies(self, how: object) -> None:
        self._end(self.pair.copy, how)
        store = self.pair.copy.open(follows=True, adopt=self.pair.master.store.identity)
        assert all(each.verdict is DamageVerdict.TORN for each in store.findings)

    @rule()
    def copy_finds_no_room(self) -> None:
        self.pair.wait()
        self.pair.copy.disk.fail_write()
        with suppress(StorageFault):
            self.pair.pass_on()
        self.pair.wait()
        self.pair.copy.disk.fail_write(0)
        if self.pair.copy.store.fault is not None:
            assert isinstance(self.pair.copy.store.fault, DiskFull)
            self.pair.copy.abandon()
            assert self.pair.copy.open(follows=True).findings == []

    @rule(how=ENDS)
    def master_dies_and_leads_again(self, how: object) -> None:
        """It may have lost what it did not sync; its copy never has more than it had synced."""
        self._end(self.pair.master, how)
        self.epoch += 1
        self.pair.master.open(epoch=self.epoch)
        self.pair.master.store.hold()
        self._go_on_from(self.pair.master.store)

    @rule(how=ENDS, is_killed=st.booleans())
    def copy_takes_over(self, how: object, is_killed: bool) -> None:
        """The old master comes back as a copy, cut to where the histories part."""
        copy = self.pair.copy.store
        if copy._catch_up.is_on:
            return  # nobody would elect it
        told = self.pair.master.store.committed_ends()
        assert all(mine >= end for mine, end in zip(copy.ends(), told, strict=True))
        if is_killed:
            self._end(self.pair.master, how)
        else:
            self.pair.master.abandon()
        self.pair.master, self.pair.copy = self.pair.copy, self.pair.master
        self.epoch += 1
        self.pair.master.store.lead(self.epoch)
        self.pair.wait()
        old = self.pair.copy.open(follows=True)
        ends = [_shared_end(old, self.pair.master.store, log) for log in range(len(LOGS))]
        assert all(end >= covered for end, covered in zip(ends, old.checkpointed_ends(), strict=True))
        if ends != list(old.ends()):
            self.pair.copy.cut(*ends)
            assert self.pair.copy.store.findings == []
        self._go_on_from(self.pair.master.store)

    def _end(self, side: Side, how: object) -> None:
        side.end(SimDisk.crash if how is SimDisk.crash else SimDisk.crash_process)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_confirmed_is_lost(self) -> None:
        if hasattr(self, "pair"):
            master, copy = self.pair.master.store, self.pair.copy.store
            for subject in SUBJECTS:
                shown, of_copy = list(messages(master, subject).values()), list(messages(copy, subject).values())
                assert len(of_copy) <= max(len(shown), len(self.confirmed[subject]))
                both = min(len(shown), len(of_copy))
                assert shown[:both] == of_copy[:both]

    def _note_confirmed(self) -> None:
        for subject in SUBJECTS:
            shown = list(messages(self.pair.master.store, subject).values())
            before = self.confirmed[subject]
            assert shown[: len(before)] == before
            self.confirmed[subject] = shown

    def _go_on_from(self, store: Store) -> None:
        """Streams and views go on from what the new leader has, which is at least what was confirmed."""
        self.pair.settle()
        self._note_confirmed()
        self._check_same()
        streams = store.messages.views.dedupe._streams
        self.pair.sequences = {producer: stream.next for producer, stream in streams.items()}

    def _check_same(self) -> None:
        master, copy = self.pair.master, self.pair.copy
        assert bytes_of(copy) == bytes_of(master)
        assert picture(copy.store.messages.views) == picture(master.store.messages.views)
        assert copy.view.found == master.view.found
        assert self.acted == copy.view.found[: len(self.acted)]
        self.acted = list(copy.view.found)


def _shared_end(one: Store, other: Store, log: int) -> int:
    """By halving, as a copy asks its master."""
    places = one.tail_positions(log)
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if one.marks(log, [places[middle]]) == other.marks(log, [places[middle]]):
            low = middle + 1
        else:
            high = middle
    return places[low] if low < len(places) else one.ends()[log]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_crash_that_takes_the_first_segment_and_leaves_the_next_leaves_an_empty_copy() -> None:
    """Neither was synced. The file that is left says nothing of what was before it."""
    model = Model()
    model.begin(seed=1)
    try:
        model.copy_dies_with_many_rounds_at_hand(rounds=3, ms=0.625)
        model.copy_dies_with_many_rounds_at_hand(rounds=2, ms=0.0)
        model.catch_up_for_good()
        model.nothing_confirmed_is_lost()
    finally:
        model.teardown()


def _search() -> None:
    search = settings(max_examples=300, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate])
    run_state_machine_as_test(Model, settings=search)


def test_a_master_that_answers_before_its_copy_is_caught() -> None:
    with swapped(Flusher, "hold", lambda *_: None), pytest.raises(AssertionError):
        _search()


def test_a_copy_that_merges_rounds_is_caught() -> None:
    with swapped(Flusher, "part", lambda *_: None), pytest.raises(AssertionError):
        _search()
