"""The forms of the registry, so that one suite runs on all of them.

def test_something(form: Form) -> None:
    async def story(stage: Stage) -> None:
        first, second = await stage.session(), await stage.session()
        ...
    form(story)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Protocol, TypeAlias

from fairway.registry.port import Registry
from fairway.registry.sqlite import SqliteRegistry
from fairway.registry.zookeeper import ZooKeeperRegistry
from fairway.simulation import Simulation
from fairway.simulation.registry import SimEnsemble
from tests.support import zookeeper

SESSION_MS = 2_000
_TRIES = 2_000


class Stage(Protocol):
    """Sessions at one registry that is empty at first."""

    async def session(self) -> Registry: ...


Story: TypeAlias = Callable[[Stage], Coroutine[None, None, None]]
Form: TypeAlias = Callable[[Story], None]


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait, on whatever time there is."""
    for _ in range(_TRIES):
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


class SimStage:
    def __init__(self, ensemble: SimEnsemble) -> None:
        self._ensemble = ensemble
        self._made = 0

    async def session(self) -> Registry:
        self._made += 1
        client = self._ensemble.client(f"client-{self._made}", session_ms=SESSION_MS)
        await until(lambda: client.session_id != 0)
        return client


class SqliteStage:
    def __init__(self, owner: SqliteRegistry) -> None:
        self._owner = owner
        self._is_taken = False

    async def session(self) -> Registry:
        """The first is the owner's own; the others are lent."""
        if not self._is_taken:
            self._is_taken = True
            return self._owner
        return await self._owner.open_session(60_000)


class ZooKeeperStage:
    def __init__(self, root: str) -> None:
        self._root = root
        self.opened: list[ZooKeeperRegistry] = []

    async def session(self) -> Registry:
        hosts = zookeeper.shared().hosts
        registry = await ZooKeeperRegistry.open(hosts, root=self._root, session_ms=SESSION_MS)
        self.opened.append(registry)
        return registry


def simulated(story: Story) -> None:
    for seed in range(5):
        with Simulation(seed) as world:
            world.run(story(SimStage(SimEnsemble(world))))


def on_sqlite(directory: Path, story: Story) -> None:
    async def main() -> None:
        owner = await SqliteRegistry.open(str(directory))
        try:
            await story(SqliteStage(owner))
        finally:
            await owner.close()

    asyncio.run(main())


def on_zookeeper(name: str, story: Story) -> None:
    async def main() -> None:
        stage = ZooKeeperStage(f"/tests/registry/{name}")
        try:
            await story(stage)
        finally:
            await asyncio.gather(*(registry.close() for registry in stage.opened))

    asyncio.run(main())
