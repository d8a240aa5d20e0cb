"""The world of `producing_world`, whose producer has a spool on a disk that loses power, and dies and lives again.

The disk tears writes, loses what was not synced, is full now and then. The process is killed too, with the page cache
left as it is. In its next life it finds the journals of the earlier ones, and drains them first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from fairway import batch
from fairway.client.spool import Spool, SpoolOptions
from fairway.client.spool_aside import Aside
from fairway.client.spool_journal import Journal
from fairway.limits import GIB
from fairway.protocol.line import Line
from fairway.protocol.pending import SpoolBatchReceipt
from fairway.protocol.producing import ProducerOptions, Producing
from fairway.world.sim_disk import SimDisk, SimulatedPowerCut
from tests.property.producing_world import World

SEGMENT_BYTES = 3_000


class SpoolWorld(World):
    """One producer through as many lives as fate gives it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._timers: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self.disks: dict[int, SimDisk] = {}  # by journal
        self.lives = 0
        self.power_cuts = 0
        self.life_of: list[int] = []  # of each message in `sent`
        self.asides: list[tuple[Aside, list[bytes]]] = []
        self.begin()

    # --- lives

    def begin(self) -> None:
        """The process starts, and finds what is there."""
        self.lives += 1
        rng = self.rng.child(f"life-{self.lives}")
        self.line = Line(rng.child("line"), now_ns=self.now_ns, on_trouble=self._trouble)
        options = ProducerOptions(
            batch_messages_max=1 + rng.below(6),
            window=1 + rng.below(8),
            delivery_timeout_ms=(2_000, 60_000)[rng.below(2)],
            buffer_messages_max=200,
            when_full="spool",
        )
        self.producing = Producing(self.clock, rng.child("producer"), options, run_later=self.line.run_later)
        self.line.add(self.producing, self.now_ns)
        number = rng.bits(64)
        before = [self._reopened(number, disk) for number, disk in self.disks.items()]
        self.disks[number] = SimDisk(rng.child("disk"), self._call_later, capacity_bytes=(160_000, GIB)[rng.below(2)])
        spool_options = SpoolOptions(
            "spool",
            after_ms=(5, 40, 200)[rng.below(3)],
            buffer_messages=(5, 40, 1_000)[rng.below(3)],
            bytes_max=(6_000, 1_000_000)[rng.below(2)],
        )
        self.own = Journal(self.disks[number], number, self.clock, segment_bytes=SEGMENT_BYTES)
        self.spool = Spool(
            spool_options,
            self.own,
            self.clock,
            rng.child("spool"),
            is_connected=lambda: self.line.is_open,
            on_change=lambda: None,
            on_success=self.producing.note_success,
            on_finished=self._finished,
        )
        self.producing.divert(self.spool)
        self.line.add(self.spool.draining, self.now_ns)
        before.sort(key=lambda journal: journal.since_ms)
        found = [each for each in before if not each.is_empty]
        self._call_later(rng.below(3) * 0.1, self.spool.adopt, found)  # to read them takes a while
        for each in before:
            if each.is_empty:
                self._finished(each)

    def _reopened(self, number: int, disk: SimDisk) -> Journal:
        while True:
            try:
                return Journal.open(disk, number, self.clock, segment_bytes=SEGMENT_BYTES)
            except SimulatedPowerCut:
                disk = self.disks[number] = disk.crash(self._call_later)

    def _finished(self, journal: Journal) -> None:
        self._look_aside(journal)
        del self.disks[journal.number]

    def _look_aside(self, journal: Journal) -> None:
        for name in journal.disk.listing("aside"):
            if not name.endswith(".tmp"):
                note, data = journal.read_aside(name)
                self.asides.append((note, [bytes(each) for each in batch.decode(data).payloads]))

    def die(self, *, has_power: bool) -> None:
        """Killed, or the power goes: what nobody was told of may be anywhere or nowhere."""
        self.power_cuts += not has_power
        with suppress(SimulatedPowerCut):  # the dead do nothing about a lost connection
            self.cut()
        for number, disk in self.disks.items():
            self.disks[number] = disk.crash_process(self._call_later) if has_power else disk.crash(self._call_later)
        self._timers.clear()
        self.producing.give_up("the process died")  # so that nobody waits for an answer in this test
        self.begin()

    # --- time

    def _call_later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._timers, (self.now_ns + int(seconds * 1e9), next(self._numbers), callback, args))

    def run_timers(self, *, is_whole: bool) -> None:
        while self._timers and (is_whole or self._timers[0][0] <= self.now_ns):
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)

    # --- what happens

    def send(self) -> None:
        super().send()
        self.life_of += [self.lives] * (len(self.sent) - len(self.life_of))

    def step(self) -> None:
        try:
            self.mischief()
            super().step()
        except SimulatedPowerCut:
            self.die(has_power=False)

    def mischief(self) -> None:
        chance = self.rng.below(400)
        if chance < 3:
            self.die(has_power=True)
        elif chance < 6:
            self.die(has_power=False)
        elif chance < 12:
            next(reversed(self.disks.values())).crash_after(1 + self.rng.below(30))
        elif chance < 52:
            self.broker.is_away = not self.broker.is_away

    def move(self, *, is_whole: bool = False) -> None:
        self.run_timers(is_whole=is_whole)
        super().move(is_whole=is_whole)

    def _learn(self) -> None:
        for each in self.sent:
            if each.batch.done() and each.batch.exception() is None:
                receipt = each.batch.receipt()
                if not isinstance(receipt, SpoolBatchReceipt) and receipt.first_id.sequence == 0:
                    self.broker.settled_starts.add(receipt.first_id.producer_id)

    def heal(self) -> None:
        """From here on all goes well, until nothing is left anywhere."""
        self.broker.is_moody = self.broker.is_away = False
        for disk in self.disks.values():
            disk.crash_after(0)
        for _ in range(5_000):
            if not self.producing.messages and self.spool.is_drained:
                break
            self.clock.advance(50)
            self.move(is_whole=True)
        while self.ghosts:
            self.haunt(self.ghosts[0])
        for journal in self.spool.journals:
            self._look_aside(journal)
