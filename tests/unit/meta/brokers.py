"""Brokers for meta servers to ask: each alone in its group, on the network of a scene."""

from __future__ import annotations

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Configure, Configured, Removed, RemoveGroup
from fairway.simulation.disk import SimDisk
from fairway.storage.store import StoreOptions
from tests.support.client import Client, Stream
from tests.unit.meta.scene import Scene

BROKER_PORT = 20_881
EMPTY_MAP = b"\x80"


class GroupOfOne:
    """A broker that leads its group. `await GroupOfOne.lead(scene, "g1")`."""

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene = scene
        self.name = name
        self._disk = SimDisk(scene.sim.rng.child(f"disk {name}"), scene.sim.loop.call_later)
        self._streams = 0
        self.broker: Broker | None = None

    @classmethod
    async def lead(cls, scene: Scene, name: str) -> GroupOfOne:
        group = cls(scene, name)
        await group.start()
        await scene.lead(name, port=BROKER_PORT)
        await scene.settle()
        return group

    async def start(self) -> None:
        sim = self._scene.sim
        world = BrokerWorld(sim.clock, self._disk, sim.net.host(self.name), sim.rng.child(self.name))
        store = StoreOptions(low_water_bytes=0)
        options = BrokerOptions(
            host=self.name, port=BROKER_PORT, allow_remote=True, store=store, drain_ms_max=100, housekeeping_ms=1_000
        )
        self.broker = await Broker.start(world, options)

    async def stop(self) -> None:
        """The process is gone, and the registry has not noticed."""
        assert self.broker is not None
        await self.broker.stop()
        self.broker = None
        self._disk = self._disk.crash_process()

    async def send(self, subject: str, payload: bytes = b"") -> None:
        """As a producer with an old route does: without a question to any meta server."""
        self._streams += 1
        client = await self._client()
        produced: m.Produced = await client.produce(subject, Stream(self._streams).batch([payload]))
        assert produced.first_sequence >= 0
        client.close()

    async def make_group(self, subject: str, group: str) -> None:
        client = await self._client()
        await client.ask(Configure(subject, group, EMPTY_MAP, 0), Configured)
        client.close()

    async def remove_group(self, subject: str, group: str) -> None:
        client = await self._client()
        await client.ask(RemoveGroup(subject, group), Removed)
        client.close()

    async def _client(self) -> Client:
        sim = self._scene.sim
        return await Client.connect(sim.net.host("producer"), sim.clock, self.name, BROKER_PORT)
