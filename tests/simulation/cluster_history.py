"""One history of a group of two or three copies, its registry and its clients, all from one seed.

Copies are killed, lose their power, are wiped, stopped and started; hosts are parted, one way or both, again and again;
the registry is out of reach, loses answers, ends sessions or stands still; disks are slow, so that replicas lag;
processes stand still for longer than their lease; wall clocks jump. In the end all is calm: the groups are drained, one
of them is examined, and all copies hold the same bytes.

A history costs what its events cost, so deadlines are short (a session of 600 ms, the others in proportion), clients
send little, and the next thing mostly happens as soon as there is something to be lost again.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from fairway.broker.member import MemberOptions
from fairway.broker.server import Broker
from fairway.errors import FairwayError
from fairway.groups import GroupConfig, Mode
from fairway.limits import KIB
from fairway.registry.simulated import Weather
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import LeaderOptions
from fairway.storage.store import Store, StoreOptions
from fairway.world.loop import SimulationFailed
from fairway.world.rng import SeededRng
from fairway.world.sim_disk import SimulatedPowerCut
from fairway.world.sim_wire import Conditions
from fairway.world.simulation import Simulation
from tests.simulation import broker_exam
from tests.simulation.broker_clients import Consumer, Mood, Producer, group_config
from tests.simulation.broker_truth import Breach, Owner, Promise
from tests.simulation.cluster_readers import Reader
from tests.simulation.cluster_trouble import DRAWN, Trouble
from tests.simulation.cluster_truth import ClusterTruth
from tests.simulation.cluster_world import GROUP, STORE, Cluster

STEPS_MAX = 1_500_000
CALM_S_MAX = 30.0
DRAIN_S_MAX = 30.0

SESSION_MS = 600
TICK_MS = 100  # of the registry
WEATHER = Weather(notice_us=80_000, watch_late_us=30_000, stale_us=50_000, late_us=SESSION_MS * 1_000)
NET = Conditions(is_choppy=False, told_bytes=32 * KIB)  # in one history of four it is choppy
MEMBER = MemberOptions(GROUP, session_ms=SESSION_MS, look_ms=200, beat_ms=400, backoff_ms=15, hand_over_ms=800)
LEADER = LeaderOptions(gone_ms=120, check_ms=25, news_ms=15)
FOLLOWER = FollowerOptions(credits=3, wait_ms=150)


@dataclass
class Outcome:
    """What a history came to."""

    seed: int
    incidents: Counter[str] = field(default_factory=Counter)
    reigns: int = 0
    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    breaches: list[Breach] = field(default_factory=list)
    trace_hash: str = ""


class ClusterHistory:
    """The life of one group. Has what the examination of a broker's history asks for."""

    has_policies = False

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.rng = world.rng.child("history")
        rng = world.rng.child("options")
        copies = 2 + rng.below(2)
        drawn = world.rng.child("lag")
        lag_ms = (150, 500)[drawn.below(2)]  # sooner than the lease ends, and later
        catch_up_bytes = (8 << 20, 2_000)[drawn.below(2)]  # never, and often
        membership = replace(
            MEMBER,
            min_in_sync=1 + (rng.below(4) == 0),
            leader=replace(LEADER, lag_ms=lag_ms),
            follower=replace(FOLLOWER, catch_up_bytes=catch_up_bytes),
        )
        self.cluster = Cluster(
            world, copies, membership=membership, store=_store(rng), tick_ms=TICK_MS, weather=WEATHER
        )
        self.truth = ClusterTruth(self.cluster)
        self.mood = Mood()
        self.scene = replace(self.cluster.scene, patience_s=SESSION_MS / 1_000, search_ms=80)
        self.net = replace(NET, is_choppy=drawn.below(4) == 0)
        world.net.set_conditions(self.net)
        self.config = group_config(world.rng.child("config"))
        self.incidents: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.consumers: list[Consumer] = []
        self.producers: list[Producer] = []
        self.readers: list[Reader] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.trouble = Trouble(self)
        world.loop.set_exception_handler(lambda _, context: self._unhandled(context))

    async def run(self) -> None:
        await self.guarded(self._run())

    async def _run(self) -> None:
        for name in self.cluster.copies:
            await self.trouble.rise(name)
        self._hire()
        self.start_task(self._watch())
        self.start_task(self._bad_weather())
        self.start_task(self.trouble.promote_now_and_then())
        for _ in range(3 + self.rng.below(4)):
            await self._recover()
            if self.truth.is_refuted:
                return
            await self.trouble.meet(DRAWN[self.rng.below(len(DRAWN))])
        await asyncio.sleep(self.rng.below(SESSION_MS) / 1_000)
        for step in (self._calm_down, self._drain, self._examine, self._compare):
            if self.truth.is_refuted:
                return
            await step()

    async def _recover(self) -> None:
        """Mostly until all is well again, or until one leads; not for ever, and now and then not at all."""
        wants = self.rng.below(4)
        deadline = self.world.loop.time() + 4 * SESSION_MS / 1_000
        while wants and self.world.loop.time() < deadline and not self.truth.is_refuted:
            if self._is_whole() if wants > 1 else self.cluster.masters:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.rng.below((20, 100, 400)[self.rng.below(3)]) / 1_000)

    # --- people ------------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        rng = self.rng
        subjects = ["orders", "trips"][: 1 + (rng.below(6) == 0)]
        for number in range(3 * len(subjects)):
            subject = subjects[number % len(subjects)]
            pace_ms = (60, 150, 300)[rng.below(3)]
            producer = Producer(self.scene, self.truth, self.mood, f"p{number}", subject, pace_ms=pace_ms)
            self.producers.append(producer)
            self.start_task(producer.run())
        for number in range(1 + (rng.below(3) == 0)):
            for subject in subjects:
                self._employ(self._found(f"g{number}", subject, self.config), self.config, 1 + rng.below(2))
        reader = Reader(self.scene, self.truth, self.mood, "reader", subjects[0])
        self.readers.append(reader)
        self.start_task(reader.run())
        if rng.below(4) == 0:
            once = GroupConfig(version=2, lease_ms=self.config.lease_ms, mode=Mode.AT_MOST_ONCE)
            self._employ(self._found("once", subjects[0], once), once, 2)

    def _found(self, group: str, subject: str, config: GroupConfig) -> Owner:
        owner = self.truth.owner(group, subject, config.lease_ms)
        owner.is_at_most_once = config.mode is Mode.AT_MOST_ONCE
        return owner

    def _employ(self, owner: Owner, config: GroupConfig, consumers: int) -> None:
        for number in range(consumers):
            name = f"{owner.group}-{owner.subject}-c{number}"
            pace_ms = (30, 100, 200)[self.rng.below(3)]
            consumer = Consumer(self.scene, self.truth, self.mood, owner, name, config, pace_ms=pace_ms)
            self.consumers.append(consumer)
            self.start_task(consumer.run())

    async def _bad_weather(self) -> None:
        rng = self.world.rng.child("weather")
        while True:
            await asyncio.sleep(rng.below(400) / 1_000)
            if self.mood.is_calm:
                return
            lossy = (0.0, 0.0, 0.0, 0.01, 0.05)[rng.below(5)]
            if not self.trouble.is_registry_lossy:
                self.cluster.ensemble.lose(requests=lossy, replies=lossy)
            self.world.net.set_conditions(replace(self.net, drop_chance=(0.0, 0.0, 0.0, 0.001, 0.01)[rng.below(5)]))

    async def _watch(self) -> None:
        """Beside every receipt and every delivery."""
        while True:
            await asyncio.sleep(0.03)
            self.truth.look()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """Everything works, and every copy is in sync again."""
        self.mood.is_calm = True
        self.mood.wait_ms = 5_000
        ensemble = self.cluster.ensemble
        ensemble.weather = replace(WEATHER, late_us=0)
        ensemble.start()
        self.world.net.set_conditions(self.net)
        for copy in self.cluster.copies.values():
            copy.disk.slowness = 1.0
            if copy.registry is not None and not copy.registry.is_gone:
                ensemble.resume(copy.name)
        self.trouble.heal_all()
        deadline = self.world.loop.time() + CALM_S_MAX
        whole_since = None  # what was on its way when the world calmed down may still end a session
        while self.world.loop.time() < deadline:
            await asyncio.sleep(0.05)
            now = self.world.loop.time()
            whole_since = (whole_since or now) if self._is_whole() else None
            if self.truth.is_refuted or (whole_since is not None and now - whole_since > SESSION_MS / 1_000):
                return
        self.truth.blame(Promise.STUCK, f"the copies do not come together: {self.cluster.why()}")

    def _is_whole(self) -> bool:
        masters = self.cluster.masters
        leader = masters[0].member.standing.leader if len(masters) == 1 and masters[0].member else None
        return leader is not None and len(leader.in_sync) == len(self.cluster.copies)

    @property
    def broker(self) -> Broker | None:
        masters = self.cluster.masters
        return masters[0].member.broker if masters and masters[0].member is not None else None

    async def _drain(self) -> None:
        deadline = self.world.loop.time() + DRAIN_S_MAX
        while self.world.loop.time() < deadline and not self.truth.is_refuted:
            is_said = all(each.is_done for each in self.producers)
            if is_said and all(each.has_joined for each in self.truth.owners.values()) and self.truth.is_drained():
                return
            await asyncio.sleep(0.05)
        if not self.truth.is_refuted:
            self.truth.check_drained()
            if not self.truth.is_refuted:
                self.truth.blame(Promise.STUCK, f"batches are left: {self.cluster.why()}")

    async def _examine(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for consumer in self.consumers:
            consumer.hang_up()
        await asyncio.sleep(0.02)
        master = await self.cluster.master()
        self.scene = replace(self.scene, host=master.name, others=())
        owners = list(self.truth.owners.values())
        await broker_exam.examine(self, [owners[self.rng.below(len(owners))]])  # type: ignore[arg-type]

    async def _compare(self) -> None:
        """All copies hold the same bytes, as soon as there is nothing new."""
        deadline = self.world.loop.time() + 5 * SESSION_MS / 1_000
        while not self._is_even():
            if self.world.loop.time() < deadline:
                await asyncio.sleep(0.05)
                continue
            self.truth.blame(Promise.STUCK, f"copies differ in length: {self.cluster.why()}")
            return
        contents = {name: _bytes_of(store) for name, store in self._stores().items()}
        first, *others = contents
        for other in others:
            if contents[other] != contents[first]:
                self.truth.blame(Promise.RENAMED, f"{other} holds other bytes than {first}")

    def _stores(self) -> dict[str, Store]:
        members = {copy.name: copy.member for copy in self.cluster.copies.values() if copy.member is not None}
        return {name: each.broker.store for name, each in members.items() if each.broker is not None}

    def _is_even(self) -> bool:
        """Whether all have committed all that any of them has."""
        stores = self._stores()
        ends = {end for store in stores.values() for end in (store.ends(), store.committed_ends())}
        return len(stores) == len(self.cluster.copies) and len(ends) == 1

    # --- parts -------------------------------------------------------------------------------------------------------

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.world.loop.create_task(self.guarded(work)))

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except SimulatedPowerCut:
            pass
        except Exception as problem:
            self._broke(problem)

    def _unhandled(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if not isinstance(problem, SimulatedPowerCut):
            self._broke(problem if problem is not None else FairwayError(str(context["message"])))

    def _broke(self, problem: BaseException) -> None:
        where = traceback.extract_tb(problem.__traceback__)
        place = " > ".join(f"{each.name}:{each.lineno}" for each in where[-5:])
        self.truth.blame(Promise.BROKE, f"{problem!r} in {place}")


def _bytes_of(store: Store) -> list[tuple[int, bytes]]:
    found = []
    for log in (store.messages.log, store.actions.log):
        for each in log.segments:
            end = min(each.end, log.committed_end)
            if end > each.base:
                found.append((each.base, log.file(each).read(0, end - each.base)))
    return found


def _store(rng: SeededRng) -> StoreOptions:
    return replace(
        STORE,
        segment_bytes=(8 * KIB, 32 * KIB, 256 * KIB)[rng.below(3)],
        action_segment_bytes=(8 * KIB, 64 * KIB)[rng.below(2)],
        checkpoint_every_bytes=(4 * KIB, 24 * KIB, 96 * KIB)[rng.below(3)],
    )


def run(seed: int) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash."""
    world = Simulation(seed, steps_max=STEPS_MAX)
    history = ClusterHistory(world)
    truth = history.truth
    try:
        with world:
            world.run(history.run())
    except SimulationFailed as stuck:
        truth.blame(Promise.BROKE, str(stuck))
    history.counts["scanned"] += sum(each.scanned for each in history.readers)
    return Outcome(
        seed,
        history.incidents,
        truth.reigns,
        truth.acknowledged,
        truth.delivered,
        sum(len(owner.acked) for owner in truth.owners.values()),
        truth.reasons,
        history.counts,
        truth.breaches,
        world.trace_hash(),
    )
