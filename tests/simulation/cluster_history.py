"""One history of a group of two or three copies of a broker, its registry and its clients, all from one seed.

What happens to them is in `copies_history`. In the end the groups are drained, one of them is examined, and all copies
hold the same bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fairway.broker.server import Broker
from fairway.groups import GroupConfig, Mode
from fairway.limits import KIB
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.storage.store import Store, StoreOptions
from tests.simulation import broker_exam
from tests.simulation.broker_clients import Consumer, Producer, group_config
from tests.simulation.broker_truth import Owner, Promise
from tests.simulation.cluster_readers import Reader
from tests.simulation.cluster_trouble import DRAWN
from tests.simulation.cluster_truth import ClusterTruth
from tests.simulation.cluster_world import STORE, Cluster
from tests.simulation.copies_history import (
    FOLLOWER,
    LEADER,
    MEMBER,
    SESSION_MS,
    SIMULATED_FAULTS,
    TICK_MS,
    CopiesHistory,
    Outcome,
)

STEPS_MAX = 1_500_000
DRAIN_S_MAX = 30.0


class ClusterHistory(CopiesHistory):
    """The life of one group of brokers. Has what the examination of a broker's history asks for."""

    has_policies = False
    look_s = 0.03
    rests_ms = (20, 100, 400)
    truth: ClusterTruth

    def __init__(self, world: Simulation) -> None:
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
        cluster = Cluster(
            world, copies, membership=membership, store=_store(rng), tick_ms=TICK_MS, simulated_faults=SIMULATED_FAULTS
        )
        super().__init__(world, cluster, ClusterTruth(cluster), is_choppy=drawn.below(4) == 0)
        self.scene = replace(cluster.scene, patience_s=SESSION_MS / 1_000, search_ms=80)
        self.config = group_config(world.rng.child("config"))
        self.consumers: list[Consumer] = []
        self.producers: list[Producer] = []
        self.readers: list[Reader] = []

    async def _run(self) -> None:
        await self._rise()
        self._hire()
        await self._suffer(DRAWN)
        await self._conclude(self._drain, self._examine, self._compare)

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

    @property
    def clients(self) -> list[str]:
        return [each.name for each in self.producers] + [each.holder.name for each in self.consumers]

    # --- the end -----------------------------------------------------------------------------------------------------

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

    @property
    def taken_by_retention(self) -> int:
        """Messages that retention took from groups that were owed them, in the lives that the brokers are in now."""
        members = [copy.member for copy in self.cluster.copies.values() if copy.member is not None]
        return sum(each.server.maintenance.forsaken for each in members if each.server is not None)

    async def _examine(self) -> None:
        await self._end_tasks()
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
    history.live()
    truth = history.truth
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
