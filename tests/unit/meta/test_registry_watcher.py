"""The picture follows the registry, whatever the registry does; and what a creation costs does not depend on how many
subjects there are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fairway.meta.cluster_state import ClusterState
from fairway.meta.registry_watcher import RegistryWatcher
from fairway.registry import layout
from fairway.registry.layout import SubjectRecord
from fairway.registry.port import Registry, RegistryError
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble, SimulatedFaults
from fairway.simulation.registry_client import SimRegistry


class Counting:
    """A registry that counts what is asked of it, in nodes."""

    def __init__(self, inner: SimRegistry) -> None:
        self._inner = inner
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_session":
            self._inner.on_session = value
        else:
            super().__setattr__(name, value)

    async def get_many(self, paths: list[str]) -> Any:
        self.asked["nodes"] += len(paths)
        return await self._inner.get_many(paths)

    async def get(self, path: str, *, fresh: bool = False) -> Any:
        self.asked["nodes"] += 1
        return await self._inner.get(path, fresh=fresh)

    async def children(self, path: str) -> list[str]:
        found = await self._inner.children(path)
        self.asked["names"] += len(found)
        return found

    def watch(self, path: str, changed: Any) -> Any:
        self.asked["watches"] += 1
        return self._inner.watch(path, changed)


@asynccontextmanager
async def keeping(world: Simulation, registry: Registry) -> AsyncIterator[ClusterState]:
    cluster_state = ClusterState()
    registry_watcher = RegistryWatcher(
        registry, cluster_state, world.rng.child("keeper"), lambda _: None, lambda _: None
    )
    registry.on_session = registry_watcher.session_is
    registry_watcher.start()
    try:
        await registry_watcher.loaded()
        yield cluster_state
    finally:
        await registry_watcher.stop()


def record(*groups: str, is_read_only: bool = False) -> SubjectRecord:
    return SubjectRecord(list(groups), list(groups), is_read_only=is_read_only)


async def make(registry: Registry, name: str, value: SubjectRecord) -> None:
    await registry.create(layout.subject_path(name), layout.pack(value))


def test_what_a_creation_costs_does_not_grow_with_the_number_of_subjects() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        operator = ensemble.client("operator")
        registry = Counting(ensemble.client("meta"))
        costs = []
        async with keeping(world, registry) as cluster_state:  # type: ignore[arg-type]
            for size in (0, 200, 2_000):
                for number in range(len(cluster_state.subjects), size):
                    await make(operator, f"s{number}", record("east"))
                await asyncio.sleep(2)
                registry.asked.clear()
                await make(operator, f"one-more-at-{size}", record("east"))
                await asyncio.sleep(2)
                assert f"one-more-at-{size}" in cluster_state.subjects
                costs.append(dict(registry.asked))
        assert costs == [{"nodes": 1}] * 3

    simulate(scenario, 1)


def test_at_the_start_no_subject_has_a_watch_of_its_own() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        operator = ensemble.client("operator")
        for number in range(1_200):
            await make(operator, f"s{number}", record("east"))
        registry = Counting(ensemble.client("meta"))
        async with keeping(world, registry) as cluster_state:  # type: ignore[arg-type]
            assert len(cluster_state.subjects) == 1_200
            assert registry.asked["watches"] == 2, "of the groups, and of the meta servers"
            assert cluster_state.carried == {"east": 1_200}

    simulate(scenario, 1)


@pytest.mark.parametrize("seed", range(40))
def test_the_picture_is_the_registrys_however_that_behaves(seed: int) -> None:
    """Late watches, lost requests and replies, stale reads, connections that break, sessions that end."""

    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world, simulated_faults=SimulatedFaults(watch_late_us=400_000, stale_us=300_000))
        operator, registry = ensemble.client("operator"), ensemble.client("meta", session_ms=2_000)
        rng = world.rng.child("changes")
        async with keeping(world, registry) as cluster_state:
            for step in range(120):
                await change(operator, rng, step)
                if rng.below(12) == 0:
                    (ensemble.drop, ensemble.expire)[rng.below(2)]("meta")
                ensemble.lose(requests=0.05 * rng.below(3), replies=0.05 * rng.below(3))
                await asyncio.sleep(rng.uniform() * 0.1)
            ensemble.lose()
            await asyncio.sleep(10)
            names = ensemble.tree.children(layout.SUBJECTS)
            assert sorted(cluster_state.subjects) == names
            for name in names:
                node = ensemble.tree.get(layout.subject_path(name))
                assert node is not None
                assert cluster_state.subjects[name] == layout.unpack(SubjectRecord, node.path, node.value)
            counted = Counter(group for each in cluster_state.subjects.values() for group in each.writable)
            assert +cluster_state.carried == counted
            assert cluster_state._names_sorted == names

    simulate(scenario, seed)


async def change(registry: Registry, rng: Any, step: int) -> None:
    """A subject is made, changed, or removed by hand."""
    path = layout.subject_path(f"s{rng.below(30)}")
    value = layout.pack(record(*(f"g{number}" for number in range(rng.below(3) + 1)), is_read_only=step % 2 == 0))
    try:
        node = await registry.get(path, fresh=True)
        if node is None:
            await registry.create(path, value)
        elif rng.below(3) == 0:
            await registry.remove(path, node.version)
        else:
            await registry.put(path, value, node.version)
    except RegistryError:
        return
