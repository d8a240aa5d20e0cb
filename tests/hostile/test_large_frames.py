"""Many senders of the largest frames at once: each has its turn, and whoever sends little does not notice."""

from __future__ import annotations

import asyncio
import random

from fairway import batch
from fairway.limits import KIB, MIB
from fairway.protocol import ConnectionOptions
from fairway.protocol.messages import Produce
from tests.support.raw import Raw, beginning_of_a_frame
from tests.unit.broker.scene import BROKER, PORT, Scene, options_of, staged_with
from tests.unit.serving.test_session import large_disk

SENDERS = 12
PAYLOAD_BYTES = 900 * KIB
TIGHT = options_of(
    connection=ConnectionOptions(frame_bytes_max=MIB),
    partial_bytes_max=2 * MIB,
    unsent_bytes_max=2 * MIB,
    waiting_bytes_max=16 * MIB,
)


def large_frame(raw: Raw, number: int) -> bytes:
    payload = random.Random(number).randbytes(PAYLOAD_BYTES)
    data = batch.encode([payload], producer_id=1_000 + number, first_sequence=0, created_ms=0)
    raw.connection.request(Produce(f"large-{number}"), [data])
    return b"".join(bytes(part) for part in raw.connection.take())


async def send_by_turns(raws: list[Raw], frames: list[bytes], piece: int = 64 * KIB) -> None:
    """A piece of each frame at a time: all of them are partial for as long as can be."""
    for at in range(0, max(map(len, frames)), piece):
        for raw, frame in zip(raws, frames, strict=True):
            raw.send(frame[at : at + piece])
        await asyncio.sleep(0.01)


@staged_with(TIGHT)
async def test_senders_of_large_frames_do_not_evict_one_another(scene: Scene) -> None:
    large_disk(scene)
    await scene.restart()
    net = scene.sim.net.host("large")
    raws = [await Raw.connect(net, BROKER, PORT) for _ in range(SENDERS)]
    frames = [large_frame(raw, number) for number, raw in enumerate(raws)]
    sending = asyncio.ensure_future(send_by_turns(raws, frames))
    for _ in range(20):
        await scene.send(b"small")
        assert scene.broker.session_manager.incoming.taken_bytes <= 2 * MIB + 2 * MIB // 8
        await asyncio.sleep(0.05)
    await sending
    await asyncio.sleep(10)
    assert not any(raw.is_lost for raw in raws)
    assert [raw.answered for raw in raws] == [1] * SENDERS
    assert scene.broker.session_manager.incoming.evictions == 0
    assert scene.broker.produce.messages == SENDERS + 20
    for raw in raws:
        raw.abort()


@staged_with(TIGHT)
async def test_who_announces_large_frames_and_sends_nothing_holds_nobody_up_for_long(scene: Scene) -> None:
    large_disk(scene)
    await scene.restart()
    net = scene.sim.net.host("large")
    rude = [await Raw.connect(net, BROKER, PORT) for _ in range(4)]
    for each in rude:
        each.send(beginning_of_a_frame(MIB, 64))
    await asyncio.sleep(0.1)
    honest = await Raw.connect(net, BROKER, PORT)
    honest.send(large_frame(honest, 1))
    await scene.send(b"small")
    await asyncio.sleep(10)
    assert (honest.is_lost, honest.answered) == (False, 1)
    assert [each.is_lost for each in rude[:2]] == [True, True], "those that had room and did not use it"
    for each in (honest, *rude):
        each.abort()
