"""Strict order: the whole subject one after another, by one active consumer; the others stand by and take over."""

from __future__ import annotations

import asyncio

import msgspec

from fairway.groups import AfterDead, Backoff, GroupConfig, Order
from fairway.groups.config import encode
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Configure, Configured, Lever
from tests.unit.broker.scene import GROUP, SUBJECT, Handed, Scene, Worker, staged

LEASE_S = 15
STRICT = GroupConfig(order=Order.STRICT, backoff=Backoff(first_ms=5_000, jitter=0))


async def crew(scene: Scene, *names: str, config: GroupConfig = STRICT) -> list[Worker]:
    await scene.configure(config)
    return [await scene.worker(name) for name in names]


def some(handed: Handed, kind: m.Settlement, *texts: str, after_s: float | None = None) -> list[m.Settle]:
    """A verdict on these alone."""
    found = {each.payload.decode(): each.sequence for each in handed.messages}
    after_ms = None if after_s is None else round(after_s * 1_000)
    return [
        m.Settle(kind, lot.first, lot.attempt, [m.SequenceRange(found[text], 1)], after_ms, fence=lot.fence)
        for lot in handed.lots
        for text in texts
        if any(span.first <= found[text] < span.first + span.count for span in lot.spans)
    ]


@staged
async def test_one_is_active_and_the_others_stand_by(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send(b"1", b"2", b"3")
    assert not (await ben.pull()).lots
    first = await ann.pull(most=2)
    assert first.texts == ["1", "2"]
    assert not (await ben.pull()).lots
    assert (await scene.describe()).active == "ann"
    await ann.ack(first)
    assert (await ann.pull()).texts == ["3"]


@staged
async def test_the_next_takes_over_when_the_active_one_leaves(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send(b"1", b"2")
    await ann.pull()
    waiting = scene.sim.loop.create_task(ben.pull(wait_s=7))
    await scene.sleep(1)
    await ann.leave()
    assert (await waiting).texts == ["1", "2"]


@staged
async def test_the_next_takes_over_when_the_lease_of_the_active_one_ends(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send(b"1", b"2")
    held = await ann.pull()
    got = await ben.pull(wait_s=7)
    for _ in range(3):
        if got.lots:
            break
        got = await ben.pull(wait_s=7)
    assert (got.texts, got.attempts) == (["1", "2"], [2, 2])
    assert got.lots[0].fence > held.lots[0].fence
    late = await scene.worker("ann", arrived=ann.arrived)
    assert (await late.settle(m.Settlement.ACK, held)).stale == 2
    assert not (await late.pull()).lots, "it stands by now"


@staged
async def test_a_message_that_waits_for_its_next_attempt_holds_up_all_behind_it(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send(b"1", b"2", b"3")
    await scene.send(b"4")
    got = await ann.pull(most=3)
    retry, release = m.Settlement.RETRY, m.Settlement.RELEASE
    await ann.settle_all([*some(got, retry, "2", after_s=60), *some(got, release, "3")])
    await ann.settle_all(some(got, m.Settlement.ACK, "1"))
    for _ in range(11):
        assert not (await ann.pull(wait_s=5)).lots
    again = await ann.pull(wait_s=7)
    assert (again.texts, again.attempts) == (["2", "3", "4"], [2, 1, 1])


@staged
async def test_what_comes_back_in_pieces_is_handed_out_in_order(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send(*(b"%d" % at for at in range(8)))
    one, two = await ann.pull(most=4), await ann.pull(most=4)
    await ann.settle_all([*some(one, m.Settlement.RELEASE, "1", "3"), *some(two, m.Settlement.RELEASE, "5")])
    await ann.settle_all(some(one, m.Settlement.RETRY, "2", after_s=0))
    await ann.settle_all([*some(one, m.Settlement.ACK, "0"), *some(two, m.Settlement.ACK, "4", "6", "7")])
    assert (await ann.pull()).texts == ["1", "2", "3", "5"]


@staged
async def test_a_dead_letter_lets_the_group_go_on_or_halts_it(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send(b"1", b"2")
    await ann.reject(await ann.pull(most=1))
    assert (await ann.pull(wait_s=5)).texts == ["2"]
    config = msgspec.structs.replace(STRICT, version=2, after_dead=AfterDead.HALT)
    await scene.ask(Configure(SUBJECT, GROUP, encode(config), 1), Configured)
    await scene.send(b"3", b"4")
    await scene.power_cut()
    ann = await scene.worker("ann")
    again = await ann.pull()
    assert again.texts == ["2", "3", "4"]
    await ann.settle_all([*some(again, m.Settlement.REJECT, "3"), *some(again, m.Settlement.ACK, "2")])
    await ann.settle_all(some(again, m.Settlement.RELEASE, "4"))
    assert not (await ann.pull(wait_s=5)).lots
    await scene.restart()
    ann = await scene.worker("ann", arrived=ann.arrived)
    assert (await scene.describe()).halted == 1
    assert not (await ann.pull()).lots
    assert (await scene.switch(Lever.HALT_KEY, is_on=False)).was_on
    assert (await ann.pull()).texts == ["4"]


@staged
async def test_every_message_is_handled_in_order_whoever_comes_and_goes(scene: Scene) -> None:
    await scene.configure(STRICT)
    for at in range(0, 60, 5):
        await scene.send(*(b"%02d" % each for each in range(at, at + 5)))
    handled: list[str] = []
    for turn in range(4):
        names = [f"w{turn}", f"w{turn + 1}"]
        workers = [await scene.worker(name) for name in names]
        for _ in range(3):
            for worker in workers:
                got = await worker.pull(most=4)
                handled += got.texts
                if got.lots:
                    await worker.ack(got)
        await workers[0].pull(most=2)
        await workers[0].leave()
        await workers[1].leave()
        await asyncio.sleep(0.01)
    last = await scene.worker("last")
    handled += [each.decode() for each in await last.drain()]
    assert handled == [f"{at:02}" for at in range(60)]
