"""Order by key: messages of one key one after another, whoever handles them, through failures and restarts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fairway.errors import Code
from fairway.groups import AfterDead, Backoff, GroupConfig, Mode, Order
from fairway.groups.config import decode, encode
from fairway.limits import KIB
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Configure, Configured, Lever
from fairway.storage.store import StoreOptions
from tests.unit.broker.scene import GROUP, SUBJECT, Handed, Scene, Worker, options_of, refused, staged

LEASE_S = 15
BY_KEY = GroupConfig(order=Order.KEY, backoff=Backoff(first_ms=5_000, jitter=0))


async def crew(scene: Scene, *names: str, config: GroupConfig = BY_KEY) -> list[Worker]:
    await scene.configure(config)
    return [await scene.worker(name) for name in names]


def part(handed: Handed, *texts: str) -> list[m.Settle]:
    """An ack of these alone."""
    meant = [each.sequence for each in handed.messages if each.payload.decode() in texts]
    outcomes = []
    for lot in handed.lots:
        spans = [
            m.SequenceRange(each, 1) for each in meant if any(s.first <= each < s.first + s.count for s in lot.spans)
        ]
        if spans:
            outcomes.append(m.Settle(m.Settlement.ACK, lot.first, lot.attempt, spans, fence=lot.fence))
    return outcomes


@staged
async def test_messages_of_one_key_go_out_one_at_a_time(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "b1", "a2", "c1", "b2", "a3")
    first = await ann.pull()
    assert first.texts == ["a1", "b1", "c1"]
    assert not (await ben.pull()).lots, "the others wait behind these"
    await ann.settle_all(part(first, "a1"))
    assert (await ben.pull()).texts == ["a2"], "anybody may have the next"
    await ann.settle_all(part(first, "b1", "c1"))
    assert (await ann.pull()).texts == ["b2"]


@staged
async def test_messages_without_a_key_are_free(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("-1", "a1", "-2", "a2", "-3")
    assert (await ann.pull(most=3)).texts == ["-1", "a1", "-2"]
    assert (await ben.pull()).texts == ["-3"]


@staged
async def test_a_failing_key_blocks_only_itself(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "b1", "a2", "b2")
    await ann.retry(await ann.pull(most=1))
    before = (await ben.pull()).texts
    assert before == ["b1"], "a1 waits for its next attempt, and a2 behind it"
    await scene.sleep(6)
    again = await ben.pull()
    assert (again.texts, again.attempts) == (["a1"], [2])
    await ben.ack(again)
    assert (await ann.pull()).texts == ["a2"]


@staged
async def test_what_a_dead_consumer_held_comes_before_the_rest_of_its_keys(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "b1", "b2")
    held = got = await ann.pull()
    for _ in range(4):
        await scene.sleep(LEASE_S / 3)
        got = await ben.pull()
        if got.lots:
            break
    assert (held.texts, got.texts, got.attempts) == (["a1", "b1"], ["a1", "b1"], [2, 2])
    assert not (await ben.pull()).lots


@staged
async def test_the_word_of_a_former_holder_does_not_count(scene: Scene) -> None:
    """Its fence is lower than that of whoever has the message now."""
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2")
    held = await ann.pull()
    await ann.settle(m.Settlement.RELEASE, held)
    got = await ben.pull()
    assert (got.texts, got.attempts) == (["a1"], [1])
    assert got.lots[0].fence > held.lots[0].fence > 0
    assert (await ann.ack(held)).stale == 1
    await ben.settle(m.Settlement.RELEASE, got)
    again = await ann.pull()
    assert again.texts == ["a1"]
    old = [m.Settle(m.Settlement.ACK, 0, 1, held.lots[0].spans, fence=held.lots[0].fence)]
    assert (await ann.settle_all(old)).stale == 1, "about the time before"
    assert (await ann.settle_all(part(again, "a1"))).settled == 1


@staged
async def test_an_ack_wakes_whoever_waits_for_the_next_of_the_key(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2")
    held = await ann.pull()
    waiting = scene.sim.loop.create_task(ben.pull(wait_s=7))
    await scene.sleep(1)
    before_ns = scene.clock.monotonic_ns()
    await ann.ack(held)
    assert (await waiting).texts == ["a2"]
    assert scene.clock.monotonic_ns() - before_ns < 1e9


@staged
async def test_so_many_are_parked_and_then_the_group_waits_and_says_so(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann", config=msgspec.structs.replace(BY_KEY, parked_max=3))
    await scene.send_keyed("a1", "a2", "a3", "a4")
    await scene.send_keyed("a5", "b1")
    held = await ann.pull()
    state = await scene.describe()
    assert (held.texts, state.parked, state.is_full, state.order) == (["a1"], 3, True, "key")
    assert (state.lag, state.oldest_unacked) == (2, 0)
    assert "fairway_group_parked" in scene.broker.metrics.page()
    assert not (await ann.pull()).lots
    await ann.ack(held)
    assert (await ann.pull()).texts == ["a2", "b1"]


@staged
async def test_a_dead_letter_lets_its_key_go_on(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2")
    await ann.reject(await ann.pull(), "no good")
    assert (await ann.pull(wait_s=5)).texts == ["a2"]
    assert [each.payload for each in await scene.scan(f"dead:{GROUP}:{SUBJECT}")] == [b"a1"]


@staged
async def test_a_dead_letter_halts_its_key_by_choice(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann", config=msgspec.structs.replace(BY_KEY, after_dead=AfterDead.HALT))
    await scene.send_keyed("a1", "b1", "a2", "b2")
    await ann.reject(await ann.pull(most=1), "no good")
    assert await ann.drain() == [b"b1", b"b2"]
    await scene.power_cut()
    ann = await scene.worker("ann", arrived=ann.arrived)
    await scene.send_keyed("a3")
    assert not (await ann.pull(wait_s=3)).lots
    assert (await scene.describe()).halted == 1
    assert not (await scene.switch(Lever.HALT_KEY, is_on=False, key="b")).was_on
    assert (await scene.switch(Lever.HALT_KEY, is_on=False, key="a")).was_on
    assert await ann.drain() == [b"a2", b"a3"]
    assert await refused(scene.switch(Lever.HALT_KEY, is_on=True, key="a")) is Code.BAD_REQUEST


@staged
async def test_a_power_cut_forgets_no_handout(scene: Scene) -> None:
    """PULL is durable before it is answered: whoever is told of a message is known to have it."""
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "b1")
    held = await ann.pull()
    await scene.power_cut()
    ben = await scene.worker("ben", arrived=ben.arrived)
    assert not (await ben.pull()).lots
    ann = await scene.worker("ann", arrived=ann.arrived)
    assert (await ann.settle_all(part(held, "a1"))).settled == 1
    assert (await ben.pull()).texts == ["a2"]


@staged
async def test_restarts_keep_what_is_parked(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3", "b1")
    held = await ann.pull()
    for life in range(3):
        await (scene.restart() if life % 2 else scene.power_cut())
        ann = await scene.worker("ann", arrived=ann.arrived)
        assert (await scene.describe()).parked == 2
    await ann.ack(held)
    assert [(await _one(ann)).texts for _ in range(2)] == [["a2"], ["a3"]]


async def _one(worker: Worker) -> Handed:
    got = await worker.pull()
    await worker.ack(got)
    return got


@staged
async def test_a_member_makes_the_group_that_it_counts_on(scene: Scene) -> None:
    ann = await scene.worker("ann", is_joining=False)
    joined = await ann.join(policies=msgspec.msgpack.encode({"order": "key", "after_dead": "halt"}))
    assert decode(joined.config) == GroupConfig(order=Order.KEY, after_dead=AfterDead.HALT)
    joined = await ann.join(policies=msgspec.msgpack.encode({"order": "none"}))
    assert decode(joined.config).order is Order.KEY, "it exists: whoever wants another must see that it is not"
    ben = await scene.worker("ben", group="other", is_joining=False)
    for policies in (b"\xc1", msgspec.msgpack.encode({"order": "rank"}), msgspec.msgpack.encode({"parked_max": 0})):
        assert await refused(ben.join(policies=policies)) is Code.BAD_REQUEST


@staged
async def test_a_group_becomes_ordered_when_all_before_is_settled(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send_keyed("a1", "a2", "a3")
    before = await ann.pull(most=2)
    await scene.ask(Configure(SUBJECT, GROUP, encode(msgspec.structs.replace(BY_KEY, version=2)), 1), Configured)
    await ann.join()
    assert not (await ann.pull()).lots
    await ann.ack(before)
    assert (await ann.pull()).texts == ["a3"]


@staged
async def test_a_group_that_is_ordered_no_longer_hands_out_what_was_parked(scene: Scene) -> None:
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3")
    await ann.pull()
    unordered = GroupConfig(version=2)
    await scene.ask(Configure(SUBJECT, GROUP, encode(unordered), 1), Configured)
    await ann.join()
    assert (await ann.pull()).texts == ["a2", "a3"]


@staged
async def test_a_redriven_message_does_not_go_out_beside_another_of_its_key(scene: Scene) -> None:
    ann, ben = await crew(scene, "ann", "ben")
    await scene.send_keyed("a1", "a2", "b1")
    await ann.reject(await ann.pull(most=1))
    await scene.sleep(1)
    held = await ann.pull(most=1)
    assert held.texts == ["a2"]
    assert (await scene.redrive()).count == 1
    assert (await ben.pull()).texts == ["b1"]
    assert not (await ben.pull(wait_s=1)).lots
    await ann.ack(held)
    again = await ben.pull(wait_s=1)
    assert again.texts == ["a1"]
    assert again.is_inbox
    assert again.lots[0].fence > held.lots[0].fence, "it is later, whatever its sequence"


@staged
async def test_retention_takes_what_is_parked(scene: Scene) -> None:
    """What was handed out goes to dead letter, what was not is counted as lost."""
    (ann,) = await crew(scene, "ann")
    await scene.send_keyed("a1", "a2", "a3", "b1")
    await ann.pull(most=1)
    host = scene.broker.coordinator.host(SUBJECT, GROUP)
    scene.broker.coordinator.carry_out(host, host.state_machine.forsake(2, now_ms=scene.clock.wall_ms()))
    await scene.sleep(1)
    state = await scene.describe()
    assert (state.lost, state.parked, state.dead) == (1, 0, 1)
    assert (await ann.pull()).texts == ["a3", "b1"]


@staged
async def test_many_consumers_keep_the_order_of_every_key(scene: Scene) -> None:
    workers = await crew(scene, "ann", "ben", "cy")
    texts = [f"{'abcdefgh'[at * 7 % 8]}{at:03}" for at in range(300)]
    for at in range(0, 300, 60):
        await scene.send_keyed(*texts[at : at + 60])
    handled: list[str] = []

    async def work(worker: Worker) -> None:
        while len(handled) < len(texts):
            got = await worker.pull(most=3, wait_s=1)
            for text in got.texts:
                handled.append(text)
                await asyncio.sleep(0.001)
            if got.lots:
                await worker.ack(got)

    await asyncio.gather(*map(work, workers))
    assert sorted(handled) == sorted(texts)
    for key in "abcdefgh":
        assert [text for text in handled if text[0] == key] == [text for text in texts if text[0] == key]


@staged
async def test_what_cannot_be_ordered_is_refused(scene: Scene) -> None:
    config = {**msgspec.to_builtins(GroupConfig()), "order": "key", "mode": Mode.AT_MOST_ONCE.value}
    packed = msgspec.msgpack.encode(config)
    assert await refused(scene.ask(Configure(SUBJECT, GROUP, packed, 0), Configured)) is not None


@pytest.mark.parametrize("cold", [0.5, 1.0])
def test_the_order_is_kept_when_batches_are_not_in_memory(cold: float) -> None:
    """Their keys are read first, and the batches themselves again: nobody goes round in circles."""

    async def story(scene: Scene) -> None:
        workers = await crew(scene, "ann", "ben")
        texts = [f"{'abcd-'[at % 5]}{at:03}" for at in range(300)]
        for at in range(0, 300, 20):
            await scene.send_keyed(*texts[at : at + 20])
        scene.disk.cold = cold
        log = scene.broker.store.messages.log
        for name in scene.disk.listing("messages"):
            if log.file(log.segments[-1]).name != f"messages/{name}":
                scene.disk.evict(f"messages/{name}")
        handled: list[str] = []
        for _ in range(600):
            for worker in workers:
                got = await worker.pull(most=4, wait_s=0.2)
                handled += got.texts
                if got.lots:
                    await worker.ack(got)
            if len(handled) == len(texts):
                break
        assert sorted(handled) == sorted(texts)
        for key in "abcd":
            assert [text for text in handled if text[0] == key] == [text for text in texts if text[0] == key]

    store = StoreOptions(segment_bytes=8 * KIB, action_segment_bytes=64 * KIB, low_water_bytes=0)
    Scene(f"cold {cold}", options_of(store=store)).play(story)
