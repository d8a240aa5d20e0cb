"""Two meta servers before a real ZooKeeper: both know the same, and each sees the other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from fairway.errors import Refused
from fairway.meta.server import MetaOptions, MetaServer, MetaWorld
from fairway.protocol.route_messages import (
    Act,
    ClientRole,
    Govern,
    Governed,
    Register,
    Registered,
    Route,
    RouteChange,
    Routed,
)
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.registry.zookeeper import ZooKeeperRegistry
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng
from tests.support import zookeeper
from tests.support.client import Client

pytestmark = pytest.mark.xdist_group("zookeeper")

ROOT = "/tests/meta/two"
SESSION_MS = 4_000


async def registry() -> ZooKeeperRegistry:
    return await ZooKeeperRegistry.open(zookeeper.shared().hosts, root=ROOT, session_ms=SESSION_MS)


async def started(stack: AsyncExitStack) -> tuple[MetaServer, Client]:
    world = MetaWorld(RealClock(), RealNet(), RealRng(), await registry())
    server = await MetaServer.start(world, MetaOptions(port=0))
    stack.push_async_callback(server.stop)
    return server, await Client.connect(RealNet(), RealClock(), "127.0.0.1", server.port)


async def until_told(client: Client, asked: Route, group: str) -> Routed:
    """By long poll, until this group has a master."""
    while True:
        routed = (await client.ask(asked, Routed))[0]
        if any(each.name == group and each.master for each in routed.groups):
            return routed
        asked = Route(asked.asker, asked.subjects, routed.version, 10_000, asked.may_create)


def test_two_meta_servers_know_the_same_and_see_each_other() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            hand = await registry()
            stack.push_async_callback(hand.close)
            (one, first), (two, second) = await started(stack), await started(stack)
            waiting = [
                asyncio.ensure_future(until_told(client, Route(ClientRole.TOOL, []), "g1"))
                for client in (first, second)
            ]
            await hand.create(layout.group_path("g1"), layout.pack(GroupRecord("broker", 1, "d1", ["d1"])))
            member = layout.pack(RegisteredCopy("d1", "127.0.0.1", 7))
            await hand.create(layout.member_path("g1", "d1"), member, is_ephemeral=True)
            for routed in await asyncio.gather(*waiting):
                assert [each.master for each in routed.groups] == ["127.0.0.1:7"]
            made = Route(ClientRole.PRODUCER, ["orders"], may_create=True)
            both = await asyncio.gather(first.ask(made, Routed), second.ask(made, Routed))
            assert [routed.subjects[0].writable for routed, _ in both] == [["g1"], ["g1"]]
            await first.ask(Govern(RouteChange.READ_ONLY, "orders"), Governed)
            asked = Route(ClientRole.PRODUCER, ["orders"], both[1][0].version, 10_000)
            while not (routed := (await second.ask(asked, Routed))[0]).subjects:
                asked = Route(ClientRole.PRODUCER, ["orders"], routed.version, 10_000)
            assert routed.subjects[0].is_read_only
            everything = (await first.ask(Route(ClientRole.TOOL, []), Routed))[0]
            assert sorted(everything.metas) == sorted([one.address, two.address])
            with pytest.raises(Refused, match="zookeeper://"):
                await first.ask(Register(Act.OPEN, 0, number=1_000), Registered)

    asyncio.run(main())
