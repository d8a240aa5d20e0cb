"""Strangers that follow a master, with an id of their own or that of a copy: nothing is acknowledged on their word."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from fairway.broker.broker_copy import BrokerCopy
from fairway.errors import Code, Refused
from fairway.protocol.frames import stretched
from fairway.protocol.replication_messages import Follow, Followed, Replicate, Replicated
from fairway.registry.layout import RegisteredCopy, hex_id, member_path, pack, place_name
from fairway.replication.leader import Leader
from fairway.simulation import Simulation
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


async def claim_everything(client: Client, directory: int, epoch: int, secret: bytes = b"") -> None:
    """Follow, and say that every byte is synced, as long as the master listens."""
    followed, _ = await client.ask(Follow(GROUP, epoch, directory, secret), Followed)
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
        assert member.copy_status.leader is not None
        assert member.copy_status.leader.peers == {}

    play(scenario)


def test_copies_that_came_and_went_leave_nothing_behind_in_the_master() -> None:
    """A copy that was registered for a moment and never had everything is forgotten with its node."""

    async def scenario(cluster: Cluster) -> None:
        epoch = await master_alone(cluster)
        hand = cluster.ensemble.client("hand")
        await until(lambda: hand.session_id != 0, cluster)
        member = cluster.copies["b1"].member
        assert member is not None
        leader = member.copy_status.leader
        assert leader is not None
        for number in range(5):
            directory = hex_id(STRANGER + number)
            path = member_path(GROUP, place_name(directory, hand.session_id))
            await hand.create(path, pack(RegisteredCopy(directory, "elsewhere", 1)), is_ephemeral=True)
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
        assert leader.copy_status.leader is not None
        reign = leader.copy_status.leader
        await until(lambda: directory in reign.peers and reign.peers[directory].is_connected, cluster)
        await asyncio.sleep(1)
        assert directory not in record(cluster).in_sync
        cluster.ensemble.mend("b2")
        await until(lambda: directory in record(cluster).in_sync, cluster)

    play(scenario, copies=2, min_in_sync=1)


# --- a stranger that knows the id of a copy ---------------------------------------------------------------------------


async def pair(cluster: Cluster) -> tuple[str, str, int, Leader]:
    """Two copies in sync: where the master and where the replica runs, the replica's directory, and who leads."""
    await whole(cluster, "b1", "b2")
    leading = next(name for name in ("b1", "b2") if _member(cluster, name).directory == record(cluster).master)
    replica = "b2" if leading == "b1" else "b1"
    leader = _member(cluster, leading).copy_status.leader
    assert leader is not None
    return leading, replica, int(_member(cluster, replica).directory, 16), leader


def _member(cluster: Cluster, name: str) -> BrokerCopy:
    member = cluster.copies[name].member
    assert member is not None
    return member


async def insist(cluster: Cluster, leading: str, directory: int, secret: bytes = b"") -> None:
    """Pose as a copy, again and again."""
    stranger = await client_of(cluster, leading)
    while True:
        with suppress(Refused):
            await claim_everything(stranger, directory, record(cluster).epoch, secret)
        await asyncio.sleep(0.01)


async def acknowledged(client: Client, batches: int) -> int:
    """How many batches are acknowledged, one after the other, until the first is not."""
    stream = Stream(9)
    for number in range(batches):
        try:
            async with asyncio.timeout(2):
                await client.produce("orders", stream.batch([b"two"]))
        except (TimeoutError, Refused):
            return number
    return batches


@pytest.mark.parametrize("secret", [b"", b"x" * 16])
def test_nothing_is_acknowledged_on_the_word_of_a_stranger_that_knows_the_id_of_a_copy(secret: bytes) -> None:
    """The master reaches no replica, and one copy is fewer than min_in_sync."""

    async def scenario(cluster: Cluster) -> None:
        leading, replica, directory, _ = await pair(cluster)
        good = await client_of(cluster, leading)
        await good.produce("orders", Stream(7).batch([b"one"]))
        posing = asyncio.create_task(insist(cluster, leading, directory, secret))
        await asyncio.sleep(0.5)
        cluster.world.net.partition(leading, replica)
        await until(lambda: record(cluster).in_sync == [record(cluster).master], cluster)
        assert await acknowledged(good, 20) == 0
        posing.cancel()

    play(scenario, copies=2)


def test_a_stranger_that_knows_the_id_of_a_copy_does_not_disturb_that_copy() -> None:
    async def scenario(cluster: Cluster) -> None:
        leading, _, directory, leader = await pair(cluster)
        good, stranger = await client_of(cluster, leading), await client_of(cluster, leading)
        peer = leader.peers[hex_id(directory)]
        for secret, words in ((b"", "shows no secret"), (b"x" * 16, "shows another secret")):
            with pytest.raises(Refused, match=words) as refused:
                await claim_everything(stranger, directory, leader.epoch, secret)
            assert refused.value.code is Code.FENCED
        with pytest.raises(Refused, match="16 to 64 bytes"):
            await claim_everything(stranger, directory, leader.epoch, b"short")
        with pytest.raises(Refused, match="follow again"):
            await stranger.ask(Replicate(GROUP, leader.epoch, directory, 1, [0, 0], [0, 0], 50), Replicated)
        posing = asyncio.create_task(insist(cluster, leading, directory))
        assert await acknowledged(good, 20) == 20
        posing.cancel()
        assert leader.peers[hex_id(directory)] is peer
        assert peer.is_connected
        assert len(record(cluster).in_sync) == 2
        assert leader.tally.refused_follows > 2

    play(scenario, copies=2)


def test_the_secret_of_a_copy_counts_when_the_copy_is_not_registered_any_more() -> None:
    """The copy that is cut off loses its session, too; it is in sync until then."""

    async def scenario(cluster: Cluster) -> None:
        leading, replica, directory, leader = await pair(cluster)
        cluster.ensemble.cut(replica)
        posing = asyncio.create_task(insist(cluster, leading, directory))
        await until_seen(cluster, leader, hex_id(directory), is_registered=False)
        assert leader.peers[hex_id(directory)].is_connected, "the copy itself goes on to follow"
        cluster.world.net.partition(leading, replica)
        await until(lambda: record(cluster).in_sync == [record(cluster).master], cluster)
        good = await client_of(cluster, leading)
        assert await acknowledged(good, 20) == 0
        posing.cancel()

    play(scenario, copies=2)


def test_a_stranger_that_followed_before_the_copy_was_registered_is_sent_away() -> None:
    """A new master has never seen the node of a copy that was away: it lets anybody catch up under that id, for
    the copy may be of an earlier version. When the copy registers, the secret in its node decides."""

    async def scenario(cluster: Cluster) -> None:
        leading, replica, directory, _ = await pair(cluster)
        await cluster.stop(replica)
        await until(lambda: hex_id(directory) not in record(cluster).in_sync, cluster)
        await cluster.stop(leading)
        await cluster.start(leading)
        await cluster.master()
        leader = _member(cluster, leading).copy_status.leader
        assert leader is not None
        posing = asyncio.create_task(insist(cluster, leading, directory))
        await until(lambda: hex_id(directory) in leader.peers, cluster)
        false = leader.peers[hex_id(directory)]
        assert not false.verifier
        await until(lambda: false.confirmed is not None, cluster)
        hand = cluster.ensemble.client("hand")
        await until(lambda: hand.session_id != 0, cluster)
        path = member_path(GROUP, place_name(hex_id(directory), hand.session_id))
        registered = RegisteredCopy(hex_id(directory), "elsewhere", 1, verifier=b"v" * 32)
        await hand.create(path, pack(registered), is_ephemeral=True)
        await until(lambda: false.is_sent_away, cluster)
        assert false.confirmed is None
        await asyncio.sleep(2)
        assert leader.peers[hex_id(directory)] is false, "it may not follow again"
        assert record(cluster).in_sync == [record(cluster).master]
        posing.cancel()

    play(scenario, copies=2, min_in_sync=1)


def test_a_copy_that_is_started_again_has_a_new_secret_and_follows() -> None:
    async def scenario(cluster: Cluster) -> None:
        _, replica, directory, leader = await pair(cluster)
        before = leader.peers[hex_id(directory)].verifier
        cluster.kill(replica)
        await cluster.start(replica)
        await until(lambda: leader.peers[hex_id(directory)].verifier not in (b"", before), cluster)
        await until(lambda: len(record(cluster).in_sync) == 2, cluster)

    play(scenario, copies=2, min_in_sync=1)


@pytest.mark.parametrize("order", [("b1", "b2"), ("b2", "b1")])
def test_copies_of_the_version_before_are_upgraded_one_by_one_and_back(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas before masters, or masters before replicas. A copy of the version before has no secret."""

    async def start(cluster: Cluster, name: str, *, is_older: bool) -> None:
        with monkeypatch.context() as patched:
            if is_older:
                patched.setattr("fairway.replication.copy_lifecycle.new_secret", lambda _: b"")
            await cluster.start(name)

    async def scenario(cluster: Cluster) -> None:
        for name in ("b1", "b2"):
            await start(cluster, name, is_older=True)
        await whole(cluster, "b1", "b2")
        assert _is_followed(cluster, is_older=True)
        for is_older in (False, True):
            for name in order:
                cluster.kill(name)
                await start(cluster, name, is_older=is_older)
                await until(lambda: len(cluster.masters) == 1 and len(record(cluster).in_sync) == 2, cluster)
                good = await client_of(cluster, cluster.masters[0].name)
                await good.produce("orders", Stream(7).batch([b"one"]))
            await until(partial(_is_followed, cluster, is_older=is_older), cluster)

    play(scenario, copies=2)


def _is_followed(cluster: Cluster, *, is_older: bool) -> bool:
    """Whether one master is followed by one copy, of that version."""
    if len(cluster.masters) != 1 or (leader := _member(cluster, cluster.masters[0].name).copy_status.leader) is None:
        return False
    return [not each.verifier for each in leader.peers.values() if each.is_connected] == [is_older]
