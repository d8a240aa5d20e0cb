"""The registry of a meta server over the wire, as one more form of the registry: see tests/unit/registry/forms.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fairway.lookup.registries import RemoteRegistry
from fairway.meta.registry_access import RegistryAccess
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.route_messages import Register
from fairway.registry.port import Registry
from fairway.registry.sqlite import SqliteRegistry, SqliteSession
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng
from tests.unit.registry.forms import SESSION_MS, Story


class AnyAccess(RegistryAccess):
    """Everybody may write everything: for tests of the wire, whose nodes are no copies' and no careers'."""

    async def check(self, session: SqliteSession, asked: Register) -> None:
        del session, asked


@asynccontextmanager
async def meta_server(
    directory: Path, port: int = 0, options: type[MetaOptions] = MetaOptions, *, is_guarded: bool = False
) -> AsyncIterator[MetaServer]:
    """One on loopback, with an SQLite registry; `is_guarded`: with the table of what may be written, as in earnest."""
    owner = await SqliteRegistry.open(str(directory))
    world = MetaWorld(RealClock(), RealNet(), RealRng(), owner, owner)
    server = await MetaServer.start(world, options(port=port))
    if not is_guarded:
        server.registers.access = AnyAccess(lambda _: True)
    try:
        yield server
    finally:
        await server.stop()


async def connect(port: int, session_ms: int = SESSION_MS) -> RemoteRegistry:
    return await RemoteRegistry.open(RealNet(), RealClock(), RealRng(), [("127.0.0.1", port)], session_ms=session_ms)


class RemoteStage:
    def __init__(self, server: MetaServer) -> None:
        self._server = server
        self.opened: list[RemoteRegistry] = []

    async def session(self) -> Registry:
        registry = await connect(self._server.port)
        self.opened.append(registry)
        return registry


def on_meta_server(directory: Path, story: Story) -> None:
    async def main() -> None:
        async with meta_server(directory) as server:
            stage = RemoteStage(server)
            try:
                await story(stage)
            finally:
                for registry in stage.opened:
                    await registry.close()

    asyncio.run(main())
