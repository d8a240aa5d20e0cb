"""The items of a forwarder on a disk that loses power: what was on disk or is in memory is forwarded, in the end."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.client.forwarder_buffer import ForwarderBuffer, ForwarderOptions, Item
from fairway.client.spool.journal import Journal
from fairway.errors import BufferFull
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk, SimulatedPowerCut

STEPS = 300
SEGMENT_BYTES = 2_000


class ForwarderWorld:
    """A forwarder through as many lives as fate gives it."""

    def __init__(self, seed: int) -> None:
        self.rng = SeededRng(seed)
        self.clock = ManualClock()
        self.disks: dict[int, SimDisk] = {}
        self.safe: set[bytes] = set()  # those that `persist` has confirmed
        self.ended: Counter[bytes] = Counter()
        self.forwarded: list[bytes] = []
        self.names: dict[bytes, set[tuple[int, int]]] = {}  # under which each was forwarded
        self.accepted: list[bytes] = []
        self.lives = 0
        self._timers: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self.begin()

    @property
    def now_ns(self) -> int:
        return self.clock.monotonic_ns()

    def begin(self) -> None:
        self.lives += 1
        rng = self.rng.child(f"life-{self.lives}")
        before = [self._reopened(number, disk) for number, disk in self.disks.items()]
        number = rng.bits(64)
        self.disks[number] = SimDisk(rng.child("disk"), self._call_later)
        options: ForwarderOptions[bytes] = ForwarderOptions(
            capacity=1 + rng.below(20),
            when_full=("block", "spool")[rng.below(2)],
            journal="journal",
            persist_after=(0.01, 0.2)[rng.below(2)],
            persist_items=rng.below(12),
            attempts=2,
            backoff_first_ms=1,
        )
        self.unheld_lots = ForwarderBuffer(
            options,
            self.clock,
            rng.child("stock"),
            journal=Journal(self.disks[number], number, self.clock, segment_bytes=SEGMENT_BYTES),
            on_change=lambda: None,
            on_finished=self._finished,
        )
        self.at_work: list[Item[bytes]] = []
        self.living: set[bytes] = set()  # accepted in this life
        found = [each for each in before if not each.is_empty]
        for each in before:
            if each.is_empty:
                del self.disks[each.number]
        self._call_later(rng.below(2) * 0.05, self.unheld_lots.adopt, found)

    def _finished(self, journal: Journal) -> None:
        del self.disks[journal.number]

    def _reopened(self, number: int, disk: SimDisk) -> Journal:
        return Journal.open(disk, number, self.clock, segment_bytes=SEGMENT_BYTES)

    def die(self) -> None:
        self._timers.clear()
        has_power = self.rng.below(2)
        for number, disk in self.disks.items():
            self.disks[number] = disk.crash_process(self._call_later) if has_power else disk.crash(self._call_later)
        self.begin()

    def _call_later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._timers, (self.now_ns + int(seconds * 1e9), next(self._numbers), callback, args))

    def run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now_ns:
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)

    def step(self) -> None:
        chance = self.rng.below(100)
        if chance < 1:
            self.die()
        elif chance < 3:
            next(reversed(self.disks.values())).crash_after(1 + self.rng.below(40))
        elif chance < 40:
            self.accept()
        elif chance < 43:
            self.unheld_lots.persist()
        else:
            self.work()
        self.clock.advance(self.rng.below(12))
        self.run_timers()
        self.unheld_lots.look(self.now_ns)
        if self.unheld_lots.is_kept:
            self.safe |= self.living

    def accept(self) -> None:
        item = b"%d:" % len(self.accepted) + bytes(self.rng.below(60))
        with suppress(BufferFull):
            self.unheld_lots.accept(item)
            self.accepted.append(item)
            self.living.add(item)

    def work(self, *, is_calm: bool = False) -> None:
        item = self.unheld_lots.take(self.now_ns)
        if item is not None:
            self.at_work.append(item)
        if self.at_work and (is_calm or self.rng.below(2)):
            item = self.at_work.pop(self.rng.below(len(self.at_work)))
            if not is_calm and self.rng.below(5) == 0:
                is_last = item.attempts == 1
                self.unheld_lots.fail(item, LookupError("no"), self.now_ns)
                self.ended[item.value] += is_last
            else:
                self.names.setdefault(item.value, set()).add((item.owner, item.number))
                self.unheld_lots.finish(item, 1)
                self.forwarded.append(item.value)
                self.ended[item.value] += 1

    def heal(self) -> None:
        for disk in self.disks.values():
            disk.crash_after(0)
        for _ in range(20_000):
            if self.unheld_lots.is_drained:
                return
            self.clock.advance(5)
            self.run_timers()
            self.unheld_lots.look(self.now_ns)
            self.work(is_calm=True)
        raise AssertionError(f"it is never drained: {self.unheld_lots.counts()}")


def run(seed: int) -> ForwarderWorld:
    world = ForwarderWorld(seed)
    for _ in range(STEPS):
        try:
            world.step()
        except SimulatedPowerCut:
            world.die()
    world.heal()
    return world


def check(world: ForwarderWorld) -> None:
    assert world.ended.keys() <= set(world.accepted), "nothing is invented"
    owed = world.safe | world.living
    assert owed <= world.ended.keys(), "what was on disk when the power went, or is in memory still, is dealt with"
    assert all(len(names) == 1 for names in world.names.values()), "its messages have the same ids each time"


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_items_on_disk_survive_power_cuts_and_are_all_forwarded(seed: int) -> None:
    check(run(seed))


def test_the_model_meets_crashes() -> None:
    worlds = [run(seed) for seed in range(10)]
    assert sum(world.lives for world in worlds) > 30
    assert sum(len(world.safe) for world in worlds) > 200
    assert any(times > 1 for world in worlds for times in world.ended.values()), "at least once, and no better"


def test_what_the_dead_left_goes_first_and_in_order() -> None:
    for seed in range(20):
        world = ForwarderWorld(seed)
        for _ in range(2):
            for _ in range(30):  # before it is known what is there, too
                world.accept()
            for _ in range(20):
                world.clock.advance(10)
                world.run_timers()
                world.unheld_lots.persist()
            world.die()
        world.accept()
        world.heal()
        assert world.forwarded == world.accepted
