"""The memory of all groups together: what is refused where it is full, what always goes through, who goes on."""

from __future__ import annotations

import contextlib

import msgspec

from fairway import limits
from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever
from tests.support.client import Client, Stream
from tests.unit.broker.scene import SUBJECT, Handed, Scene, Worker, options_of, refused, staged, staged_with

BUDGET = limits.MIB
SMALL = options_of(groups_bytes_max=BUDGET)
TINY = options_of(groups_bytes_max=64 * limits.KIB)
GROUP_ALONE_BYTES = limits.GROUP_BYTES + limits.GROUP_RESERVE_BYTES


async def _greedy(scene: Scene, client: Client, group: str, **policies: object) -> Worker:
    """A consumer on that connection which takes lots of one message, for a day."""
    worker = Worker(client, "greedy", group, SUBJECT)
    stated = {"lot_messages_max": 1, "lease_ms": 86_400_000, **policies}
    await worker.join(policies=msgspec.msgpack.encode(stated))
    return worker


async def _take_all(worker: Worker) -> tuple[list[Handed], Code | None]:
    """Pull until it is refused, or nothing comes."""
    taken: list[Handed] = []
    for _ in range(1_000):
        try:
            handed = await worker.pull()
        except Refused as full:
            return taken, full.code
        if not handed.lots:
            return taken, None
        taken.append(handed)
    raise AssertionError("there is no end to it")


async def _fill(scene: Scene) -> None:
    """Groups that take all that they may, each with a connection of its own, until there is no room for another."""
    code = None
    for number in range(200):
        try:
            await _take_all(await _greedy(scene, await scene.connect(), f"greedy-{number}"))
        except Refused as full:
            code = full.code
            break
    assert code is Code.BUSY


@staged_with(SMALL)
async def test_groups_of_one_connection_take_half_and_a_good_group_goes_on(scene: Scene) -> None:
    await scene.send(*([b"x"] * 2_000))
    client = await scene.connect()
    for worker in [await _greedy(scene, client, f"greedy-{number}") for number in range(10)]:
        _, code = await _take_all(worker)
        assert code is Code.BUSY
    memory = scene.broker.coordinator.memory
    assert memory.taken_bytes <= BUDGET // 2 + 10 * GROUP_ALONE_BYTES
    good = await scene.worker("ann", group="good")
    assert len(await good.drain()) == 2_000


@staged_with(SMALL)
async def test_a_keyed_group_is_bounded_by_its_messages(scene: Scene) -> None:
    data = Stream(9).batch([b"x"] * 4_000, [f"key {number}" for number in range(4_000)])
    await (await scene.control()).produce(SUBJECT, data)
    greedy = await _greedy(scene, await scene.connect(), "keyed", order="key", lot_messages_max=1_000)
    taken, code = await _take_all(greedy)
    assert code is Code.BUSY
    messages = sum(len(handed.messages) for handed in taken)
    assert 100 < messages * limits.KEYED_BYTES < BUDGET // 2
    for handed in taken:
        assert (await greedy.ack(handed)).settled == len(handed.messages)
    assert (await greedy.pull()).lots


@staged_with(SMALL)
async def test_what_frees_memory_goes_through_and_what_splits_lots_does_not(scene: Scene) -> None:
    await scene.send(*([b"x"] * 3_000))
    wide = await _greedy(scene, await scene.connect(), "wide", lot_messages_max=1_000)
    held = await wide.pull()
    await _fill(scene)
    [lot] = held.lots
    part = m.Settle(m.Settlement.RETRY, lot.first, lot.attempt, [m.SequenceRange(lot.first, 1)])
    assert await refused(wide.settle_all([part])) is Code.BUSY
    assert (
        await wide.settle_all([m.Settle(m.Settlement.ACK, lot.first, 1, [m.SequenceRange(lot.first, 1)])])
    ).settled == 1
    assert (await wide.heartbeat()).lease_ms
    whole = m.Settle(m.Settlement.RETRY, lot.first, lot.attempt, [m.SequenceRange(lot.first + 1, 999)])
    assert (await wide.settle_all([whole])).settled == 999
    await wide.leave()


@staged_with(SMALL)
async def test_a_group_goes_on_in_small_steps_although_the_account_is_full(scene: Scene) -> None:
    """Others came first, each with a connection of its own, and what they hold does not come back."""
    await scene.send(*([b"x"] * 3_000))
    good = await scene.worker("ann", group="good")
    await _fill(scene)
    assert len(await good.drain()) == 3_000
    ben = await scene.worker("ben", group="good")
    assert (await ben.heartbeat()).lease_ms


@staged_with(TINY)
async def test_groups_members_and_paused_names_are_bounded(scene: Scene) -> None:
    await scene.send(b"x")
    joined, code = 0, None
    while joined < 100 and code is None:
        try:
            await scene.worker(f"consumer-{joined}", group="one")
            joined += 1
        except Refused as full:
            code = full.code
    assert code is Code.BUSY
    assert limits.GROUP_MEMBERS_MIN <= joined < 64
    paused = scene.switch(Lever.PAUSE_CONSUMER, is_on=True, group="one", consumer="nobody")
    assert await refused(paused) is Code.BUSY
    for number in range(10):
        with contextlib.suppress(Refused):
            await scene.worker("ann", group=f"another-{number}")
    assert await refused(scene.worker("ann", group="another")) is Code.BUSY
    assert scene.broker.coordinator.memory.taken_bytes <= TINY.groups_bytes_max


@staged
async def test_a_group_that_is_removed_is_forgotten(scene: Scene) -> None:
    ann = await scene.worker("ann")
    memory = scene.broker.coordinator.memory
    before = memory.taken_bytes
    await ann.leave()
    assert memory.taken_bytes == before - limits.MEMBER_BYTES == GROUP_ALONE_BYTES
    [host] = scene.broker.coordinator.groups
    scene.broker.coordinator.remove(host)
    assert memory.taken_bytes == 0


@staged
async def test_a_lower_bound_after_a_restart_loads_everything_and_refuses_growth(scene: Scene) -> None:
    await scene.send(*([b"x"] * 500))
    greedy = await _greedy(scene, await scene.connect(), "greedy")
    taken = [await greedy.pull() for _ in range(3)]
    before = scene.broker.coordinator.memory.taken_bytes
    await scene.restart(TINY)
    memory = scene.broker.coordinator.memory
    assert memory.taken_bytes == before > TINY.groups_bytes_max
    again = await scene.worker("greedy", group="greedy", arrived=greedy.arrived)
    assert await refused(again.pull()) is Code.BUSY
    for handed in taken:
        assert (await again.ack(handed)).settled == len(handed.messages)
    assert memory.taken_bytes < before
    assert (await again.pull()).lots
