"""Whoever follows a master without being registered in the group: it is no copy, and nothing is acknowledged by it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fairway.errors import Code, Refused
from fairway.protocol.frames import stretched
from fairway.protocol.replicating import Follow, Followed, Replicate, Replicated
from fairway.registry.layout import Member, hex_id, member_path, pack, place_name
from fairway.replication.leader import Leader
from fairway.world.simulation import Simulation
from tests.simulation.cluster_steps import client_of, record, until, whole
from tests.simulation.cluster_world import GROUP, MEMBER, Cluster
from tests.simulation.test_cluster import Scenario
from tests.support.client import Client, Stream

STRANGER = 0xBAD


def play(scenario: Scenario, copies: int = 1, seed: int = 1, *, min_in_sync: int = 2) -> None:
    world = Simulation(seed, steps_max=2_000_000)
    cluster = Cluster(world, copies, membership=replace(MEMBER, min_in_sync=min_in_sync))
    with world:
        world.run(asyncio.wait_for(scenario(cluster), 120))


async def claim_everything(client: Client, directory: int, epoch: int) -> None:
    """Follow, and say that every byte is synced, as long as the master listens."""
    followed, _ = await client.ask(Follow(GROUP, epoch, directory), Followed)
    ends = [each.end for each in followed.logs]
    number = 0
    while True:
        number += 1
        starts = ends if number == 1 else []
        told, parts = await client.ask(Replicate(GROUP, epoch, directory, number, ends, starts, 50), Replicated)
        for chunk, part in zip(told.chunks, parts, strict=True):
            ends[chunk.log] = chunk.position + len(stretched(part))


async def master_alone(cluster: Cluster) -> int:
    """One copy leads; the epoch."""
    await cluster.start("b1")
    await cluster.master()
    return record(cluster).epoch


async def until_seen(cluster: Cluster, leader: Leader, directory: str, *, is_registered: bool) -> None:
    await until(lambda: (directory in leader.living) == is_registered, cluster)


def test_a_stranger_that_follows_is_no_copy_and_opens_no_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        epoch = await master_alone(cluster)
        stranger, good = await client_of(cluster, "b1"), await client_of(cluster, "b1")
        with pytest.raises(Refused, match="is not registered in group g1") as refused:
            await claim_everything(stranger, STRANGER, epoch)
        assert refused.value.code is Code.FENCED
        await asyncio.sleep(3)
        assert record(cluster).in_sync == record(cluster).members == [record(cluster).master]
        with pytest.raises(Refused) as closed:
            await good.produce("orders", Stream(7).batch([b"one"]))
        assert closed.value.code is Code.READ_ONLY, "one real copy is fewer than min_in_sync"

    play(scenario)


def test_a_thousand_strangers_leave_nothing_behind_in_the_master() -> None:
    async def scenario(cluster: Cluster) -> None:
        epoch = await master_alone(cluster)
        stranger = await client_of(cluster, "b1")
        for number in range(1_000):
            with pytest.raises(Refused):
                await stranger.ask(Follow(GROUP, epoch, STRANGER + number), Followed)
        member = cluster.copies["b1"].member
        assert member is not None
        assert member.standing.leader is not None
        assert member.standing.leader.peers == {}

    play(scenario)


def test_copies_that_came_and_went_leave_nothing_behind_in_the_master() -> None:
    """A copy that was registered for a moment and never had everything is forgotten with its node."""

    async def scenario(cluster: Cluster) -> None:
        epoch = await master_alone(cluster)
        hand = cluster.ensemble.client("hand")
        await until(lambda: hand.session_id != 0, cluster)
        member = cluster.copies["b1"].member
        assert member is not None
        leader = member.standing.leader
        assert leader is not None
        for number in range(5):
            directory = hex_id(STRANGER + number)
            path = member_path(GROUP, place_name(directory, hand.session_id))
            await hand.create(path, pack(Member(directory, "elsewhere", 1)), is_ephemeral=True)
            await until_seen(cluster, leader, directory, is_registered=True)
            visitor = await client_of(cluster, "b1")
            await visitor.ask(Follow(GROUP, epoch, STRANGER + number), Followed)
            assert list(leader.peers) == [directory]
            visitor.abort()
            await hand.remove(path)
            await until_seen(cluster, leader, directory, is_registered=False)

    play(scenario)


def test_a_copy_that_has_lost_its_session_follows_again_and_counts_once_it_is_registered() -> None:
    """A copy that the group knows may catch up while the registry does not answer it; it does not count meanwhile."""

    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        copy = cluster.copies["b2"].member
        assert copy is not None
        directory = copy.directory
        cluster.ensemble.cut("b2")
        cluster.world.net.partition("b1", "b2")
        await until(lambda: directory not in record(cluster).in_sync, cluster)
        await asyncio.sleep(MEMBER.session_ms / 1_000)
        cluster.world.net.heal("b1", "b2")
        leader = cluster.copies["b1"].member
        assert leader is not None
        assert leader.standing.leader is not None
        reign = leader.standing.leader
        await until(lambda: directory in reign.peers and reign.peers[directory].is_connected, cluster)
        await asyncio.sleep(1)
        assert directory not in record(cluster).in_sync
        cluster.ensemble.mend("b2")
        await until(lambda: directory in record(cluster).in_sync, cluster)

    play(scenario, copies=2, min_in_sync=1)
