"""What operators do: seek, filter by tags, weigh, close a subject, look."""

from __future__ import annotations

import pytest

from fairway.errors import Code, Refused
from fairway.groups import GroupConfig, TagFilter
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Lever
from tests.support.client import Stream
from tests.unit.broker.scene import Scene, refused, staged

RED = GroupConfig(tags=TagFilter(("red",)))


@staged
async def test_seek_to_the_earliest_begins_again(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.ack(await ann.pull(most=1))
    held = await ann.pull()
    sought = await scene.seek(m.Whence.EARLIEST)
    assert (sought.sequence, sought.was, sought.held) == (0, 2, 1)
    assert (await ann.ack(held)).stale == 1
    assert await ann.drain() == [b"a", b"b"]


@staged
async def test_seek_to_the_latest_skips(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    assert (await scene.seek(m.Whence.LATEST)).sequence == 2
    await scene.send(b"c")
    assert await ann.drain() == [b"c"]


@staged
async def test_seek_to_the_end_is_as_far_as_it_goes(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    with pytest.raises(Refused, match=r"no sequence 3 in .*, which ends at 2 here: seek to 2, or to 'la") as beyond:
        await scene.seek(m.Whence.SEQUENCE, 3)
    assert beyond.value.code is Code.BAD_REQUEST
    assert (await scene.seek(m.Whence.SEQUENCE, 2)).was == 0, "what is refused has moved nothing"
    await scene.send(b"c")
    assert await ann.drain() == [b"c"]


@staged
async def test_seek_to_a_time_and_to_a_sequence(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await scene.sleep(10)
    noon_ms = scene.clock.wall_ms()
    await scene.send(b"b")
    await scene.send(b"c")
    assert await ann.drain() == [b"a", b"b", b"c"]
    assert (await scene.seek(m.Whence.TIME, noon_ms)).sequence == 1
    assert await ann.drain() == [b"b", b"c"]
    await scene.seek(m.Whence.SEQUENCE, 2)
    await scene.restart()
    ann = await scene.worker("ann")
    assert await ann.drain() == [b"c"]


@staged
async def test_a_seek_wakes_whoever_waits(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.drain()
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.sleep(1)
    await scene.seek(m.Whence.EARLIEST)
    await scene.sleep(0.5)
    assert pull.done()
    assert pull.result().payloads == [b"a"]


@staged
async def test_a_group_that_filters_gets_only_batches_with_its_tags(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    await scene.send_tagged((b"a", "blue"), (b"b", "red"), (b"c", "blue"), (b"d", "red"))
    assert await ann.drain() == [b"b", b"d"]


@staged
async def test_what_a_filter_passes_over_is_not_written_down_step_by_step(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    await scene.send_tagged((b"a", "blue"))
    assert not (await ann.pull()).lots
    log = scene.broker.store.actions.log
    before = log.end
    for _ in range(50):
        await scene.send_tagged((b"b", "blue"))
        assert not (await ann.pull()).lots
    assert log.end == before
    state = await scene.describe()
    assert (state.cursor, state.lag, state.oldest_unacked) == (51, 0, 51)
    await scene.send_tagged((b"c", "red"))
    assert await ann.drain() == [b"c"]
    await scene.power_cut()
    assert not (await (await scene.worker("ann")).pull()).lots
    assert (await scene.describe()).cursor == 52


@staged
async def test_it_is_once_it_is_much(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    stream = Stream(9)
    for _ in range(3):
        await scene.send(*[b"x"] * 400, stream=stream)
        assert not (await ann.pull()).lots
    await scene.restart()
    assert (await scene.describe()).cursor == 1_200


@staged
async def test_a_new_filter_and_a_seek_look_again(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    await scene.send_tagged((b"a", "blue"), (b"b", "blue"))
    assert not (await ann.pull()).lots
    await scene.configure(GroupConfig(version=2, tags=TagFilter(("blue",))), expected=1)
    await ann.join()
    assert await ann.drain() == [b"a", b"b"]
    await scene.seek(m.Whence.SEQUENCE, 1)
    assert await ann.drain() == [b"b"]


@staged
async def test_any_and_all_of_the_tags(scene: Scene) -> None:
    await scene.configure(GroupConfig(tags=TagFilter(("red", "blue"))), group="any")
    await scene.configure(GroupConfig(tags=TagFilter(("red", "blue"), is_all=True)), group="all")
    ann, ben = await scene.worker("ann", group="any"), await scene.worker("ben", group="all")
    await scene.send_tagged((b"a", "blue"), (b"b", "red"), (b"c", "green"))
    assert await ann.drain() == [b"a", b"b"]
    assert await ben.drain() == []


@staged
async def test_a_long_poll_sees_past_what_it_skips(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    pull = scene.sim.loop.create_task(ann.pull(wait_s=12))
    await scene.send_tagged((b"a", "blue"), (b"b", "blue"))
    await scene.sleep(1)
    assert not pull.done()
    await scene.send_tagged((b"c", "red"))
    assert (await pull).payloads == [b"c"]
    assert (await scene.describe()).lag == 0


@staged
async def test_a_pull_that_skips_a_slices_worth_answers_empty(scene: Scene) -> None:
    await scene.configure(RED)
    ann = await scene.worker("ann")
    await scene.send_tagged(*((b"x", "blue") for _ in range(1_100)), (b"wanted", "red"))
    assert not (await ann.pull()).lots
    assert 0 < (await scene.describe()).lag < 1_101
    assert (await ann.pull()).payloads == [b"wanted"]
    await scene.seek(m.Whence.EARLIEST)
    assert (await ann.pull(wait_s=5)).payloads == [b"wanted"]


@staged
async def test_a_broadcast_consumer_is_a_group_of_one(scene: Scene) -> None:
    ann = await scene.worker("ann", group="ann", is_joining=False)
    ben = await scene.worker("ben", group="ben", is_joining=False)
    await ann.join(is_broadcast=True)
    await ben.join(is_broadcast=True)
    await scene.send(b"a")
    assert (await ann.drain(), await ben.drain()) == ([b"a"], [b"a"])
    intruder = await scene.worker("cy", group="ann", is_joining=False)
    assert await refused(intruder.join(is_broadcast=True)) is Code.BUSY
    await scene.worker("dan", group="shared")
    late = await scene.worker("eve", group="shared", is_joining=False)
    assert await refused(late.join(is_broadcast=True)) is Code.BAD_REQUEST


@staged
async def test_a_read_only_subject_takes_nothing_and_is_consumed_all_the_same(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await scene.switch(Lever.READ_ONLY, is_on=True)
    assert await refused(scene.send(b"b")) is Code.READ_ONLY
    await scene.restart()
    assert await refused(scene.send(b"b")) is Code.READ_ONLY
    ann = await scene.worker("ann")
    assert await ann.drain() == [b"a"]
    assert (await scene.switch(Lever.READ_ONLY, is_on=False)).was_on


@staged
async def test_a_subject_may_be_closed_before_its_first_message_and_stays_so_after_a_power_cut(scene: Scene) -> None:
    """The subject is committed before the switch speaks of its number, or another subject would get both."""
    await scene.switch(Lever.READ_ONLY, is_on=True)
    await scene.power_cut()
    assert await refused(scene.send(b"a")) is Code.READ_ONLY
    await scene.send(b"b", subject="another", stream=Stream(77))


@staged
async def test_a_weight_outlives_a_restart(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.weigh(2.5)
    await scene.restart()
    assert (await scene.describe()).weight == 2.5
    assert await refused(scene.weigh(0)) is Code.BAD_REQUEST


@staged
async def test_a_description_counts_what_is_where(scene: Scene) -> None:
    ann, ben = await scene.worker("ann"), await scene.worker("ben")
    await scene.send(*(b"%d" % number for number in range(10)))
    await ann.pull(most=3)
    await ann.retry(await ann.pull(most=2), after_s=3_600)
    await ben.pull(most=1)
    await ben.leave()
    state = await scene.describe()
    assert (state.cursor, state.lag, state.in_flight, state.retrying, state.returned) == (6, 4, 3, 2, 1)
    assert (state.oldest_unacked, state.lots, state.consumers_count) == (0, 3, 1)
    [consumer] = state.consumers
    assert (consumer.name, consumer.messages, consumer.lots) == ("ann", 3, 1)
    assert "client-" in consumer.address
    ann.client.abort()
    await scene.sleep(1)
    assert (await scene.describe()).consumers[0].address == ""


@staged
async def test_a_description_is_paged_by_groups(scene: Scene) -> None:
    names = [f"g{number}" for number in range(5)]
    for subject in ("a", "b"):
        for name in names:
            await scene.configure(GroupConfig(), group=name, subject=subject)
    await scene.configure(GroupConfig(), subject="c")
    seen, after = [], ""
    while True:
        page: Described = await scene.ask(Describe(Depth.GROUPS, after=after, items_max=3), Described)
        found = [(subject.name, group.name) for subject in page.subjects for group in subject.groups]
        assert 0 < len(found) <= 3
        seen += found
        after = page.next
        if not after:
            break
    assert seen == [(subject, name) for subject in ("a", "b") for name in names] + [("c", "billing")]


@staged
async def test_inboxes_are_seen_only_by_name(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    await scene.redrive()
    everything: Described = await scene.ask(Describe(Depth.SUBJECTS), Described)
    assert [each.name for each in everything.subjects] == ["dead:billing:orders", "orders"]
    by_name: Described = await scene.ask(Describe(Depth.SUBJECTS, "inbox:billing:orders"), Described)
    assert by_name.subjects[0].committed_end == 1
