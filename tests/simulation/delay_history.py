"""One history of the copies of a delay server, its registry and those who schedule, all from one seed.

What happens to the copies is what happens to those of a broker (`cluster_trouble`), and more often one of them comes
back with an empty disk: their logs are let go of within a second, so it is filled from a snapshot, and so is one that
was away. In the end all is calm. Every message that was taken has been sent once, in its time, unless it was cancelled
or is due much later; and then every copy knows of it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from fairway import batch
from fairway.batch import MessageId
from fairway.delay import housekeeping
from fairway.delay.rows import State
from fairway.errors import FairwayError, Refused
from fairway.protocol.admin import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.world.loop import SimulationFailed
from fairway.world.sim_disk import SimulatedPowerCut
from fairway.world.simulation import Simulation
from tests.simulation.broker_clients import PORT, Mood
from tests.simulation.broker_truth import Promise
from tests.simulation.cluster_history import FOLLOWER, LEADER, MEMBER, NET, SESSION_MS, WEATHER, Outcome
from tests.simulation.cluster_trouble import DRAWN, Incident, Trouble
from tests.simulation.delay_patrons import Patron
from tests.simulation.delay_truth import Arrival, DelayTruth
from tests.simulation.delay_world import OPTIONS, SUBJECTS, DelayCluster
from tests.simulation.planted import swapped
from tests.support.client import Client

STEPS_MAX = 3_000_000
CALM_S_MAX = 30.0
DRAIN_S_MAX = 90.0  # a clock may be behind by 20 s
_EVERY_MS = 300  # between two rounds of housekeeping: a minute would be longer than a history
_INCIDENTS = (*DRAWN, *(Incident.WIPE,) * 10)


class DelayHistory:
    """The life of one delay group."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.rng = world.rng.child("history")
        rng = world.rng.child("options")
        copies = 2 + rng.below(2)
        membership = replace(
            MEMBER,
            min_in_sync=1 + (rng.below(4) == 0),
            leader=replace(LEADER, lag_ms=(150, 500)[rng.below(2)]),
            follower=replace(FOLLOWER, catch_up_bytes=(8 << 20, 2_000)[rng.below(2)]),
        )
        options = replace(OPTIONS, hold_ms=(0, 20, 200)[rng.below(3)], remembered_max=(30, 10_000)[rng.below(2)])
        self.cluster = DelayCluster(world, copies, membership=membership, options=options)
        self.truth = DelayTruth(self.cluster)
        self.mood = Mood()
        self.net = replace(NET, is_choppy=rng.below(4) == 0)
        world.net.set_conditions(self.net)
        self.incidents: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.producers: list[Patron] = []
        self.consumers: list[Any] = []
        self.delivered = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.trouble = Trouble(self)  # type: ignore[arg-type]
        world.loop.set_exception_handler(lambda _, context: self._unhandled(context))

    async def run(self) -> None:
        await self.guarded(self._run())

    async def _run(self) -> None:
        await self.cluster.found()
        for name in self.cluster.copies:
            await self.trouble.rise(name)
        for number in range(3):
            subject = list(SUBJECTS)[number % len(SUBJECTS)]
            patron = Patron(self.cluster, self.truth, number, subject, (40, 100, 250)[self.rng.below(3)])
            self.producers.append(patron)
            self.start_task(patron.run(lambda: self.mood.is_calm))
        self.start_task(self._watch())
        self.start_task(self._bad_weather())
        self.start_task(self.trouble.promote_now_and_then())
        for _ in range(3 + self.rng.below(4)):
            await self._recover()
            if self.truth.is_refuted:
                return
            await self.trouble.meet(_INCIDENTS[self.rng.below(len(_INCIDENTS))])
        await asyncio.sleep(self.rng.below(SESSION_MS) / 1_000)
        for step in (self._calm_down, self._drain, self._examine):
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
        await asyncio.sleep(self.rng.below((50, 300, 1_000)[self.rng.below(3)]) / 1_000)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.truth.look()

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

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """Everything works, and every copy is in sync again."""
        self.mood.is_calm = True
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

    async def _drain(self) -> None:
        """What is due is sent, and everybody has heard what became of what they asked for."""
        deadline = self.world.loop.time() + DRAIN_S_MAX
        missing = 0
        while self.world.loop.time() < deadline and not self.truth.is_refuted:
            if all(each.is_done for each in self.producers):
                arrived = {each.payload for each in await self._arrived()}
                missing = sum(each.payload not in arrived for each in self.truth.awaited())
                if not missing:
                    break
            await asyncio.sleep(0.5)
        if not all(each.is_done for each in self.producers):
            self.truth.blame(Promise.STUCK, f"questions are left: {self.cluster.why()}")
        await asyncio.sleep(2.0)

    async def _examine(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self.producers:
            each.hang_up()
            self.counts["cancelled"] += each.cancelled
        arrived = await self._arrived()
        self.delivered = len(arrived)
        engines = self.cluster.engines
        known = {name: _pending(engine) for name, engine in engines.items()}
        self.truth.reckon(arrived, next(iter(known.values()), set()))
        self.counts["snapshots"] += self._refilled()
        if len(engines) != len(self.cluster.copies) or len({frozenset(each) for each in known.values()}) != 1:
            sizes = {name: len(each) for name, each in known.items()}
            self.truth.blame(Promise.LOST, f"copies do not know the same messages: {sizes}; {self.cluster.why()}")
        lacking = {name: [*engine.damaged, *engine.stuck] for name, engine in engines.items()}
        damaged = {name: each for name, each in lacking.items() if each}
        if damaged:
            self.truth.blame(Promise.BROKE, f"buckets are damaged, and nothing was: {damaged}")

    def _refilled(self) -> int:
        members: list[Any] = [copy.member for copy in self.cluster.copies.values() if copy.member is not None]
        return sum("begins anew" in each for member in members for each in member.findings)

    async def _arrived(self) -> list[Arrival]:
        """All that the brokers have."""
        found: list[Arrival] = []
        for host in self.cluster.brokers:
            client = await Client.connect(self.world.net.host("auditor"), self.world.clock, host, PORT)
            for subject in SUBJECTS:
                found += await _scanned(client, subject)
            client.close()
        return found

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


def _pending(engine: Any) -> set[MessageId]:
    rows = engine.rows
    found = [row for state in (State.PENDING, State.INTENDED) for row in rows.in_state(state).tolist()]
    return {MessageId(int(rows.index_columns.id_high[row]), int(rows.index_columns.id_low[row])) for row in found}


async def _scanned(client: Client, subject: str) -> list[Arrival]:
    found: list[Arrival] = []
    at = 0
    while True:
        try:
            scanned, batches = await client.ask(Scan(subject, Whence.SEQUENCE, at, None, 1 << 20), Scanned)
        except Refused:  # it has no such subject yet
            return found
        for attached, opened in zip(scanned.batches, map(batch.decode, batches), strict=True):
            found += [Arrival(*each, attached.appended_ms) for each in zip(opened.payloads, opened.ids(), strict=True)]
        at = scanned.next_sequence
        if not scanned.batches or at >= scanned.committed_end:
            return found


def run(seed: int) -> Outcome:
    """One seed, one history; the same seed gives the same trace hash."""
    world = Simulation(seed, steps_max=STEPS_MAX)
    history = DelayHistory(world)
    truth = history.truth
    try:
        with swapped(housekeeping, "EVERY_MS", _EVERY_MS), world:
            world.run(history.run())
    except SimulationFailed as stuck:
        truth.blame(Promise.BROKE, str(stuck))
    return Outcome(
        seed,
        history.incidents,
        truth.reigns,
        truth.acknowledged,
        history.delivered,
        history.counts["cancelled"],
        Counter(),
        history.counts,
        truth.breaches,
        world.trace_hash(),
    )
