"""A wall clock that jumps ahead and back: before a start, while the broker runs, across restarts. Nothing is deleted by
it, and what is appended is dated right again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fairway.groups import GroupConfig
from fairway.limits import KIB
from fairway.protocol import messages as m
from fairway.storage import log as logs
from fairway.storage.retention import Policy
from tests.support.client import Stream
from tests.unit.broker.scene import STORE, Scene, options_of
from tests.unit.storage.copies import Pair, bytes_of

YEAR_MS = 365 * 24 * 3_600_000
HOUR_MS = 3_600_000
KEPT = replace(STORE, segment_bytes=16 * KIB, retention=Policy(age_ms_max=24 * HOUR_MS))
OPTIONS = options_of(store=KEPT, housekeeping_ms=10_000)


async def begin(scene: Scene) -> None:
    """A group without members that has had half of what there is, in several segments."""
    ann = await scene.worker("ann")
    for number in range(60):
        await scene.send(b"%d" % number + bytes(KIB))
    for _ in range(3):
        await ann.ack(await ann.pull(most=10))
    await ann.leave()
    ben = await scene.worker("ben", group="done")
    await ben.drain()
    await ben.leave()


async def whole(scene: Scene) -> None:
    """The group and its cursor are there, and so is every message."""
    assert (await scene.describe()).cursor == 30
    assert (await scene.describe(group="done")).cursor >= 60
    log = scene.broker.store.messages
    assert log.first_sequence(1) == 0
    assert scene.broker.maintenance.removed == 0


async def times(scene: Scene) -> list[int]:
    return [entry.appended_ms for entry in scene.broker.store.messages.readable(1, 0)]


@pytest.mark.parametrize("seed", range(12))
def test_no_jump_deletes_anything(seed: int) -> None:
    """Each jump is put right within the hour; restarts come in between, clean or not."""
    rng = random.Random(seed)

    async def story(scene: Scene) -> None:
        await begin(scene)
        ahead_ms = 0
        for _ in range(12):
            what = rng.choice(["ahead", "back", "restart", "kill", "send", "wait"])
            if what == "ahead" and not ahead_ms:
                ahead_ms = rng.choice([2 * 24 * HOUR_MS, YEAR_MS, 30 * YEAR_MS])
                scene.clock.jump(ahead_ms)
            elif what == "back" and ahead_ms:
                scene.clock.jump(-ahead_ms)
                ahead_ms = 0
            elif what == "restart":
                await scene.restart()
            elif what == "kill":
                await scene.kill()
            elif what == "send" and not ahead_ms:
                await scene.send(b"more")
            await scene.sleep(rng.choice([1, 30, 120]))
            await whole(scene)

    Scene(f"jumps {seed}", OPTIONS).play(story)


def test_a_clock_that_is_ahead_when_the_broker_starts_deletes_nothing() -> None:
    async def story(scene: Scene) -> None:
        await begin(scene)
        for _ in range(3):
            await scene.stop()
            scene.clock.jump(YEAR_MS)
            await scene.start()
            await scene.sleep(600)
            await whole(scene)
            await scene.stop()
            scene.clock.jump(-YEAR_MS)
            await scene.start()
            await scene.sleep(120)
            await whole(scene)

    Scene("before a start", OPTIONS).play(story)


def test_what_is_appended_during_a_short_jump_is_dated_as_if_there_had_been_none() -> None:
    async def story(scene: Scene) -> None:
        await begin(scene)
        scene.clock.jump(YEAR_MS)
        await scene.send(b"during")
        await scene.sleep(20)
        scene.clock.jump(-YEAR_MS)
        await scene.sleep(5)
        sent_ms = scene.clock.wall_ms()
        await scene.send(b"after")
        found = await times(scene)
        assert found == sorted(found)
        assert abs(found[-1] - sent_ms) < 5_000
        await scene.worker("cy", group="late")
        assert (await scene.seek(m.Whence.TIME, sent_ms, group="late")).sequence == 61

    Scene("append times", OPTIONS).play(story)


def test_a_clock_that_stays_ahead_is_believed_after_an_hour() -> None:
    async def story(scene: Scene) -> None:
        await begin(scene)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(3_000)
        await whole(scene)
        await scene.sleep(1_000)
        assert scene.broker.maintenance.removed == 2

    Scene("stays ahead", OPTIONS).play(story)


def test_the_memory_of_what_producers_sent_outlasts_a_jump() -> None:
    async def story(scene: Scene) -> None:
        stream = Stream(9)
        data = stream.batch([b"once"])
        client = await scene.control()
        await client.produce("other", data)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(120)
        await scene.restart()  # a checkpoint lets go of streams that nobody used for long
        await scene.sleep(120)
        await scene.restart()
        again = await (await scene.control()).produce("other", data)
        assert again.first_sequence == 0

    Scene("streams", OPTIONS).play(story)


async def fill(scene: Scene, count: int) -> None:
    """More than one segment, over five minutes."""
    for number in range(count):
        await scene.send(b"%d" % number + bytes(KIB))
        await scene.sleep(300 / count)


def follows_the_clock(scene: Scene) -> None:
    """Append times go back where a segment begins, and nowhere else; effective times never do."""
    log = scene.broker.store.messages
    entries = list(log.readable(1, 0))
    for each in log.log.segments:
        own = [entry.appended_ms for entry in entries if each.base <= entry.position < each.end]
        assert own == sorted(own)
        assert not own or (each.newest_ms >= own[-1] and each.set_back_ms <= own[0])
    effective = logs.effective_ms(log.log.segments)
    assert effective == sorted(effective)


@pytest.mark.parametrize("end", ["restart", "kill", "power_cut", None])
def test_append_times_follow_the_clock_once_it_was_put_right(end: str | None) -> None:
    """A year ahead for ten minutes. What was sent then ages from when the clock was put right."""

    async def story(scene: Scene) -> None:
        begun_ms = scene.clock.wall_ms()
        await fill(scene, 20)
        jumped_ms = scene.clock.wall_ms()
        scene.clock.jump(YEAR_MS)
        await scene.sleep(90)
        await fill(scene, 40)
        await scene.sleep(210)
        scene.clock.jump(-YEAR_MS)
        await scene.send(b"held")  # nobody knows yet whether it was put right
        if end is not None:
            await getattr(scene, end)()
        await scene.send(b"held")
        await scene.sleep(90)
        sent_ms = scene.clock.wall_ms()
        await fill(scene, 20)
        if end is not None:
            await getattr(scene, end)()
            await scene.sleep(1)
        found = await times(scene)
        assert [each < jumped_ms + YEAR_MS for each in found] == [True] * 20 + [False] * 42 + [True] * 20
        assert sent_ms <= found[62] < sent_ms + 1_000
        follows_the_clock(scene)
        await scene.worker("cy", group="late")
        for time_ms, sequence in [
            (begun_ms, 0),
            (found[10], 10),
            (jumped_ms, 20),
            (sent_ms, 62),
            (found[70], 70),
            (found[70] + 1, 71),
            (found[30], 82),
        ]:
            assert (await scene.seek(m.Whence.TIME, time_ms, group="late")).sequence == sequence
        await scene.seek(m.Whence.LATEST, group="late")
        log = scene.broker.store.messages
        await scene.sleep(23 * 3_600)
        assert log.first_sequence(1) < 20  # the segment in which the jump came
        await scene.sleep(1.2 * 3_600)
        assert log.first_sequence(1) >= 62
        assert (await scene.seek(m.Whence.TIME, found[81], group="late")).sequence == 81

    Scene(f"put right, {end}", OPTIONS).play(story)


def test_what_was_sent_ahead_of_time_ages_though_nothing_is_sent_any_more() -> None:
    async def story(scene: Scene) -> None:
        await fill(scene, 20)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(90)
        await fill(scene, 40)
        scene.clock.jump(-YEAR_MS)
        await scene.sleep(23 * 3_600)
        assert scene.broker.store.messages.first_sequence(1) < 20
        await scene.sleep(2 * 3_600)
        assert scene.broker.store.messages.first_sequence(1) == 60

    Scene("nothing more", OPTIONS).play(story)


def test_a_clock_that_is_set_back_wrongly_dates_nothing_back() -> None:
    """Ten minutes a year behind. Append times stand still, so that nothing is taken for a year old afterwards."""

    async def story(scene: Scene) -> None:
        await fill(scene, 20)
        scene.clock.jump(-YEAR_MS)
        await fill(scene, 40)
        await scene.sleep(300)
        await scene.restart()
        await fill(scene, 40)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(90)
        sent_ms = scene.clock.wall_ms()
        await fill(scene, 20)
        found = await times(scene)
        assert found == sorted(found)
        assert sent_ms <= found[100] < sent_ms + 1_000
        await scene.sleep(22 * 3_600)
        assert scene.broker.store.messages.first_sequence(1) == 0

    Scene("set back", OPTIONS).play(story)


@pytest.mark.parametrize("end", ["leaves", "expires", "is made"])
def test_a_group_that_loses_its_last_member_while_the_clock_is_behind_is_kept(end: str) -> None:
    """A year behind for two minutes: the group is not taken for one that nobody used for a year."""

    async def story(scene: Scene) -> None:
        await scene.send(b"a", b"b")
        ann = await scene.worker("ann", is_joining=end != "is made")
        if end != "is made":
            await ann.ack(await ann.pull(most=1))
        scene.clock.jump(-YEAR_MS)
        await scene.sleep(20)
        if end == "leaves":
            await ann.leave()
        elif end == "is made":
            await scene.configure(GroupConfig())
        await scene.sleep(100)
        scene.clock.jump(YEAR_MS)
        for _ in range(3):
            await scene.sleep(1_500)
            assert scene.broker.maintenance.removed == 0
            await scene.restart()
        assert (await scene.describe()).cursor == (0 if end == "is made" else 1)

    Scene(f"behind, {end}", OPTIONS).play(story)


def test_a_broadcast_consumer_misses_nothing_because_the_clock_jumped() -> None:
    async def story(scene: Scene) -> None:
        ann = await scene.worker("ann", group="ann", is_joining=False)
        await ann.join(is_broadcast=True, start=m.Whence.LATEST)
        await scene.send(b"a")
        assert await ann.drain() == [b"a"]
        await ann.leave()
        await scene.send(b"b")
        scene.clock.jump(YEAR_MS)
        await scene.sleep(30)
        assert not (await ann.join(is_broadcast=True)).has_gap
        assert await ann.drain() == [b"b"]

    Scene("broadcast", OPTIONS).play(story)


def test_a_clock_that_is_set_back_wrongly_after_a_pause_dates_nothing_back() -> None:
    """Ages lag behind for an hour after a start: that is no proof that append times are ahead."""

    async def story(scene: Scene) -> None:
        await fill(scene, 20)
        await scene.stop()
        await scene.sleep(1_200)
        await scene.start()
        await fill(scene, 20)
        scene.clock.jump(-YEAR_MS)
        await fill(scene, 20)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(90)
        await fill(scene, 20)
        found = await times(scene)
        assert found == sorted(found)
        await scene.sleep(20 * 3_600)
        assert scene.broker.store.messages.first_sequence(1) == 0

    Scene("a pause", OPTIONS).play(story)


def test_a_clock_that_was_ahead_for_long_is_followed_back_after_an_hour() -> None:
    async def story(scene: Scene) -> None:
        await fill(scene, 20)
        scene.clock.jump(YEAR_MS)
        await scene.sleep(90)
        await fill(scene, 20)
        await scene.sleep(2 * 3_600)
        scene.clock.jump(-YEAR_MS)
        await scene.sleep(1_800)
        await scene.send(b"still ahead")
        await scene.sleep(2_000)
        sent_ms = scene.clock.wall_ms()
        await fill(scene, 20)
        found = await times(scene)
        assert found[40] > sent_ms + YEAR_MS // 2
        assert sent_ms <= found[41] < sent_ms + 1_000
        follows_the_clock(scene)

    Scene("ahead for long", options_of(store=replace(KEPT, retention=Policy()), housekeeping_ms=10_000)).play(story)


def test_a_copy_has_the_same_times_and_finds_the_same_by_them() -> None:
    """As it follows, after it died, and after its checkpoints and indexes are gone."""
    with Pair("times") as pair:

        def fill(count: int) -> None:
            for number in range(count):
                pair.send([b"%d" % number * 80])
                pair.act(number)
                pair.wait(10)
            pair.settle()

        fill(20)
        pair.sim.clock.jump(YEAR_MS)
        pair.wait(1)
        pair.master.store.time.wall_ms()
        pair.wait(60)
        fill(40)
        pair.sim.clock.jump(-YEAR_MS)
        pair.master.store.time.wall_ms()
        pair.wait(60)
        fill(20)
        master = pair.master.store
        assert [
            sum(each.set_back_ms > 0 for each in log.log.segments) for log in (master.messages, master.actions)
        ] == [1, 1]
        found = [each.appended_ms for each in master.messages.readable(1, 0)]
        for life in ("follows", "dies", "makes its views again"):
            if life != "follows":
                pair.copy.end()
                if life == "makes its views again":
                    for directory in ("checkpoints", "index"):
                        for name in pair.copy.disk.listing(directory):
                            pair.copy.disk.remove(f"{directory}/{name}")
                pair.copy.open(follows=True)
                pair.settle()
            copy = pair.copy.store
            assert bytes_of(pair.copy) == bytes_of(pair.master)
            assert copy.messages.log.segments == master.messages.log.segments
            assert copy.actions.log.segments == master.actions.log.segments
            for time_ms in (0, *found, *(each + 1 for each in found)):
                assert copy.messages.sequence_at(1, time_ms) == master.messages.sequence_at(1, time_ms)
        assert master.messages.sequence_at(1, found[60]) == 20  # of what lies between, nobody knows more
        for sequence in (0, 10, 61, 79):
            assert master.messages.sequence_at(1, found[sequence]) == sequence
        assert master.messages.sequence_at(1, found[40]) is None


assert GroupConfig().absence_ms_max < YEAR_MS
