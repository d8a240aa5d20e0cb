"""Rates: how many messages a group, or each key of it, is handed, whoever pulls and however often the broker dies."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fairway.errors import Misuse
from fairway.groups import GroupConfig, Order
from fairway.groups.config import encode
from fairway.protocol.admin_messages import Configure, Configured
from tests.unit.broker.scene import GROUP, SUBJECT, Handed, Scene, Worker, staged

S_NS = 1_000_000_000


async def at_times(scene: Scene, worker: Worker, seconds: float) -> list[tuple[float, int]]:
    """Pull and ack for so long: when, and how many messages."""
    begin_ns, seen = scene.clock.monotonic_ns(), []
    while (passed_s := (scene.clock.monotonic_ns() - begin_ns) / S_NS) < seconds:
        got = await worker.pull(wait_s=min(seconds - passed_s, 5))
        if got.lots:
            seen.append(((scene.clock.monotonic_ns() - begin_ns) / S_NS, len(got.messages)))
            await worker.ack(got)
    return seen


@staged
async def test_a_group_has_no_more_than_its_rate(scene: Scene) -> None:
    await scene.configure(GroupConfig(rate_per_s=10, burst=5))
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send(*(b"%d" % at for at in range(200)))
    seen = [each for of in await asyncio.gather(*(at_times(scene, w, 9.9) for w in (ann, ben))) for each in of]
    assert 95 <= sum(count for _, count in seen) <= 5 + 10 * 10
    assert sum(count for at, count in seen if at < 0.05) == 5, "a burst, when it had been quiet"
    assert (await scene.describe()).rate_per_s == 10


@staged
async def test_pulls_wait_for_a_token_and_are_woken_for_it(scene: Scene) -> None:
    await scene.configure(GroupConfig(rate_per_s=0.5, burst=1))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    first = await ann.pull()
    before_ns, asked = scene.clock.monotonic_ns(), scene.broker.meters.pulls
    assert not (await ann.pull()).lots
    second = await ann.pull(wait_s=7)
    assert (first.texts, second.texts) == (["a"], ["b"])
    assert 1.9 * S_NS <= scene.clock.monotonic_ns() - before_ns <= 2.1 * S_NS
    assert scene.broker.meters.pulls - asked == 2


@staged
async def test_what_did_not_arrive_is_sent_again_without_a_token(scene: Scene) -> None:
    await scene.configure(GroupConfig(rate_per_s=0.1, burst=1))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.pull()
    ann.arrived = 0
    assert (await ann.pull()).texts == ["a"]


@staged
async def test_a_restart_does_not_fill_the_bucket(scene: Scene) -> None:
    await scene.configure(GroupConfig(rate_per_s=1, burst=50))
    await scene.send(*(b"%d" % at for at in range(200)))
    handed = 0
    arrived = 0
    for _ in range(3):
        ann = await scene.worker("ann", arrived=arrived)
        got = await ann.pull()
        handed += len(got.messages)
        if got.lots:
            await ann.ack(got)
        arrived = ann.arrived
        await scene.power_cut()
    assert 50 <= handed <= 53


@staged
async def test_a_rate_can_be_taken_off(scene: Scene) -> None:
    await scene.configure(GroupConfig(rate_per_s=0.01))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    await ann.ack(await ann.pull())
    await scene.ask(Configure(SUBJECT, GROUP, encode(GroupConfig(version=2)), 1), Configured)
    await ann.join()
    assert (await ann.pull(wait_s=1)).texts == ["b", "c"]


@staged
async def test_each_key_has_its_own_rate(scene: Scene) -> None:
    await scene.configure(GroupConfig(order=Order.KEY, rate_per_key=0.5))
    ann = await scene.worker("ann")
    await scene.send_keyed("a1", "a2", "b1", "-1", "-2")
    got = await ann.pull()
    assert got.texts == ["a1", "b1", "-1", "-2"]
    await ann.ack(got)
    await scene.send_keyed("b2", "c1")
    assert (await _acked(ann)).texts == ["c1"], "a and b rest"
    before_ns = scene.clock.monotonic_ns()
    rest = (await _acked(ann, 5)).texts
    assert 1.8 * S_NS <= scene.clock.monotonic_ns() - before_ns <= 2.2 * S_NS
    assert sorted(rest + (await _acked(ann, 1)).texts) == ["a2", "b2"]


@staged
async def test_keys_rest_through_a_restart(scene: Scene) -> None:
    await scene.configure(GroupConfig(order=Order.KEY, rate_per_key=0.1))
    ann = await scene.worker("ann")
    await scene.send_keyed("a1")
    await ann.ack(await ann.pull())
    await scene.power_cut()
    ann = await scene.worker("ann", arrived=ann.arrived)
    await scene.send_keyed("a2")
    assert not (await ann.pull(wait_s=7)).lots
    assert (await ann.pull(wait_s=7)).texts == ["a2"]


async def _acked(worker: Worker, wait_s: float = 0) -> Handed:
    got = await worker.pull(wait_s=wait_s)
    if got.lots:
        await worker.ack(got)
    return got


@pytest.mark.parametrize(
    "config",
    [
        {"rate_per_s": -1.0},
        {"rate_per_s": float("nan")},
        {"rate_per_s": 1e12},
        {"burst": 5},
        {"rate_per_key": 5.0},
        {"order": "key", "rate_per_key": 1e-9},
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(config: dict[str, object]) -> None:
    with pytest.raises((Misuse, msgspec.ValidationError)):
        msgspec.convert(config, GroupConfig)
