"""Coalescing: while one request of a key is in process and one waits, further ones are declined, across processes."""

from __future__ import annotations

import msgspec
import pytest

from fairway.errors import Misuse
from fairway.groups import Coalesce, GroupConfig, Mode, Order
from tests.unit.broker.scene import Scene, staged

DECLINE = GroupConfig(coalesce=Coalesce.DECLINE)
LATEST = GroupConfig(coalesce=Coalesce.LATEST)


@staged
async def test_one_is_in_process_one_waits_and_further_ones_are_declined(scene: Scene) -> None:
    await scene.configure(DECLINE)
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send_keyed("a1", "a2", "a3", "b1", "a4", "-1", "-2")
    held = await ann.pull()
    assert held.texts == ["a1", "b1", "-1", "-2"]
    assert not (await ben.pull()).lots
    state = await scene.describe()
    assert (state.declined, state.parked, state.coalesce, state.lag) == (2, 1, "decline", 0)
    assert "fairway_group_declined_total" in scene.broker.metrics.page()
    await ann.ack(held)
    assert (await ben.pull()).texts == ["a2"]
    await scene.send_keyed("a5")
    assert not (await ann.pull()).lots, "a2 is in process by now: this one waits"
    await ben.leave()
    assert (await ann.pull()).texts == ["a2"]


@staged
async def test_the_latest_may_take_the_place_of_the_one_that_waits(scene: Scene) -> None:
    await scene.configure(LATEST)
    ann = await scene.worker("ann")
    await scene.send_keyed("a1", "a2", "a3")
    held = await ann.pull()
    await scene.send_keyed("a4", "b1")
    other = await ann.pull()
    await scene.send_keyed("a5")
    assert (held.texts, other.texts, (await ann.pull()).texts) == (["a1"], ["b1"], [])
    await ann.ack(held)
    assert (await ann.pull()).texts == ["a5"]
    assert (await scene.describe()).declined == 3


@staged
async def test_what_is_declined_stays_so_through_a_crash(scene: Scene) -> None:
    await scene.configure(DECLINE)
    ann = await scene.worker("ann")
    await scene.send_keyed("a1", "a2", "a3", "a4")
    held = await ann.pull()
    assert not (await ann.pull()).lots
    await ann.heartbeat()
    for crash in (scene.power_cut, scene.kill, scene.restart):
        await crash()
        ann = await scene.worker("ann", arrived=ann.arrived)
        assert not (await ann.pull()).lots
        assert (await scene.describe()).declined == 2
    await ann.ack(held)
    assert await ann.drain() == [b"a2"]


@staged
async def test_a_request_that_failed_is_still_the_one_in_process(scene: Scene) -> None:
    await scene.configure(DECLINE)
    ann = await scene.worker("ann")
    await scene.send_keyed("a1", "a2")
    await ann.retry(await ann.pull(), after_s=60)
    await scene.send_keyed("a3")
    assert not (await ann.pull()).lots
    assert (await scene.describe()).declined == 1
    again = await ann.pull(wait_s=7)
    for _ in range(12):
        if again.lots:
            break
        again = await ann.pull(wait_s=7)
    assert (again.texts, again.attempts) == (["a1"], [2])
    await ann.ack(again)
    assert (await ann.pull()).texts == ["a2"]


@staged
async def test_a_repetitive_stream_is_mostly_declined_and_every_key_is_done_last(scene: Scene) -> None:
    """Whatever was asked for, something that began later has done it."""
    await scene.configure(DECLINE)
    workers = [await scene.worker(name) for name in ("ann", "ben")]
    begun: list[str] = []
    held = []
    for batch in range(10):
        await scene.send_keyed(*(f"{'abc'[at % 3]}{batch}{at:02}" for at in range(30)))
        for worker in workers:
            got = await worker.pull(most=5)
            begun += got.texts
            held.append((worker, got))
        for worker, got in held:
            if got.lots:
                await worker.ack(got)
        held.clear()
    begun += [each.decode() for each in await workers[0].drain()]
    declined = (await scene.describe()).declined
    assert len(begun) + declined == 300
    assert declined > 200


def test_coalescing_goes_with_acks_and_with_keys() -> None:
    for changes in ({"mode": Mode.AT_MOST_ONCE}, {"order": Order.STRICT}):
        with pytest.raises(Misuse):
            msgspec.structs.replace(DECLINE, **changes)
