"""One history of a broker and its clients: a few lives of the broker, each with an end of its own, all from one seed.

Clients outlive the broker's lives. While it lives, connections drop, hosts are parted, the disk is slow or full. In the
end all is calm: the groups are drained, an examination shows that nobody sleeps through what he waits for, and after a
last crash nothing that was acked comes back.
"""

from __future__ import annotations

import asyncio
import enum
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import DiskFull, FairwayError, Refused, StorageFault
from fairway.limits import KIB
from fairway.storage.store import StoreOptions
from fairway.world.loop import SimulationFailed
from fairway.world.rng import SeededRng
from fairway.world.sim_disk import SimDisk, SimulatedPowerCut
from fairway.world.sim_wire import Conditions
from fairway.world.simulation import Simulation
from tests.simulation import broker_exam
from tests.simulation.broker_clients import BROKER, MS_NS, PORT, Consumer, Mood, Producer, Scene, group_config
from tests.simulation.broker_truth import Breach, Promise, Truth

HOG = "lost+found/hog"  # another tenant's file on the same disk
OPENINGS_MAX = 6
DRAIN_S_MAX = 60.0
STEPS_MAX = 3_000_000


class End(enum.Enum):
    """How a life ends."""

    POWER_CUT = "power cut"
    KILL = "kill"
    CUT_IN_OPERATION = "power cut in an operation"
    STOP = "stop"
    FAILED_SYNC = "failed sync"


ENDS = (End.POWER_CUT, End.POWER_CUT, End.KILL, End.KILL, End.CUT_IN_OPERATION, End.STOP, End.FAILED_SYNC)


@dataclass
class Outcome:
    """What a history came to."""

    seed: int
    lives: int = 0
    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    breaches: list[Breach] = field(default_factory=list)
    trace_hash: str = ""


class History:
    """The lives of one broker."""

    def __init__(self, world: Simulation) -> None:
        self.truth = Truth()
        self.mood = Mood()
        self.lives = 0
        self.ends: Counter[str] = Counter()
        self.world = world
        self.scene = Scene.simulated(world)
        self.broker: Broker | None = None
        self.consumers: list[Consumer] = []
        self.producers: list[Producer] = []
        self._rng = world.rng.child("history")
        self._trouble_rng = world.rng.child("trouble")
        self.config = group_config(world.rng.child("config"))
        self._options = self._draw_options(world.rng.child("options"))
        self.disk = SimDisk(
            world.rng.child("disk"), world.loop.call_later, capacity_bytes=(2 << 20) + self._rng.below(2 << 20)
        )
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._parted: list[str] = []
        world.loop.set_exception_handler(lambda _, context: self._unhandled(context))

    def _draw_options(self, rng: SeededRng) -> BrokerOptions:
        store = StoreOptions(
            segment_bytes=(8 * KIB, 32 * KIB, 256 * KIB)[rng.below(3)],
            action_segment_bytes=(8 * KIB, 64 * KIB)[rng.below(2)],
            low_water_bytes=16 * KIB,
            checkpoint_every_bytes=(4 * KIB, 24 * KIB, 96 * KIB)[rng.below(3)],
        )
        return BrokerOptions(host=BROKER, port=PORT, allow_remote=True, store=store, drain_ms_max=300)

    # --- the whole ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self._guarded(self._run())

    async def _run(self) -> None:
        self._hire()
        for end in [ENDS[self._rng.below(len(ENDS))] for _ in range(2 + self._rng.below(3))]:
            await self._live(end)
            if self.truth.is_refuted:
                return
        await self._finish()

    async def _finish(self) -> None:
        """Calm: everything is taken and acked, then examined, and after one more crash nothing comes back."""
        self._calm_down()
        await self.start()
        for step in (self._drain, self._examine, self._ask_once_more):
            await step()
            if self.truth.is_refuted:
                return

    async def _examine(self) -> None:
        await self._dismiss()
        await broker_exam.examine(self)
        self._look_over()

    async def _ask_once_more(self) -> None:
        self._bury(self.disk.crash)
        broker = await self.start()
        if broker is not None:
            await broker_exam.ask_once_more(self)
            await broker.stop()
            self.ends["last stop"] += 1

    def _hire(self) -> None:
        rng = self._rng
        subjects = ["orders", "trips"][: 1 + rng.below(2)]
        for number in range(2 * len(subjects)):  # two to a subject, so that batches sent again change places
            subject = subjects[number % len(subjects)]
            pace_ms = (40, 120, 250)[rng.below(3)]  # some groups fall behind, others wait for every message
            producer = Producer(self.scene, self.truth, self.mood, f"p{number}", subject, pace_ms=pace_ms)
            self.producers.append(producer)
            self._start_task(producer.run())
        for number in range(2 + rng.below(2)):
            for subject in subjects:
                late_ms = rng.below(1_500) if rng.below(2) else 0
                self._found(f"g{number}", subject, consumers=1 + rng.below(3), late_ms=late_ms)

    def _found(self, group: str, subject: str, *, consumers: int, late_ms: int) -> None:
        """A group; one that is late may begin at the latest message."""
        from_ns = None if late_ms and self._rng.below(2) else 0
        owner = self.truth.owner(group, subject, self.config.lease_ms, from_ns=from_ns)
        for number in range(consumers):
            name = f"{group}-{subject}-c{number}"
            consumer = Consumer(self.scene, self.truth, self.mood, owner, name, self.config)
            self.consumers.append(consumer)
            self._start_task(self._later(late_ms, consumer.run))

    async def _later(self, ms: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(ms / 1_000)
        await work()

    def _calm_down(self) -> None:
        self.mood.is_calm = True
        self.mood.wait_ms = 20_000
        self.world.net.set_conditions(Conditions())
        self._heal()
        self.disk.slowness = 1.0
        self.disk.remove(HOG)

    async def _drain(self) -> None:
        """Until all that is owed is acked; whoever waits is woken, so there is no need to ask often."""
        deadline = self.world.loop.time() + DRAIN_S_MAX
        while self.world.loop.time() < deadline and not self.truth.is_refuted:
            if all(each.is_done for each in self.producers) and self.truth.is_drained() and not self._leftovers():
                return
            await self._wait(50)
        if not self.truth.is_refuted:
            self.truth.check_drained()
            if not self.truth.is_refuted:
                self.truth.blame(Promise.STUCK, f"batches or messages are left: {self._leftovers()}")

    def _leftovers(self) -> list[str]:
        """What the broker itself believes to be still owed."""
        if self.broker is None:
            return ["no broker"]
        left = []
        for host in self.broker.desk.groups:
            end = self.broker.store.messages.end_sequence(host.subject_id)
            seen = host.law.describe(end, now_ns=self.world.clock.monotonic_ns(), now_ms=self.world.clock.wall_ms())
            if seen.lag or seen.lots:
                left.append(f"{host.name}: {seen}")
        return left

    # --- a life ------------------------------------------------------------------------------------------------------

    async def _live(self, end: End) -> None:
        if await self.start() is None:
            return
        self.ends[end.value] += 1
        trouble = self.world.loop.create_task(self._guarded(self._make_trouble()))
        await self._wait(20 + self._rng.below(1_000))
        if end is End.STOP:
            trouble.cancel()
        await self._meet(end)
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)

    async def start(self) -> Broker | None:
        """Open the store and listen, as often as it takes."""
        for _ in range(OPENINGS_MAX):
            self._over.clear()
            self.truth.faulty_ns = None
            try:
                net = self.world.net.host(BROKER)
                rng = self.world.rng.child(f"broker-{self.lives}")
                world = BrokerWorld(self.world.clock, self.disk, net, rng)
                self.broker = await Broker.start(world, self._options)
            except SimulatedPowerCut:
                self._bury(self._any_crash())
            except StorageFault as fault:
                self.world.loop.note(f"not opened: {type(fault).__name__}")
                self._bury(self.disk.crash_process)
                if isinstance(fault, DiskFull):
                    self.disk.remove(HOG)
            else:
                self.lives += 1
                self.world.loop.note(f"life {self.lives}")
                return self.broker
        self.truth.blame(Promise.BROKE, "the broker cannot be started")
        return None

    async def _meet(self, end: End) -> None:
        match end:
            case End.POWER_CUT:
                if self._rng.below(4):  # a disk that hangs: much is written, and little of it synced
                    self.disk.slowness = 300.0
                    await self._wait(50 + self._rng.below(400))
                self._bury(self.disk.crash)
            case End.KILL:
                self._bury(self.disk.crash_process)
            case End.CUT_IN_OPERATION:
                self.disk.crash_after(1 + self._rng.below(20))
                await self._wait(200)
                self._bury(self._any_crash())
            case End.FAILED_SYNC:
                self.disk.fail_sync(1 + self._rng.below(5))
                await self._wait(400)
                self._bury(self._any_crash())
            case End.STOP:
                await self._stop()

    async def _stop(self) -> None:
        """The power may go while the broker is stopping. A clean stop forgets nothing."""
        broker = self.broker
        if broker is None:
            return
        stopping = self.world.loop.create_task(self._stopping(broker))
        if self._rng.below(4) == 0:
            await self._wait(self._rng.below(4_000) / 1_000)
        else:
            await asyncio.wait([stopping])
        is_clean = stopping.done() and stopping.result() and not self._over.is_set()
        stopping.cancel()
        self._bury(self._any_crash(), is_clean=is_clean)

    async def _stopping(self, broker: Broker) -> bool:
        try:
            await broker.stop()
        except (Refused, StorageFault) as reason:
            self.world.loop.note(f"not stopped cleanly: {type(reason).__name__}")
            return False
        return broker.store.fault is None

    def _any_crash(self) -> Callable[[], SimDisk]:
        return self.disk.crash if self._rng.below(2) else self.disk.crash_process

    def _bury(self, crash: Callable[[], SimDisk], *, is_clean: bool = False) -> None:
        """The process is gone; what it left is the next one's disk."""
        self._silence()
        if not is_clean:
            self.truth.note_crash(self.world.clock.monotonic_ns())
        self.disk = crash()
        self.disk.slowness = 1.0
        self._heal()

    def _silence(self) -> None:
        """Nothing that the dead process had still meant to do reaches anybody."""
        self.world.net.host(BROKER)
        self.world.net.crash(BROKER)
        if self.broker is not None:
            self.broker.desk.close()
            self.broker = None

    # --- trouble -----------------------------------------------------------------------------------------------------

    async def _make_trouble(self) -> None:
        rng, net = self._trouble_rng, self.world.net
        while not self.mood.is_calm:
            await asyncio.sleep(rng.below(60_000) / 1e6)
            self._watch()
            match rng.below(16):
                case 0 | 1:
                    net.drop(self._somebody())
                case 2:
                    net.drop(BROKER)
                case 3:
                    self._part()
                case 4 | 5:
                    self._heal()
                case 6:
                    net.set_conditions(Conditions(drop_chance=(0.0, 0.0, 0.002, 0.02)[rng.below(4)]))
                case 7:
                    self.disk.slowness = (0.2, 1.0, 1.0, 5.0, 20.0)[rng.below(5)]
                case 8:
                    self.disk.stall(rng.below(80) / 1_000)
                case 9:
                    self._fill(leaving=rng.below(24 * KIB))
                case 10 | 11:
                    self.disk.remove(HOG)
                case 12:
                    self.disk.fail_write(1 + rng.below(8))
                case 13:
                    self.disk.cold = (0.0, 0.1, 0.6)[rng.below(3)]
                case _:
                    pass

    def _somebody(self) -> str:
        names = [each.name for each in self.producers] + [each.holder.name for each in self.consumers]
        return names[self._trouble_rng.below(len(names))]

    def _part(self) -> None:
        name = self._somebody()
        self.world.net.partition(name, BROKER, one_way=bool(self._trouble_rng.below(2)))
        self._parted.append(name)

    def _heal(self) -> None:
        for name in self._parted:
            self.world.net.host(BROKER)
            self.world.net.heal(name, BROKER)
        self._parted.clear()

    def _fill(self, leaving: int) -> None:
        self.disk.remove(HOG)
        hog = self.disk.open(HOG, create=True)
        self.disk.reserve(hog, max(0, self.disk.free_bytes() - leaving))
        hog.close()

    def _watch(self) -> None:
        """A fault is seen, and bounds are held."""
        broker = self.broker
        if broker is None:
            return
        if broker.store.fault is not None and self.truth.faulty_ns is None:
            self.truth.faulty_ns = self.world.clock.monotonic_ns()
        self._look_over()

    def _look_over(self) -> None:
        """Memory: nothing that the broker keeps for its groups is beyond its bound."""
        broker = self.broker
        if broker is None:
            return
        now_ns, now_ms = self.world.clock.monotonic_ns(), self.world.clock.wall_ms()
        for host in broker.desk.groups:
            seen = host.law.describe(broker.store.messages.end_sequence(host.subject_id), now_ns=now_ns, now_ms=now_ms)
            lots_max = 3 * host.law.config.lots_max
            if seen.lots > lots_max:
                self.truth.blame(Promise.BOUND, f"{seen.lots} lots in {host.name}, of {host.law.config.lots_max}")
        for actor in broker.scheduler:
            if len(actor.mailbox) > 4 * (len(self.consumers) + len(self.producers)):
                self.truth.blame(Promise.BOUND, f"{len(actor.mailbox)} requests of a few clients wait for one actor")

    # --- parts -------------------------------------------------------------------------------------------------------

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.world.loop.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except SimulatedPowerCut:
            self._power_went()
        except Exception as problem:
            self._broke(problem)

    def _unhandled(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, SimulatedPowerCut):
            self._power_went()
        else:
            self._broke(problem if problem is not None else FairwayError(str(context["message"])))

    def _power_went(self) -> None:
        """At once: no answer leaves a machine without power."""
        if not self.disk.alive:
            self._silence()
            self._over.set()

    def _broke(self, problem: BaseException) -> None:
        where = traceback.extract_tb(problem.__traceback__)
        place = " > ".join(f"{each.name}:{each.lineno}" for each in where[-5:])
        self.truth.blame(Promise.BROKE, f"{problem!r} in {place}")
        self._over.set()

    async def _wait(self, ms: float) -> bool:
        """Let time pass, unless the life is over before."""
        try:
            await asyncio.wait_for(self._over.wait(), ms / 1_000)
        except TimeoutError:
            return False
        return True

    async def _dismiss(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for consumer in self.consumers:
            consumer.hang_up()
        await asyncio.sleep(0.02)


def run(seed: int) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash."""
    world = Simulation(seed, steps_max=STEPS_MAX)
    history = History(world)
    truth = history.truth
    try:
        with world:
            world.run(history.run())
    except SimulationFailed as stuck:
        truth.blame(Promise.BROKE, str(stuck))
    return Outcome(
        seed,
        history.lives,
        truth.acknowledged,
        truth.delivered,
        sum(len(owner.acked) for owner in truth.owners.values()),
        history.ends,
        truth.reasons,
        truth.breaches,
        world.trace_hash(),
    )


__all__ = ["MS_NS", "End", "History", "Outcome", "run"]
