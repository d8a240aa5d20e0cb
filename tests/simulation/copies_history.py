"""What one history of a group of two or three copies is, whatever they are copies of: `cluster_history` of a broker,
`delay_history` of a delay server.

Copies are killed, lose their power, are wiped, stopped and started. Hosts are parted, one way or both, again and again.
The registry is out of reach, loses answers, ends sessions or stands still. Disks are slow, so that replicas lag.
Processes stand still for longer than their lease. Wall clocks jump. In the end all is calm, and every copy is in sync.

A history costs what its events cost, so deadlines are short (a session of 600 ms, the others in proportion), clients
send little, and the next thing mostly happens as soon as there is something to be lost again.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from fairway.errors import FairwayError
from fairway.limits import KIB
from fairway.replication.copies import CopyOptions
from fairway.replication.follower import FollowerOptions
from fairway.replication.leader import LeaderOptions
from fairway.simulation import Simulation
from fairway.simulation.disk import SimulatedPowerCut
from fairway.simulation.loop import SimulationFailed
from fairway.simulation.registry import SimulatedFaults
from fairway.simulation.wire import Conditions
from tests.simulation.broker_clients import Mood
from tests.simulation.broker_truth import Breach, Promise
from tests.simulation.cluster_trouble import Incident, Trouble
from tests.simulation.cluster_world import GROUP, Cluster

CALM_S_MAX = 30.0

SESSION_MS = 600
TICK_MS = 100  # of the registry
SIMULATED_FAULTS = SimulatedFaults(notice_us=80_000, watch_late_us=30_000, stale_us=50_000, late_us=SESSION_MS * 1_000)
NET = Conditions(is_choppy=False, told_bytes=32 * KIB)  # in one history of four it is choppy
MEMBER = CopyOptions(GROUP, session_ms=SESSION_MS, look_ms=200, beat_ms=400, backoff_ms=15, hand_over_ms=800)
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


class Judge(Protocol):
    """The model of what must be true, as far as the copies concern it."""

    @property
    def is_refuted(self) -> bool: ...

    def blame(self, promise: Promise, sentence: str, /) -> None: ...

    def note_crash(self, now_ns: int, /) -> None: ...

    def note_lease_void(self, name: str, until_ns: int, /) -> None:
        """A registry has ended a copy's session before its time: until then its lease holds nobody back."""

    def look(self) -> None: ...


class CopiesHistory(ABC):
    """The life of one group, and what befalls it. Who its clients are, and how they fare, others say."""

    look_s: ClassVar[float]  # between two looks at who leads
    rests_ms: ClassVar[tuple[int, int, int]]  # before the next thing happens: up to one of these
    cluster: Cluster
    truth: Judge

    def __init__(self, world: Simulation, cluster: Cluster, truth: Judge, *, is_choppy: bool) -> None:
        self.world = world
        self.rng = world.rng.child("history")
        self.cluster = cluster
        self.truth = truth
        self.mood = Mood()
        self.net = replace(NET, is_choppy=is_choppy)
        world.net.set_conditions(self.net)
        self.incidents: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self.trouble = Trouble(self)
        world.loop.set_exception_handler(lambda _, context: self._unhandled(context))

    def live(self) -> None:
        """All of it, until the world ends."""
        try:
            with self.world:
                self.world.run(self.guarded(self._run()))
        except SimulationFailed as stuck:
            self.truth.blame(Promise.BROKE, str(stuck))

    @abstractmethod
    async def _run(self) -> None:
        """`_rise`, people, `_suffer`, `_conclude`."""

    @property
    @abstractmethod
    def clients(self) -> list[str]:
        """Their hosts."""

    async def _rise(self) -> None:
        for name in self.cluster.copies:
            await self.trouble.rise(name)

    async def _suffer(self, incidents: Sequence[Incident]) -> None:
        self.start_task(self._watch())
        self.start_task(self._bad_simulated_faults())
        self.start_task(self.trouble.promote_now_and_then())
        for _ in range(3 + self.rng.below(4)):
            await self._recover()
            if self.truth.is_refuted:
                return
            await self.trouble.meet(incidents[self.rng.below(len(incidents))])
        await asyncio.sleep(self.rng.below(SESSION_MS) / 1_000)

    async def _conclude(self, *steps: Callable[[], Awaitable[None]]) -> None:
        """When all is calm again, one after the other; unless something is wrong already."""
        for step in (self._calm_down, *steps):
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
        await asyncio.sleep(self.rng.below(self.rests_ms[self.rng.below(3)]) / 1_000)

    async def _bad_simulated_faults(self) -> None:
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
            await asyncio.sleep(self.look_s)
            self.truth.look()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """Everything works, and every copy is in sync again."""
        self.mood.is_calm = True
        self.mood.wait_ms = 5_000
        ensemble = self.cluster.ensemble
        ensemble.simulated_faults = replace(SIMULATED_FAULTS, late_us=0)
        ensemble.start()
        self.world.net.set_conditions(self.net)
        for copy in self.cluster.copies.values():
            copy.disk.slowness = 1.0
            if copy.registry is not None and not copy.registry.is_gone:
                ensemble.resume(copy.name)
        self.trouble.heal_all()
        self.trouble.dismiss_operator()
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
        leader = masters[0].member.copy_status.leader if len(masters) == 1 and masters[0].member else None
        return leader is not None and len(leader.in_sync) == len(self.cluster.copies)

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
