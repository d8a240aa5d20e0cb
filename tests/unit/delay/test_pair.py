"""Copies of a delay server: who leads dies, and every message is sent once, at its time, by the one that is left."""

from __future__ import annotations

import pytest

from fairway.delay.server import DelayServer, ServerOptions
from fairway.delay.service import DelayWorld
from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.delay_messages import DelayTally, Fate, Tallied, Which
from fairway.registry import layout
from fairway.registry.layout import GroupRecord
from fairway.replication.leadership import change_master
from fairway.storage import segment
from tests.unit.delay.cluster import Cluster, in_cluster
from tests.unit.delay.helpers import OPTIONS
from tests.unit.delay.scene import PORT, Machine

MINUTE_S = 60


async def pair(cluster: Cluster) -> None:
    """A second copy, in sync."""
    await cluster.create("orders")
    await cluster.start_copy("heir")
    await cluster.in_sync(2)


async def pending(cluster: Cluster) -> int:
    for _ in range(100):
        try:
            tallied: Tallied = await cluster.ask(DelayTally(Which()), Tallied)
        except Refused as refused:
            if refused.code is not Code.BUSY:
                raise
            await cluster.sleep(0.1)
        else:
            return tallied.count
    raise AssertionError("it is never loaded")


@in_cluster()
async def test_another_directory_under_the_same_name_follows(cluster: Cluster) -> None:
    await pair(cluster)
    await cluster.sleep(3)
    shown = {each.host: each for each in await cluster.members_shown()}
    assert {host: each.role for host, each in shown.items()} == {"delay": "master", "heir": "follower"}
    assert shown["delay"].ends == shown["heir"].ends
    record = await cluster.record()
    assert (record.epoch, record.master) == (1, shown["delay"].directory)
    assert cluster.members["heir"].sentence().startswith("follows delay:")


@in_cluster()
async def test_a_replica_takes_nothing_and_says_who_does(cluster: Cluster) -> None:
    await pair(cluster)
    client = await cluster.client("heir")
    with pytest.raises(Refused, match="this is a replica of group d1: its master is at delay:20880") as refused:
        await client.produce("orders", cluster.batch_of([b"a"], cluster.now_ms + 1_000)[0])
    assert refused.value.code is Code.NOT_MASTER
    with pytest.raises(Refused, match="replica of group d1"):
        await client.ask(DelayTally(Which()), Tallied)
    described, _ = await client.ask(Describe(Depth.SUBJECTS), Described)
    assert not described.broker.is_master


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_what_is_pending_is_sent_by_the_one_that_is_left(is_power_cut: bool) -> None:
    @in_cluster()
    async def test_story(cluster: Cluster) -> None:
        await pair(cluster)
        for number in range(20):
            await cluster.schedule([b"%d" % number], after_s=5 + number)
        cluster.kill_delay(is_power_cut=is_power_cut)
        assert await cluster.led() == "heir"
        await cluster.sleep(30)
        stored = await cluster.stored()
        assert sorted(each.payload for each in stored) == sorted(b"%d" % number for number in range(20))
        assert await pending(cluster) == 0

    test_story()


@in_cluster()
async def test_no_message_is_early_lost_or_sent_twice_through_ten_changes_of_masters(cluster: Cluster) -> None:
    """Killed at any moment: in the middle of what is due, of what is scheduled, of a takeover."""
    await pair(cluster)
    due: dict[bytes, int] = {}
    rng = cluster.sim.rng.child("moments")
    for change in range(10):
        for number in range(20):
            payload = b"%d/%d" % (change, number)
            due[payload] = cluster.now_ms + rng.below(6_000)
            await (await cluster.client()).produce("orders", cluster.batch_of([payload], due[payload])[0])
        await cluster.sleep(rng.below(5_000) / 1_000)
        killed = await cluster.led()
        if rng.below(3):
            cluster.kill_copy(killed, is_power_cut=bool(rng.below(2)))
        else:
            await cluster.stop_copy(killed)
        await cluster.led()
        await cluster.start_copy(killed)
        await cluster.in_sync(2)
    await cluster.sleep(MINUTE_S)
    stored = await cluster.stored()
    assert sorted(each.payload for each in stored) == sorted(due)
    assert [each for each in stored if each.appended_ms < due[each.payload]] == []
    assert (await cluster.record()).epoch >= 11


@in_cluster()
async def test_one_that_is_stopped_hands_over_at_once(cluster: Cluster) -> None:
    await pair(cluster)
    await cluster.schedule([b"a"], after_s=3)
    began_ms = cluster.now_ms
    await cluster.stop_copy("delay")
    assert await cluster.led() == "heir"
    assert cluster.now_ms - began_ms < 1_000, "no session had to end"
    await cluster.sleep(5)
    assert await cluster.payloads() == [b"a"]


@in_cluster()
async def test_decisions_hold_for_whoever_leads(cluster: Cluster) -> None:
    await pair(cluster)
    [cancelled, moved, kept] = await cluster.schedule([b"cancelled", b"moved", b"kept"], after_s=20)
    assert (await cluster.cancel(cancelled)).fate is Fate.CANCELLED
    assert (await cluster.reschedule(moved, after_s=60)).fate is Fate.RESCHEDULED
    cluster.kill_delay()
    await cluster.led()
    assert await pending(cluster) == 2
    assert (await cluster.cancel(cancelled)).fate is Fate.CANCELLED, "it was cancelled before"
    await cluster.sleep(25)
    assert await cluster.payloads() == [b"kept"]
    assert (await cluster.cancel(kept)).fate is Fate.ALREADY_DISPATCHED
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads() == [b"kept", b"moved"]


@in_cluster()
async def test_what_is_on_its_way_is_sent_again_and_recognised(cluster: Cluster) -> None:
    """The broker has it, and the one that sent it dies before it hears so."""
    await pair(cluster)
    await cluster.schedule([b"first"], after_s=1)
    await cluster.sleep(5)
    await cluster.schedule([b"a", b"b"], after_s=2)
    cluster.sim.net.partition("g1", "delay", one_way=True)  # answers are lost
    await cluster.sleep(4)
    assert await cluster.payloads() == [b"first", b"a", b"b"]
    cluster.kill_delay()
    cluster.sim.net.heal("g1", "delay")
    await cluster.led()
    await cluster.schedule([b"c"], after_s=2)
    await cluster.sleep(20)
    assert await cluster.payloads() == [b"first", b"a", b"b", b"c"]
    assert cluster.delay.request_handler.figures.repeated == 2


@in_cluster()
async def test_one_that_was_away_comes_back_and_leads_with_all_that_happened_meanwhile(cluster: Cluster) -> None:
    await pair(cluster)
    [gone] = await cluster.schedule([b"gone"], after_s=60)
    cluster.kill_copy("heir")
    await cluster.in_sync(1)
    await cluster.schedule([b"late"], after_s=60)
    await cluster.cancel(gone)
    await cluster.start_copy("heir")
    await cluster.in_sync(2)
    cluster.kill_copy("delay")
    assert await cluster.led() == "heir"
    await cluster.sleep(2 * MINUTE_S)
    assert await cluster.payloads() == [b"late"]


@in_cluster()
async def test_with_too_few_copies_nothing_is_taken_and_what_is_pending_is_sent(cluster: Cluster) -> None:
    await cluster.stop_copy("delay")
    await cluster.start_copy("delay", min_in_sync=2)
    await cluster.led()
    await pair(cluster)
    await cluster.schedule([b"a"], after_s=20)
    cluster.kill_copy("heir")
    await cluster.in_sync(1)
    with pytest.raises(Refused, match="2 are the least for new messages") as refused:
        await cluster.schedule([b"b"], after_s=20)
    assert refused.value.code is Code.READ_ONLY
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads() == [b"a"]
    await cluster.start_copy("heir")
    await cluster.in_sync(2)
    await cluster.schedule([b"b"], after_s=1)


@in_cluster()
async def test_one_that_cannot_reach_the_registry_sends_nothing_more(cluster: Cluster) -> None:
    await pair(cluster)
    await cluster.schedule([b"a"], after_s=20)
    cluster.ensemble.cut(cluster.registries["delay"].name)
    deposed = cluster.members["delay"]
    await cluster.sleep(10)
    assert not deposed.copy_status.is_master
    assert await cluster.led() == "heir"
    await cluster.sleep(20)
    assert await cluster.payloads() == [b"a"]
    cluster.ensemble.mend(cluster.registries["delay"].name)
    await cluster.in_sync(2)


@in_cluster()
async def test_what_was_cancelled_is_not_sent_although_that_had_rotted_where_it_leads(cluster: Cluster) -> None:
    """The other copy brings it back. To read it, the master opens its directory again; the other leads meanwhile."""
    await pair(cluster)
    [first, second, _] = await cluster.schedule([b"cancelled", b"this too", b"kept"], after_s=0.5)
    await cluster.cancel(first)
    store = cluster.delay.engine.store
    *_, decision = store.positions(1, 0, store.actions.log.end)
    await cluster.cancel(second)
    await cluster.sleep(0.2)
    cluster.kill_copy("delay")
    cluster.disks["delay"] = disk = cluster.disks["delay"].beside()
    disk.flip(segment.file_name("actions", 0), 8 * (decision + 100))
    for name in disk.listing("checkpoints"):
        disk.remove(f"checkpoints/{name}")
    disk.slowness = 100
    member = await cluster.start_copy("delay")
    assert member.server is not None
    assert member.server.store.rotten
    assert await cluster.led() == "heir", "it did not wait until the other had read its directory again"
    await cluster.in_sync(2)
    assert member.server is not None
    assert member.server.store.rotten == []
    await cluster.sleep(5)
    assert await cluster.payloads() == [b"kept"]


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_new_copy_of_an_old_group_is_filled_and_can_lead(is_apart: bool) -> None:
    @in_cluster()
    async def test_story(cluster: Cluster) -> None:
        await fill_a_new_copy(cluster, is_apart=is_apart)

    test_story()


async def fill_a_new_copy(cluster: Cluster, *, is_apart: bool) -> None:
    """What the first one holds is in buckets alone: its logs begin later."""
    await cluster.create("orders")
    for number in range(200):
        await cluster.schedule([b"%d" % number + b"." * 200], after_s=600 + number)
        if number % 50 == 0:
            await cluster.sleep(65)  # housekeeping lets go of what is in buckets
    await cluster.sleep(130)
    assert cluster.delay.engine.store.first_bases()[0] > 0
    due = await pending(cluster)
    await cluster.start_copy("heir", is_apart=is_apart)
    await cluster.in_sync(2)
    await cluster.sleep(5)
    cluster.kill_copy("delay")
    assert await cluster.led() == "heir"
    assert await pending(cluster) == due
    await cluster.sleep(30 * MINUTE_S)
    numbers = sorted(int(each.partition(b".")[0]) for each in await cluster.payloads())
    assert numbers == list(range(200))
    assert any("begins anew" in each for each in cluster.members["heir"].findings)


@in_cluster()
async def test_three_copies_survive_two(cluster: Cluster) -> None:
    await pair(cluster)
    await cluster.start_copy("third")
    await cluster.in_sync(3)
    due_ms = cluster.now_ms + 40_000
    await (await cluster.client()).produce("orders", cluster.batch_of([b"a", b"b"], due_ms)[0])
    for _ in range(2):
        cluster.kill_copy(await cluster.led())
        await cluster.sleep(5)
        await cluster.led()
    assert len(cluster.members) == 1
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads() == [b"a", b"b"]


@in_cluster()
async def test_what_was_given_up_by_hand_is_sent_by_nobody(cluster: Cluster) -> None:
    """It is in the buckets of the copy that alone had it, which comes back and leads again."""
    await pair(cluster)
    await cluster.schedule([b"kept"], after_s=120)
    cluster.kill_copy("heir")
    await cluster.in_sync(1)
    await cluster.schedule([b"given up"], after_s=120)
    await cluster.sleep(5)
    cluster.kill_copy("delay")
    heir = await cluster.start_copy("heir")
    await cluster.sleep(5)
    assert "no copy that has everything lives" in heir.sentence()
    await change_master(cluster.hand, "d1", heir.directory, accepts_data_loss=True)
    assert await cluster.led() == "heir"
    await cluster.schedule([b"new"], after_s=120)
    await cluster.start_copy("delay")
    await cluster.in_sync(2)
    await cluster.stop_copy("heir")
    assert await cluster.led() == "delay"
    await cluster.sleep(3 * MINUTE_S)
    assert await cluster.payloads() == [b"kept", b"new"]
    assert await pending(cluster) == 0


@in_cluster()
async def test_a_copy_whose_disk_was_lost_is_filled_again(cluster: Cluster) -> None:
    await pair(cluster)
    await cluster.schedule([b"a", b"b"], after_s=60)
    lost = cluster.members["heir"].directory
    cluster.kill_copy("heir")
    del cluster.disks["heir"]
    await cluster.in_sync(1)
    heir = await cluster.start_copy("heir")
    await cluster.in_sync(2)
    assert heir.directory != lost, "it is another copy"
    cluster.kill_copy("delay")
    await cluster.led()
    await cluster.sleep(2 * MINUTE_S)
    assert await cluster.payloads() == [b"a", b"b"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_delay_server_that_was_alone_becomes_the_first_copy(is_killed: bool) -> None:
    @in_cluster()
    async def test_story(cluster: Cluster) -> None:
        """Its group's node was written by a version that knew no copies."""
        await cluster.stop_copy("delay")
        await cluster.hand.remove(layout.members_path("d1"))
        await cluster.hand.remove(layout.group_path("d1"))
        del cluster.disks["delay"]
        await cluster.create("orders")
        machine = Machine(cluster.sim, "delay")
        world = DelayWorld(cluster.clock, machine.disk, cluster.sim.net.host("delay"), cluster.sim.rng.child("alone"))
        options = ServerOptions(host="delay", port=PORT, allow_remote=True, delay=OPTIONS)
        alone = await DelayServer.start(world, options, {})
        identity = alone.store.identity
        directory = layout.hex_id(identity.directory_id)
        record = GroupRecord("delay", 7, directory, [directory], 1, *identity[1:], members=[directory])
        await cluster.hand.create(layout.group_path("d1"), layout.pack(record))
        [cancelled, _] = await cluster.schedule([b"cancelled", b"kept"], after_s=60)
        await cluster.cancel(cancelled)
        await cluster.sleep(3)
        if is_killed:
            alone.delay.fall_silent()
            cluster.sim.net.crash("delay")
            cluster.disks["delay"] = machine.disk.crash()
        else:
            await alone.stop()
            cluster.disks["delay"] = machine.disk
        cluster._clients.clear()
        await cluster.start_delay()
        assert (await cluster.record()).epoch == 8
        await cluster.start_copy("heir")
        await cluster.in_sync(2)
        cluster.kill_copy("delay")
        await cluster.led()
        assert await pending(cluster) == 1
        await cluster.sleep(2 * MINUTE_S)
        assert await cluster.payloads() == [b"kept"]

    test_story()
