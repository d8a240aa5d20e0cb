"""A consumer is bound to the connection that joined: no other one acts for it, and only its secret moves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from tests.unit.broker.scene import GROUP, SUBJECT, Handed, Scene, Worker, refused, staged

OTHER = bytes(range(100, 116))
NONE = b""
LEASE_S = 15.0
STRANGERS = [OTHER, NONE]


def against_strangers(story: Callable[[Scene, bytes], Coroutine[Any, Any, None]]) -> Callable[[bytes], None]:
    """Like `staged`, with each secret that a stranger may show."""

    @pytest.mark.parametrize("secret", STRANGERS, ids=["another secret", "no secret"])
    def test(secret: bytes) -> None:
        Scene(test.__name__).play(lambda scene: story(scene, secret))

    test.__name__ = story.__name__
    return test


async def stranger(scene: Scene, secret: bytes = OTHER, arrived: int = 0) -> Worker:
    """Somebody who knows that there is a consumer ann, and not her secret."""
    return await scene.worker("ann", secret=secret, arrived=arrived, is_joining=False)


async def joined_at_last(scene: Scene, worker: Worker) -> int:
    """JOIN, as often as it takes; how often it had to wait."""
    for waits in range(100):
        try:
            await worker.join()
        except Refused as no:
            if no.code is not Code.BUSY or no.retry_after_ms is None:
                raise
            await scene.sleep(no.retry_after_ms / 1_000)
        else:
            return waits
    raise AssertionError("it never joined")


async def tries(worker: Worker, held: Handed) -> list[Code]:
    """What the broker says to everything that a member may ask, but for JOIN."""
    worker.arrived = held.number
    asked = (
        worker.pull(),
        worker.ack(held),
        worker.retry(held),
        worker.reject(held),
        worker.settle(m.Settlement.RELEASE, held),
        worker.heartbeat(),
        worker.leave(),
    )
    return [await refused(each) for each in asked]


@against_strangers
async def test_a_stranger_can_do_nothing_while_the_consumer_is_connected(scene: Scene, secret: bytes) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull()
    eve = await stranger(scene, secret)
    assert set(await tries(eve, held)) == {Code.FENCED}
    assert await refused(eve.join()) is Code.BUSY
    assert set(await tries(eve, held)) == {Code.FENCED}
    assert await ann.ack(held) == m.Settled(2, 0)


@against_strangers
async def test_nor_while_it_has_no_connection(scene: Scene, secret: bytes) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull()
    ann.client.abort()
    await scene.sleep(0.1)
    eve = await stranger(scene, secret)
    assert set(await tries(eve, held)) == {Code.NOT_A_MEMBER}
    assert await refused(eve.join()) is Code.BUSY
    back = await scene.worker("ann", arrived=held.number)
    assert await back.ack(held) == m.Settled(2, 0)


@against_strangers
async def test_nor_after_a_restart_of_the_broker(scene: Scene, secret: bytes) -> None:
    await _test_restart(scene, secret, scene.restart)


@against_strangers
async def test_nor_after_a_power_cut(scene: Scene, secret: bytes) -> None:
    await _test_restart(scene, secret, scene.power_cut)


async def _test_restart(scene: Scene, secret: bytes, restart: Callable[[], Coroutine[Any, Any, None]]) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull(most=1)
    await ann.heartbeat()
    await scene.sleep(1)  # for the handout to be synced
    await restart()
    eve = await stranger(scene, secret, arrived=held.number)
    assert set(await tries(eve, held)) == {Code.NOT_A_MEMBER}
    assert await refused(eve.join()) is Code.BUSY
    back = await scene.worker("ann", arrived=held.number)
    assert await back.ack(held) == m.Settled(1, 0)
    assert (await back.pull()).payloads == [b"b"]


@against_strangers
async def test_after_the_lease_a_stranger_gets_what_was_not_acked(scene: Scene, secret: bytes) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull()
    await ann.settle_all([m.Settle(m.Settlement.ACK, held.lots[0].first, 1, [m.SequenceRange(0, 1)])])
    ann.client.abort()
    eve = await stranger(scene, secret)
    began_s = scene.clock.monotonic_ns() / 1e9
    waits = await joined_at_last(scene, eve)
    assert waits >= LEASE_S - 1
    assert LEASE_S - 1 <= scene.clock.monotonic_ns() / 1e9 - began_s <= LEASE_S + 1
    got = await eve.pull()
    assert (got.payloads, got.attempts) == ([b"b"], [2])
    back = await scene.worker("ann", is_joining=False, arrived=held.number)
    assert await refused(back.ack(held)) is Code.FENCED
    assert await refused(back.join()) is Code.BUSY
    assert await eve.ack(got) == m.Settled(1, 0)


@staged
async def test_who_leaves_frees_its_id_at_once(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await ann.leave()
    eve = await stranger(scene)
    await eve.join()
    assert await refused(ann.heartbeat()) is Code.FENCED


@staged
async def test_a_waiting_pull_of_the_consumer_goes_on_beside_a_stranger(scene: Scene) -> None:
    ann = await scene.worker("ann")
    waits = asyncio.ensure_future(ann.pull(wait_s=5))
    await scene.sleep(0.1)
    eve = await stranger(scene)
    assert await refused(eve.join()) is Code.BUSY
    assert await refused(eve.leave()) is Code.FENCED
    await scene.send(b"a")
    assert (await waits).payloads == [b"a"]


@staged
async def test_the_same_session_on_a_new_connection_is_believed_at_once(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    held = await ann.pull()
    back = await scene.worker("ann", arrived=held.number)  # the old connection is open: the broker has not noticed
    assert await refused(ann.ack(held)) is Code.FENCED
    assert await back.ack(held) == m.Settled(1, 0)


@staged
async def test_two_sessions_on_one_connection_do_not_share_an_id(scene: Scene) -> None:
    ann = await scene.worker("ann")
    twin = Worker(ann.client, "ann", GROUP, SUBJECT, OTHER)
    assert await refused(twin.join()) is Code.BUSY


@staged
async def test_a_stranger_who_waits_does_not_get_what_the_inbox_handed_out(scene: Scene) -> None:
    """The inbox has members of its own: whoever takes an id over takes over nothing that it held there."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.reject(await ann.pull(), "no")
    await scene.sleep(1)
    await scene.redrive()
    held = await ann.pull(wait_s=5)
    assert (held.is_inbox, held.payloads) == (True, [b"a"])
    ann.client.abort()
    await scene.sleep(LEASE_S - 0.001)
    eve = await stranger(scene, arrived=held.number)
    await joined_at_last(scene, eve)
    got = await eve.pull(wait_s=5)
    assert (got.is_inbox, got.payloads, got.attempts) == (True, [b"a"], [2])


# --- clients of earlier versions, which show no secret ---------------------------------------------------------------


@staged
async def test_a_client_without_secrets_comes_back_when_its_connection_has_ended(scene: Scene) -> None:
    old = await scene.worker("ann", secret=NONE)
    await scene.send(b"a", b"b")
    held = await old.pull(most=1)
    back = await scene.worker("ann", secret=NONE, arrived=held.number, is_joining=False)
    assert await refused(back.join()) is Code.BUSY
    assert set(await tries(back, held)) == {Code.FENCED}
    old.client.abort()
    await scene.sleep(0.1)
    assert set(await tries(back, held)) == {Code.NOT_A_MEMBER}
    await back.join()
    assert await back.ack(held) == m.Settled(1, 0)
    assert (await back.pull()).payloads == [b"b"]


@staged
async def test_a_client_without_secrets_comes_back_after_a_restart_of_the_broker(scene: Scene) -> None:
    old = await scene.worker("ann", secret=NONE)
    await scene.send(b"a")
    held = await old.pull()
    await scene.sleep(1)
    await scene.restart()
    back = await scene.worker("ann", secret=NONE, arrived=held.number)
    assert await back.ack(held) == m.Settled(1, 0)


@staged
async def test_a_program_that_was_upgraded_has_a_secret_from_then_on(scene: Scene) -> None:
    old = await scene.worker("ann", secret=NONE)
    old.client.abort()
    await scene.sleep(0.1)
    new = await scene.worker("ann")
    new.client.abort()
    await scene.sleep(0.1)
    eve = await stranger(scene, NONE)
    assert await refused(eve.join()) is Code.BUSY
    await scene.worker("ann")


# --- what is no secret -----------------------------------------------------------------------------------------------


@staged
async def test_a_secret_that_is_easily_guessed_is_refused(scene: Scene) -> None:
    for secret in (b"short", bytes(65)):
        eve = await stranger(scene, secret)
        assert await refused(eve.join()) is Code.BAD_REQUEST


@staged
async def test_the_secret_is_nowhere_on_the_disk(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await ann.pull()
    await scene.restart()
    stored = [
        scene.disk.open(f"{folder}/{name}").read(0, 1 << 20)
        for folder in ("actions", "checkpoints", "messages")
        for name in scene.disk.listing(folder)
    ]
    assert any(b"ann" in each for each in stored)
    assert not any(ann.secret in each for each in stored)


def test_no_repr_shows_a_secret() -> None:
    join = m.Join(SUBJECT, GROUP, "ann", 0, 0, secret=OTHER)
    assert repr(join).endswith("policies=None, secret=<16 bytes>)")
    assert "consumer='ann'" in str(join)
    assert repr(OTHER)[2:-1] not in repr(join)
