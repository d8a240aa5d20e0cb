"""The world of `producing_world`, whose producer has a spool on a disk that loses power, and dies and lives again.

The disk tears writes, loses what was not synced, is full now and then. The process is killed too, with the page cache
left as it is. In its next life it finds the journals of the earlier ones, and drains them first.
"""

from __future__ import annotations

from contextlib import suppress

from fairway.client.spool.spool import Spool
from fairway.protocol.line import Line
from fairway.protocol.producer_session import ProducerSession
from fairway.protocol.receipts import SpoolBatchReceipt
from fairway.simulation.disk import SimulatedPowerCut
from tests.property.producing_world import World
from tests.property.spool_journals import Journals, producer_options, spool_options


class SpoolWorld(Journals, World):
    """One producer through as many lives as fate gives it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prepare()
        self.lives = 0
        self.power_cuts = 0
        self.life_of: list[int] = []  # of each message in `sent`
        self.begin()

    # --- lives

    def begin(self) -> None:
        """The process starts, and finds what is there."""
        self.lives += 1
        rng = self.rng.child(f"life-{self.lives}")
        self.line = Line(rng.child("line"), now_ns=self.now_ns, on_trouble=self._trouble)
        options = producer_options(rng)
        self.producing = ProducerSession(self.clock, rng.child("producer"), options, run_later=self.line.run_later)
        self.line.add(self.producing, self.now_ns)
        number = rng.bits(64)
        before = self.reopened()
        self.own = self.new_journal(rng, number, 160_000, is_cluster=False)
        self.spool = Spool(
            spool_options(rng),
            self.own,
            self.clock,
            rng.child("spool"),
            is_connected=lambda: self.line.is_open,
            on_change=lambda: None,
            on_success=self.producing.note_success,
            on_finished=self.finished,
        )
        self.producing.divert(self.spool)
        self.line.add(self.spool.draining, self.now_ns)
        self.hand_over(before, self.spool.adopt, rng)

    def die(self, *, has_power: bool) -> None:
        """Killed, or the power goes: what nobody was told of may be anywhere or nowhere."""
        self.power_cuts += not has_power
        with suppress(SimulatedPowerCut):  # the dead do nothing about a lost connection
            self.cut()
        self.crash_disks(has_power=has_power)
        self.producing.give_up("the process died")  # so that nobody waits for an answer in this test
        self.begin()

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
            self.look_aside(journal)
