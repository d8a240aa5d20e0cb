"""A group of copies, step by step: who leads, what is kept, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from fairway import batch
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Code, DiskFull, FairwayError, Refused, WrongDirectory
from fairway.groups.attempts import decode
from fairway.limits import KIB
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Scan, Scanned, Seek, Sought
from fairway.replication.leadership import NotPromoted, change_master
from fairway.simulation import Simulation
from fairway.storage import segment
from fairway.storage.retention import Policy
from tests.simulation.broker_clients import PORT
from tests.simulation.cluster_steps import client_of, payloads, record, until, whole
from tests.simulation.cluster_world import GROUP, MEMBER, STORE, Cluster
from tests.support.client import Stream

Scenario = Callable[[Cluster], Coroutine[Any, Any, None]]


def play(scenario: Scenario, copies: int = 2, seed: int = 1, **options: Any) -> None:
    world = Simulation(seed, steps_max=2_000_000)
    cluster = Cluster(world, copies, **options)
    with world:
        world.run(asyncio.wait_for(scenario(cluster), 120))


def test_an_in_sync_replica_takes_over_with_everything_that_was_acknowledged() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        sent = [f"m{number}".encode() for number in range(50)]
        for each in sent:
            told = await client.produce("orders", stream.batch([each]))
            assert told.epoch == 1
        cluster.cut_power("b1")
        assert (await cluster.master()).name == "b2"
        client = await client_of(cluster, "b2")
        again = await client.produce("orders", Stream(7).batch(sent[:1]))
        assert again.is_duplicate, "what producers sent before is remembered"
        assert again.epoch == 2
        assert await payloads(client) == sent
        await whole(cluster, "b1", "b2")
        assert cluster.copies["b2"].is_master, "who comes back follows"

    play(scenario)


def test_an_ack_and_a_lease_survive_the_change() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"one", b"two"]))
        await client.join("orders", "g", "c")
        delivery = await client.pull("orders", "g", "c")
        first = m.WireLot(delivery.lots[0].first, delivery.lots[0].attempt, [m.SequenceRange(0, 1)])
        await client.settle("orders", "g", "c", [first], arrived=delivery.number)
        cluster.kill("b1")
        await cluster.master()
        client = await client_of(cluster, "b2")
        await client.join("orders", "g", "c", arrived=delivery.number)
        second = m.WireLot(delivery.lots[0].first, delivery.lots[0].attempt, [m.SequenceRange(1, 1)])
        settled = await client.settle("orders", "g", "c", [second], arrived=delivery.number)
        assert (settled.settled, settled.stale) == (1, 0), "it still holds what it was given by the other"
        assert await payloads(client) == []

    play(scenario)


def test_the_attempts_of_a_dead_letter_survive_the_change() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await client_of(cluster, "b1")
        await client.produce("orders", Stream(7).batch([b"one"]))
        await client.join("orders", "g", "c")
        [lot] = (await client.pull("orders", "g", "c")).lots
        again = m.Settle(m.Settlement.RETRY, lot.first, lot.attempt, lot.spans, 0, "not yet")
        await client.ask(m.SettleAll("orders", "g", "c", [again], 1), m.Settled)
        cluster.kill("b1")
        await cluster.master()
        client = await client_of(cluster, "b2")
        await client.join("orders", "g", "d")
        [lot] = (await client.pull("orders", "g", "d")).lots
        never = m.Settle(m.Settlement.REJECT, lot.first, lot.attempt, lot.spans, None, "never")
        await client.ask(m.SettleAll("orders", "g", "d", [never], 1), m.Settled)
        await asyncio.sleep(1)
        _, [letters] = await client.ask(Scan("dead:g:orders", m.Whence.EARLIEST, 0, None, KIB), Scanned)
        history = decode(batch.decode(letters).headers(0)["fairway.dead.history"])
        assert history is not None
        shown = [(each.attempt, each.consumer, each.reason) for each in history.attempts]
        assert shown == [(1, "c", "not yet"), (2, "d", "never")]

    play(scenario)


def test_what_only_a_deposed_master_has_is_cut_off_and_kept_aside() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"kept"]))
        cluster.world.net.partition("b1", "b2")
        lost = asyncio.ensure_future(client.produce("orders", stream.batch([b"never answered"])))
        cluster.ensemble.cut("b1")
        await until(lambda: cluster.copies["b2"].is_master, cluster)
        assert not cluster.copies["b1"].is_master
        with pytest.raises(FairwayError):
            await lost
        client = await client_of(cluster, "b2")
        await client.produce("orders", Stream(8).batch([b"new"]))
        cluster.world.net.heal("b1", "b2")
        cluster.ensemble.mend("b1")
        await whole(cluster, "b1", "b2")
        assert await payloads(client) == [b"kept", b"new"]
        findings = cluster.copies["b1"].member.findings if cluster.copies["b1"].member else []
        assert any("not in the master's history" in each for each in findings)
        assert any(name.endswith(".cut") for name in cluster.copies["b1"].disk.listing("aside"))

    play(scenario)


def test_a_replica_shows_what_is_committed_and_refuses_the_rest() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"one"]))
        await asyncio.sleep(0.1)
        replica = await client_of(cluster, "b2")
        scanned, batches = await replica.ask(Scan("orders", m.Whence.EARLIEST, 0, None, 1 << 16), Scanned)
        assert scanned.committed_end == 1
        assert len(batches) == 1
        described, _ = await replica.ask(Describe(Depth.SUBJECTS), Described)
        assert not described.broker.is_master
        with pytest.raises(Refused, match="its master is at b1:20880") as refused:
            await replica.produce("orders", stream.batch([b"two"]))
        assert refused.value.code is Code.NOT_MASTER
        waiting = asyncio.ensure_future(
            replica.ask(Scan("orders", m.Whence.SEQUENCE, 1, None, 1 << 16, wait_ms=5_000), Scanned)
        )
        await asyncio.sleep(0.05)
        await client.produce("orders", Stream(9).batch([b"three"]))
        assert (await asyncio.wait_for(waiting, 1.0))[0].committed_end == 2

    play(scenario)


def test_a_clean_stop_hands_over_at_once() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await client_of(cluster, "b1")
        await client.produce("orders", Stream(7).batch([b"one"]))
        began_s = cluster.world.loop.time()
        await cluster.stop("b1")
        await cluster.master()
        assert cluster.world.loop.time() - began_s < 0.5 * MEMBER.session_ms / 1_000
        assert await payloads(await client_of(cluster, "b2")) == [b"one"]
        assert not cluster.copies["b2"].disk.listing("aside"), "nothing had to be cut"

    play(scenario)


def test_produce_closes_below_min_in_sync_and_consumption_goes_on() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"one"]))
        cluster.kill("b2")
        await until(lambda: len(record(cluster).in_sync) == 1, cluster)
        with pytest.raises(Refused, match="1 of the copies of group g1 are in sync, and 2 are the least") as refused:
            await client.produce("orders", stream.batch([b"two"]))
        assert refused.value.code is Code.READ_ONLY
        assert refused.value.retry_after_ms
        assert await payloads(client) == [b"one"]
        await whole(cluster, "b1", "b2")
        assert (await client.produce("orders", Stream(8).batch([b"three"]))).count == 1

    play(scenario, membership=replace(MEMBER, min_in_sync=2))


def test_a_wiped_replica_is_another_copy_and_is_filled_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        sent = [f"m{number}".encode().ljust(600, b".") for number in range(200)]
        for start in range(0, 200, 20):
            await client.produce("orders", stream.batch(sent[start : start + 20]))
        before = record(cluster).in_sync
        cluster.wipe("b2")
        filled = await cluster.start("b2")
        assert filled.directory not in before
        await until(lambda: filled.directory in record(cluster).in_sync, cluster)
        cluster.kill("b1")
        await cluster.master()
        assert await payloads(await client_of(cluster, "b2")) == sent

    play(scenario)


def test_no_copy_that_lags_takes_over_but_by_hand() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"both have it"]))
        cluster.world.net.partition("b1", "b2")
        await until(lambda: len(record(cluster).in_sync) == 1, cluster)
        await client.produce("orders", stream.batch([b"b1 alone has it"]))
        cluster.kill("b1")
        await asyncio.sleep(5.0)
        assert not cluster.masters
        lagging = cluster.copies["b2"].member
        assert lagging is not None
        assert "--accept-data-loss" in lagging.sentence()
        operator = cluster.ensemble.client("operator")
        with pytest.raises(NotPromoted, match="--accept-data-loss"):
            await change_master(operator, GROUP, lagging.directory)
        await change_master(operator, GROUP, lagging.directory, accepts_data_loss=True)
        await cluster.master()
        assert await payloads(await client_of(cluster, "b2")) == [b"both have it"]
        cluster.world.net.heal("b1", "b2")
        await whole(cluster, "b1", "b2")
        assert cluster.copies["b2"].is_master, "what was accepted as lost does not come back"

    play(scenario)


def test_a_master_is_changed_by_hand_without_a_loss() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2", "b3")
        client = await client_of(cluster, "b1")
        await client.produce("orders", Stream(7).batch([b"one"]))
        operator = cluster.ensemble.client("operator")
        chosen = cluster.copies["b3"].member
        assert chosen is not None
        said = await change_master(operator, GROUP, chosen.directory)
        assert chosen.directory in said
        await until(lambda: cluster.copies["b3"].is_master, cluster, within_s=3.0)
        assert not cluster.copies["b1"].is_master
        assert await payloads(await client_of(cluster, "b3")) == [b"one"]
        await whole(cluster, "b1", "b2", "b3")
        with pytest.raises(NotPromoted, match="leads group g1 already"):
            await change_master(operator, GROUP, chosen.directory)

    play(scenario, copies=3)


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("copies", [2, 3])
def test_nobody_waits_until_a_deposed_master_has_recovered_its_directory(copies: int, seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, *cluster.copies)
        stream = Stream(7)
        await (await client_of(cluster, "b1")).produce("orders", stream.batch([b"one"]))
        deposed, chosen = cluster.copies["b1"], cluster.copies["b2"].member
        assert deposed.jobs is not None
        assert chosen is not None
        deposed.jobs.late_s = 300.0
        await change_master(cluster.ensemble.client("operator"), GROUP, chosen.directory)
        await until(lambda: cluster.copies["b2"].is_master, cluster, within_s=1.0)
        assert not deposed.is_master
        assert deposed.member is not None
        assert deposed.member.broker is None, "its directory is being recovered"
        client = await client_of(cluster, "b2")
        await asyncio.wait_for(client.produce("orders", stream.batch([b"two"])), 1.0)
        assert await payloads(client) == [b"one", b"two"]

    play(scenario, copies=copies, seed=seed)


def test_probes_are_answered_while_the_directory_of_a_copy_is_closed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        await (await client_of(cluster, "b1")).produce("orders", Stream(7).batch([b"one"]))
        deposed, chosen = cluster.copies["b1"], cluster.copies["b2"].member
        assert deposed.member is not None
        assert deposed.jobs is not None
        assert chosen is not None
        pages = deposed.member.probes.pages
        assert "fairway_store_is_open 1" in pages["/metrics"]().text
        assert pages["/readyz"]().status == 200
        deposed.jobs.late_s = 300.0
        await change_master(cluster.ensemble.client("operator"), GROUP, chosen.directory)
        await until(lambda: cluster.copies["b2"].is_master, cluster, within_s=1.0)
        assert deposed.member.broker is None
        closed = pages["/metrics"]()
        assert closed.status == 200
        assert "fairway_store_is_open 0" in closed.text
        assert "fairway_produced_messages_total 1" in closed.text, "what was known last"
        assert pages["/livez"]().status == 200
        ready = pages["/readyz"]()
        assert ready.status == 503
        assert "the data directory is closed" in ready.text

    play(scenario)


def test_a_store_that_is_closed_says_what_it_knew() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1")
        member = cluster.copies["b1"].member
        assert member is not None
        broker = member.broker
        assert broker is not None
        free_bytes = broker.store.free_bytes()
        assert free_bytes > 0
        broker.store.abandon()
        assert broker.store.free_bytes() == free_bytes
        text = broker.pages["/metrics"]().text
        assert "fairway_store_is_open 0" in text
        assert "fairway_store_is_poisoned 1" in text

    play(scenario)


def test_a_master_without_room_on_its_disk_gives_up_its_place_before_it_tries_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        member = cluster.copies["b1"].member
        assert member is not None
        assert member.broker is not None
        member.broker.store.poison(DiskFull("the disk of this copy is full"))
        await until(lambda: cluster.copies["b2"].is_master, cluster, within_s=1.0)
        await whole(cluster, "b1", "b2")
        assert cluster.copies["b2"].is_master

    play(scenario)


def test_a_master_that_comes_back_at_once_is_not_blocked_by_what_it_left() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1")
        await (await client_of(cluster, "b1")).produce("orders", Stream(7).batch([b"one"]))
        cluster.kill("b1")
        began_s = cluster.world.loop.time()
        await cluster.start("b1")
        await cluster.master()
        assert cluster.world.loop.time() - began_s < 0.5 * MEMBER.session_ms / 1_000
        assert await payloads(await client_of(cluster, "b1")) == [b"one"]

    play(scenario)


def test_a_copied_directory_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1")
        await cluster.stop("b1")
        copied = cluster.copies["b1"].disk.beside().crash()
        await whole(cluster, "b1")
        cluster.copies["b2"].disk = copied
        member = await cluster.start("b2")
        await asyncio.wait_for(member.failed(), 20)
        with pytest.raises(WrongDirectory, match="this directory is a copy of that one's"):
            await member.stop()
        cluster.copies["b2"].member = None

    play(scenario)


def test_two_new_copies_that_start_together_make_one_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        await asyncio.gather(*(cluster.start(name) for name in cluster.copies))
        await whole(cluster, *cluster.copies)
        members = [copy.member for copy in cluster.copies.values() if copy.member is not None]
        logs = {each.broker.store.identity[1:] for each in members if each.broker is not None}
        assert len(logs) == 1

    for seed in range(4):
        play(scenario, copies=3, seed=seed)


def test_data_of_another_group_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        other = Cluster(cluster.world, 2, membership=replace(MEMBER, group="other"), store=STORE)
        other.ensemble = cluster.ensemble
        other.copies = {"b2": cluster.copies["b2"]}
        await other.start("b2")
        await other.master()
        await (await client_of(other, "b2")).produce("orders", Stream(7).batch([b"one"]))
        await other.stop("b2")
        await whole(cluster, "b1")
        with pytest.raises(WrongDirectory, match="directory"):
            await cluster.start("b2")
        cluster.copies["b2"].member = None

    play(scenario)


def test_a_broker_that_stood_alone_becomes_the_first_copy_of_a_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        copy, world = cluster.copies["b1"], cluster.world
        disk = copy.disk = copy.disk.beside()
        alone = BrokerWorld(copy.clock, disk, world.net.host("b1"), world.rng.child("alone"))
        options = BrokerOptions(host="b1", port=PORT, allow_remote=True, store=STORE, drain_ms_max=100)
        broker = await Broker.start(alone, options)
        await (await client_of(cluster, "b1")).produce("orders", Stream(7).batch([b"from before"]))
        await broker.stop()
        await whole(cluster, "b1", "b2")
        cluster.kill("b1")
        await cluster.master()
        assert await payloads(await client_of(cluster, "b2")) == [b"from before"]

    play(scenario)


@pytest.mark.parametrize(("log", "end"), [("messages", 8_000), ("actions", 700)])
def test_what_has_rotted_on_a_replica_is_repaired_from_the_master(log: str, end: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        sent = [f"m{number}".encode().ljust(200, b".") for number in range(60)]
        for each in sent:
            await client.produce("orders", stream.batch([each]))
        await payloads(client)
        cluster.kill("b2")
        cluster.copies["b2"].disk.beside().rot(segment.file_name(log, 0), 3, low=300, high=end)
        await whole(cluster, "b1", "b2")
        await asyncio.sleep(0.5)
        member = cluster.copies["b2"].member
        assert member is not None
        assert member.broker is not None
        assert not member.broker.store.rotten_spans()
        cluster.kill("b1")
        await cluster.master()
        client = await client_of(cluster, "b2")
        await client.ask(Seek("orders", "g", m.Whence.EARLIEST, 0), Sought)
        assert await payloads(client) == sent

    play(scenario)


def test_a_replica_lets_go_of_what_the_master_does_and_begins_anew_if_it_was_away_for_too_long() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)

        async def fill(messages: int) -> None:
            for number in range(messages):
                await client.produce("orders", stream.batch([f"m{number}".encode().ljust(1_000, b".")]))
            await asyncio.sleep(0.5)

        await fill(100)
        stores = [copy.member.broker.store for copy in cluster.copies.values() if copy.member and copy.member.broker]
        assert stores[0].first_bases()[0] > 0
        assert stores[1].first_bases() == stores[0].first_bases()
        cluster.kill("b2")
        await fill(100)
        before = cluster.copies["b2"].disk.beside().listing("messages")
        await whole(cluster, "b1", "b2")
        member = cluster.copies["b2"].member
        assert member is not None
        assert any("begins anew" in each for each in member.findings)
        aside = member.findings
        assert all(any(name in each for each in aside) for name in before), "nothing is deleted"
        cluster.kill("b1")
        await cluster.master()
        assert len(await payloads(await client_of(cluster, "b2"))) > 5

    store = replace(STORE, segment_bytes=8 * KIB, checkpoint_every_bytes=4 * KIB, retention=Policy(bytes_max=24 * KIB))
    play(scenario, store=store, housekeeping_ms=50)
