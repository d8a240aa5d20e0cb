"""A consumer begins nothing that others may have: its lease counts from its requests, however late the answers are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

import fairway
import fairway.aio
from fairway.groups import GroupConfig
from fairway.groups.config import Order
from fairway.runtime.rng import SeededRng
from fairway.simulation.wire import Conditions
from tests.simulation.stalled_consumers import Judge, connect
from tests.unit.broker.scene import BROKER, GROUP, PORT, SUBJECT, Scene

URL = f"fairway://{BROKER}:{PORT}"
LEASE_S = 3.0
HELD_S = 6.0
TEXTS = tuple(f"k{number}" for number in range(6))  # of one key
Take = Callable[[fairway.aio.Consumer], Coroutine[Any, Any, list[bytes]]]


async def by_poll(consumer: fairway.aio.Consumer) -> list[bytes]:
    found = []
    while (message := await consumer.poll(2)) is not None:
        found.append(message.payload)
        message.ack()
    return found


async def by_take(consumer: fairway.aio.Consumer) -> list[bytes]:
    return [message.payload for message in await consumer.take(10, 4)]


async def by_iteration(consumer: fairway.aio.Consumer) -> list[bytes]:
    found = []
    with suppress(TimeoutError):
        async with asyncio.timeout(4):
            async for message in consumer:
                found.append(message.payload)
                message.ack()
    return found


async def finished(scene: Scene, found: list[bytes]) -> None:
    """Another program, which handles all that the group hands to it."""
    async with connect(scene.sim, "other", URL) as client, client.consumer(SUBJECT, GROUP) as consumer:
        while len(found) < len(TEXTS):
            for message in await consumer.take(10, 1):
                found.append(message.payload)
                message.ack()
            await consumer.flush()


@pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)
@pytest.mark.parametrize("take", [by_poll, by_take, by_iteration], ids=lambda take: take.__name__)
def test_an_answer_that_was_held_for_longer_than_a_lease_is_not_begun(take: Take, order: Order) -> None:
    async def story(scene: Scene) -> None:
        await scene.configure(GroupConfig(lease_ms=int(LEASE_S * 1_000), order=order))
        async with connect(scene.sim, "stalled", URL) as client, client.consumer(SUBJECT, GROUP) as consumer:
            await scene.sleep(0.5)  # it has joined, and its pull waits
            scene.sim.net.partition(BROKER, "stalled")
            await scene.send_keyed(*TEXTS)
            began_s = scene.sim.loop.time()
            others: list[bytes] = []
            await finished(scene, others)
            assert sorted(others) == [text.encode() for text in TEXTS]
            assert scene.sim.loop.time() - began_s < HELD_S
            await scene.sleep(HELD_S - (scene.sim.loop.time() - began_s))
            scene.sim.net.heal(BROKER, "stalled")
            assert await take(consumer) == [], "others have finished them"
            assert consumer.counts.lapsed >= 1
            assert consumer.counts.handed_out == 0

    Scene("held").play(story)


@pytest.mark.parametrize("order", [Order.NONE, Order.KEY], ids=lambda order: order.value)
def test_what_was_begun_says_that_it_has_lapsed_and_what_was_not_goes_back(order: Order) -> None:
    async def story(scene: Scene) -> None:
        await scene.configure(GroupConfig(lease_ms=int(LEASE_S * 1_000), order=order))
        await scene.send_keyed(*TEXTS)
        async with connect(scene.sim, "stalled", URL) as client, client.consumer(SUBJECT, GROUP) as consumer:
            first = await consumer.poll(5)
            assert first is not None
            assert first.is_lapsed is False
            scene.sim.net.partition(BROKER, "stalled")
            await scene.sleep(LEASE_S)
            assert [first.is_lapsed] == [True], "nobody has answered for a lease"
            assert await consumer.take(10, 0.1) == []
            scene.sim.net.heal(BROKER, "stalled")
            first.release()
            found: list[bytes] = []
            while len(found) < len(TEXTS):
                for message in await consumer.take(10, 5):
                    assert not message.is_lapsed
                    found.append(message.payload)
                    message.ack()
            assert found == [text.encode() for text in TEXTS]

    Scene("lapsed").play(story)


def test_a_short_silence_costs_nothing() -> None:
    async def story(scene: Scene) -> None:
        await scene.configure(GroupConfig(lease_ms=int(LEASE_S * 1_000)))
        await scene.send_keyed(*TEXTS)
        async with connect(scene.sim, "stalled", URL) as client, client.consumer(SUBJECT, GROUP) as consumer:
            first = await consumer.poll(5)
            assert first is not None
            scene.sim.net.partition(BROKER, "stalled")
            await scene.sleep(LEASE_S / 4)
            scene.sim.net.heal(BROKER, "stalled")
            await scene.sleep(LEASE_S / 4)
            assert first.is_lapsed is False
            assert len(await consumer.take(10, 1)) == len(TEXTS) - 1
            assert consumer.counts.lapsed == 0

    Scene("short").play(story)


# --- random delays ----------------------------------------------------------------------------------------------------


async def work(scene: Scene, name: str, judge: Judge, rng: SeededRng, is_over: asyncio.Event) -> None:
    """A program: takes some, is busy for a while, acks."""
    async with connect(scene.sim, name, URL) as client, client.consumer(SUBJECT, GROUP, consumer=name) as consumer:
        while not is_over.is_set():
            taken = await consumer.take(1 + rng.below(8), 0.2)
            for message in taken:
                judge.begins(name, message.payload)
            for message in taken:
                await scene.sleep(rng.uniform() * 0.2)
                judge.look(name, message.payload, is_lapsed=message.is_lapsed)
                stale = consumer.counts.stale
                message.ack()
                if await consumer.flush(0.3) and consumer.counts.stale == stale:
                    judge.has_acked(name, message.payload)


async def trouble(scene: Scene, names: list[str], rng: SeededRng) -> None:
    """Ways that hold what is sent for up to three leases, and connections that break; for ever."""
    while True:
        await scene.sleep(rng.uniform() * LEASE_S / 3)
        name = names[rng.below(len(names))]
        if not rng.below(4):
            with suppress(fairway.FairwayError):
                scene.sim.net.drop(name)
            continue
        is_one_way = bool(rng.below(2))
        ends = (BROKER, name) if rng.below(2) else (name, BROKER)
        scene.sim.net.partition(*ends, one_way=is_one_way)
        await scene.sleep(rng.uniform() ** 2 * 3 * LEASE_S)
        scene.sim.net.heal(*ends, one_way=is_one_way)


def run_delayed(seed: str, order: Order) -> Judge:
    judge = Judge()
    rng = SeededRng(seed)

    async def story(scene: Scene) -> None:
        scene.sim.net.set_conditions(Conditions(latency_us=50, jitter_us=40_000))
        await scene.configure(GroupConfig(lease_ms=int(LEASE_S * 1_000), order=order, attempts_max=1_000))
        texts = [f"{'abc'[rng.below(3)]}{number}" for number in range(40)]
        names = ["ann", "ben", "cid"]
        troubling = asyncio.ensure_future(trouble(scene, names, rng.child("trouble")))
        is_over = asyncio.Event()
        working = [asyncio.ensure_future(work(scene, name, judge, rng.child(name), is_over)) for name in names]
        for at in range(0, len(texts), 5):
            await scene.send_keyed(*texts[at : at + 5])
            await scene.sleep(0.5)
        for _ in range(600):
            state = await scene.describe()
            if not state.lag and state.oldest_unacked == state.cursor:
                break
            await scene.sleep(0.1)
        troubling.cancel()
        await asyncio.wait([troubling])
        for name in names:
            for ends in ((BROKER, name), (name, BROKER)):
                scene.sim.net.heal(*ends)
        is_over.set()
        for each in working:
            await each
        assert {payload for _, payload in judge.begun} == {text.encode() for text in texts}

    Scene(seed).play(story)
    return judge


@pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_held_up_nothing_is_begun_that_another_has_acked(seed: int, order: Order) -> None:
    judge = run_delayed(f"delays/{seed}", order)
    assert judge.verdict() == []
    assert len(judge.confirmed) >= 20, "or it says little"
