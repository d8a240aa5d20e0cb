"""What a consumer has prefetched is not begun after another master may have handed it to others.

A master that is cut off from its copies and from the registry, and that clients still reach, hands out messages until
its session may be over. Nobody else knows of those handouts: the next master hands the same messages out again. A lone
broker that loses power forgets handouts that it had not synced.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import fairway.aio
from fairway.protocol.messages import OrderPolicy
from fairway.simulation import Simulation
from tests.simulation.broker_clients import PORT
from tests.simulation.cluster_steps import whole
from tests.simulation.cluster_world import SESSION_MS, Cluster
from tests.simulation.stalled_consumers import connect
from tests.unit.broker.scene import BROKER, GROUP, SUBJECT, Scene

URL = f"fairway://b1:{PORT},b2:{PORT}"
PAYLOADS = [b"%d" % number for number in range(20)]
IN_HAND = 5  # of those, messages that its program has taken from the session, and not begun


async def joined(
    stack: AsyncExitStack, world: Simulation, name: str, url: str, order: OrderPolicy
) -> fairway.aio.Consumer:
    """A consumer that has joined and asks for nothing yet."""
    client = await stack.enter_async_context(connect(world, name, url))
    consumer = await stack.enter_async_context(client.consumer(SUBJECT, GROUP, consumer=name, order=order))
    consumer.pause()
    return consumer


async def produce(world: Simulation, url: str, name: str = "producer") -> None:
    async with connect(world, name, url) as client:
        await client.send_many(SUBJECT, PAYLOADS)


async def prefetched(consumer: fairway.aio.Consumer) -> None:
    """It has them all; its program has begun none."""
    consumer.resume()
    async with asyncio.timeout(5):
        while consumer._session.waiting_count < len(PAYLOADS):  # noqa: ASYNC110
            await asyncio.sleep(0.0001)


async def finish(consumer: fairway.aio.Consumer, most: int) -> list[bytes]:
    found: list[bytes] = []
    consumer.resume()
    while len(found) < most:
        taken = await consumer.take(100, 30)
        assert taken, f"{len(found)} of {most} came"
        found += [message.payload for message in taken]
        consumer.ack(taken)
    assert await consumer.flush(30)
    return found


@pytest.mark.parametrize("is_deaf", [False, True], ids=["it hears of the change", "it does not"])
@pytest.mark.parametrize("has_some_in_hand", [False, True], ids=["in the session", "in the consumer's hand"])
def test_what_an_isolated_master_handed_out_is_not_begun_later(*, is_deaf: bool, has_some_in_hand: bool) -> None:
    world = Simulation("isolated", steps_max=2_000_000)
    cluster = Cluster(world, 2)

    async def story() -> None:
        await whole(cluster, "b1", "b2")
        async with AsyncExitStack() as stack:
            ann = await joined(stack, world, "ann", URL, "none")
            ben = await joined(stack, world, "ben", URL, "none")
            await produce(world, URL)
            world.net.partition("b1", "b2")
            cluster.ensemble.cut("b1")
            await prefetched(ann)
            if has_some_in_hand:
                assert [await ann.poll(1)]
                ann._grab(IN_HAND)
            ann.pause()  # so that the next master gives all of them to the other
            if is_deaf:
                world.net.partition("b1", "ann")
            assert sorted(await finish(ben, len(PAYLOADS))) == sorted(PAYLOADS)
            ann.resume()
            assert await ann.take(100, 3) == [], "all of them are done, by the confirmed acks of another"
            world.net.heal("b1", "b2")
            world.net.heal("b1", "ann")
            cluster.ensemble.mend("b1")
            await ben.close()
            await produce(world, URL, "another")
            assert sorted(await finish(ann, len(PAYLOADS))) == sorted(PAYLOADS), "it goes on with what is new"

    with world:
        world.run(asyncio.wait_for(story(), 300))


def test_before_another_can_lead_what_was_prefetched_may_be_begun() -> None:
    world = Simulation("certain", steps_max=2_000_000)
    cluster = Cluster(world, 2)

    async def story() -> None:
        await whole(cluster, "b1", "b2")
        async with AsyncExitStack() as stack:
            ann = await joined(stack, world, "ann", URL, "none")
            await produce(world, URL)
            await prefetched(ann)
            await asyncio.sleep(10 * SESSION_MS / 1_000)  # heartbeats confirm who leads, all the time
            taken = await ann.take(100, 1)
            assert [message.payload for message in taken] == PAYLOADS
            assert not any(message.is_lapsed for message in taken)
            assert ann.counts.lapsed == 0

    with world:
        world.run(asyncio.wait_for(story(), 300))


@pytest.mark.parametrize("order", ["none", "key"])
def test_a_change_of_masters_takes_only_what_it_may_have_forgotten(order: OrderPolicy) -> None:
    """Ordered handouts are on every copy before they are answered: whoever has them keeps them."""
    world = Simulation("change", steps_max=2_000_000)
    cluster = Cluster(world, 2)

    async def story() -> None:
        await whole(cluster, "b1", "b2")
        async with AsyncExitStack() as stack:
            ann = await joined(stack, world, "ann", URL, order)
            await produce(world, URL)
            await prefetched(ann)
            cluster.kill("b1")
            await cluster.master()
            assert sorted(await finish(ann, len(PAYLOADS))) == sorted(PAYLOADS)
            assert ann.counts.lapsed == (len(PAYLOADS) if order == "none" else 0)

    with world:
        world.run(asyncio.wait_for(story(), 300))


@pytest.mark.parametrize("is_quiet", [False, True], ids=["with a pull in flight", "with nothing in flight"])
def test_what_a_broker_that_lost_power_handed_out_is_not_begun_later(*, is_quiet: bool) -> None:
    forgotten: list[bool] = []

    async def story(scene: Scene) -> None:
        url = f"fairway://{BROKER}:{PORT}"
        async with AsyncExitStack() as stack:
            ann = await joined(stack, scene.sim, "ann", url, "none")
            ben = await joined(stack, scene.sim, "ben", url, "none")
            await produce(scene.sim, url)
            await scene.sleep(0.1)
            await prefetched(ann)
            if is_quiet:
                ann.pause()
            await scene.sleep(0.05 * (len(forgotten) % 2))  # a handout is synced within 20 ms
            await scene.power_cut()
            await scene.sleep(0.01)  # she learns that her connection is lost
            scene.sim.net.partition(BROKER, "ann")  # and cannot ask the broker in its next life for a while
            is_forgotten = (await scene.describe()).cursor == 0
            done = await finish(ben, len(PAYLOADS)) if is_forgotten else []
            ann.resume()
            assert await ann.take(100, 1) == [], "another may have finished them"
            scene.sim.net.heal(BROKER, "ann")
            again = await finish(ann, len(PAYLOADS) - len(done))
            assert sorted(done + again) == sorted(PAYLOADS)
            forgotten.append(is_forgotten)

    for seed in range(20):
        Scene(f"power/{seed}").play(story)
    assert set(forgotten) == {False, True}, "both happen"
