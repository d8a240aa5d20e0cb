"""A delay server in a cluster on virtual time: a simulated registry, meta servers, brokers that stand in for groups.

    @in_cluster("g1", "g2")
    async def test_something(cluster: Cluster) -> None:
        await cluster.create("orders", "g1")
        await cluster.schedule([b"a"], after_s=5)

Each broker is alone in its group; the registry's nodes are written for it, as a copy that leads would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from fairway.delay.joining import Joining
from fairway.delay.server import DelayServer, ServerOptions
from fairway.delay.service import DelayWorld
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.routing import Change, Govern, Governed
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, Member
from fairway.registry.sim_client import SimRegistry
from fairway.registry.simulated import SimEnsemble
from tests.support.client import Client
from tests.unit.delay.helpers import OPTIONS
from tests.unit.delay.scene import PORT, Machine, Scene

META_PORT = 20882


class Cluster(Scene):
    """A scene whose delay server learns everything by itself."""

    def __init__(self, seed: str, brokers: tuple[str, ...]) -> None:
        super().__init__(seed, brokers, False, OPTIONS)
        self.ensemble = SimEnsemble(self.sim)
        self.hand: SimRegistry = None  # type: ignore[assignment]  # from `start` on
        self.metas: dict[str, MetaServer] = {}
        self.registry: SimRegistry = None  # type: ignore[assignment]  # the delay server's
        self.remarks: list[str] = []
        self.group = "d1"

    # --- lives -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.hand = self.ensemble.client("hand")
        for name in self.machines:
            await self.start_broker(name)
            await self.lead(name)
        await self.start_meta("m1")
        await self.start_delay()
        await self.sleep(1)

    async def start_meta(self, name: str) -> None:
        registry = self.ensemble.client(f"{name} {len(self.metas)}")
        world = MetaWorld(self.clock, self.sim.net.host(name), self.sim.rng.child(name), registry)
        self.metas[name] = await MetaServer.start(world, MetaOptions(host=name, port=META_PORT, allow_remote=True))

    async def start_delay(self) -> None:
        self.server = await self.new_delay(self.disk_of_delay)
        self.delay = self.server.delay

    @property
    def disk_of_delay(self) -> Machine:
        machine = Machine(self.sim, "delay")
        machine.disk = self.disk
        return machine

    async def new_delay(self, machine: Machine, host: str = "delay", **more: Any) -> DelayServer:
        self._lives += 1
        rng = self.sim.rng.child(f"{host} {self._lives}")
        self.registry = self.ensemble.client(f"{host} {self._lives}")
        joining = replace(Joining(self.registry, self.group), **more)
        world = DelayWorld(self.clock, machine.disk, self.sim.net.host(host), rng)
        options = ServerOptions(host=host, port=PORT, allow_remote=True, delay=OPTIONS)
        return await DelayServer.start(world, options, {}, joining, self.remarks.append)

    def kill_delay(self, *, is_power_cut: bool = False) -> None:
        assert self.server is not None
        joined = self.server._joined
        assert joined is not None
        for task in (joined._looker, joined.membership._task):
            if task is not None:
                task.cancel()
        joined.wayfinder.close()
        self.ensemble.crash(self.registry.name)
        super().kill_delay(is_power_cut=is_power_cut)

    async def stop(self) -> None:
        await super().stop()
        for meta in self.metas.values():
            await meta.stop()
        await self.hand.close()

    # --- who leads, as brokers would write it ------------------------------------------------------------------------

    async def lead(self, group: str, host: str | None = None) -> None:
        """The broker on that host lives, and leads the group."""
        host = host or group
        directory = f"{host}-copy"
        path = layout.group_path(group)
        node = await self.hand.get(path, fresh=True)
        member = Member(directory, host, PORT, role="master")
        if node is None or not node.value:
            await self.hand.create(path, layout.pack(GroupRecord("broker", 1, directory, [directory])))
        else:
            known = layout.unpack(GroupRecord, path, node.value)
            changed = msgspec.structs.replace(known, epoch=known.epoch + 1, master=directory, in_sync=[directory])
            await self.hand.put(path, layout.pack(changed), node.version)
        await self.hand.create(layout.member_path(group, directory), layout.pack(member), is_ephemeral=True)

    async def leave(self, group: str, host: str | None = None) -> None:
        """Its session has ended."""
        await self.hand.remove(layout.member_path(group, f"{host or group}-copy"))

    async def create(self, subject: str, *groups: str) -> None:
        await self.govern(Change.CREATE, subject, *groups)

    async def govern(self, change: Change, name: str, *groups: str, **more: Any) -> str:
        client = await Client.connect(self.sim.net.host("operator"), self.clock, next(iter(self.metas)), META_PORT)
        return (await client.ask(Govern(change, name, list(groups), **more), Governed))[0].sentence

    async def record(self) -> GroupRecord:
        path = layout.group_path(self.group)
        node = await self.hand.get(path, fresh=True)
        assert node is not None
        return layout.unpack(GroupRecord, path, node.value)

    async def members(self) -> list[Member]:
        found = []
        for name in await self.hand.children(layout.members_path(self.group)):
            path = layout.member_path(self.group, name)
            node = await self.hand.get(path, fresh=True)
            if node is not None:
                found.append(layout.unpack(Member, path, node.value))
        return found


Story = Callable[[Cluster], Coroutine[Any, Any, None]]


def in_cluster(*brokers: str) -> Callable[[Story], Callable[[], None]]:
    def decorate(story: Story) -> Callable[[], None]:
        @functools.wraps(story)
        def test() -> None:
            Cluster(story.__name__, brokers or ("g1",)).play(story)  # type: ignore[arg-type]

        del test.__wrapped__  # pytest would look there for fixtures
        return test

    return decorate
