"""The client on virtual time, with a net that loses connections and a broker that dies: all of it from a seed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import fairway
import fairway.aio
from fairway.client.core import ClientOptions
from fairway.protocol.line import ReconnectOptions
from fairway.simulation.wire import Conditions
from tests.unit.broker.scene import BROKER, PORT, SUBJECT, Scene

URL = f"fairway://{BROKER}:{PORT}"
OPTIONS = ClientOptions(line=ReconnectOptions(backoff_most_ms=500))
MESSAGES = 150


def connect(scene: Scene, host: str) -> fairway.aio.Client:
    net, rng = scene.sim.net.host(host), scene.sim.rng.child(host)
    return fairway.aio.connect(URL, patience=60, options=OPTIONS, net=net, clock=scene.clock, rng=rng)


async def produce(scene: Scene, host: str) -> None:
    async with connect(scene, host) as client:
        for number in range(MESSAGES):
            await client.send(SUBJECT, f"{host}-{number}".encode())
            await scene.sleep(0.01)


async def consume(scene: Scene, host: str, seen: Counter[bytes], total: int) -> None:
    async with connect(scene, host) as client, client.consumer(SUBJECT, group="hotel", consumer=host) as consumer:
        while len(seen) < total:
            for message in await consumer.take(50, 0.5):
                seen[message.payload] += 1
                message.ack()
        await consumer.flush(60)


async def stored(scene: Scene) -> Counter[bytes]:
    async with connect(scene, "auditor") as client:
        return Counter([payload async for page in client.scan(SUBJECT) for payload in page.batch.payloads])


def run(seed: str, *, kills: int, conditions: Conditions) -> str:
    """The trace hash of a run in which two produce, two consume, connections break and the broker dies now and then."""

    async def story(scene: Scene) -> None:
        scene.sim.net.set_conditions(conditions)
        seen: Counter[bytes] = Counter()
        total = 2 * MESSAGES
        everybody = [asyncio.ensure_future(produce(scene, f"p-{number}")) for number in (1, 2)]
        everybody += [asyncio.ensure_future(consume(scene, f"c-{number}", seen, total)) for number in (1, 2)]
        for _ in range(kills):
            await scene.sleep(1)
            await scene.power_cut()
        for each in everybody:
            await each
        scene.sim.net.set_conditions(Conditions())
        everything = {f"p-{who}-{number}".encode() for who in (1, 2) for number in range(MESSAGES)}
        assert set(seen) == everything
        assert await stored(scene) == Counter(everything), "each was stored once, however often it was sent"

    scene = Scene(seed)
    scene.play(story)
    return scene.sim.trace_hash()


@pytest.mark.parametrize("seed", ["one", "two", "three"])
def test_lost_connections_lose_and_repeat_nothing(seed: str) -> None:
    run(seed, kills=0, conditions=Conditions(drop_chance=0.01))


@pytest.mark.parametrize("seed", ["one", "two", "three"])
def test_a_broker_that_dies_loses_and_repeats_nothing(seed: str) -> None:
    run(seed, kills=3, conditions=Conditions(drop_chance=0.002))


def test_the_same_seed_gives_the_same_run() -> None:
    conditions = Conditions(drop_chance=0.01)
    assert run("again", kills=1, conditions=conditions) == run("again", kills=1, conditions=conditions)


def test_minutes_without_a_broker_take_no_time() -> None:
    async def story(scene: Scene) -> None:
        async with connect(scene, "p") as client, client.consumer(SUBJECT, group="hotel") as consumer:
            await client.send(SUBJECT, b"before")
            message = await consumer.poll(60)
            assert message is not None
            message.ack()
            assert await consumer.flush(60)
            await scene.stop()
            sending = asyncio.ensure_future(client.send(SUBJECT, b"after"))
            await scene.sleep(90)
            await scene.start()
            await sending
            again = await consumer.poll(60)
            assert again is not None
            assert again.payload == b"after"
            again.ack()

    Scene("minutes").play(story)


def test_a_silent_broker_is_given_up_and_found_again() -> None:
    async def story(scene: Scene) -> None:
        async with connect(scene, "p") as client:
            await client.send(SUBJECT, b"before")
            scene.sim.net.partition("p", BROKER)
            sending = asyncio.ensure_future(client.send(SUBJECT, b"during"))
            await scene.sleep(60)
            assert not sending.done()
            scene.sim.net.heal("p", BROKER)
            assert (await sending).sequence == 1

    Scene("silent").play(story)
