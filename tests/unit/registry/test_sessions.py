"""A session that is certain is one that nobody has seen end: over hundreds of seeds of cut, broken and paused clients.

Every client keeps an ephemeral node, looks at those of the others, and keeps a picture of the list that is refreshed by
its watch alone. Whatever happens, no client is certain of a session whose node another has seen go; and when all is
mended, everybody has a session, a node and the right picture.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fairway.registry.port import RegistryError, SessionState
from fairway.registry.sessions import Certainty
from fairway.runtime.rng import SeededRng
from fairway.simulation import Simulation
from fairway.simulation.registry import SimEnsemble, SimulatedFaults
from fairway.simulation.registry_client import SimRegistry
from fairway.simulation.wire import Conditions

SESSION_MS = 4_000
TROUBLE_S = 60.0
CALM_S = 15.0
NAMES = ("a", "b", "c")
SEEDS = 200


class Certain(AssertionError):
    """Of a session that is over."""


class Client:
    """One client, and what it knows of the others."""

    def __init__(self, world: Simulation, registry: SimRegistry, gone: dict[int, str]) -> None:
        self.registry = registry
        self.picture: list[str] = []
        self.states: list[SessionState] = []
        self._world = world
        self._gone = gone  # sessions that somebody has seen end, and whose they were
        self._known: dict[str, int] = {}
        self._is_due = asyncio.Event()
        registry.on_session = self.states.append
        registry.watch("/m", self._is_due.set)

    async def keep_node(self) -> None:
        path = f"/m/{self.registry.name}"
        while True:
            try:
                if await self.registry.get(path, fresh=True) is None:
                    await self.registry.create(path, is_ephemeral=True)
            except RegistryError:
                pass
            await asyncio.sleep(0.3)

    async def keep_picture(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            try:
                self.picture = await self.registry.children("/m")
            except RegistryError:
                self._is_due.set()
                await asyncio.sleep(0.2)

    async def look_around(self) -> None:
        while True:
            for name in NAMES:
                try:
                    node = await self.registry.get(f"/m/{name}")
                except RegistryError:
                    continue
                before = self._known.pop(name, 0)
                if node is not None:
                    self._known[name] = node.owner
                if before and (node is None or node.owner != before):
                    self._gone[before] = name
            await asyncio.sleep(0.2)

    @property
    def is_certain(self) -> bool:
        return self.registry.certain_until_ns() > self._world.clock.monotonic_ns()


async def trouble(ensemble: SimEnsemble, rng: SeededRng, end_s: float) -> None:
    """One fault after the other, each for a while."""
    loop = asyncio.get_running_loop()
    while loop.time() < end_s:
        await asyncio.sleep(rng.uniform() * 3)
        name, lasts_s = NAMES[rng.below(len(NAMES))], rng.uniform() * 1.5 * SESSION_MS / 1e3
        match rng.below(7):
            case 0:
                ensemble.cut(name)
                await asyncio.sleep(lasts_s)
                ensemble.mend(name)
            case 1 | 2 as kind:
                way = "there" if kind == 1 else "back"
                ensemble.cut(name, way)  # type: ignore[arg-type]
                await asyncio.sleep(lasts_s)
                ensemble.mend(name, way)  # type: ignore[arg-type]
            case 3 | 4:
                ensemble.pause(name)
                await asyncio.sleep(lasts_s)
                ensemble.resume(name)
                if rng.below(2):
                    await asyncio.sleep(rng.uniform() * 0.3)
                    ensemble.drop(name)
                    ensemble.cut(name)
                    await asyncio.sleep(lasts_s)
                    ensemble.mend(name)
            case 5:
                ensemble.drop(name)
            case _:
                ensemble.stop()
                await asyncio.sleep(lasts_s)
                ensemble.start()


async def story(world: Simulation, certainty: type[Certainty]) -> int:
    """How many sessions were seen to end."""
    rng = world.rng.child("story")
    bad = Conditions(latency_us=1_000, jitter_us=20_000, drop_chance=0.005)
    simulated_faults = SimulatedFaults(there=bad, back=bad, watch_late_us=500_000, stale_us=300_000)
    ensemble = SimEnsemble(world, simulated_faults=simulated_faults, tick_ms=SESSION_MS // 2)
    gone: dict[int, str] = {}
    clients = []
    for name in NAMES:
        registry = ensemble.client(name, session_ms=SESSION_MS)
        registry._certainty = certainty()
        clients.append(Client(world, registry, gone))
    tasks = [
        asyncio.create_task(part)
        for client in clients
        for part in (client.keep_node(), client.keep_picture(), client.look_around())
    ]
    faults = asyncio.create_task(trouble(ensemble, rng, TROUBLE_S))
    while not faults.done():
        await asyncio.sleep(0.05)
        for client in clients:
            if client.is_certain and client.registry.session_id in gone:
                raise Certain(f"{client.registry.name} of session {client.registry.session_id}")
    await faults
    ensemble.simulated_faults = replace(ensemble.simulated_faults, there=Conditions(), back=Conditions())
    await asyncio.sleep(CALM_S)
    for client in clients:
        assert client.is_certain, client.registry.name
        assert client.picture == list(NAMES), (client.registry.name, client.picture)
        assert client.registry.connection is not None
        assert client.states[-1] is SessionState.OPEN
    for task in tasks:
        assert not task.done(), task
    return len(gone)


def campaign(seeds: int, certainty: type[Certainty] = Certainty) -> int:
    ended = 0
    for seed in range(seeds):
        with Simulation(seed) as world:
            try:
                ended += world.run(story(world, certainty))
            except AssertionError as error:
                error.add_note(f"seed {seed}")
                raise
    return ended


def test_nobody_is_certain_of_a_session_that_another_has_seen_end() -> None:
    assert campaign(8) > 8


@pytest.mark.slow
def test_nobody_is_certain_of_a_session_that_another_has_seen_end_over_many_seeds() -> None:
    assert campaign(SEEDS) > SEEDS


class FromTheAnswer(Certainty):
    """Counts from when the answer came, which may be long after the question was heard."""

    def answered(self, sent_ns: int, now_ns: int) -> None:
        self.until_ns = max(self.until_ns, now_ns + self._session_ns * 2 // 3)


class WithoutPassingOn(Certainty):
    """Takes for granted that who answers has passed it on."""

    def answered(self, sent_ns: int, now_ns: int) -> None:
        self.until_ns = max(self.until_ns, sent_ns + self._session_ns * 2 // 3)


class NeverEnds(Certainty):
    """Trusts that the session lives as long as nobody says otherwise."""

    def begin(self, asked_ns: int, session_ns: int) -> None:
        super().begin(asked_ns, session_ns)
        self.until_ns = 1 << 62


@pytest.mark.parametrize("planted", [FromTheAnswer, WithoutPassingOn, NeverEnds])
def test_planted_certainties_are_caught(planted: type[Certainty]) -> None:
    with pytest.raises(Certain):
        campaign(SEEDS, planted)


def test_certainty_is_two_thirds_after_the_question_and_less_for_who_was_away() -> None:
    second = 1_000_000_000
    certainty = Certainty()
    certainty.begin(0, 12 * second)
    assert certainty.until_ns == 8 * second
    for number in range(1, 5):
        certainty.answered(2 * number * second, 2 * number * second + 1)
    assert certainty.until_ns == (8 + 8) * second
    certainty.answered(15 * second, 15 * second)  # the question at 8 was passed on, the one at 15 perhaps not
    assert certainty.until_ns == (8 + 12) * second
    certainty.answered(17 * second, 17 * second)
    assert certainty.until_ns == (8 + 12) * second
    certainty.answered(18 * second, 18 * second)
    assert certainty.until_ns == (18 + 8) * second
    certainty.end()
    assert certainty.until_ns == 0
