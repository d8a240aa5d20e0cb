"""A copy that lacks more than the logs have, in a cluster: it is filled from its master, whatever happens meanwhile,
and sends what is pending when its turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fairway.delay import install
from fairway.errors import Refused
from fairway.protocol.replication_messages import Follow, Followed, Snapshot, TakeSnapshot
from fairway.simulation.disk import SimDisk
from tests.support.client import Client
from tests.unit.delay.cluster import Cluster, in_cluster
from tests.unit.delay.scene import PORT, Machine
from tests.unit.storage.helpers import names

COUNT = 40
DUE_S = 400


async def _old_group(cluster: Cluster, copies: tuple[str, ...] = ()) -> None:
    """Everything is in buckets, and the logs begin later. Copies are in sync."""
    await cluster.create("orders")
    for host in copies:
        await cluster.start_copy(host)
    await cluster.in_sync(1 + len(copies))
    await _schedule(cluster, 0, COUNT)


async def _schedule(cluster: Cluster, first: int, count: int, due_s: float = DUE_S) -> None:
    for number in range(first, first + count):
        await cluster.schedule([b"%d" % number + b"." * 200], after_s=due_s + number)
    await cluster.sleep(65)  # housekeeping lets go of what is in buckets
    assert cluster.delay.engine.store.first_bases()[0] > 0


async def _sent(cluster: Cluster) -> list[int]:
    return sorted(int(each.partition(b".")[0]) for each in await cluster.payloads())


async def _fetching(cluster: Cluster, host: str) -> None:
    """Until part of a snapshot is there."""
    for _ in range(100_000):
        disk = cluster.disks[host]
        if sum(_size(disk, name) for name in names(disk, "arriving")) > 2_000:
            return
        await asyncio.sleep(0.000_2)
    raise AssertionError("nothing ever arrives")


def _size(disk: SimDisk, name: str) -> int:
    file = disk.open(name)
    try:
        return file.size
    finally:
        file.close()


async def _counted(cluster: Cluster, host: str) -> None:
    """Until that copy is in sync, under the id that it has by then."""
    for _ in range(6_000):
        member = cluster.members[host]
        if member.server is not None and member.directory in (await cluster.record()).in_sync:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{host} never counts: {cluster.members[host].sentence()}")


def _is_filled(cluster: Cluster, host: str) -> bool:
    """Whether it began anew, and nothing is left of that but what was set aside."""
    member, disk = cluster.members[host], cluster.disks[host]
    assert not names(disk, "arriving")
    assert install.FILE not in disk.listing("")
    return any("this copy begins anew" in each for each in member.findings)


@in_cluster()
async def test_a_wiped_copy_is_filled_and_takes_over(cluster: Cluster) -> None:
    await _old_group(cluster, ("heir",))
    cluster.kill_copy("heir")
    await cluster.in_sync(1)
    cluster.disks["heir"] = Machine(cluster.sim, "another disk").disk
    await cluster.start_copy("heir")
    await cluster.in_sync(2)
    assert _is_filled(cluster, "heir")
    await _schedule(cluster, COUNT, 5)
    cluster.kill_copy("delay", is_power_cut=True)
    assert await cluster.led() == "heir"
    await cluster.sleep(DUE_S + 2 * COUNT)
    assert await _sent(cluster) == list(range(COUNT + 5))


@in_cluster()
async def test_a_stranger_that_knows_the_id_of_a_copy_neither_follows_nor_takes_its_snapshot(cluster: Cluster) -> None:
    await _old_group(cluster)
    leader = cluster.members["delay"].copy_status.leader
    assert leader is not None
    stranger = await Client.connect(cluster.sim.net.host("stranger"), cluster.clock, "delay", PORT)
    directory = (await cluster.start_copy("heir")).directory
    directory_id = int(directory, 16)
    await _fetching(cluster, "heir")
    peer = leader.peers[directory]
    with pytest.raises(Refused, match="shows no secret"):
        await stranger.ask(Follow(cluster.group, leader.epoch, directory_id), Followed)
    with pytest.raises(Refused, match="is not known here"):
        await stranger.ask(TakeSnapshot(cluster.group, leader.epoch, directory_id), Snapshot)
    assert leader.peers.get(directory, peer) is peer, "nobody else followed under the id"
    assert leader.tally.refused_follows > 0
    stranger.abort()
    await cluster.in_sync(2)
    assert _is_filled(cluster, "heir")


@pytest.mark.slow
@in_cluster()
async def test_one_that_was_away_for_too_long_sets_aside_what_it_had(cluster: Cluster) -> None:
    await _old_group(cluster, ("heir",))
    cluster.kill_copy("heir")
    await cluster.in_sync(1)
    await _schedule(cluster, COUNT, COUNT)
    before = {each.directory for each in await cluster.members_shown()}
    await cluster.start_copy("heir")
    await cluster.in_sync(2)
    assert _is_filled(cluster, "heir")
    assert [name for name in names(cluster.disks["heir"], "aside") if "-schedule-manifest" in name]
    record = await cluster.record()
    assert len(set(record.in_sync) - before) == 1, "it is another copy now, under another id"
    cluster.kill_copy("delay")
    await cluster.led()
    await cluster.sleep(DUE_S + 2 * COUNT)
    assert await _sent(cluster) == list(range(2 * COUNT))


@pytest.mark.slow
@in_cluster()
async def test_decisions_come_along(cluster: Cluster) -> None:
    await cluster.create("orders")
    [gone, moved, kept] = await cluster.schedule([b"0.gone", b"1.moved", b"2.kept"], after_s=DUE_S)
    await cluster.cancel(gone)
    await cluster.reschedule(moved, after_s=DUE_S + 200)
    await cluster.schedule([b"3.sent"], after_s=5)
    for number in range(10, 10 + COUNT):
        await cluster.schedule([b"%d." % number + b"." * 200], after_s=DUE_S)
    await cluster.sleep(65)
    assert await _sent(cluster) == [3]
    await cluster.start_copy("heir")
    await cluster.in_sync(2)
    assert _is_filled(cluster, "heir")
    cluster.kill_copy("delay")
    await cluster.led()
    assert (await cluster.cancel(kept)).fate.name == "CANCELLED"
    await cluster.sleep(DUE_S + 60)
    assert await _sent(cluster) == [3, *range(10, 10 + COUNT)]
    await cluster.sleep(200)
    assert await _sent(cluster) == [1, 3, *range(10, 10 + COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("is_power_cut", [False, True])
def test_it_dies_in_the_middle_and_goes_on(is_power_cut: bool) -> None:
    @in_cluster()
    async def test_story(cluster: Cluster) -> None:
        await _old_group(cluster)
        for _ in range(3):
            await cluster.start_copy("heir")
            await _fetching(cluster, "heir")
            cluster.kill_copy("heir", is_power_cut=is_power_cut)
        await cluster.start_copy("heir")
        await cluster.in_sync(2)
        assert _is_filled(cluster, "heir")
        cluster.kill_copy("delay")
        await cluster.led()
        await cluster.sleep(DUE_S + 2 * COUNT)
        assert await _sent(cluster) == list(range(COUNT))

    test_story()


def _cut(cluster: Cluster) -> None:
    cluster.sim.net.partition("delay", "third")


def _kill(cluster: Cluster) -> None:
    cluster.kill_copy("delay")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [_cut, _kill])
def test_the_master_is_lost_in_the_middle(trouble: Callable[[Cluster], None]) -> None:
    """Another one leads, or the same one comes back: it begins again there, or goes on."""

    @in_cluster()
    async def test_story(cluster: Cluster) -> None:
        await _old_group(cluster, ("heir",))
        await cluster.start_copy("third")
        await _fetching(cluster, "third")
        trouble(cluster)
        await cluster.sleep(20)
        cluster.sim.net.heal("delay", "third")
        await cluster.led()
        await _counted(cluster, "third")
        assert _is_filled(cluster, "third") or trouble is _kill, "another master may have kept more of its logs"
        for host in [each for each in cluster.members if each != "third"]:
            cluster.kill_copy(host)
        assert await cluster.led() == "third"
        await cluster.sleep(DUE_S + 2 * COUNT)
        assert await _sent(cluster) == list(range(COUNT))

    test_story()


@pytest.mark.slow
@in_cluster()
async def test_one_without_room_says_so_and_goes_on_when_there_is_some(cluster: Cluster) -> None:
    await _old_group(cluster)
    disk = SimDisk(cluster.sim.rng.child("small"), cluster.sim.loop.call_later, capacity_bytes=300_000)
    cluster.disks["heir"] = disk
    await cluster.start_copy("heir")
    file = cluster.disks["heir"].open("else/where", create=True)
    cluster.disks["heir"].reserve(file, 290_000)
    file.close()
    await cluster.sleep(10)
    assert "is held up: READ_ONLY: there is no room for the master's snapshot" in cluster.members["heir"].sentence()
    cluster.disks["heir"].remove("else/where")
    await cluster.in_sync(2)
    assert _is_filled(cluster, "heir")
    assert "held up" not in cluster.members["heir"].sentence()
