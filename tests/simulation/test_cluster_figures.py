"""What a copy of a group shows of itself, and that a group that is switched off everywhere gets nothing from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fairway.protocol.messages import Heartbeat, Renewed
from fairway.registry.layout import SubjectRecord, pack, subject_path
from tests.simulation.cluster_steps import client_of, payloads, record, until, whole
from tests.simulation.cluster_world import GROUP, MEMBER, Cluster
from tests.simulation.test_cluster import play
from tests.support.client import Stream


def figures(cluster: Cluster, name: str) -> dict[str, float]:
    member = cluster.copies[name].member
    assert member is not None
    assert member.broker is not None
    lines = member.broker.metrics.page().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("fairway_"): float(value) for name, value in samples}


def test_master_and_replica_say_what_they_are() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client = await client_of(cluster, "b1")
        await client.produce("orders", Stream(7).batch([b"one"]))
        await asyncio.sleep(0.1)
        replica = next(each for each in record(cluster).in_sync if each != record(cluster).master)
        master, follower = figures(cluster, "b1"), figures(cluster, "b2")
        assert master['copy_role{role="master"}'] == follower['copy_role{role="follower"}'] == 1
        assert master['copy_role{role="follower"}'] == follower['copy_role{role="master"}'] == 0
        assert (master["copy_is_open"], follower["copy_is_open"]) == (1, 0)
        assert (master["copy_epoch"], master["copies_in_sync"], master["copies_in_sync_min"]) == (1, 2, 2)
        assert follower["copies_in_sync"] == 0
        assert master[f'replica_in_sync{{copy="{replica}"}}'] == 1
        assert master[f'replica_lag_bytes{{copy="{replica}"}}'] == 0
        assert master["catch_up_bytes_total"] > 0
        assert (master["reigns_total"], follower["reigns_total"]) == (1, 0)
        assert master['copy_read_only{why="min_in_sync"}'] == 0

        cluster.kill("b2")
        await until(lambda: len(record(cluster).in_sync) == 1, cluster)
        alone = figures(cluster, "b1")
        assert (alone["copies_in_sync"], alone['copy_read_only{why="min_in_sync"}']) == (1, 1)
        assert alone[f'replica_in_sync{{copy="{replica}"}}'] == 0
        assert f'replica_lag_bytes{{copy="{replica}"}}' not in alone

        await whole(cluster, "b1", "b2")
        cluster.ensemble.cut("b1")
        await until(lambda: cluster.copies["b2"].is_master, cluster)
        cluster.ensemble.mend("b1")
        await whole(cluster, "b1", "b2")
        assert (figures(cluster, "b1")["depositions_total"], figures(cluster, "b2")["reigns_total"]) == (1, 1)
        assert figures(cluster, "b1")['copy_role{role="follower"}'] == 1

    play(scenario, membership=replace(MEMBER, min_in_sync=2))


def test_a_group_that_is_switched_off_everywhere_gets_nothing_here() -> None:
    async def scenario(cluster: Cluster) -> None:
        await whole(cluster, "b1", "b2")
        client, stream = await client_of(cluster, "b1"), Stream(7)
        await client.produce("orders", stream.batch([b"one"]))
        operator = cluster.ensemble.client("operator")
        switch = SubjectRecord([GROUP], [GROUP], paused=["g"])
        node = await operator.create(subject_path("orders"), pack(switch))
        assert await payloads(client) == [b"one"], "it is not seen before the first look"
        await asyncio.sleep(1)
        await client.produce("orders", stream.batch([b"two"]))
        assert await payloads(client) == []
        renewed, _ = await client.ask(Heartbeat("orders", "g", "c", 0), Renewed)
        assert renewed.is_paused
        await client.join("orders", "others", "c")
        waiting = asyncio.ensure_future(client.pull("orders", "g", "c", wait_ms=20_000))
        await asyncio.sleep(1)
        assert not waiting.done()
        await operator.put(node.path, pack(SubjectRecord([GROUP], [GROUP])), node.version)
        assert list((await asyncio.wait_for(waiting, 5)).payloads.values()) == [b"two"]

    play(scenario)
