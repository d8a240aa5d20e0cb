"""A broker group in one simulated world: a registry, copies that live and die, and the ways between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from fairway.broker.broker_copy import BrokerCopy, CopyOptions, CopyRuntime
from fairway.broker.server import BrokerOptions
from fairway.limits import KIB
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import LeaderOptions
from fairway.runtime.clock import SimClock
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.simulation.registry import SimEnsemble, SimulatedFaults
from fairway.simulation.registry_client import SimRegistry
from fairway.storage.store import StoreOptions
from tests.simulation.broker_clients import PORT, Scene
from tests.support.threads import SimRunner

GROUP = "g1"
SESSION_MS = 1_500
NAMES = ("b1", "b2", "b3")

LEADER = LeaderOptions(lag_ms=1_200, gone_ms=300, check_ms=50, news_ms=20)
FOLLOWER = FollowerOptions(credits=4, wait_ms=200)
MEMBER = CopyOptions(
    GROUP, session_ms=SESSION_MS, look_ms=300, beat_ms=500, backoff_ms=20, leader=LEADER, follower=FOLLOWER
)
SIMULATED_FAULTS = SimulatedFaults(late_us=1_500_000)
STORE = StoreOptions(
    segment_bytes=32 * KIB, action_segment_bytes=32 * KIB, low_water_bytes=16 * KIB, checkpoint_every_bytes=24 * KIB
)


@dataclass
class Copy:
    """One host with a disk, and the process on it, if one lives."""

    name: str
    disk: SimDisk
    clock: SimClock
    lives: int = 0
    member: BrokerCopy | None = None
    registry: SimRegistry | None = None
    jobs: SimRunner | None = None  # recovers its directory

    @property
    def is_master(self) -> bool:
        return self.member is not None and self.member.copy_status.is_master


class Cluster:
    """The copies of one group."""

    def __init__(
        self,
        world: Simulation,
        copies: int = 2,
        *,
        membership: CopyOptions = MEMBER,
        store: StoreOptions = STORE,
        housekeeping_ms: int = 60_000,
        tick_ms: int = 200,
        simulated_faults: SimulatedFaults = SIMULATED_FAULTS,
    ) -> None:
        self.world = world
        self.ensemble = SimEnsemble(world, tick_ms=tick_ms, simulated_faults=simulated_faults)
        self.membership = membership
        self.store = store
        self.housekeeping_ms = housekeeping_ms
        self.copies = {
            name: Copy(name, self._new_disk(name, 0), SimClock(world.loop.now_ns)) for name in NAMES[:copies]
        }
        self.scene = replace(
            Scene.simulated(world), host=NAMES[0], others=tuple((name, PORT) for name in NAMES[1:copies])
        )

    def _new_disk(self, name: str, number: int) -> SimDisk:
        rng = self.world.rng.child(f"disk-{name}-{number}")
        return SimDisk(rng, self.world.loop.call_later, capacity_bytes=8 << 20)

    @property
    def masters(self) -> list[Copy]:
        return [copy for copy in self.copies.values() if copy.is_master]

    async def start(self, name: str) -> BrokerCopy:
        """A process on that host; the simulated power cut and faults of its disk come out of here."""
        copy = self.copies[name]
        options = BrokerOptions(
            host=name,
            port=PORT,
            allow_remote=True,
            store=self.store,
            drain_ms_max=100,
            housekeeping_ms=self.housekeeping_ms,
        )
        copy.member = await BrokerCopy.start(self._new_life(copy), options, self.membership)
        return copy.member

    def _new_life(self, copy: Copy) -> CopyRuntime:
        """What a process that starts on that host finds."""
        copy.lives += 1
        copy.registry = self.ensemble.client(copy.name, session_ms=self.membership.session_ms, clock=copy.clock)
        self.world.loop.note(f"{copy.name} starts")
        rng = self.world.rng.child(f"{copy.name}-{copy.lives}")
        jobs = copy.jobs = SimRunner(rng.child("jobs"))
        net = self.world.net.host(copy.name)
        return CopyRuntime(copy.clock, lambda: self._open_disk(copy), net, rng, copy.registry, jobs)

    def _open_disk(self, copy: Copy) -> SimDisk:
        copy.disk = copy.disk.beside()
        return copy.disk

    def kill(self, name: str) -> None:
        self._die(name, SimDisk.crash_process)

    def cut_power(self, name: str) -> None:
        self._die(name, SimDisk.crash)

    def _die(self, name: str, crash: Callable[[SimDisk], SimDisk]) -> None:
        """Nothing that the dead process had still meant to do reaches anybody."""
        copy = self.copies[name]
        self.world.net.host(name)
        self.world.net.crash(name)
        self.world.net.host(name)
        self.silence(name)
        copy.disk = crash(copy.disk)
        copy.disk.slowness = 1.0

    def silence(self, name: str) -> None:
        copy = self.copies[name]
        member, copy.member = copy.member, None
        if copy.registry is not None and not copy.registry.is_gone:
            self.ensemble.crash(name)
        if member is None:
            return
        for task in member._tasks.values():
            task.cancel()
        if member.copy_status.leader is not None:
            member.copy_status.leader.close()
        self._hush(member)

    def _hush(self, member: BrokerCopy) -> None:
        """Its server, which does not know that its process is dead."""
        if member.broker is not None:
            member.broker.coordinator.close()

    def wipe(self, name: str) -> None:
        """A host that comes back with an empty disk."""
        self.kill(name)
        copy = self.copies[name]
        copy.disk = self._new_disk(name, copy.lives)

    async def stop(self, name: str) -> None:
        member = self.copies[name].member
        if member is not None:
            await member.stop()
            self.copies[name].member = None

    async def master(self, within_s: float = 20.0) -> Copy:
        """The one that is open to clients, as soon as there is one."""
        async with asyncio.timeout(within_s):
            while not (found := self.masters):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found[0]

    def why(self) -> str:
        """For a failure: what each copy does."""
        told = []
        for copy in self.copies.values():
            member = copy.member
            if member is None:
                told.append(f"{copy.name} is dead")
            else:
                told.append(f"{copy.name} is {member.role} ({member.copy_status.why}; {self._ends(member)})")
        return "; ".join(told)

    def _ends(self, member: BrokerCopy) -> object:
        """How far its logs reach, and are committed; None if they are not open."""
        return None if member.broker is None else (member.broker.store.ends(), member.broker.store.committed_ends())
