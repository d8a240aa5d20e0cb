"""Groups without partitions: join, pull, settle, heartbeat, leave, as consumers see them."""

from __future__ import annotations

import asyncio

import msgspec

from fairway.errors import Code
from fairway.groups import Backoff, GroupConfig, Mode
from fairway.groups.config import decode
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Lever
from fairway.storage.action_log import unpack
from fairway.storage.record import RecordKind
from fairway.storage.segment import SegmentScan
from tests.unit.broker.scene import Scene, Worker, refused, staged

LEASE_S = 15


def waiting(scene: Scene, worker: Worker, wait_s: float = 30) -> asyncio.Task[object]:
    return scene.sim.loop.create_task(worker.pull(wait_s=wait_s))


@staged
async def test_members_share_the_messages_and_other_groups_get_all_of_them(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    other = await scene.worker("cy", group="shipping")
    await scene.send(b"a", b"b", b"c", b"d")
    first, second = await ann.pull(most=2), await ben.pull(most=2)
    assert first.payloads + second.payloads == [b"a", b"b", b"c", b"d"]
    assert (await other.pull()).payloads == [b"a", b"b", b"c", b"d"]


@staged
async def test_a_pull_with_no_wait_answers_at_once(scene: Scene) -> None:
    ann = await scene.worker("ann")
    before = scene.clock.monotonic_ns()
    assert not (await ann.pull()).lots
    assert scene.clock.monotonic_ns() - before < 1e9


@staged
async def test_a_long_poll_ends_with_the_first_message(scene: Scene) -> None:
    ann = await scene.worker("ann")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=10))
    await scene.sleep(3)
    before = scene.clock.monotonic_ns()
    await scene.send(b"a")
    assert (await pull).payloads == [b"a"]
    assert scene.clock.monotonic_ns() - before < 1e9


@staged
async def test_a_failed_message_returns_after_the_backoff_and_blocks_no_other(scene: Scene) -> None:
    await scene.configure(GroupConfig(backoff=Backoff(first_ms=5_000, jitter=0)))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.retry(await ann.pull(most=1))
    assert (await ann.pull()).payloads == [b"b"]
    before_ms = scene.clock.wall_ms()
    again = await ann.pull(wait_s=30)
    assert (again.payloads, again.attempts) == ([b"a"], [2])
    assert 4_900 <= scene.clock.wall_ms() - before_ms <= 5_100


@staged
async def test_a_retry_may_say_when(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.retry(await ann.pull(), after_s=60)
    for _ in range(5):
        await scene.sleep(10)
        assert not (await ann.pull()).lots
    await scene.sleep(11)
    assert (await ann.pull()).attempts == [2]


@staged
async def test_what_a_silent_consumer_held_goes_to_the_others_at_once(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send(b"a")
    await ann.pull()
    await scene.sleep(10)
    await ben.heartbeat()
    got = await ben.pull(wait_s=LEASE_S)
    assert (got.payloads, got.attempts) == ([b"a"], [2])
    assert await refused(ann.heartbeat()) is Code.NOT_A_MEMBER


@staged
async def test_who_beats_keeps_what_it_holds(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send(b"a")
    held = await ann.pull()
    for _ in range(20):
        await scene.sleep(5)
        await ann.heartbeat()
        await ben.heartbeat()
    assert not (await ben.pull()).lots
    assert (await ann.ack(held)).settled == 1


@staged
async def test_who_leaves_hands_back_untouched(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send(b"a")
    await ann.pull()
    pull = scene.sim.loop.create_task(ben.pull(wait_s=10))
    await scene.sleep(1)
    await ann.leave()
    got = await pull
    assert (got.payloads, got.attempts) == ([b"a"], [1])


@staged
async def test_leaving_answers_the_consumers_own_waiting_pulls(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    others = scene.sim.loop.create_task(ben.pull(wait_s=12))
    await scene.sleep(0.1)
    own = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await ann.leave()
    await scene.sleep(0.1)
    assert own.done()
    assert not own.result().lots
    assert not others.done()
    await scene.send(b"a")
    assert (await others).payloads == [b"a"]


@staged
async def test_what_did_not_arrive_is_sent_again_under_its_number(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    first = await ann.pull(most=1)
    ann.arrived = 0
    again = await ann.pull()
    assert (again.number, again.payloads, again.attempts) == (first.number, [b"a"], [1])


@staged
async def test_a_consumer_that_comes_back_goes_on_where_it_was(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull(most=1)
    ann.client.abort()
    back = await scene.worker("ann", arrived=held.number)
    assert (await back.ack(held)).settled == 1
    assert (await back.pull()).payloads == [b"b"]


@staged
async def test_an_older_connection_of_the_same_name_is_fenced(scene: Scene) -> None:
    old = await scene.worker("ann")
    waits = scene.sim.loop.create_task(old.pull(wait_s=30))
    await scene.sleep(1)
    new = await scene.worker("ann")
    assert await refused(waits) is Code.FENCED  # type: ignore[arg-type]
    assert await refused(old.heartbeat()) is Code.FENCED
    assert await refused(old.pull()) is Code.FENCED
    assert await refused(old.leave()) is Code.FENCED
    await scene.send(b"a")
    assert (await new.pull()).payloads == [b"a"]


@staged
async def test_to_settle_twice_does_no_harm(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    held = await ann.pull()
    assert await ann.ack(held) == m.Settled(2, 0)
    assert await ann.ack(held) == m.Settled(0, 2)


@staged
async def test_many_outcomes_are_one_action_record(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.configure(GroupConfig(version=2, lot_messages_max=1), expected=1)
    await ann.join()
    await scene.send(b"a", b"b", b"c")
    held = await ann.pull()
    assert len(held.lots) == 3
    await ann.ack(held)
    log = scene.broker.store.actions.log
    segment = log.segments[0]
    records = [each for each in SegmentScan(log.file(segment), 0, 64, log.log_id) if getattr(each, "body", b"")]
    last = [list(unpack(each.body)) for each in records if each.header.kind == RecordKind.ACTIONS][-1]  # type: ignore[union-attr]
    assert [action.event.kind.name for action in last] == ["ACK", "ACK", "ACK"]


@staged
async def test_outcomes_for_one_lot_in_one_request_follow_on_one_another(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    [lot] = (await ann.pull()).lots
    spans = [m.SequenceRange(0, 1)], [m.SequenceRange(1, 1)], [m.SequenceRange(0, 3)]
    outcomes = [m.Settle(m.Settlement.ACK, lot.first, lot.attempt, each) for each in spans]
    assert await ann.settle_all(outcomes) == m.Settled(3, 2)


@staged
async def test_a_paused_group_gets_empty_answers_and_resuming_wakes_it(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.switch(Lever.PAUSE_GROUP, is_on=True)
    await scene.send(b"a")
    assert not (await ann.pull(wait_s=5)).lots
    assert (await ann.heartbeat()).is_paused
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(5)
    assert not pull.done()
    assert (await scene.switch(Lever.PAUSE_GROUP, is_on=False)).was_on
    await scene.sleep(0.5)
    assert pull.done()
    assert pull.result().payloads == [b"a"]


@staged
async def test_a_paused_consumer_waits_and_keeps_nothing_from_the_others(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.switch(Lever.PAUSE_CONSUMER, is_on=True, consumer="ann")
    pauses = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(0.1)
    works = scene.sim.loop.create_task(ben.pull(wait_s=12))
    await scene.sleep(1)
    await scene.send(b"a")
    await scene.sleep(0.5)
    assert works.done()
    assert works.result().payloads == [b"a"]
    assert not pauses.done()
    await scene.send(b"b")
    await scene.switch(Lever.PAUSE_CONSUMER, is_on=False, consumer="ann")
    assert (await pauses).payloads == [b"b"]


@staged
async def test_a_paused_consumers_pull_is_answered_empty_at_the_end_of_its_wait(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.switch(Lever.PAUSE_CONSUMER, is_on=True, consumer="ann")
    await scene.send(b"a")
    before = scene.clock.monotonic_ns()
    assert not (await ann.pull(wait_s=5)).lots
    assert 4.9e9 < scene.clock.monotonic_ns() - before < 5.2e9


@staged
async def test_a_pause_outlives_a_restart(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.switch(Lever.PAUSE_GROUP, is_on=True)
    await scene.restart()
    assert (await scene.describe()).is_paused


@staged
async def test_a_new_configuration_is_rolled_out_and_members_with_another_are_told(scene: Scene) -> None:
    ann = await scene.worker("ann")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await scene.configure(GroupConfig(version=2, lease_ms=30_000), expected=1)
    assert await refused(pull) is Code.STALE_CONFIG  # type: ignore[arg-type]
    assert (await ann.heartbeat()).config_version == 2
    assert await refused(ann.join(version=1)) is Code.STALE_CONFIG
    joined = await ann.join(version=2)
    assert (joined.lease_ms, decode(joined.config).lease_ms) == (30_000, 30_000)
    assert not (await ann.pull()).lots
    assert await refused(scene.configure(GroupConfig(version=2), expected=1)) is Code.STALE_CONFIG


@staged
async def test_at_most_once_is_never_delivered_again(scene: Scene) -> None:
    await scene.configure(GroupConfig(mode=Mode.AT_MOST_ONCE))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    assert (await ann.pull(most=1)).payloads == [b"a"]
    await scene.power_cut()
    back = await scene.worker("ann")
    assert await back.drain() == [b"b"]


@staged
async def test_what_was_acked_never_comes_back_and_what_was_not_does(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.ack(await ann.pull(most=1))
    await ann.pull(most=1)
    await scene.power_cut()
    await scene.sleep(LEASE_S + 1)
    ben = await scene.worker("ben")
    assert await ben.drain() == [b"b"]
    await scene.sleep(LEASE_S + 1)
    await scene.restart()
    assert not (await (await scene.worker("cy")).pull()).lots


@staged
async def test_earliest_and_latest_are_resolved_once(scene: Scene) -> None:
    await scene.send(b"a")
    late = await scene.worker("ann", group="late", is_joining=False)
    await late.join(start=m.Whence.LATEST)
    early = await scene.worker("ben", group="early")
    await scene.power_cut()
    await scene.send(b"b")
    late = await scene.worker("ann", group="late", is_joining=False)
    await late.join(start=m.Whence.EARLIEST)
    early = await scene.worker("ben", group="early")
    assert await late.drain() == [b"b"]
    assert await early.drain() == [b"a", b"b"]


@staged
async def test_too_many_unacked_ranges_are_busy(scene: Scene) -> None:
    await scene.configure(GroupConfig(lots_max=2, lot_messages_max=1))
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b", b"c")
    held = await ann.pull()
    assert held.payloads == [b"a", b"b"]
    assert await refused(ann.pull()) is Code.BUSY
    await ann.ack(held)
    assert (await ann.pull()).payloads == [b"c"]


@staged
async def test_retries_from_far_apart_come_in_as_many_responses_as_their_bytes_need(scene: Scene) -> None:
    ann = await scene.worker("ann")
    for number in range(4):
        await scene.send(bytes([number]) * 400 * 1024)
        await ann.retry(await ann.pull(), after_s=1)
    await scene.sleep(2)
    sizes = []
    while (got := await ann.pull()).lots:
        sizes.append(len(got.messages))
        await ann.ack(got)
    assert sizes == [2, 2]


@staged
async def test_a_subject_that_nobody_sent_to_can_be_joined_and_waited_for(scene: Scene) -> None:
    ann = await scene.worker("ann", subject="new")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await scene.send(b"a", subject="new")
    assert (await pull).payloads == [b"a"]
    assert await refused(ann.client.ask(m.Pull("no", "g", "c", 1, 1, 0, 0), m.Pulled)) is Code.NO_SUCH_SUBJECT


def test_the_default_configuration_is_the_designs() -> None:
    config = GroupConfig()
    assert (config.lease_ms, config.attempts_max, config.backoff.first_ms) == (15_000, 16, 5_000)
    assert msgspec.structs.asdict(config)["mode"] is Mode.AT_LEAST_ONCE
