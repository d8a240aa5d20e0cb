"""Short histories with one fault each, in the worst place: what was acknowledged, and is not there in the end.

For bugs that histories drawn from a seed meet too rarely. Without a bug, each of them loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeAlias

from fairway.errors import FairwayError
from fairway.protocol.admin_messages import Seek, Sought
from fairway.protocol.messages import Whence
from fairway.registry.layout import GroupRecord, group_path, unpack
from fairway.registry.port import Node
from fairway.simulation import Simulation
from fairway.simulation.registry import SimulatedFaults
from tests.simulation.broker_clients import PORT
from tests.simulation.cluster_world import GROUP, LEADER, MEMBER, Cluster
from tests.support.client import Client, Stream

Step: TypeAlias = Callable[[Cluster], Coroutine[Any, Any, set[bytes]]]

MESSAGES = 30


def lost(step: Step, copies: int = 2, seed: int = 1) -> set[bytes]:
    """What a step loses."""
    world = Simulation(seed, steps_max=2_000_000)
    cluster = Cluster(world, copies, membership=replace(MEMBER, leader=replace(LEADER, lag_ms=400)))
    with world:
        return world.run(asyncio.wait_for(step(cluster), 120))


async def until(holds: Callable[[], bool], cluster: Cluster, within_s: float = 20.0) -> None:
    for _ in range(round(within_s / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(cluster.why())


def record(cluster: Cluster) -> GroupRecord:
    node = cluster.ensemble.tree.get(group_path(GROUP))
    if node is None:
        raise AssertionError("nobody has made the group")
    return unpack(GroupRecord, node.path, node.value)


async def whole(cluster: Cluster, *names: str) -> None:
    """All of these live, and are in sync."""
    for name in names:
        if cluster.copies[name].member is None:
            await cluster.start(name)
    await until(lambda: len(cluster.masters) == 1 and len(record(cluster).in_sync) == len(names), cluster)


async def client_of(cluster: Cluster, name: str) -> Client:
    return await Client.connect(cluster.world.net.host("client"), cluster.world.clock, name, PORT)


async def payloads(client: Client, subject: str = "orders") -> list[bytes]:
    """All that a group has not been handed yet, acked."""
    await client.join(subject, "g", "c")
    found: list[bytes] = []
    arrived = 0
    while lots := (delivery := await client.pull(subject, "g", "c", arrived=arrived)).lots:
        arrived = delivery.number
        found += delivery.payloads.values()
        await client.settle(subject, "g", "c", lots, arrived=arrived)
    return found


class Sender:
    """Sends one message after another without waiting for answers, and remembers which were acknowledged."""

    def __init__(self, client: Client) -> None:
        self.acknowledged: set[bytes] = set()
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, pace_s: float = 0.05) -> None:
        for number in range(MESSAGES):
            self._tasks.append(asyncio.ensure_future(self._send(number)))
            await asyncio.sleep(pace_s)

    async def _send(self, number: int) -> None:
        payload = f"m{number}".encode()
        try:
            await self._client.produce("orders", Stream(100 + number).batch([payload]))
        except FairwayError:
            return
        self.acknowledged.add(payload)

    async def missing(self, cluster: Cluster, name: str) -> set[bytes]:
        """Of what was acknowledged, at this copy."""
        for task in self._tasks:
            task.cancel()
        if not self.acknowledged:
            return set()
        return self.acknowledged - set(await payloads(await client_of(cluster, name)))


async def marooned(cluster: Cluster) -> set[bytes]:
    """A master that reaches neither its replica nor the registry, and clients that reach it."""
    await whole(cluster, "b1", "b2")
    sender = Sender(await client_of(cluster, "b1"))
    cluster.world.net.partition("b1", "b2")
    cluster.ensemble.cut("b1")
    await sender.send()
    await until(lambda: cluster.copies["b2"].is_master, cluster)
    return await sender.missing(cluster, "b2")


async def powerless(cluster: Cluster) -> set[bytes]:
    """All lose their power while a replica has not synced what it has received, and it is the first to come back."""
    await whole(cluster, "b1", "b2")
    sender = Sender(await client_of(cluster, "b1"))
    cluster.copies["b2"].disk.slowness = 400.0
    await sender.send(pace_s=0.005)
    cluster.cut_power("b1")
    cluster.cut_power("b2")
    await cluster.start("b2")
    await cluster.master()
    return await sender.missing(cluster, "b2")


async def bereaved(cluster: Cluster) -> set[bytes]:
    """A new master whose other copy cannot reach it, and which falls soon."""
    await whole(cluster, "b1", "b2", "b3")
    cluster.world.net.partition("b2", "b3")
    cluster.kill("b1")
    successor = await cluster.master()
    other = "b3" if successor.name == "b2" else "b2"
    sender = Sender(await client_of(cluster, successor.name))
    if cluster.copies[other].member and record(cluster).in_sync != [record(cluster).master]:
        await sender.send(pace_s=0.002)
    cluster.kill(successor.name)
    if len(record(cluster).in_sync) < 2:
        return set()
    await until(lambda: cluster.copies[other].is_master, cluster)
    return await sender.missing(cluster, other)


async def outrun(cluster: Cluster) -> set[bytes]:
    """A replica that was cut off for long, and lives when the master falls."""
    await whole(cluster, "b1", "b2")
    cluster.world.net.partition("b1", "b2")
    await until(lambda: len(record(cluster).in_sync) == 1, cluster)
    sender = Sender(await client_of(cluster, "b1"))
    await sender.send(pace_s=0.005)
    cluster.kill("b1")
    await asyncio.sleep(5.0)
    return await sender.missing(cluster, "b2") if cluster.copies["b2"].is_master else set()


async def impatient(cluster: Cluster) -> set[bytes]:
    """A producer that asks once more on another connection, before the replica has what it sent."""
    await whole(cluster, "b1", "b2")
    client, data = await client_of(cluster, "b1"), Stream(7).batch([b"once"])
    cluster.world.net.partition("b1", "b2")
    first = asyncio.ensure_future(client.produce("orders", data))
    await asyncio.sleep(0.05)
    again = asyncio.ensure_future((await client_of(cluster, "b1")).produce("orders", data))
    await asyncio.sleep(0.1)
    is_acknowledged = again.done()
    first.cancel()
    again.cancel()
    cluster.kill("b1")
    await cluster.master()
    found = await payloads(await client_of(cluster, "b2"))
    return {b"once"} - set(found) if is_acknowledged else set()


async def premature(cluster: Cluster) -> set[bytes]:
    """A consumer that asks for more while the replica does not have it, and never will."""
    await whole(cluster, "b1", "b2")
    client = await client_of(cluster, "b1")
    await client.produce("orders", Stream(7).batch([b"both have it"]))
    await client.join("orders", "g", "early")
    delivery = await client.pull("orders", "g", "early")
    cluster.world.net.partition("b1", "b2")
    sent = asyncio.ensure_future(client.produce("orders", Stream(8).batch([b"b1 alone has it"])))
    await asyncio.sleep(0.1)
    shown = set((await client.pull("orders", "g", "early", arrived=delivery.number)).payloads.values())
    sent.cancel()
    cluster.kill("b1")
    await cluster.master()
    client = await client_of(cluster, "b2")
    await client.ask(Seek("orders", "g", Whence.EARLIEST, 0), Sought)
    return shown - set(await payloads(client))


async def set_back(cluster: Cluster) -> set[bytes]:
    """A master whose wall clock is set back while it cannot reach the registry: two of them serve, then."""
    await whole(cluster, "b1", "b2")
    cluster.copies["b1"].clock.jump(-20_000)
    cluster.ensemble.cut("b1")
    cluster.world.net.partition("b1", "b2")
    await until(lambda: cluster.copies["b2"].is_master, cluster)
    return {copy.name.encode() for copy in cluster.masters} - {b"b2"}


async def deposed(cluster: Cluster) -> set[bytes]:
    """A master that comes back with what nobody else has, and leads again later."""
    await whole(cluster, "b1", "b2")
    sender = Sender(await client_of(cluster, "b1"))
    cluster.world.net.partition("b1", "b2")
    cluster.ensemble.cut("b1")
    await sender.send(pace_s=0.005)
    await until(lambda: cluster.copies["b2"].is_master, cluster)
    client = await client_of(cluster, "b2")
    sent = {f"n{number}".encode() for number in range(2 * MESSAGES)}
    for number, payload in enumerate(sorted(sent)):
        await client.produce("orders", Stream(200 + number).batch([payload]))
    cluster.world.net.heal("b1", "b2")
    cluster.ensemble.mend("b1")
    await until(lambda: len(record(cluster).in_sync) == 2, cluster)
    cluster.kill("b2")
    await cluster.master()
    return sent ^ set(await payloads(await client_of(cluster, "b1")))


async def unheard(cluster: Cluster) -> set[bytes]:
    """A master that strikes its replica out, and the registry never hears of it."""
    await whole(cluster, "b1", "b2")
    sender = Sender(await client_of(cluster, "b1"))
    registry = cluster.copies["b1"].registry
    assert registry is not None
    put = registry.put

    async def put_unheard(path: str, value: bytes, version: int) -> Node:
        """The connection breaks under the first change of the group's node, whatever else is asked at that time."""
        if path == group_path(GROUP):
            cluster.ensemble.lose(requests=1.0)
        return await put(path, value, version)

    registry.put = put_unheard  # type: ignore[method-assign]
    cluster.ensemble.simulated_faults = SimulatedFaults()
    cluster.world.net.partition("b1", "b2")
    await sender.send(pace_s=0.02)
    cluster.kill("b1")
    cluster.ensemble.lose()
    await until(lambda: bool(cluster.masters) or len(record(cluster).in_sync) == 1, cluster)
    return await sender.missing(cluster, "b2") if cluster.masters else set()
