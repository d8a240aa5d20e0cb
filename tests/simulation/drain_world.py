"""Delay servers and broker groups that are drained and given up, on virtual time: every process is the real one.

Each broker group has one copy, a `BrokerCopy` on a disk of its own, so that it drains as `fairway broker` does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from fairway.broker.broker_copy import BrokerCopy
from fairway.broker.server import BrokerOptions
from fairway.errors import Refused
from fairway.protocol.delay_messages import DelayTally, Tallied, TransitReport, Which
from fairway.protocol.route_messages import RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord
from fairway.replication.copies import CopyOptions, CopyRuntime
from fairway.simulation.files import Volume
from fairway.simulation.registry_client import SimRegistry
from tests.support.threads import SimRunner
from tests.unit.delay.cluster import SESSION_MS, Cluster
from tests.unit.delay.scene import PORT, STORE, SUBJECT

LOOKS_MAX = 600


class DrainWorld(Cluster):
    """A cluster whose broker groups are led by processes of their own."""

    def __init__(self, seed: str, groups: tuple[str, ...]) -> None:
        super().__init__(seed, groups)
        self.brokers: dict[str, BrokerCopy] = {}
        self.broker_registries: dict[str, SimRegistry] = {}
        self.subjects: tuple[str, ...] = (SUBJECT,)
        self._backup: Volume | None = None
        self.kept: Counter[bytes] = Counter()  # by a group that was given up, when that was granted

    # --- lives -------------------------------------------------------------------------------------------------------

    async def start_broker(self, name: str, delay: Any = None) -> None:
        del delay
        machine = self.machines[name]
        self._lives += 1

        def opened() -> Any:
            machine.disk = machine.disk.beside()
            return machine.disk

        self.broker_registries[name] = self.ensemble.client(f"{name} {self._lives}", session_ms=SESSION_MS)
        rng = self.sim.rng.child(f"{name} {self._lives}")
        net, jobs = self.sim.net.host(name), SimRunner(rng.child("jobs"))
        world = CopyRuntime(self.clock, opened, net, rng, self.broker_registries[name], jobs)
        options = BrokerOptions(host=name, port=PORT, allow_remote=True, store=STORE)
        membership = replace(CopyOptions(name, session_ms=SESSION_MS), look_ms=300, beat_ms=500)
        self.brokers[name] = member = await BrokerCopy.start(world, options, membership)
        for _ in range(LOOKS_MAX):
            if member.copy_status.is_master:
                machine.broker = member.broker
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{name} does not lead: {member.sentence()}")

    async def lead(self, group: str, host: str | None = None) -> None:
        """It does so by itself."""

    def kill_group(self, name: str, *, is_power_cut: bool = False) -> None:
        """No goodbye."""
        member = self.brokers.pop(name)
        for task in member._tasks.values():
            task.cancel()
        if member.copy_status.leader is not None:
            member.copy_status.leader.close()
        self.ensemble.crash(self.broker_registries[name].name)
        self.kill_broker(name, is_power_cut=is_power_cut)

    def back_up_delay(self) -> None:
        """Keep the delay server's disk as it is now."""
        self._backup = self.disks["delay"]._volume.after_power_cut(self.sim.rng.child("backup"))

    async def restore_delay(self) -> None:
        """Start the delay server on the disk that was kept."""
        assert self._backup is not None
        self.kill_delay()
        self.disks["delay"] = self.disks["delay"]._successor(self._backup, None)
        await self.start_delay()

    async def stop_group(self, name: str) -> None:
        self.machines[name].broker = None
        self._clients.pop(name, None)
        await self.brokers.pop(name).stop()

    async def stop(self) -> None:
        for host in [*self.members]:
            await self.stop_copy(host)
        for name in [*self.brokers]:
            await self.stop_group(name)
        await super().stop()

    # --- what operators do and see -----------------------------------------------------------------------------------

    async def in_transit(self) -> list[TransitReport]:
        tallied: Tallied = await self.ask(DelayTally(Which()), Tallied)
        assert tallied.in_transit is not None
        return tallied.in_transit

    async def decommissioned(self, group: str, within_s: int = 120) -> None:
        """Give up a group as the pages say, however often that must be asked; its servers are stopped in between."""
        for _ in range(within_s):
            try:
                sentence = await self.govern(RouteChange.DECOMMISSION, group)
            except Refused as refused:
                if "is not done" not in str(refused):
                    raise
                await self.sleep(1)
                continue
            if sentence.startswith(f"group {group} is forgotten"):
                return
            self.kept = await self.delivered(group)
            await self.stop_group(group)
            await self.sleep(2 * SESSION_MS / 1_000)
        raise AssertionError(f"{group} is never given up: {await self.in_transit()}")

    async def group_record(self, name: str) -> GroupRecord | None:
        path = layout.group_path(name)
        node = await self.hand.get(path, fresh=True)
        return None if node is None or not node.value else layout.unpack(GroupRecord, path, node.value)

    async def delivered(self, *groups: str) -> Counter[bytes]:
        """How often each payload is stored, in these groups and in the one that was given up."""
        found = Counter(self.kept)
        for group in groups:
            for subject in self.subjects:
                found += Counter(await self.payloads(subject, group))
        return found
