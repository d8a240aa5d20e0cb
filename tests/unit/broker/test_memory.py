"""Durability `memory`: what a power cut may take, and what it must not leave behind."""

from __future__ import annotations

from dataclasses import replace

from fairway.storage.flusher import Durability
from tests.support.client import Stream
from tests.unit.broker.scene import STORE, Scene, Worker, options_of, staged_with

LEASE_S = 15
LAZY = options_of(store=replace(STORE, durability=Durability.MEMORY), sync_every_ms=3_600_000)


async def synced(scene: Scene) -> None:
    scene.broker.store.sync()
    await scene.sleep(1)


async def back(scene: Scene, worker: Worker) -> Worker:
    """The same consumer, which remembers what arrived."""
    return await scene.worker(worker.name, arrived=worker.arrived)


async def cut_until_lost(scene: Scene, end: int) -> None:
    """What was not synced may be gone, or not: until some is."""
    log = scene.broker.store.actions.log
    assert log.synced_end <= end < log.end
    await scene.power_cut()


@staged_with(LAZY)
async def test_what_was_acked_in_vain_comes_again_though_its_consumer_lives(scene: Scene) -> None:
    """The ack was answered and lost; its consumer does not come back to it, and keeps its lease."""
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    handed = await ann.pull()
    await synced(scene)
    end = scene.broker.store.actions.log.end
    assert (await ann.ack(handed)).settled == 2
    await cut_until_lost(scene, end)
    ann = await back(scene, ann)
    got: list[bytes] = []
    for _ in range(8):
        await scene.sleep(LEASE_S / 4)
        got += await ann.drain()
    assert got in ([b"a", b"b"], [])
    state = await scene.describe()
    assert (state.in_flight, state.returned, state.retrying) == (0, 0, 0)


@staged_with(LAZY)
async def test_who_holds_it_still_may_ack_it_after_a_kill(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    handed = await ann.pull()
    await scene.kill()
    ann = await back(scene, ann)
    assert not (await ann.pull()).lots
    assert (await ann.ack(handed)).settled == 2
    await scene.sleep(2 * LEASE_S)
    assert not (await (await scene.worker("ben")).pull()).lots


@staged_with(LAZY)
async def test_a_kill_takes_nothing(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for _ in range(5):
        await scene.send(b"a")
        await ann.ack(await ann.pull())
    await scene.send(b"b")
    await scene.kill()
    assert await (await back(scene, ann)).drain() == [b"b"]


@staged_with(LAZY)
async def test_the_hole_that_a_power_cut_leaves_is_no_lag(scene: Scene) -> None:
    """Sequences are claimed ahead, so the next message is a million further on."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.ack(await ann.pull())
    await synced(scene)
    await scene.send(b"b")
    await scene.power_cut()
    ann = await back(scene, ann)
    await ann.drain()
    assert (await scene.describe()).lag == 0
    sent = await scene.send(b"c", stream=Stream(8))
    assert sent.first_sequence >= 1_000_000
    assert await ann.drain() == [b"c"]


@staged_with(LAZY)
async def test_an_ack_from_beyond_the_hole_floods_nobody(scene: Scene) -> None:
    """What lies below a believed ack is owed, but not a million messages that never were."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.ack(await ann.pull())
    await synced(scene)
    await scene.send(b"unsynced")
    await scene.power_cut()
    ann = await back(scene, ann)
    await ann.drain()  # by the seed, the power cut may have left it
    end = scene.broker.store.actions.log.end
    await scene.send(b"c", b"d", stream=Stream(8))
    handed = await ann.pull()
    assert handed.payloads == [b"c", b"d"]
    scene.broker.store.messages.log.flusher.sync()
    await scene.sleep(1)
    await scene.power_cut()
    ann = await back(scene, ann)
    await ann.ack(handed)
    await scene.sleep(2 * LEASE_S)
    await (await back(scene, ann)).drain()
    assert scene.broker.store.actions.log.end < end + 8_192
    assert (await scene.describe()).lots == 0


@staged_with(LAZY)
async def test_a_broadcast_consumer_whose_group_the_power_cut_took_is_told_that_it_missed_messages(
    scene: Scene,
) -> None:
    """It comes back to a broker that has never heard of it, and cannot know what it had: it is told so, loudly."""
    ann = await scene.worker("ann", is_joining=False)
    assert not (await ann.join(is_broadcast=True)).has_gap
    await scene.send(b"a")
    assert (await ann.pull()).payloads == [b"a"]
    await scene.power_cut()
    ann = await scene.worker("ann", arrived=ann.arrived, is_joining=False)
    assert (await ann.join(is_broadcast=True)).has_gap
    await scene.send(b"b", stream=Stream(8))
    assert await ann.drain() == [b"b"]
