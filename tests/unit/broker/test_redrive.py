"""Redrive: dead letters of a group back to that group alone, through its private inbox."""

from __future__ import annotations

from fairway import batch, limits
from fairway.broker.dead_letters import HISTORY, HISTORY_ATTEMPTS, HISTORY_SEQUENCE, HISTORY_SUBJECT
from fairway.errors import Code
from fairway.groups import GroupConfig
from fairway.groups.attempts import decode
from fairway.names import GroupName, Subject
from fairway.protocol.admin_messages import Lever
from tests.unit.broker.scene import Scene, Worker, refused, staged

DEAD = "dead:billing:orders"


async def with_dead_letters(scene: Scene, *payloads: bytes) -> Worker:
    ann = await scene.worker("ann")
    await scene.send(*payloads)
    await ann.reject(await ann.pull(), "no")
    await scene.sleep(1)
    return ann


def text_id(sequence: int) -> str:
    return str(batch.MessageId(7, sequence))


@staged
async def test_all_dead_letters_come_back_with_the_ids_they_were_born_with(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a", b"b")
    other = await scene.worker("cy", group="shipping")
    await other.drain()
    assert (await scene.redrive()).count == 2
    state = await scene.describe()
    assert (state.inbox, state.dead) == (2, 0)
    got = await ann.pull()
    assert got.is_inbox
    assert got.payloads == [b"a", b"b"]
    assert [str(each.id) for each in got.messages] == [text_id(0), text_id(1)]
    assert got.attempts == [1, 1]
    assert (await ann.ack(got)).settled == 2
    assert not (await other.pull()).lots
    assert (await scene.describe()).inbox == 0


@staged
async def test_a_waiting_pull_gets_what_is_redriven(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await scene.redrive()
    await scene.sleep(1)
    assert pull.done()
    assert pull.result().payloads == [b"a"]


@staged
async def test_by_ids_and_the_rest_stays(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a", b"b", b"c")
    nobody = text_id(99)
    answer = await scene.redrive([text_id(2), nobody])
    assert (answer.count, answer.unknown) == (1, [nobody])
    assert await ann.drain() == [b"c"]
    assert (await scene.describe()).dead == 2
    assert (await scene.redrive()).count == 2
    assert await ann.drain() == [b"a", b"b"]


@staged
async def test_a_second_redrive_repeats_nothing_not_even_after_a_crash(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a", b"b")
    await scene.redrive([text_id(1)])
    assert (await scene.redrive([text_id(1)])).unknown == [text_id(1)]
    await scene.power_cut()
    assert (await scene.redrive()).count == 1
    assert (await scene.redrive()).count == 0
    ann = await scene.worker("ann")
    assert sorted(await ann.drain()) == [b"a", b"b"]


@staged
async def test_what_is_in_the_inbox_survives_a_restart_and_what_was_acked_stays_away(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a", b"b")
    await scene.redrive()
    await ann.ack(await ann.pull(most=1))
    await scene.restart()
    ann = await scene.worker("ann")
    assert await ann.drain() == [b"b"]


@staged
async def test_an_inbox_response_that_did_not_arrive_is_sent_again(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    await scene.redrive()
    await scene.send(b"fresh")
    before = ann.arrived
    lost = [await ann.pull(), await ann.pull()]
    assert {each.is_inbox for each in lost} == {True, False}
    back = await scene.worker("ann", arrived=before)  # which has forgotten what it had, not that it had something
    again = [await back.pull(), await back.pull()]
    assert [(each.number, each.payloads) for each in again] == [(each.number, each.payloads) for each in lost]


@staged
async def test_inbox_and_subject_take_turns(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a", b"b")
    await scene.redrive()
    await scene.send(b"x", b"y")
    seen = []
    for _ in range(4):
        got = await ann.pull(most=1)
        seen.append(got.is_inbox)
        await ann.ack(got)
    assert sorted(seen) == [False, False, True, True]
    assert seen[0] != seen[1]
    assert seen[2] != seen[3]


@staged
async def test_a_redriven_message_may_fail_again_and_its_history_adds_up(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    await scene.redrive()
    await ann.retry(await ann.pull(), after_s=1, reason="not yet")
    await scene.restart()
    await scene.sleep(2)
    ben = await scene.worker("ben")
    again = await ben.pull()
    assert again.attempts == [2]
    await ben.reject(again, "never")
    await scene.sleep(1)
    dead = (await scene.scan(DEAD))[-1]
    history = decode(dead.headers[HISTORY])
    assert history is not None
    shown = [(each.attempt, each.consumer, each.reason) for each in history.attempts]
    assert (shown, history.left_out) == ([(1, "ann", "no"), (2, "ann", "not yet"), (3, "ben", "never")], 0)
    assert (dead.headers[HISTORY_SUBJECT], dead.headers[HISTORY_SEQUENCE]) == ("orders", "0")
    assert dead.headers[HISTORY_ATTEMPTS] == "3"
    assert dead.id == batch.MessageId(7, 0)
    assert (await scene.describe()).dead == 1
    assert (await scene.redrive()).count == 1


@staged
async def test_a_rate_holds_across_a_restart(scene: Scene) -> None:
    ann = await with_dead_letters(scene, *(b"%d" % number for number in range(10)))
    assert (await scene.redrive(rate=2)).count == 10
    begun_ms = scene.clock.wall_ms()
    got = 0
    while got < 4:
        handed = await ann.pull(wait_s=5)
        got += len(handed.messages)
        await ann.ack(handed)
    await scene.restart()
    ann = await scene.worker("ann")
    while got < 10:
        handed = await ann.pull(wait_s=5)
        assert len(handed.messages) <= 2
        got += len(handed.messages)
        await ann.ack(handed)
    assert 3_000 <= scene.clock.wall_ms() - begun_ms <= 6_000


@staged
async def test_the_lease_of_what_came_from_the_inbox_is_renewed_and_ends_like_any(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    ben = await scene.worker("ben")
    await scene.redrive()
    await ann.pull()
    for _ in range(10):
        await scene.sleep(5)
        await ann.heartbeat()
        await ben.heartbeat()
    assert not (await ben.pull()).lots
    got = await ben.pull(wait_s=15)
    while not got.lots:
        got = await ben.pull(wait_s=15)
    assert (got.payloads, got.attempts, got.is_inbox) == ([b"a"], [2], True)


@staged
async def test_a_pause_and_a_new_configuration_hold_for_the_inbox_too(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    await scene.redrive()
    await scene.switch(Lever.PAUSE_GROUP, is_on=True)
    assert not (await ann.pull()).lots
    await scene.switch(Lever.PAUSE_GROUP, is_on=False)
    await scene.configure(GroupConfig(version=2, attempts_max=1), expected=1)
    assert await refused(ann.pull()) is Code.STALE_CONFIG
    await ann.join()
    await ann.retry(await ann.pull())
    await scene.sleep(1)
    assert (await scene.describe()).dead == 1


@staged
async def test_who_leaves_hands_back_what_came_from_the_inbox(scene: Scene) -> None:
    ann = await with_dead_letters(scene, b"a")
    await scene.redrive()
    await ann.pull()
    await ann.leave()
    ben = await scene.worker("ben")
    got = await ben.pull()
    assert (got.payloads, got.attempts) == ([b"a"], [1])


@staged
async def test_there_may_be_nothing_to_redrive(scene: Scene) -> None:
    await scene.worker("ann")
    answer = await scene.redrive([text_id(0)])
    assert (answer.count, answer.unknown) == (0, [text_id(0)])
    assert await refused(scene.redrive(group="nobody")) is Code.NO_SUCH_GROUP
    assert await refused(scene.redrive(["short"])) is Code.BAD_REQUEST
    assert await refused(scene.redrive([text_id(0)] * (limits.REDRIVE_IDS_MAX + 1))) is Code.TOO_LARGE


@staged
async def test_an_inbox_is_durable_before_anything_lies_in_it(scene: Scene) -> None:
    """A power cut that took the inbox and left its messages would lose them: a new one begins behind what is there."""
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    scene.disk.slowness = 1_000
    redriving = scene.sim.loop.create_task(scene.redrive())
    store = scene.broker.store
    while (inbox := store.messages.views.subjects.find(Subject("inbox:billing:orders"))) is None:
        await scene.sleep(0.001)
    while not inbox.next_sequence:
        await scene.sleep(0.001)
    made = scene.broker.coordinator.groups.find(inbox.id, GroupName("billing"))
    assert made is not None
    assert store.actions.log.committed_end == store.actions.log.end
    assert (await redriving).count == 1
