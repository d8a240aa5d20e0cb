"""However much arrives at once, a piece of a bucket stays within what a batch may hold: one that does not could never
be read again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairway import batch
from fairway.delay.engine import DelayOptions
from fairway.delay.pending_messages import Filter
from fairway.limits import BATCH_MESSAGES_MAX, KIB, MIB, PENDING_PAGE_MAX
from tests.unit.delay.helpers import DAY_MS, HOUR_MS, STORE, World

PLAIN = DelayOptions(
    store=replace(STORE, segment_bytes=MIB, action_segment_bytes=256 * KIB, checkpoint_every_bytes=MIB)
)


def listed(world: World) -> set[bytes]:
    """The payloads of all that is pending, as they are read from the buckets."""
    after, found = "", set[bytes]()
    for _ in range(1_000):
        page = world.run(world.engine.page(Filter(), after, PENDING_PAGE_MAX))
        for _, composer, due_ms in page.composers:
            found |= set(batch.decode(composer.encode(1, 0, due_ms)).payloads)
        after = page.next
        if not after:
            return found
    raise AssertionError("a listing ends")


def payloads(producer: int, count: int, size: int = 0) -> list[bytes]:
    return [b"%d-%d" % (producer, each) + bytes(size) for each in range(count)]


@pytest.mark.parametrize(
    ("batches", "count", "size"), [(5, 2_100, 0), (3, BATCH_MESSAGES_MAX, 0), (40, 150, 0), (9, 3, MIB)]
)
def test_what_is_durable_together_is_there_after_a_restart(batches: int, count: int, size: int) -> None:
    with World("together", options=PLAIN) as world:
        check_together(world, batches, count, size)


def check_together(world: World, batches: int, count: int, size: int) -> None:
    sent = set[bytes]()
    for producer in range(1, batches + 1):
        due_ms = [world.now_ms + 5 * DAY_MS + each for each in range(count)]
        world.send(payloads(producer, count, size), due_ms, producer=producer)
        sent |= set(payloads(producer, count, size))
    world.settle()
    assert listed(world) == sent
    world.reopen()
    world.settle()
    assert listed(world) == sent
    assert not world.engine.damaged
    world.advance(5 * DAY_MS + HOUR_MS)
    assert set(world.broker.payloads) == sent


def test_a_split_makes_pieces_that_can_be_read() -> None:
    """A small piece before a full one, in the same hour: together they would be more than a batch may hold."""
    with World("split", options=PLAIN) as world:
        check_split(world)


def check_split(world: World) -> None:
    at_ms = world.now_ms + 5 * DAY_MS
    sent = set[bytes]()
    for producer, count in ((1, 300), (2, BATCH_MESSAGES_MAX), (3, 1_000), (4, 3_500)):
        world.schedule(payloads(producer, count), [at_ms + each for each in range(count)], producer=producer)
        world.settle()
        sent |= set(payloads(producer, count))
    before = world.files
    for _ in range(5 * 24):
        world.advance(HOUR_MS)
        if world.files != before:
            break
    world.advance(2 * 60_000)
    assert world.now_ms < at_ms, "it was split before it is due"
    world.reopen()
    world.settle()
    assert listed(world) == sent
    assert not world.engine.damaged
