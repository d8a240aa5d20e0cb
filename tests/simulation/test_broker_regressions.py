"""What simulated histories have found in the broker, each told once more as a short story."""

from __future__ import annotations

import asyncio

import pytest

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Refused
from fairway.world.rng import SeededRng
from fairway.world.sim_disk import SimDisk
from fairway.world.simulation import Simulation, simulate
from tests.simulation.broker_clients import BROKER, PORT
from tests.support.client import Client, Stream

SLOW = 2_000.0  # a sync takes from 40 ms to a second


async def started(world: Simulation, disk: SimDisk) -> Broker:
    options = BrokerOptions(host=BROKER, port=PORT, allow_remote=True)
    return await Broker.start(BrokerWorld(world.clock, disk, world.net.host(BROKER), SeededRng("broker")), options)


async def connected(world: Simulation, name: str) -> Client:
    return await Client.connect(world.net.host(name), world.clock, BROKER, PORT)


def test_an_ack_that_is_repeated_is_answered_no_sooner_than_the_first() -> None:
    """A consumer acks, loses the connection and acks again. By then nothing is left to settle, and that was answered
    at once; the power went before the first ack was on disk, and the broker took the consumer to hold the messages
    still, while the consumer had been told that it does not. Nobody ever got them again."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        await client.join("orders", "hotel", "c")
        await client.produce("orders", Stream(1).batch([b"a", b"b"]))
        delivery = await client.pull("orders", "hotel", "c")
        await asyncio.sleep(0.1)
        disk.slowness = SLOW
        first = asyncio.ensure_future(client.settle("orders", "hotel", "c", delivery.lots, arrived=delivery.number))
        await asyncio.sleep(0.005)
        again = await client.settle("orders", "hotel", "c", delivery.lots, arrived=delivery.number)
        assert again.stale == 2
        log = broker.store.actions.log
        assert log.committed_end == log.end
        assert (await first).settled == 2
        await broker.stop()

    simulate(story, seed=1)


def test_a_membership_that_is_confirmed_again_is_durable() -> None:
    """JOIN, and JOIN once more from a new connection: the second changes nothing, but the first may not be on disk."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        await client.produce("orders", Stream(1).batch([b"a"]))
        disk.slowness = SLOW
        first = asyncio.ensure_future(client.join("orders", "hotel", "c"))
        await asyncio.sleep(0.005)
        await (await connected(world, "consumer")).join("orders", "hotel", "c")
        log = broker.store.actions.log
        assert log.committed_end == log.end
        await first
        await broker.stop()

    simulate(story, seed=1)


def test_who_waits_for_longer_than_a_lease_keeps_its_place() -> None:
    """A consumer with nothing to handle sent no heartbeats, as the protocol allows, and one long poll after the other.
    Each outlasted the lease, so it was expired while it waited, and refused when a message came."""

    async def story(world: Simulation) -> None:
        broker = await started(world, SimDisk(world.rng.child("disk"), world.loop.call_later))
        client = await connected(world, "consumer")
        lease_ms = (await client.join("orders", "hotel", "c")).lease_ms
        for _ in range(5):
            assert not (await client.pull("orders", "hotel", "c", wait_ms=10 * lease_ms)).lots
        await client.produce("orders", Stream(1).batch([b"a"]))
        assert (await client.pull("orders", "hotel", "c")).payloads == {0: b"a"}
        await broker.stop()

    simulate(story, seed=1)


def test_who_is_told_that_it_is_no_member_is_none_after_a_crash_either() -> None:
    """A lease ended, and the consumer was told so before that was on disk. It forgot what it held; the power went, the
    broker took it to be a member still, and the consumer came back as one that had everything. Nobody got it again."""

    async def story(world: Simulation) -> None:
        disk = SimDisk(world.rng.child("disk"), world.loop.call_later)
        broker = await started(world, disk)
        client = await connected(world, "consumer")
        lease_ms = (await client.join("orders", "hotel", "c")).lease_ms
        await client.produce("orders", Stream(1).batch([b"a"]))
        await client.pull("orders", "hotel", "c")
        await asyncio.sleep(lease_ms / 1_000 - 0.01)
        disk.slowness = SLOW
        await asyncio.sleep(0.02)
        log = broker.store.actions.log
        assert log.committed_end < log.end
        with pytest.raises(Refused, match="NOT_A_MEMBER"):
            await client.pull("orders", "hotel", "c", arrived=1)
        assert log.committed_end == log.end
        await broker.stop()

    simulate(story, seed=1)
