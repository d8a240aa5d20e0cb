"""A master whose own disk rots: what it has lost comes back from a replica, and no group misses a message by it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Seek, Sought
from fairway.replication.leader import Leader
from fairway.storage import segment
from fairway.storage.store import Store
from tests.simulation.cluster_steps import client_of, record, until, whole
from tests.simulation.cluster_world import LEADER, MEMBER, STORE, Cluster
from tests.simulation.test_cluster import play
from tests.support.client import Client, Stream

SENT = [f"m{number}".encode().ljust(200, b".") for number in range(60)]
FIRST_MESSAGES, FIRST_ACTIONS = (segment.file_name(log, 0) for log in ("messages", "actions"))


def store_of(cluster: Cluster, name: str) -> Store:
    member = cluster.copies[name].member
    assert member is not None
    assert member.broker is not None
    return member.broker.store


def leader_of(cluster: Cluster, name: str) -> Leader:
    member = cluster.copies[name].member
    assert member is not None
    assert member.copy_status.leader is not None
    return member.copy_status.leader


async def fill(cluster: Cluster, name: str = "b1") -> Client:
    client, stream = await client_of(cluster, name), Stream(7)
    for each in SENT:
        await client.produce("orders", stream.batch([each]))
    await asyncio.sleep(0.1)
    return client


async def consumed(client: Client, group: str = "g", pulls_max: int = 500) -> list[bytes]:
    """All that a group is handed; a refusal to wait for something is no end."""
    await client.join("orders", group, "c")
    found: list[bytes] = []
    arrived = 0
    for _ in range(pulls_max):
        try:
            delivery = await client.pull("orders", group, "c", arrived=arrived)
        except Refused as refused:
            if refused.code is not Code.BUSY or not refused.retry_after_ms:
                raise
            await asyncio.sleep(refused.retry_after_ms / 1_000)
            continue
        if not delivery.lots:
            break
        arrived = delivery.number
        found += delivery.payloads.values()
        await client.settle("orders", group, "c", delivery.lots, arrived=arrived)
    return found


async def lost(client: Client, group: str = "g") -> int:
    described, _ = await client.ask(Describe(Depth.GROUPS, "orders", group), Described)
    return described.subjects[0].groups[0].lost


def spoil(cluster: Cluster, name: str, *records: int, file: str = FIRST_MESSAGES) -> None:
    """A bit flips in the bodies of these records."""
    log = 0 if file == FIRST_MESSAGES else 1
    places = store_of(cluster, name).positions(log, 0, 30_000)
    for number in records:
        cluster.copies[name].disk.flip(file, (places[number] + 100) * 8)


def test_a_group_gets_what_had_rotted_under_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        spoil(cluster, "b1", 5, 17, 18, 40)
        assert await consumed(client) == SENT
        assert store_of(cluster, "b1").rotten == []
        assert leader_of(cluster, "b1").tally.mended_spans >= 3
        assert await consumed(client, "another") == SENT
        cluster.kill("b2")
        cluster.kill("b1")
        await whole(cluster, "b1")
        assert await consumed(await client_of(cluster, "b1"), "third") == SENT, "it is on its disk"

    play(scenario)


@pytest.mark.parametrize("is_alone", [False, True])
def test_without_a_replica_that_has_it_things_are_as_they_were(is_alone: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        spoil(cluster, "b1", 5)
        if is_alone:
            cluster.kill("b2")
            await until(lambda: len(record(cluster).in_sync) == 1, cluster)
        else:
            spoil(cluster, "b2", 5)
        assert len(await consumed(client)) == len(SENT) - 1
        assert len(store_of(cluster, "b1").rotten) == 1
        assert leader_of(cluster, "b1").hopeless_spans() == 1
        assert await lost(client) == 1

    play(scenario)


def test_the_copies_agree_on_what_a_group_has_lost() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        for name in ("b1", "b2"):
            spoil(cluster, name, 5, 17, 18)
        assert len(await consumed(client)) == len(SENT) - 3
        assert await lost(client) == 3
        cluster.kill("b1")
        await until(lambda: cluster.copies["b2"].is_master, cluster)
        assert await lost(await client_of(cluster, "b2")) == 3

    play(scenario)


def test_a_third_copy_is_asked_where_the_second_has_lost_it_too() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2", "b3")
        client = await fill(cluster)
        spoil(cluster, "b1", 5, 9)
        spoil(cluster, "b2", 5)
        spoil(cluster, "b3", 9)
        assert await consumed(client) == SENT
        assert store_of(cluster, "b1").rotten == []

    play(scenario, copies=3)


@pytest.mark.parametrize("file", [FIRST_MESSAGES, FIRST_ACTIONS])
def test_a_master_that_comes_back_with_rot_is_repaired_before_clients_are_let_in(file: str) -> None:
    """What recovery found is a hole: a group that came now would step over it, or get again what it has acked."""

    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        await client.join("orders", "late", "c")
        assert await consumed(client) == SENT
        await client.ask(Seek("orders", "late", m.Whence.EARLIEST, 0), Sought)
        cluster.kill("b1")
        cluster.copies["b1"].disk.beside().rot(file, 3, low=300, high=8_000 if file == FIRST_MESSAGES else 1_400)
        for name in cluster.copies["b1"].disk.listing("checkpoints"):
            cluster.copies["b1"].disk.beside().remove(f"checkpoints/{name}")
        await cluster.start("b1")
        await cluster.master()
        await until(lambda: cluster.copies["b1"].is_master or cluster.copies["b2"].is_master, cluster)
        await whole(cluster, "b1", "b2")
        master = next(copy.name for copy in cluster.masters)
        await until(lambda: not store_of(cluster, "b1").rotten, cluster)
        client = await client_of(cluster, master)
        assert await consumed(client) == [], "all of that was acked"
        assert await consumed(client, "late") == SENT

    play(scenario, store=replace(STORE, checkpoint_every_bytes=1 << 30))


def test_a_replica_that_catches_up_over_rot_gets_there_once_it_is_mended() -> None:
    """The master meets the rot while it sends; the third copy has it."""

    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        spoil(cluster, "b1", 12)
        await cluster.start("b3")
        await until(lambda: len(record(cluster).in_sync) == 3, cluster)
        assert store_of(cluster, "b1").rotten == []
        assert await consumed(client) == SENT

    play(scenario, copies=3)


def test_readers_do_not_wait_for_a_replica_that_never_answers() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await fill(cluster)
        spoil(cluster, "b1", 5)
        cluster.world.net.partition("b1", "b2")
        assert len(await consumed(client)) == len(SENT) - 1, "it was struck out, and then there was no hope"

    play(scenario, membership=replace(MEMBER, leader=replace(LEADER, repair_ms=300)))


def test_a_replica_far_behind_is_served_from_the_disk_without_holding_up_the_loop() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1")
        client = await fill(cluster)
        disk = cluster.copies["b1"].disk
        for log in ("messages", "actions"):
            for name in disk.listing(log):
                disk.evict(f"{log}/{name}")
        await whole(cluster, "b1", "b2")
        tally = leader_of(cluster, "b1").tally
        assert tally.fetches > 1
        assert tally.catch_up_bytes > sum(map(len, SENT))
        await client.produce("orders", Stream(8).batch([b"and on"]))
        cluster.kill("b1")
        await cluster.master()
        assert await consumed(await client_of(cluster, "b2")) == [*SENT, b"and on"]

    play(scenario, membership=replace(MEMBER, leader=replace(LEADER, chunk_bytes_max=4_096)))
