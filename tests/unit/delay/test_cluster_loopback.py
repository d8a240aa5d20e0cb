"""The same on real sockets and disks: a meta server that keeps the registry, two brokers, a delay server."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from fairway import batch
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.delay.server import DelayCopy, ServerOptions
from fairway.errors import Code, Refused
from fairway.lookup.registries import RemoteRegistry
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol import Bytes
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.protocol.route_messages import ClientRole, Govern, Governed, Route, RouteChange, Routed
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.registry.sqlite import SqliteRegistry
from fairway.replication.copies import CopyOptions, CopyRuntime
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.runtime.threads import ThreadRunner
from tests.support import copies
from tests.support.client import Client

HOST = "127.0.0.1"
LOOK_S, LOOKS_MAX = 0.05, 600
CLOCK, NET, RNG = RealClock(), RealNet(), RealRng()


def disk(path: Path) -> RealDisk:
    return RealDisk(path, post=asyncio.get_running_loop().call_soon_threadsafe)


async def start_broker(path: Path) -> Broker:
    return await Broker.start(BrokerWorld(CLOCK, disk(path), NET, RNG), BrokerOptions(host=HOST, port=0))


async def lead(registry: RemoteRegistry, group: str, broker: Broker) -> None:
    """Write what a copy that leads would write."""
    directory = layout.hex_id(broker.store.identity.directory_id)
    await copies.register(registry, group, RegisteredCopy(directory, HOST, broker.port, role="master"))
    await copies.put_record(registry, group, GroupRecord("broker", 1, directory, [directory], members=[directory]))


async def first_payloads(broker: Broker, subject: str) -> list[bytes]:
    """What there is of a subject, once there is something."""
    client = await Client.connect(NET, CLOCK, HOST, broker.port)
    batches: tuple[Bytes, ...] = ()
    for _ in range(LOOKS_MAX):
        with contextlib.suppress(Refused):
            _, batches = await client.ask(Scan(subject, Whence.SEQUENCE, 0, None, 1 << 20), Scanned)
        if batches:
            break
        await asyncio.sleep(LOOK_S)
    client.abort()
    return [payload for data in batches for payload in batch.decode(data).payloads]


async def schedule(client: Client, subject: str, data: bytes) -> None:
    """As soon as it is open: it is named as the master a moment before."""
    for _ in range(LOOKS_MAX):
        try:
            await client.produce(subject, data)
        except Refused as refused:
            if refused.code is not Code.NOT_MASTER:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return
    raise AssertionError("it never leads")


async def story(root: Path) -> None:
    owner = await SqliteRegistry.open(str(root / "meta"), clock=CLOCK)
    meta = await MetaServer.start(MetaWorld(CLOCK, NET, RNG, owner, owner), MetaOptions(host=HOST, port=0))
    places = ((HOST, meta.port),)
    registry = await RemoteRegistry.open(NET, CLOCK, RNG, places)
    brokers = {name: await start_broker(root / name) for name in ("g1", "g2")}
    for name, broker in brokers.items():
        await lead(registry, name, broker)
    own = await RemoteRegistry.open(NET, CLOCK, RNG, places)
    world = CopyRuntime(CLOCK, lambda: disk(root / "d1"), NET, RNG, own, ThreadRunner())
    server = await DelayCopy.start(world, ServerOptions(host=HOST, port=0), CopyOptions("d1"), places)
    tool = await Client.connect(NET, CLOCK, HOST, meta.port)
    for name in brokers:
        await tool.ask(Govern(RouteChange.CREATE, f"only-{name}", [name]), Governed)

    route = await _delay_route(tool)
    client = await Client.connect(NET, CLOCK, HOST, int(route.rpartition(":")[2]))
    for number, name in enumerate(brokers, 1):
        due_ms = CLOCK.wall_ms() + 200
        data = batch.encode([name.encode()], producer_id=number, first_sequence=0, created_ms=0, due_ms=[due_ms])
        await schedule(client, f"only-{name}", data)
    for name, broker in brokers.items():
        assert await first_payloads(broker, f"only-{name}") == [name.encode()]

    client.abort()
    await server.stop()
    assert (await tool.ask(Route(ClientRole.SCHEDULER, ["only-g1"]), Routed))[0].subjects[0].writable == []
    tool.abort()
    for broker in brokers.values():
        await broker.stop()
    await registry.close()
    await meta.stop()


async def _delay_route(tool: Client) -> str:
    """Where clients that schedule something are sent to."""
    for _ in range(LOOKS_MAX):
        routed, _ = await tool.ask(Route(ClientRole.SCHEDULER, ["only-g1"]), Routed)
        if routed.subjects[0].writable == ["d1"]:
            return routed.groups[0].master
        await asyncio.sleep(LOOK_S)
    raise AssertionError("no delay server takes the subject")


def test_a_delayed_message_reaches_the_group_of_its_subject_over_real_sockets(tmp_path: Path) -> None:
    asyncio.run(story(tmp_path))
