"""Durability `memory`: answered when written, synced by and by; honest about what is synced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway import limits
from fairway.errors import Code, Refused, StorageFault
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.storage.flusher import Durability, Flusher
from fairway.storage.subjects import SubjectTable
from tests.unit.runtime.timers import Timers
from tests.unit.storage.helpers import BILLS, ORDERS, SMALL, World, ack, messages
from tests.unit.storage.test_flusher import Bench

MEMORY = replace(SMALL, durability=Durability.MEMORY)
SEEDS = range(40)


class LazyBench(Bench):
    def __init__(self, capacity_bytes: int = limits.GIB) -> None:
        super().__init__()
        self.timers = Timers()
        self.disk = SimDisk(SeededRng(0), self.timers.call_later, capacity_bytes=capacity_bytes)
        self.flusher = Flusher(
            self.disk,
            self.clock,
            0,
            defer=lambda callback: self.timers.call_later(0, callback),
            on_full=self.undone.append,
            on_progress=self._progressed,
            durability=Durability.MEMORY,
        )
        self.file = self.disk.open("log/a", create=True)


# --- the flusher -----------------------------------------------------------------------------------------------------


def test_an_answer_does_not_wait_for_a_sync() -> None:
    bench = LazyBench()
    bench.add("a")
    bench.timers.ring_all()
    assert bench.answers == [("a", None)]
    assert (bench.flusher.committed_end, bench.flusher.synced_end, bench.flusher.syncs) == (8, 0, 0)
    assert (bench.flusher.unsynced_bytes, bench.flusher.uncommitted_bytes) == (8, 0)


def test_sync_syncs_what_was_gathered_and_only_once() -> None:
    bench = LazyBench()
    bench.add("a")
    bench.flusher.sync()
    bench.timers.ring_all()
    assert (bench.flusher.synced_end, bench.flusher.syncs) == (8, 1)
    bench.flusher.sync()
    bench.timers.ring_all()
    assert bench.flusher.syncs == 1


def test_who_waits_for_a_sync_gets_one_and_it_waits_for_what_is_gathered() -> None:
    bench = LazyBench()
    bench.add("a")
    bench.flusher.when_synced(8, bench.note("synced"))
    bench.timers.ring_all()
    assert bench.answers == [("a", None), ("synced", None)]
    bench.flusher.when_synced(8, bench.note("at once"))
    assert bench.answers[-1] == ("at once", None)


def test_what_must_be_synced_is_answered_with_its_sync_and_so_is_what_follows() -> None:
    bench = LazyBench()
    bench.flusher.add(bench.file, b"12345678", must_sync=True)
    bench.flusher.when_durable(8, bench.note("statement"))
    bench.timers.ring_one()  # the deferred start,
    bench.timers.ring_one()  # after a turn that brings nothing more
    bench.add("behind")
    while not bench.answers:
        assert bench.flusher.committed_end == 0
        bench.timers.ring_one()
    assert bench.answers[0] == ("statement", None)
    assert bench.flusher.synced_end == 8
    bench.timers.ring_all()
    assert bench.answers[1:] == [("behind", None)]


def test_a_file_is_synced_before_the_next_one_begins() -> None:
    bench = LazyBench()
    bench.add("a")
    bench.timers.ring_all()
    bench.file = bench.disk.open("log/b", create=True)
    bench.add("b")
    bench.timers.ring_all()
    assert (bench.flusher.synced_end, bench.flusher.committed_end) == (8, 16)


def test_too_much_is_not_left_unsynced() -> None:
    bench = LazyBench()
    for _ in range(3):
        bench.add("large", bytes(limits.UNSYNCED_BYTES_MAX // 2))
        bench.timers.ring_all()
    assert bench.flusher.synced_end == limits.UNSYNCED_BYTES_MAX


def test_a_full_disk_undoes_what_was_not_written_and_a_waiting_sync_hears_of_it() -> None:
    bench = LazyBench(capacity_bytes=limits.MIB)
    bench.add("fits")
    bench.timers.ring_all()
    bench.add("too large", bytes(2 * limits.MIB))
    bench.flusher.when_synced(bench.flusher.gathered_end, bench.note("sync"))
    bench.timers.ring_all()
    told = dict(bench.answers)
    assert told["fits"] is None
    for name in ("too large", "sync"):
        error = told[name]
        assert isinstance(error, Refused)
        assert error.code is Code.READ_ONLY
    assert bench.undone == [8]
    bench.add("after")
    bench.flusher.sync()
    bench.timers.ring_all()
    assert bench.flusher.synced_end == 16


def test_a_failed_sync_poisons_although_all_was_answered() -> None:
    bench = LazyBench()
    bench.add("a")
    bench.timers.ring_all()
    bench.disk.fail_sync()
    bench.flusher.when_synced(8, bench.note("synced"))
    bench.timers.ring_all()
    assert isinstance(bench.answers[-1][1], StorageFault)
    assert bench.flusher.fault is not None
    bench.flusher.when_synced(8, bench.note("again"))
    assert bench.answers[-1] == ("again", bench.flusher.fault)


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_death_of_the_process_loses_nothing(seed: int) -> None:
    with World(seed, options=MEMORY) as world:
        sent = [b"%d" % number for number in range(12)]
        for payload in sent:
            world.produce([payload])
        world.act(ack(0))
        world.kill()
        store = world.open()
        assert list(messages(store).values()) == sent


def test_the_record_and_the_checkpoint_name_only_what_is_synced() -> None:
    with World(options=MEMORY) as world:
        world.produce([b"a"])
        log = world.store.messages.log
        synced = log.synced_end
        receipt = world.produce([b"b"])
        assert log.synced_end == synced < receipt.end == log.committed_end
        world.checkpoint()
        assert world.store._picture().messages.end == log.synced_end


def _one_life(world: World, life: int, shown: dict[tuple[str, int], bytes]) -> None:
    """Produce, with syncs and checkpoints now and then; what was answered may have been seen by anybody."""
    rng = world.sim.rng.child(f"life {life}")
    for number in range(10):
        subject = (ORDERS, BILLS)[rng.below(2)]
        producer = 100 * life + rng.below(3) + 1
        payloads = [b"%d/%d/%d" % (life, number, each) for each in range(1 + rng.below(20))]
        receipt = world.produce(payloads, subject, producer=producer * (1 if subject is ORDERS else 1_000))
        for offset, payload in enumerate(payloads):
            name = (str(subject), receipt.first_sequence + offset)
            assert shown.setdefault(name, payload) == payload, f"{name} names two messages"
        if rng.below(4) == 0:
            world.store.sync()
        if rng.below(6) == 0:
            world.checkpoint()


def _stored(world: World) -> dict[tuple[str, int], bytes]:
    found = ((subject, messages(world.store, subject)) for subject in (ORDERS, BILLS))
    return {(str(subject), sequence): data for subject, each in found for sequence, data in each.items()}


def _forget_claims(world: World) -> None:
    """The bug that is planted: go on behind what is stored."""
    for state in world.store.messages.views.subjects:
        used = [sequence for name, sequence in _stored(world) if name == state.name]
        world.store.messages.views.subjects.rewind(state.id, max(used, default=-1) + 1)


def _lives(seed: int, *, is_forgetful: bool = False) -> None:
    shown: dict[tuple[str, int], bytes] = {}
    with World(seed, options=MEMORY) as world:
        for life in range(4):
            _one_life(world, life, shown)
            assert _stored(world).items() <= shown.items()
            world.crash()
            # Whoever comes next may promise more: what the last life left behind holds for it too.
            world.open(SMALL if seed % 3 == 0 and life == 1 else MEMORY)
            if is_forgetful:
                _forget_claims(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_takes_messages_but_never_their_sequences(seed: int) -> None:
    _lives(seed)


def test_the_test_above_finds_a_sequence_that_is_used_twice() -> None:
    found = 0
    for seed in SEEDS:
        try:
            _lives(seed, is_forgetful=True)
        except AssertionError:
            found += 1
    assert found


def test_a_clean_stop_leaves_no_gap() -> None:
    with World(options=MEMORY) as world:
        world.produce([b"a", b"b"])
        world.reopen()
        assert world.produce([b"c"], producer=2).first_sequence == 2


def test_a_power_cut_leaves_a_gap_of_what_was_claimed() -> None:
    with World(options=MEMORY) as world:
        world.produce([b"a", b"b"])
        world.crash()
        world.open()
        assert world.produce([b"c"], producer=2).first_sequence == limits.SEQUENCES_AHEAD


def test_an_undone_claim_is_made_again() -> None:
    table = SubjectTable()
    state = table.introduce(ORDERS, 0)
    state.ceiling = 50
    table.cut(8)
    assert state.ceiling == 0


def test_nothing_is_claimed_where_an_answer_means_synced() -> None:
    with World() as world:
        world.produce([b"a"])
        world.crash()
        world.open()
        assert world.produce([b"b"], producer=2).first_sequence == 1
