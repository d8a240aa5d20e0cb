"""A copy's place in the registry: one at a time for a directory, and nobody's late word takes it away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairway.errors import WrongDirectory
from fairway.registry.layout import RegisteredCopy, members_path
from fairway.registry.port import Node, RegistryError
from fairway.replication.leadership import living
from fairway.replication.registration import CopyRegistration
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble, SimulatedFaults
from fairway.simulation.registry_client import SimRegistry

GROUP = "g"
SESSION_MS = 1_000
HERE = RegisteredCopy("d1", "here", 1)
THERE = RegisteredCopy("d1", "there", 1)
LATE_S = 1.0


def place_of(world: Simulation, registry: SimRegistry) -> CopyRegistration:
    return CopyRegistration(registry, world.clock, GROUP, SESSION_MS)


async def taken(place: CopyRegistration, shown: RegisteredCopy) -> None:
    """As a member does: again and again."""
    while True:
        try:
            if await place.take(shown):
                return
        except RegistryError:
            pass
        await asyncio.sleep(0.02)


def test_who_is_restarted_has_the_place_at_once() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        before = ensemble.client("one", session_ms=SESSION_MS)
        await taken(place_of(world, before), HERE)
        ensemble.crash("one")
        after = ensemble.client("one", session_ms=SESSION_MS)
        began = world.loop.time()
        await taken(place_of(world, after), HERE)
        assert world.loop.time() - began < SESSION_MS / 2_000
        assert await after.children(members_path(GROUP)) == [f"d1-{after.session_id:x}"]

    simulate(scenario, 1)


def test_what_it_says_is_renewed() -> None:
    async def scenario(world: Simulation) -> None:
        registry = SimEnsemble(world).client("one")
        place = place_of(world, registry)
        for port in (1, 2, 2, 3):
            await taken(place, RegisteredCopy("d1", "here", port))
            assert await living(registry, GROUP) == {"d1": RegisteredCopy("d1", "here", port)}
        await place.leave()
        assert await living(registry, GROUP) == {}

    simulate(scenario, 1)


@pytest.mark.parametrize("seed", range(40))
def test_no_word_of_an_earlier_life_takes_away_the_place_of_a_later_one(seed: int) -> None:
    """A request whose connection broke is carried out all the same, when others have been made and answered since."""

    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world, simulated_faults=SimulatedFaults(late_us=int(LATE_S * 1e6)))
        rng = world.rng.child("lives")
        for _ in range(4):
            registry = ensemble.client("one", session_ms=SESSION_MS)
            ensemble.lose(requests=0.3, replies=0.1)
            place = place_of(world, registry)
            await taken(place, HERE)
            ensemble.lose()
            session = place.session
            for _ in range(int(LATE_S / 0.01)):
                await asyncio.sleep(0.01)
                lives = registry.session_id == session and world.clock.monotonic_ns() < registry.certain_until_ns()
                assert ensemble.tree.children(members_path(GROUP)) or not lives, "while it lives it may lead"
                if rng.below(40) == 0:
                    break
            ensemble.crash("one")

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", range(40))
def test_a_place_that_was_given_up_and_taken_again_is_not_removed_late(seed: int) -> None:
    """The same session: a deposed master gives up its place, opens its directory, and may lead again."""

    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world, simulated_faults=SimulatedFaults(late_us=int(LATE_S * 1e6)))
        registry = ensemble.client("one", session_ms=20 * SESSION_MS)
        place = place_of(world, registry)
        await taken(place, HERE)
        for _ in range(4):
            ensemble.lose(requests=0.5, replies=0.2)
            await place.leave()
            await taken(place, HERE)
            ensemble.lose()
            session = place.session
            for _ in range(int(1.5 * LATE_S / 0.01)):
                await asyncio.sleep(0.01)
                lives = registry.session_id == session and world.clock.monotonic_ns() < registry.certain_until_ns()
                assert ensemble.tree.children(members_path(GROUP)) or not lives, "while it lives it may lead"

    simulate(scenario, seed)


def test_a_node_that_another_session_has_made_is_no_place() -> None:
    """The session ended while the request waited for a connection: it goes out in the next one, under the old name."""

    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        registry = Straddling(ensemble.client("one", session_ms=SESSION_MS), ensemble)
        place = place_of(world, registry)  # type: ignore[arg-type]
        await registry.children("/")
        assert not await place.take(HERE)
        await taken(place, HERE)
        assert place.session == registry.session_id
        assert ensemble.tree.children(members_path(GROUP)) == [f"d1-{registry.session_id:x}"]

    simulate(scenario, 1)


class Straddling:
    """A registry whose session ends before the first node is made, and the request is not."""

    def __init__(self, inner: SimRegistry, ensemble: SimEnsemble) -> None:
        self._inner = inner
        self._ensemble = ensemble
        self._has_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, path: str, value: bytes, *, is_ephemeral: bool) -> Node:
        session = self._inner.session_id
        if not self._has_ended:
            self._has_ended = True
            self._ensemble.expire("one")
            while self._inner.session_id in (0, session):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await self._inner.create(path, value, is_ephemeral=is_ephemeral)


def test_a_copy_of_the_directory_elsewhere_is_told_so() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        one, other = (ensemble.client(name, session_ms=SESSION_MS) for name in ("one", "other"))
        await taken(place_of(world, one), HERE)
        late = place_of(world, other)
        with pytest.raises(WrongDirectory, match="at here:1, lives with the same data directory id d1"):
            async with asyncio.timeout(10 * SESSION_MS / 1_000):
                await taken(late, THERE)
        assert late.why
        assert await living(one, GROUP) == {"d1": HERE}

    simulate(scenario, 1)


@pytest.mark.parametrize("seed", range(30))
def test_of_two_with_copies_of_one_directory_one_at_most_has_the_place(seed: int) -> None:
    async def scenario(world: Simulation) -> int:
        ensemble = SimEnsemble(world)
        places = [place_of(world, ensemble.client(name, session_ms=SESSION_MS)) for name in ("one", "other")]
        had = await asyncio.gather(*(place.take(shown) for place, shown in zip(places, (HERE, THERE), strict=True)))
        assert sum(had) <= 1
        return sum(had)

    simulate(scenario, seed)
