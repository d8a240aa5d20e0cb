"""Large batches are checked off the loop: in order, at the cost of their actor, and with nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

from fairway import batch, limits
from fairway.broker.server import Broker, BrokerWorld
from fairway.errors import Code
from fairway.protocol import messages as m
from tests.support.client import Client, ConnectionEnded
from tests.support.threads import SimPool
from tests.unit.broker.scene import BROKER, SUBJECT, Scene, options_of, refused

LARGE = b"x" * (limits.CHECK_ON_LOOP_BYTES_MAX + 1)


class PooledScene(Scene):
    """A broker whose pool takes as long as the seed says, up to a second."""

    async def start(self) -> None:
        rng = self.sim.rng.child("broker")
        pool = SimPool(self.sim.rng.child("pool"), late_s=1)
        world = BrokerWorld(self.clock, self.disk, self.sim.net.host(BROKER), rng, pool)
        self.broker = await Broker.start(world, self.options)


def play(story: Any, seed: str = "checks") -> None:
    PooledScene(seed, options_of(), capacity_bytes=16 * limits.MIB).play(story)


def data_of(payload: bytes, first: int, producer_id: int = 9) -> bytes:
    return batch.encode([payload], producer_id=producer_id, first_sequence=first, created_ms=1, codec=batch.Codec.ZSTD)


async def send(client: Client, data: bytes, subject: str = SUBJECT) -> m.Produced:
    return await client.produce(subject, data)


def test_batches_of_a_stream_keep_their_order() -> None:
    for seed in range(10):

        async def story(scene: Scene) -> None:
            client = await scene.control()
            payloads = [LARGE, b"a", LARGE, b"b", b"c", LARGE]
            sent = [send(client, data_of(each, at)) for at, each in enumerate(payloads)]
            receipts = await asyncio.gather(*sent)
            assert [each.first_sequence for each in receipts] == list(range(6))
            assert [each.payload for each in await scene.scan()] == payloads
            assert scene.broker.checks.count == 3

        play(story, f"order-{seed}")


def test_other_subjects_go_on_meanwhile() -> None:
    async def story(scene: Scene) -> None:
        client = await scene.control()
        done: list[str] = []
        for producer_id, subject in enumerate(("large", "small"), 1):  # all that do not exist yet have one actor
            await send(client, data_of(b"first", 0, producer_id), subject)

        async def note(data: bytes, subject: str) -> None:
            await send(client, data, subject)
            done.append(subject)

        await asyncio.gather(note(data_of(LARGE, 0), "large"), note(data_of(b"x", 0, 8), "small"))
        assert done == ["small", "large"]

    play(story)


def test_an_unsound_batch_ends_the_connection_as_ever() -> None:
    async def story(scene: Scene) -> None:
        client = await scene.connect()
        data = bytearray(data_of(LARGE, 0))
        data[-9] ^= 1
        try:
            await send(client, bytes(data))
        except ConnectionEnded:
            pass
        else:
            raise AssertionError("a damaged batch was taken")
        assert scene.broker.checks.is_idle
        await send(await scene.control(), data_of(LARGE, 0))

    play(story)


def test_a_sender_that_goes_away_leaves_nothing_behind() -> None:
    async def story(scene: Scene) -> None:
        client = await scene.connect()
        sending = asyncio.create_task(refused(send(client, data_of(LARGE, 0))))
        await asyncio.sleep(0.01)
        client.abort()
        await asyncio.gather(sending, return_exceptions=True)
        receipt = await send(await scene.control(), data_of(LARGE, 0, 8))
        assert receipt.first_sequence in (0, 1)
        assert scene.broker.checks.is_idle

    play(story)


def test_a_broker_stops_while_a_batch_is_checked() -> None:
    async def story(scene: Scene) -> None:
        client = await scene.connect()
        sending = asyncio.create_task(refused(send(client, data_of(LARGE, 0))))
        await asyncio.sleep(0.01)
        await scene.restart()
        [told] = await asyncio.gather(sending, return_exceptions=True)
        assert told is Code.DRAINING or isinstance(told, BaseException)
        await scene.sleep(2)  # the check ends, and finds nobody
        await send(await scene.control(), data_of(LARGE, 0))
        assert len(await scene.scan()) == 1

    play(story)
