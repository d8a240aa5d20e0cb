"""A group that passes over messages which the disk has lost counts them, for good."""

from __future__ import annotations

import pytest

from fairway.groups import GroupConfig, Order, TagFilter
from fairway.protocol import messages as m
from fairway.storage import segment
from fairway.storage.flusher import Durability
from fairway.storage.store import StoreOptions
from tests.support.client import Stream
from tests.unit.broker.scene import Scene, options_of, staged, staged_with

ORDERS = [GroupConfig(), GroupConfig(order=Order.KEY), GroupConfig(order=Order.STRICT)]


def spoil(scene: Scene, sequence: int, *, is_header: bool = False, subject_id: int = 1) -> None:
    """A bit flips in the batch that holds this message."""
    entry = next(scene.broker.store.messages.readable(subject_id, sequence))
    at = entry.position + 8 if is_header else entry.position + entry.size - 30
    scene.disk.flip(segment.file_name("messages", 0), at * 8)


async def lost(scene: Scene) -> int:
    return (await scene.describe()).lost


async def fill(scene: Scene, *counts: int) -> None:
    for number, count in enumerate(counts):
        await scene.send(*(f"{number}.{each}".encode().ljust(60, b".") for each in range(count)))


async def counted_for_good(scene: Scene, count: int) -> None:
    assert await lost(scene) == count
    await scene.kill()
    assert await lost(scene) == count  # from the action log
    await scene.restart()
    await scene.restart()
    assert await lost(scene) == count  # from the checkpoint


@pytest.mark.parametrize("config", ORDERS, ids=["none", "key", "strict"])
def test_fresh_messages_that_a_reader_finds_damaged_are_lost(config: GroupConfig) -> None:
    async def story(scene: Scene) -> None:
        await scene.configure(config)
        ann = await scene.worker("ann")
        await fill(scene, 2, 3, 4, 1)
        spoil(scene, 2)
        spoil(scene, 5)
        assert len(await ann.drain()) == 3
        assert any("billing on orders lost" in each for each in scene.broker.store.remarks)
        await counted_for_good(scene, 7)

    Scene(f"fresh {config.order}", options_of()).play(story)


@staged
async def test_what_recovery_found_rotten_is_lost_too(scene: Scene) -> None:
    await scene.worker("ann")
    await fill(scene, 2, 3, 4)
    spoil(scene, 2)
    await scene.kill()
    await counted_for_good(scene, 0)  # nobody has passed over it yet
    ann = await scene.worker("ann")
    assert len(await ann.drain()) == 6
    await counted_for_good(scene, 3)


@staged
async def test_a_group_that_begins_in_a_hole_counts_it_at_the_start(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 2)
    await ann.drain()
    await fill(scene, 3, 4)
    spoil(scene, 2)
    await scene.kill()
    await counted_for_good(scene, 3)


@staged
async def test_a_last_batch_with_an_unreadable_header_counts_as_many_as_it_may_have_held(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 2, 3)
    await scene.sleep(1)
    await scene.send(b"elsewhere", subject="other", stream=Stream(8))
    spoil(scene, 2, is_header=True)
    await scene.kill()
    ann = await scene.worker("ann")
    assert len(await ann.drain()) == 2
    assert await lost(scene) >= 3


@staged
async def test_what_waits_for_its_next_attempt_is_lost(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 1, 3, 1)
    await ann.settle(m.Settlement.RELEASE, await ann.pull())
    spoil(scene, 1)
    assert len(await ann.drain()) == 2
    await counted_for_good(scene, 3)


@staged
async def test_a_response_that_did_not_arrive_is_lost(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 1, 3, 1)
    await ann.pull()
    ann.arrived = 0
    spoil(scene, 1)
    assert len(await ann.drain()) == 2
    await counted_for_good(scene, 3)


@staged
async def test_a_dead_letter_of_which_nothing_is_left_is_lost(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 2, 1)
    handed = await ann.pull()
    spoil(scene, 0)
    await ann.reject(handed)
    await scene.sleep(1)
    assert len(await scene.scan("dead:billing:orders")) == 1
    await counted_for_good(scene, 2)


@staged
async def test_what_the_group_does_not_want_is_not_lost(scene: Scene) -> None:
    await scene.configure(GroupConfig(tags=TagFilter(("red",))))
    ann = await scene.worker("ann")
    await scene.send_tagged(*((tag.encode() * 50, tag) for tag in ("red", "blue", "red", "blue")))
    ben = await scene.worker("ben", group="all")
    spoil(scene, 1)
    assert len(await ben.drain()) == 3
    assert len(await ann.drain()) == 2
    assert await lost(scene) == 0
    assert (await scene.describe(group="all")).lost == 1


IN_MEMORY = StoreOptions(action_segment_bytes=1 << 16, low_water_bytes=0, durability=Durability.MEMORY)


@staged_with(options_of(store=IN_MEMORY))
async def test_sequences_that_a_power_cut_skipped_held_nothing(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 2, 3)
    await scene.sleep(1)
    assert len(await ann.drain()) == 5
    await scene.sleep(1)
    await scene.power_cut()
    ann = await scene.worker("ann")
    await fill(scene, 2)
    assert len(await ann.drain()) == 2
    assert await lost(scene) == 0


@staged
async def test_the_metric_shows_it(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await fill(scene, 1, 3, 1)
    spoil(scene, 1)
    await ann.drain()
    lines = scene.broker.metrics.page().splitlines()
    [shown] = [line for line in lines if line.startswith("fairway_group_lost_total{")]
    assert shown.endswith(" 3")
