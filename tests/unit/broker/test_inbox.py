"""Messages for one group alone: sent to its inbox, by whoever has asked for that ability."""

from __future__ import annotations

import asyncio

import pytest

from fairway import batch
from fairway.broker.dead_letters import HISTORY, HISTORY_ATTEMPTS, HISTORY_SEQUENCE, HISTORY_SUBJECT
from fairway.broker.message_copies import stream_of
from fairway.errors import Code, Refused
from fairway.groups import GroupConfig, TagFilter
from fairway.groups.attempts import decode
from fairway.names import GroupName, Subject
from fairway.protocol import ConnectionOptions
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever
from fairway.protocol.connection_states import INBOX
from tests.support.client import Client, ConnectionEnded, Stream
from tests.unit.broker.scene import Scene, Worker, options_of, refused, staged

INBOX_OF_BILLING = "inbox:billing:orders"


async def sender(scene: Scene) -> Client:
    return await scene.connect(ConnectionOptions(features=(INBOX,)))


def a_batch(stream: int, first: int, *payloads: bytes, **columns: object) -> bytes:
    return batch.encode(list(payloads), producer_id=stream, first_sequence=first, created_ms=5, **columns)  # type: ignore[arg-type]


@staged
async def test_only_that_group_gets_it_and_it_is_what_was_sent(scene: Scene) -> None:
    ann, cy = await scene.worker("ann"), await scene.worker("cy", group="shipping")
    born = batch.MessageId(77, 3)
    data = a_batch(9, 0, b"again", keys=["k"], tags=[["paid"]], headers=[{"why": "replay"}], ids=[born])
    produced = await (await sender(scene)).produce(INBOX_OF_BILLING, data)
    assert (produced.first_sequence, produced.count, produced.is_duplicate) == (0, 1, False)
    assert (await scene.describe()).inbox == 1
    assert (await scene.describe(group="shipping")).inbox == 0
    got = await ann.pull()
    assert got.is_inbox
    [message] = got.messages
    assert (message.payload, message.key, message.tags) == (b"again", "k", ["paid"])
    assert (message.headers, message.id, message.attempt) == ({"why": "replay"}, born, 1)
    assert (await ann.ack(got)).settled == 1
    assert (await scene.describe()).inbox == 0
    assert not (await cy.pull()).lots
    assert not await scene.scan()  # nor is it in the subject


@staged
async def test_a_waiting_pull_gets_it(scene: Scene) -> None:
    ann = await scene.worker("ann")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await (await sender(scene)).produce(INBOX_OF_BILLING, Stream(9).batch([b"a"]))
    await scene.sleep(1)
    assert pull.done()
    assert pull.result().payloads == [b"a"]


@staged
async def test_what_is_sent_again_is_stored_once_also_after_a_restart(scene: Scene) -> None:
    ann = await scene.worker("ann")
    first, second = a_batch(9, 0, b"a", b"b"), a_batch(9, 2, b"c")
    client = await sender(scene)
    assert [(await client.produce(INBOX_OF_BILLING, each)).is_duplicate for each in (first, first)] == [False, True]
    await scene.restart()
    client = await sender(scene)
    assert [(await client.produce(INBOX_OF_BILLING, each)).is_duplicate for each in (first, second)] == [True, False]
    await scene.power_cut()
    client = await sender(scene)
    assert (await client.produce(INBOX_OF_BILLING, second)).is_duplicate
    assert await refused(client.produce(INBOX_OF_BILLING, a_batch(9, 2, b"x"))) is Code.SEQUENCE_CONFLICT
    assert await refused(client.produce(INBOX_OF_BILLING, a_batch(9, 9, b"x"))) is Code.SEQUENCE_GAP
    assert await refused(client.produce("orders", a_batch(9, 3, b"x"))) is Code.SEQUENCE_CONFLICT
    ann = await scene.worker("ann")
    assert await ann.drain() == [b"a", b"b", b"c"]


@staged
async def test_many_batches_at_once_stay_in_order_while_the_inbox_is_made(scene: Scene) -> None:
    ann = await scene.worker("ann")
    client = await sender(scene)
    stream = Stream(9)
    batches = [stream.batch([b"%d" % number]) for number in range(20)]
    answers = await asyncio.gather(*(client.produce(INBOX_OF_BILLING, each) for each in batches))
    assert [each.first_sequence for each in answers] == list(range(20))
    assert await ann.drain() == [b"%d" % number for number in range(20)]


@staged
async def test_who_has_not_asked_for_it_is_refused_as_ever(scene: Scene) -> None:
    await scene.worker("ann")
    plain = await scene.connect()
    assert await refused(plain.produce(INBOX_OF_BILLING, Stream(9).batch([b"a"]))) is Code.BAD_NAME
    client = await sender(scene)
    for name in ("dead:billing:orders", "inbox:billing", "inbox:../x:orders", "inbox:billing:inbox:a:b"):
        assert await refused(client.produce(name, Stream(9).batch([b"a"]))) is Code.BAD_NAME
    assert await refused(client.produce("inbox:nobody:orders", Stream(9).batch([b"a"]))) is Code.NO_SUCH_GROUP
    with pytest.raises(Refused, match="nothing was ever sent to payments"):
        await client.produce("inbox:billing:payments", Stream(9).batch([b"a"]))
    delayed = a_batch(9, 0, b"a", due_ms=[99])
    assert await refused(client.produce(INBOX_OF_BILLING, delayed)) in {Code.BAD_REQUEST, Code.BAD_NAME}
    assert len(scene.broker.store.messages.views.subjects) == 1


@staged
async def test_a_subject_that_takes_nothing_takes_nothing_for_one_group_either(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.switch(Lever.READ_ONLY, is_on=True, group="")
    client = await sender(scene)
    assert await refused(client.produce(INBOX_OF_BILLING, Stream(9).batch([b"a"]))) is Code.READ_ONLY
    await scene.switch(Lever.READ_ONLY, is_on=False, group="")
    assert (await client.produce(INBOX_OF_BILLING, Stream(9).batch([b"a"]))).count == 1


@staged
async def test_the_groups_tags_do_not_hold_for_what_is_meant_for_it(scene: Scene) -> None:
    await scene.configure(GroupConfig(tags=TagFilter(("paid",))))
    ann = await scene.worker("ann")
    await (await sender(scene)).produce(INBOX_OF_BILLING, a_batch(9, 0, b"a", tags=[["other"]]))
    assert await ann.drain() == [b"a"]


@staged
async def test_a_stranger_cannot_pass_for_a_redrive(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"dies")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    client = await sender(scene)
    own = stream_of(Subject("dead:billing:orders"), GroupName("billing"))
    assert await refused(client.produce(INBOX_OF_BILLING, a_batch(own, 0, b"x"))) is Code.SEQUENCE_CONFLICT
    await client.produce(INBOX_OF_BILLING, a_batch(9, 0, b"sent"))
    assert (await scene.describe()).dead == 1
    assert (await scene.redrive()).count == 1
    assert sorted(await ann.drain()) == [b"dies", b"sent"]
    assert await refused(client.produce(INBOX_OF_BILLING, a_batch(own, 1, b"x"))) is Code.SEQUENCE_CONFLICT


@staged
async def test_it_may_fail_and_die_and_come_back_like_any_other(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await (await sender(scene)).produce(INBOX_OF_BILLING, a_batch(9, 0, b"a"))
    await ann.retry(await ann.pull(), after_s=1)
    await scene.sleep(2)
    again = await ann.pull()
    assert (again.attempts, again.is_inbox) == ([2], True)
    await ann.reject(again, "no")
    await scene.sleep(1)
    [dead] = await scene.scan("dead:billing:orders")
    assert (dead.headers[HISTORY_SUBJECT], dead.headers[HISTORY_ATTEMPTS]) == ("orders", "2")
    assert HISTORY_SEQUENCE not in dead.headers  # it never had a place in the subject
    assert (await scene.redrive()).count == 1
    assert await ann.drain() == [b"a"]


@staged
async def test_a_group_that_is_gone_gets_nothing_and_its_successor_nothing_of_it(scene: Scene) -> None:
    await scene.worker("ann")
    client = await sender(scene)
    await client.produce(INBOX_OF_BILLING, a_batch(9, 0, b"old"))
    coordinator = scene.broker.coordinator
    coordinator.remove(coordinator.host("orders", "billing"))
    assert await refused(client.produce(INBOX_OF_BILLING, a_batch(9, 1, b"nobody's"))) is Code.NO_SUCH_GROUP
    ann = await scene.worker("ann")
    await client.produce(INBOX_OF_BILLING, a_batch(9, 1, b"new"))
    assert await ann.drain() == [b"new"]


@pytest.mark.parametrize("is_power_cut", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whenever_the_broker_dies_each_is_stored_once_and_an_ack_never_comes_back(
    seed: int, is_power_cut: bool
) -> None:
    """Batches are sent and consumed, the broker dies in between at whatever moment, and what has no answer is sent
    again."""

    async def story(scene: Scene) -> None:
        await scene.worker("ann")
        scene.disk.slowness = 20
        stream = Stream(9)
        batches = [stream.batch([b"%d-%d" % (number, each) for each in range(3)]) for number in range(12)]
        unanswered, acked, tried, deaths = list(batches), list[bytes](), set[bytes](), 0
        while unanswered:
            life = [send_in_order(await sender(scene), unanswered), consume(await scene.worker("ann"), tried, acked)]
            tasks = [scene.sim.loop.create_task(each) for each in life]
            if deaths < 4:
                deaths += 1
                await scene.sleep(scene.sim.rng.below(150) / 1_000)
                await (scene.power_cut() if is_power_cut else scene.kill())
            await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        stored = [each.payload for each in await scene.scan(INBOX_OF_BILLING)]
        assert stored == [b"%d-%d" % (number, each) for number in range(12) for each in range(3)]
        await scene.sleep(60)  # whatever was held by the dead is anybody's
        rest = await (await scene.worker("ben")).drain()
        assert not set(rest) & set(acked)
        assert len(acked) == len(set(acked))
        assert set(stored) - tried <= set(rest), "but for those whose ack had no answer"
        await scene.power_cut()
        assert not await (await scene.worker("ben")).drain()
        assert not await scene.scan()

    Scene(f"inbox-{seed}-{is_power_cut}", options_of()).play(story)


async def send_in_order(client: Client, unanswered: list[bytes]) -> None:
    """As far as the connection lasts; what is answered is taken off the list."""
    try:
        while unanswered:
            await client.ask(m.Produce(INBOX_OF_BILLING), m.Produced, [unanswered[0]])
            unanswered.pop(0)
    except ConnectionEnded:
        return


async def consume(worker: Worker, tried: set[bytes], acked: list[bytes]) -> None:
    """As long as the connection lasts; what is to be acked is noted, and what is for certain."""
    try:
        while True:
            handed = await worker.pull(most=2, wait_s=1)
            tried |= set(handed.payloads)
            if handed.lots and (await worker.ack(handed)).settled == len(handed.messages):
                acked += handed.payloads
    except ConnectionEnded:
        return


@pytest.mark.parametrize("count", ["9" * 5_000, "9" * 30, "\u00b2", "-1"])
def test_a_history_that_cannot_be_keeps_no_message_from_dead_letter(count: str) -> None:
    """Whoever sends to an inbox chooses the headers, those of dead letters among them."""

    async def story(scene: Scene) -> None:
        ann = await scene.worker("ann")
        headers = {HISTORY_ATTEMPTS: count, HISTORY: '{"left_out":0,"attempts":[{"attempt":1e400}]}'}
        await (await sender(scene)).produce(INBOX_OF_BILLING, a_batch(9, 0, b"a", headers=[headers]))
        await ann.reject(await ann.pull(), "no")
        await scene.sleep(1)
        [dead] = await scene.scan("dead:billing:orders")
        assert dead.headers[HISTORY_ATTEMPTS] == "1"
        history = decode(dead.headers[HISTORY])
        assert history is not None
        assert [(each.attempt, each.reason) for each in history.attempts] == [(1, "no")]

    Scene(f"a count of {len(count)}").play(story)
