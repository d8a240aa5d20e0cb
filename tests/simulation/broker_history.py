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
from fairway.groups import GroupConfig, Mode
from fairway.groups.config import encode
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk, SimulatedPowerCut
from fairway.simulation.loop import SimulationFailed
from fairway.simulation.wire import Conditions
from fairway.storage import checkpoint
from fairway.storage.store import StoreOptions
from tests.simulation import broker_exam, broker_flavours, broker_reckoning
from tests.simulation.broker_clients import BROKER, MS_NS, PORT, Consumer, Mood, Producer, Scene
from tests.simulation.broker_inbox_senders import Correspondent
from tests.simulation.broker_operator import Operator
from tests.simulation.broker_truth import Breach, Owner, Promise, Truth

HOG = "lost+found/hog"  # another tenant's file on the same disk
OPENINGS_MAX = 6
DRAIN_S_MAX = 40.0
STEPS_MAX = 3_000_000
REDRIVES_MAX = 6


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
    counts: Counter[str] = field(default_factory=Counter)  # of what happens in some histories only
    breaches: list[Breach] = field(default_factory=list)
    trace_hash: str = ""


class History:
    """The lives of one broker."""

    def __init__(self, world: Simulation, *, has_policies: bool = False) -> None:
        self.has_policies = has_policies
        self.truth = Truth()
        self.mood = Mood()
        self.lives = 0
        self.ends: Counter[str] = Counter()
        self.world = world
        self.scene = Scene.simulated(world)
        self.broker: Broker | None = None
        self.consumers: list[Consumer] = []
        self.producers: list[Producer] = []
        self.operator: Operator = None  # type: ignore[assignment]  # from `_hire` on
        self.correspondent: Correspondent | None = None
        self._rng = world.rng.child("history")
        self._trouble_rng = world.rng.child("trouble")
        self.flavour = broker_flavours.draw(world.rng.child("flavour"))
        self.config = self.flavour.config
        self.mood.may_forget = self.flavour.is_lazy
        self.counts: Counter[str] = Counter()
        self._marks: list[tuple[int, int]] = []  # ticks, and the action log's end then
        self._dead: Broker | None = None  # the one that ran last
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
            segment_bytes=(8 * KIB, 32 * KIB, 256 * KIB)[0 if self.flavour.is_retaining else rng.below(3)],
            action_segment_bytes=(8 * KIB, 64 * KIB)[rng.below(2)],
            low_water_bytes=16 * KIB,
            checkpoint_every_bytes=(4 * KIB, 24 * KIB, 96 * KIB)[rng.below(3)],
            retention=self.flavour.retention,
            durability=self.flavour.durability,
        )
        return BrokerOptions(
            host=BROKER,
            port=PORT,
            allow_remote=True,
            store=store,
            drain_ms_max=300,
            housekeeping_ms=20 + rng.below(100) if self.flavour.is_retaining else 60_000,
            sync_every_ms=5 + rng.below(150),
        )

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
        for step in (self._drain, self._redrive, self._reckon, self._examine, self._ask_once_more):
            await step()
            if self.truth.is_refuted:
                return

    async def _redrive(self) -> None:
        """All dead letters, and again what has died of it, until none is left."""
        for _ in range(REDRIVES_MAX if self.flavour.is_deadly else 0):
            if not await self.operator.redrive_all():
                return
            await self._drain()

    async def _reckon(self) -> None:
        if self.broker is not None:
            for host in self.broker.coordinator.groups:
                owner = self.truth.owners.get((host.name, str(self.broker.coordinator.name_of(host.subject_id))))
                if owner is not None:
                    owner.lost = host.state_machine.describe(0, now_ns=0, now_ms=0).lost
                    self.counts["lost by retention"] += owner.lost
        await broker_reckoning.reckon(self)

    async def _examine(self) -> None:
        await self._dismiss()
        await broker_exam.examine(self)
        self._look_over()

    async def _ask_once_more(self) -> None:
        if self.flavour.is_lazy:
            await self._wait(1_000)  # by then all is synced, so that this crash takes nothing
        self._mark_dead(self.disk.crash)
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
            producer = Producer(
                self.scene,
                self.truth,
                self.mood,
                f"p{number}",
                subject,
                pace_ms=pace_ms,
                has_keys=self.has_policies,
            )
            self.producers.append(producer)
            self._start_task(producer.run())
        for number in range(2 + rng.below(2)):
            for subject in subjects:
                late_ms = rng.below(1_500) if rng.below(2) else 0
                is_latest = late_ms > 0 and not self.flavour.is_lazy and bool(rng.below(2))
                owner = self._found(f"g{number}", subject, self.config, is_latest=is_latest)
                self._employ(owner, self.config, consumers=1 + rng.below(3), late_ms=late_ms)
        if self.flavour.has_at_most_once:
            config = self.flavour.at_most_once()
            self._employ(self._found("once", subjects[0], config), config, consumers=2)
        for number in range(2 * self.flavour.has_broadcast):
            config = self.flavour.broadcast()
            self._employ(self._found(f"all{number}", subjects[0], config), config, consumers=1)
        if self.has_policies:
            self._hire_by_policy(subjects[0])
        owners = [each for each in self.truth.owners.values() if not each.is_at_most_once and not each.order]
        self.operator = Operator(
            self.scene,
            self.truth,
            self.mood,
            owners,
            redrives=self.flavour.is_deadly,
            steers=self.flavour.is_steered,
        )
        self._start_task(self.operator.run())
        if self.flavour.has_letters:
            self.correspondent = Correspondent(self.scene, self.truth, self.mood, owners)
            self._start_task(self.correspondent.run())

    @property
    def operators(self) -> list[Operator]:
        return [self.operator] if self.correspondent is None else [self.operator, self.correspondent]

    @property
    def taken_by_retention(self) -> int:
        """Messages that retention, in this life of the broker, took from groups that were owed them."""
        return 0 if self.broker is None else self.broker.maintenance.forsaken

    def _hire_by_policy(self, subject: str) -> None:
        rng = self.world.rng.child("policies")
        for order, config in self.flavour.policies(rng).items():
            owner = self._found(order, subject, config)
            owner.order = order
            owner.policies = encode(config)
            self._employ(owner, config, consumers=2 + rng.below(2))

    def _found(self, group: str, subject: str, config: GroupConfig, *, is_latest: bool = False) -> Owner:
        """A group. It is owed everything, or what is sent from when it is known to have joined: where it begins at the
        latest, or where retention may have taken the rest."""
        from_ns = None if is_latest or self.flavour.is_retaining else 0
        owner = self.truth.owner(group, subject, config.lease_ms, from_ns=from_ns)
        owner.is_latest = is_latest
        owner.is_broadcast = config.is_broadcast
        owner.is_at_most_once = config.mode is Mode.AT_MOST_ONCE
        owner.attempts_max = config.attempts_max
        return owner

    def _employ(self, owner: Owner, config: GroupConfig, *, consumers: int, late_ms: int = 0) -> None:
        for number in range(consumers):
            name = f"{owner.group}-{owner.subject}-c{number}"
            consumer = Consumer(self.scene, self.truth, self.mood, owner, name, config)
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
        """Until all that is owed is acked; a client that waits is woken, so there is no need to ask often."""
        deadline = self.world.loop.time() + DRAIN_S_MAX
        while self.world.loop.time() < deadline and not self.truth.is_refuted:
            is_said = all(each.is_done for each in self.operators) and all(each.is_done for each in self.producers)
            is_said = is_said and all(each.has_joined for each in self.truth.owners.values())
            if is_said and (self.flavour.may_mark_dead or self.truth.is_drained()) and not self._leftovers():
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
        for host in self.broker.coordinator.groups:
            end = self.broker.store.messages.end_sequence(host.subject_id)
            seen = host.describe(end, now_ns=self.world.clock.monotonic_ns(), now_ms=self.world.clock.wall_ms())
            if seen.lag or seen.lots or seen.parked:
                left.append(f"{host.name}: {seen}")
        return left

    # --- a life ------------------------------------------------------------------------------------------------------

    async def _live(self, end: End) -> None:
        if await self.start() is None:
            return
        self.ends[end.value] += 1
        trouble = self.world.loop.create_task(self._guarded(self._make_trouble()))
        ticking = self.world.loop.create_task(self._guarded(self._tick()))
        await self._wait(20 + self._rng.below(1_000))
        if end is End.STOP:
            trouble.cancel()
        await self._meet(end)
        trouble.cancel()
        ticking.cancel()
        await asyncio.gather(trouble, ticking, return_exceptions=True)

    async def start(self) -> Broker | None:
        """Open the store and listen, as often as it takes."""
        for _ in range(OPENINGS_MAX):
            self._over.clear()
            self.truth.faulty_ns = None
            is_pictured = bool(checkpoint.numbers(self.disk))
            try:
                net = self.world.net.host(BROKER)
                rng = self.world.rng.child(f"broker-{self.lives}")
                world = BrokerWorld(self.world.clock, self.disk, net, rng)
                self.broker = await Broker.start(world, self._options)
            except SimulatedPowerCut:
                self._mark_dead(self._any_crash())
            except StorageFault as fault:
                self.world.loop.note(f"not opened: {type(fault).__name__}")
                self._mark_dead(self.disk.crash_process)
                if isinstance(fault, DiskFull):
                    self.disk.remove(HOG)
            except Refused as refused:  # there is no room for the record that begins a life
                self.world.loop.note(f"not opened: {refused.code.name}")
                self._mark_dead(self.disk.crash_process)
                self.disk.remove(HOG)
            else:
                self.lives += 1
                self._dead = self.broker
                self._marks.clear()
                subjects = self.broker.store.messages.views.subjects
                self.truth.note_life({str(each.name): each.next_sequence for each in subjects})
                self.counts["pictures"] += is_pictured
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
                self._mark_dead(self.disk.crash)
            case End.KILL:
                self._mark_dead(self.disk.crash_process)
            case End.CUT_IN_OPERATION:
                self.disk.crash_after(1 + self._rng.below(20))
                await self._wait(200)
                self._mark_dead(self._any_crash())
            case End.FAILED_SYNC:
                self.disk.fail_sync(1 + self._rng.below(5))
                await self._wait(400)
                self._mark_dead(self._any_crash())
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
        self._mark_dead(self._any_crash(), is_clean=is_clean)

    async def _stopping(self, broker: Broker) -> bool:
        try:
            await broker.stop()
        except (Refused, StorageFault) as reason:
            self.world.loop.note(f"not stopped cleanly: {type(reason).__name__}")
            return False
        return broker.store.fault is None

    def _any_crash(self) -> Callable[[], SimDisk]:
        return self.disk.crash if self._rng.below(2) else self.disk.crash_process

    def _mark_dead(self, crash: Callable[[], SimDisk], *, is_clean: bool = False) -> None:
        """The process is gone; what it left is the next one's disk."""
        self._silence()
        if not is_clean or self.flavour.is_lazy:  # then the next life does not count on what consumers hold
            self.truth.note_crash(self.world.clock.monotonic_ns())
        if self.flavour.is_lazy:
            self._note_loss(is_power_cut=crash == self.disk.crash)
        self.disk = crash()
        self.disk.slowness = 1.0
        self._heal()

    async def _tick(self) -> None:
        """So that it can be told which acks were synced when the power goes."""
        while self.broker is not None and self.flavour.is_lazy:
            self.truth.tick += 1
            self._marks.append((self.truth.tick, self.broker.store.actions.log.end))
            await asyncio.sleep(0.004)

    def _note_loss(self, *, is_power_cut: bool) -> None:
        """A power cut takes what was not synced, a failed sync perhaps too; a kill takes nothing."""
        dead = self._dead  # which may have died some time ago: the next one never came to life
        if dead is None or not (is_power_cut or dead.store.fault is not None):
            return
        messages, actions = dead.store.messages, dead.store.actions.log
        unsynced = {
            str(each.name): messages.views.entries.first_sequence_from(each.id, messages.log.synced_end)
            for each in messages.views.subjects
        }
        is_all = actions.synced_end >= actions.end
        safe_tick = max((tick for tick, end in self._marks if end <= actions.synced_end), default=0)
        self.counts["lossy cuts"] += not is_all
        self.truth.note_loss(
            {subject: first for subject, first in unsynced.items() if first is not None},
            self.truth.tick + 1 if is_all else safe_tick,
            self.world.clock.monotonic_ns(),
        )

    def _silence(self) -> None:
        """Nothing that the dead process had still meant to do reaches anybody."""
        self.world.net.host(BROKER)
        self.world.net.crash(BROKER)
        if self.broker is not None:
            self.broker.coordinator.close()
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
        for host in broker.coordinator.groups:
            seen = host.state_machine.describe(
                broker.store.messages.end_sequence(host.subject_id), now_ns=now_ns, now_ms=now_ms
            )
            if seen.lots > 3 * host.state_machine.config.lots_max:
                self.truth.blame(
                    Promise.BOUND, f"{seen.lots} lots in {host.name}, of {host.state_machine.config.lots_max}"
                )
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
        for operator in self.operators:
            operator.hang_up()
        await asyncio.sleep(0.02)


def run(seed: int, *, has_policies: bool = False) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash. `has_policies`: with groups that keep an order
    or merge requests."""
    world = Simulation(seed, steps_max=STEPS_MAX)
    history = History(world, has_policies=has_policies)
    truth = history.truth
    try:
        with world:
            world.run(history.run())
    except SimulationFailed as stuck:
        truth.blame(Promise.BROKE, str(stuck))
    for operator in history.operators:
        history.counts.update(operator.done)
    return Outcome(
        seed,
        history.lives,
        truth.acknowledged,
        truth.delivered,
        sum(len(owner.acked) for owner in truth.owners.values()),
        history.ends,
        truth.reasons,
        history.counts,
        truth.breaches,
        world.trace_hash(),
    )


__all__ = ["MS_NS", "End", "History", "Outcome", "run"]
