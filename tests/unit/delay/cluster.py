"""Delay servers in a cluster on virtual time: a simulated registry, meta servers, brokers that stand in for groups.

    @in_cluster("g1", "g2")
    async def test_something(cluster: Cluster) -> None:
        await cluster.create("orders", "g1")
        await cluster.schedule([b"a"], after_s=5)

Each broker is alone in its group; the registry's nodes are written for it, as a copy that leads would. Delay servers
are the copies of one group, by their hosts; the first is called `delay`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from fairway.delay.server import DelayCopy, ServerOptions
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.route_messages import Govern, Governed, RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.replication.copies import CopyOptions, CopyRuntime
from fairway.simulation.disk import SimDisk
from fairway.simulation.registry import SimEnsemble
from fairway.simulation.registry_client import SimRegistry
from tests.support.client import Client
from tests.support.threads import SimRunner
from tests.unit.delay.helpers import OPTIONS
from tests.unit.delay.scene import PORT, Machine, Scene

META_PORT = 20882
SESSION_MS = 2_000


class Cluster(Scene):
    """A scene whose delay server learns everything by itself."""

    def __init__(self, seed: str, brokers: tuple[str, ...]) -> None:
        super().__init__(seed, brokers, False, OPTIONS)
        self.ensemble = SimEnsemble(self.sim)
        self.hand: SimRegistry = None  # type: ignore[assignment]  # from `start` on
        self.metas: dict[str, MetaServer] = {}
        self.members: dict[str, DelayCopy] = {}  # by host
        self.registries: dict[str, SimRegistry] = {}
        self.disks: dict[str, SimDisk] = {"delay": self.disk}
        self.group = "d1"
        self._master = "delay"

    @property
    def _delay_host(self) -> str:
        return self._master

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
        await self.start_copy("delay")
        await self.led()

    async def start_copy(self, host: str, *, is_apart: bool = False, **more: Any) -> DelayCopy:
        """One more process with a disk of its own, or with that of its life before. `is_apart`: its buckets are on
        another one."""
        self._lives += 1
        for name in (host, f"{host}'s buckets"):
            if name not in self.disks:
                self.disks[name] = Machine(self.sim, name).disk
        self.registries[host] = self.ensemble.client(f"{host} {self._lives}", session_ms=SESSION_MS)
        rng = self.sim.rng.child(f"{host} {self._lives}")
        net = self.sim.net.host(host)
        world = CopyRuntime(
            self.clock, lambda: self._reopened(host), net, rng, self.registries[host], SimRunner(rng.child("jobs"))
        )
        options = ServerOptions(host=host, port=PORT, allow_remote=True, delay=OPTIONS)
        membership = replace(CopyOptions(self.group, session_ms=SESSION_MS), **more)
        beside = (lambda: self._reopened(f"{host}'s buckets")) if is_apart else None
        self.members[host] = member = DelayCopy(world, options, membership, open_schedule_disk=beside)
        await member.begin()
        return member

    def _reopened(self, host: str) -> SimDisk:
        self.disks[host] = self.disks[host].beside()
        return self.disks[host]

    async def led(self) -> str:
        """The host of the copy that leads, once there is one that is open to clients."""
        for _ in range(3_000):
            for host, member in self.members.items():
                if member.copy_status.is_master and member.server is not None:
                    self._master, self.server, self.delay = host, member.server, member.server.delay
                    return host
            await asyncio.sleep(0.01)
        raise AssertionError(f"nobody leads: {[each.sentence() for each in self.members.values()]}")

    async def in_sync(self, copies: int) -> None:
        """So many of them are."""
        for _ in range(3_000):
            if len((await self.record()).in_sync) == copies:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{await self.record()}: {[each.sentence() for each in self.members.values()]}")

    def kill_delay(self, *, is_power_cut: bool = False) -> None:
        self.kill_copy(self._master, is_power_cut=is_power_cut)

    def kill_copy(self, host: str, *, is_power_cut: bool = False) -> None:
        """No goodbye; whatever it had still meant to do is left undone."""
        member = self.members.pop(host)
        for task in member._tasks.values():
            task.cancel()
        if member.copy_status.leader is not None:
            member.copy_status.leader.close()
        if member.server is not None:
            if member.server._target_finder is not None:
                member.server._target_finder.close()
            member.server.delay.fall_silent()
        self.ensemble.crash(self.registries[host].name)
        self.sim.net.crash(host)
        self._clients.pop(host, None)
        for name in (host, f"{host}'s buckets"):
            disk = self.disks[name]
            self.disks[name] = disk.crash() if is_power_cut else disk.crash_process()

    async def stop_copy(self, host: str) -> None:
        await self.members.pop(host).stop()
        self._clients.pop(host, None)

    async def stop(self) -> None:
        for host in [*self.members]:
            await self.stop_copy(host)
        for machine in self.machines.values():
            if machine.broker is not None:
                await machine.broker.stop()
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
        member = RegisteredCopy(directory, host, PORT, role="master")
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
        await self.govern(RouteChange.CREATE, subject, *groups)

    async def govern(self, change: RouteChange, name: str, *groups: str, **more: Any) -> str:
        client = await Client.connect(self.sim.net.host("operator"), self.clock, next(iter(self.metas)), META_PORT)
        return (await client.ask(Govern(change, name, list(groups), **more), Governed))[0].sentence

    async def record(self) -> GroupRecord:
        path = layout.group_path(self.group)
        node = await self.hand.get(path, fresh=True)
        assert node is not None
        return layout.unpack(GroupRecord, path, node.value)

    async def members_shown(self) -> list[RegisteredCopy]:
        found = []
        for name in await self.hand.children(layout.members_path(self.group)):
            path = layout.member_path(self.group, name)
            node = await self.hand.get(path, fresh=True)
            if node is not None:
                found.append(layout.unpack(RegisteredCopy, path, node.value))
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
