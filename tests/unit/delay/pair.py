"""Two copies of one delay server's data on simulated disks: one leads, the other follows through its bytes, and whoever
is in sync may take over. Brokers store what comes from either, each batch once.

`Pair` plays the registry, the network and both owners: what `replication` does, in one thread and without its clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairway import batch
from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.engine import DelayOptions, Engine, recover_logs
from fairway.delay.install import Disks
from fairway.delay.pending_messages import PendingDecision
from fairway.delay.snapshot import OpenSnapshot
from fairway.errors import FairwayError
from fairway.protocol.delay_messages import Fate
from fairway.runtime.clock import SimClock
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.storage import directory, record, replica_directory
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.store import Store
from tests.unit.delay.helpers import OPTIONS, SimBroker, Surroundings

CHUNK_BYTES = 1_500
LOGS = (0, 1)


class TooFarBehind(Exception):
    """The master has let go of what should come next."""


class Side:
    """One data directory, through its lives."""

    def __init__(self, pair: Pair, name: str, *, apart: bool, skew_ms: int) -> None:
        self.pair = pair
        self.name = name
        self.clock = SimClock(pair.sim.loop.now_ns)
        self.clock.jump(skew_ms)
        self.disk = self._new_disk("logs")
        self.schedule_disk = self._new_disk("schedule") if apart else None
        self.refills = 0
        self._lives = 0
        self._engine: Engine | None = None

    def _new_disk(self, what: str) -> SimDisk:
        rng = self.pair.sim.rng.child(f"{what} of {self.name} {self.pair.sim.loop.now_ns()}")
        return SimDisk(rng, self.pair.sim.loop.call_later)

    @property
    def is_up(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def store(self) -> Store:
        return self.engine.store

    def open(self) -> Engine:
        """As a copy that follows."""
        pair = self.pair
        rng = pair.sim.rng.child(f"{self.name} {self._lives}")
        self._engine = pair.made(
            self.disk,
            self.clock,
            rng,
            recovered=recover_logs(self.disk, self.schedule_disk, rng, pair.identity),
            defer=self._defer,
            route=pair.route,
            schedule_disk=self.schedule_disk,
            options=pair.options,
        )
        return self._engine

    def _defer(self, callback: Callable[[], None]) -> None:
        life = self._lives
        self.pair.sim.loop.call_soon(lambda: callback() if self._lives == life else None)

    def end(self, how: Callable[[SimDisk], SimDisk] = SimDisk.crash) -> None:
        """The power goes, or the process dies."""
        self._lives += 1
        if self._engine is not None:
            self.pair.splits += self._engine._housekeeper.splits
        self._engine = None
        self.disk = how(self.disk)
        self.schedule_disk = None if self.schedule_disk is None else how(self.schedule_disk)

    def abandon(self) -> None:
        """It is deposed, and lets go."""
        self.engine.abandon()
        if self.schedule_disk is not None:
            self.schedule_disk.close()
        self.end(SimDisk.crash_process)

    def refill(self, master: Side) -> None:
        """Begin anew with what a power cut of the master would leave now."""
        self.refills += 1
        taken = OpenSnapshot.take(master.engine, Disks(master.disk, master.schedule_disk or master.disk))
        files = [(each.name, each.file.read(0, each.size)) for each in taken.items]
        taken.close()
        self.disk = self._new_disk("new logs")
        self.schedule_disk = None if self.schedule_disk is None else self._new_disk("new schedule")
        for name, data in files:
            of_schedule = name.startswith("schedule/") and self.schedule_disk is not None
            (self.schedule_disk if of_schedule and self.schedule_disk else self.disk).publish(name, [data])
        known = master.store.identity
        directory.publish(self.disk, DirectoryIdentity(self.refills + 1, known.messages_id, known.actions_id))

    @property
    def files(self) -> list[str]:
        """Its buckets."""
        return [name for name in (self.schedule_disk or self.disk).listing("schedule") if name.endswith(".log")]


class Pair(Surroundings):
    """A group of two. `master` leads, `copy` follows it if it is up and not cut off."""

    def __init__(
        self,
        seed: int | str = 0,
        *,
        options: DelayOptions = OPTIONS,
        apart: bool = False,
        made: type[Engine] = Engine,
        skew_ms: int = 0,
    ) -> None:
        super().__init__(seed, options, made)
        self.sim.loop.set_exception_handler(self._unhandled)
        self.identity: DirectoryIdentity | None = None
        self.epoch = 0
        self.in_sync = False  # the copy: the master waits for it
        self.is_cut_off = False  # the copy hears nothing
        self.cuts = 0
        self.splits = 0  # in lives that have ended
        self.late: list[Intent] = []  # given out by one that may be deposed by now
        self.master = Side(self, "a", apart=apart, skew_ms=0)
        self.copy = Side(self, "b", apart=apart, skew_ms=skew_ms)
        self.master.open()
        self.identity = self.master.store.identity
        self._lead()
        self.copy.open()
        self.settle()

    def _unhandled(self, _loop: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), SimulatedPowerCut):  # what a dead process had still meant to do
            self.sim.loop.default_exception_handler(context)

    @property
    def engine(self) -> Engine:
        return self.master.engine

    @property
    def now_ms(self) -> int:
        return self.master.clock.wall_ms()

    # --- replication -------------------------------------------------------------------------------------------------

    def pass_on(self, chunks_max: int = 1_000_000) -> None:
        """Hand the copy what the master has synced and it lacks, and let both know how far the other is."""
        if not self.copy.is_up or self.is_cut_off:
            self._confirm()
            return
        for log in LOGS:
            for _ in range(chunks_max):
                end = (self.copy.store.messages.log, self.copy.store.actions.log)[log].end
                if self._is_gone(log, end):
                    self._begin_anew()
                    return
                chunk = self.master.store.read_chunk(log, end, CHUNK_BYTES)
                if chunk is None:
                    break
                self.copy.store.follow(log, *chunk)
        self._confirm()
        self.copy.store.confirm(*self.master.store.committed_ends())
        self.copy.store.retain_from(*self.master.store.first_bases())
        self.copy.engine.on_committed()

    def _is_gone(self, log: int, end: int) -> bool:
        return end < self.master.store.first_bases()[log]

    def _begin_anew(self) -> None:
        self.in_sync = False
        if self.copy.is_up:
            self.copy.abandon()
        self.copy.refill(self.master)
        self.copy.open()

    def _confirm(self) -> None:
        ends = [self.master.store.ends()]
        if self.copy.is_up and not self.is_cut_off and _has(self.copy.store.ends(), ends[0]):
            self.in_sync = True
        if self.in_sync:
            ends.append(self.copy.store.ends() if self.copy.is_up else (0, 0))
        self.master.store.confirm(*(min(each) for each in zip(*ends, strict=True)))

    def wait_no_more(self) -> None:
        """The master gives up on its copy."""
        self.in_sync = False
        self._confirm()

    def go_on(self, ms: float = 1) -> None:
        self.sleep(ms / 2)
        self.pass_on()
        self.sleep(ms / 2)
        self.pass_on()

    def settled(self, position: int, log: int = 0) -> bool:
        """Whether the master commits that in the end; if need be without its copy."""
        of = (self.master.store.messages.log, self.master.store.actions.log)[log]
        outcomes: list[FairwayError | None] = []
        of.flusher.when_durable(position, outcomes.append)
        for turn in range(60):
            if outcomes:
                return outcomes[0] is None
            if turn == 30:
                self.wait_no_more()
            self.go_on()
        raise AssertionError("it is never committed")

    # --- who leads ---------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        """The master opens a reign: nobody is waited for but those that are in sync."""
        self.epoch += 1
        store = self.master.store
        store.lead(self.epoch)
        for log in LOGS:
            assert self.settled((store.messages.log, store.actions.log)[log].end, log)
        self.engine.lead()

    def take_over(self, end: Callable[[Side], None] = Side.end) -> None:
        """The copy leads; the one that led comes back as its copy."""
        assert self.in_sync
        end(self.master)
        self.master, self.copy = self.copy, self.master
        self.in_sync, self.is_cut_off = False, False
        self._lead()
        self.join()

    def lead_again(self, end: Callable[[Side], None] = Side.end) -> None:
        """The master is the first to be back. It was in sync with itself."""
        end(self.master)
        self.master.open()
        self.in_sync = False
        self._lead()
        if self.copy.is_up:
            self.copy.abandon()
            self.join()

    def join(self, looks: int = 3) -> None:
        """The copy is opened, has a few turns, and is cut to what it shares with its master; or it begins anew."""
        self.copy.open()
        for _ in range(looks):
            assert self.copy.engine.on_time() == []
            self.sleep(1)
        try:
            ends = [self._shared_end(log) for log in LOGS]
        except TooFarBehind:
            self._begin_anew()
            return
        if tuple(ends) != self.copy.store.ends():
            while not self.copy.engine.is_loaded:
                self.copy.engine.on_time()
            assert ends[0] >= self.copy.engine.derived_end
            self.cuts += 1
            self.copy.abandon()
            replica_directory.cut(self.copy.disk, *ends)
            self.copy.disk.close()
            self.copy.end(SimDisk.crash_process)
            self.copy.open()

    def _shared_end(self, log: int) -> int:
        own, other = self.copy.store, self.master.store
        if own.ends()[log] < other.first_bases()[log]:
            raise TooFarBehind
        places = [each for each in own.tail_positions(log) if each >= other.first_bases()[log]]
        if not places:
            if own.ends()[log] > other.ends()[log]:
                raise TooFarBehind
            return own.ends()[log]
        shared = self._shared(log, places)
        if not shared:
            raise TooFarBehind
        if len(shared) < len(places):
            shared = self._shared(log, own.positions(log, shared[-1], places[len(shared)])) or shared
        of = (own.messages.log, own.actions.log)[log]
        return record.parse_header(of.read(shared[-1], record.HEADER_BYTES), 0, shared[-1], of.log_id).end

    def _shared(self, log: int, places: list[int]) -> list[int]:
        marks = zip(self.copy.store.marks(log, places), self.master.store.marks(log, places), strict=True)
        same = [mine == other for mine, other in marks]
        assert same == sorted(same, reverse=True)
        return places[: sum(same)]

    # --- what clients do ---------------------------------------------------------------------------------------------

    def await_receipt(self) -> None:
        assert self.settled(self.receipt.end)

    def decide(self, decision: PendingDecision) -> Fate:
        """Wait until the answer may be given."""
        assert self.settled(decision.end, 1)
        return decision.answer

    # --- what time does ----------------------------------------------------------------------------------------------

    def tick(self, *, is_noted: bool = True) -> list[Intent]:
        """One look at the clock by both; what comes out is stored, and noted as sent."""
        if self.copy.is_up:
            assert self.copy.engine.on_time() == []
        intents = self.look()
        for each in intents:
            self.deliver(each)
            if is_noted:
                self.engine.sent(each.number)
        self.pass_on()
        return intents

    def give_out(self) -> None:
        """A look at the clock; what comes out is under way for a while, whatever becomes of the master."""
        self.late += self.look()

    def deliver_late(self) -> None:
        """What one that is deposed had still under way. A broker refuses what would leave a gap."""
        late, self.late = self.late, []
        for each in late:
            stored = self.brokers.setdefault(each.target, SimBroker()).streams.get(each.producer_id, [])
            last = batch.peek(stored[-1]) if stored else None
            if each.first_sequence <= (0 if last is None else last.first_sequence + last.count):
                self.deliver(each)

    def settle(self) -> None:
        """Until nothing more happens on either side."""
        quiet = 0
        for _ in range(2_000):
            is_idle = not self.tick() and self.engine.is_idle
            if self.copy.is_up and not self.is_cut_off:
                is_idle = is_idle and self.copy.engine.is_idle and self.copy.store.ends() == self.master.store.ends()
            elif self.in_sync:
                self.wait_no_more()
            quiet = quiet + 1 if is_idle else 0
            if quiet >= 3:
                return
            self.sleep(5)
        raise AssertionError("the engines never come to rest")


def _has(ends: tuple[int, int], wanted: tuple[int, int]) -> bool:
    return all(own >= each for own, each in zip(ends, wanted, strict=True))
