"""Subjects and groups are removed: what goes, what keeps them, who is told, and what a crash in between leaves."""

from __future__ import annotations

import asyncio

import pytest

from fairway import limits
from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import (
    Depth,
    Describe,
    Described,
    Lever,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Scan,
    Scanned,
)
from tests.support.client import Stream
from tests.unit.broker.scene import GROUP, SUBJECT, Scene, refused, staged

HOUR_S = 3_600


async def remove(scene: Scene, subject: str = SUBJECT, *, force: bool = False) -> Removed:
    answer: Removed = await scene.ask(RemoveSubject(subject, force), Removed)
    return answer


async def remove_group(scene: Scene, *, force: bool = False, dead: bool = False) -> Removed:
    answer: Removed = await scene.ask(RemoveGroup(SUBJECT, GROUP, force, takes_dead=dead), Removed)
    return answer


async def names(scene: Scene) -> set[str]:
    described: Described = await scene.ask(Describe(Depth.SUBJECTS), Described)
    return {each.name for each in described.subjects}


async def sentence_of(scene: Scene, subject: str = SUBJECT) -> str:
    with pytest.raises(Refused) as caught:
        await remove(scene, subject)
    assert caught.value.code is Code.BAD_REQUEST
    return caught.value.sentence


@staged
async def test_a_subject_whose_groups_are_done_is_removed_without_force(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.drain()
    await ann.leave()
    assert await remove(scene) == Removed(True, groups=1)
    assert await names(scene) == set()
    assert await remove(scene) == Removed(False)
    assert len(scene.broker.coordinator.groups) == 0


@staged
async def test_what_would_be_lost_keeps_it_and_is_named(scene: Scene) -> None:
    await scene.send(b"a", b"b", b"c")
    assert "3 messages that no group consumes" in await sentence_of(scene)
    ann = await scene.worker("ann")
    told = await sentence_of(scene)
    assert f"3 messages not handled ({GROUP} 3) and 1 consumer" in told
    assert "--force" in told
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    await ann.leave()
    assert "3 dead letters" in await sentence_of(scene)
    assert await names(scene) >= {SUBJECT}
    removed = await remove(scene, force=True)
    assert removed == Removed(True, groups=1, dead=3)
    assert await names(scene) == set()


@staged
async def test_a_dry_removal_changes_nothing(scene: Scene) -> None:
    await scene.send(b"a")
    assert await scene.ask(RemoveSubject(SUBJECT, True, is_dry=True), Removed) == Removed(True, 0, 1, 0)
    assert await names(scene) == {SUBJECT}


@pytest.mark.parametrize("ending", ["restart", "kill", "power_cut"])
def test_it_stays_removed_and_its_groups_with_it(ending: str) -> None:
    async def story(scene: Scene) -> None:
        ann = await scene.worker("ann")
        await scene.send(b"a", b"b")
        await ann.reject(await ann.pull())
        await scene.sleep(1)
        await scene.redrive()
        await scene.switch(Lever.READ_ONLY, is_on=True)
        await remove(scene, force=True)
        await getattr(scene, ending)()
        assert await names(scene) == set()
        assert len(scene.broker.coordinator.groups) == 0
        assert not scene.broker.coordinator.groups.read_only
        bob = await scene.worker("bob")
        await scene.send(b"new", stream=Stream(9))
        handed = await bob.pull()
        assert handed.payloads == [b"new"]
        assert handed.messages[0].sequence == 2

    Scene(ending).play(story)


@staged
async def test_a_crash_between_the_two_logs_leaves_no_group_behind(scene: Scene) -> None:
    await scene.worker("ann")
    await scene.send(b"a")
    store = scene.broker.store
    state = store.messages.views.subjects.find(scene.broker.coordinator.subject(SUBJECT).name)
    assert state is not None
    store.messages.on_removed = lambda _gone: None  # the process dies before it writes the REMOVE of the groups
    store.remove_subjects([state])
    await scene.sleep(1)
    await scene.kill()
    assert len(scene.broker.coordinator.groups) == 0
    bob = await scene.worker("bob")
    assert (await bob.pull()).payloads == []
    await scene.kill()
    assert {host.subject_id for host in scene.broker.coordinator.groups} == {
        scene.broker.coordinator.subject(SUBJECT).id
    }


@staged
async def test_whoever_waits_is_told(scene: Scene) -> None:
    ann = await scene.worker("ann")
    scanner = await scene.connect()
    pull = asyncio.ensure_future(ann.pull(wait_s=5))
    scan = asyncio.ensure_future(scanner.ask(Scan(SUBJECT, m.Whence.LATEST, 0, None, 1_000, wait_ms=20_000), Scanned))
    await scene.sleep(1)
    await remove(scene, force=True)
    for waiting, code in ((pull, Code.NO_SUCH_GROUP), (scan, Code.NO_SUCH_SUBJECT)):
        with pytest.raises(Refused) as caught:
            await waiting
        assert caught.value.code in {code, Code.NO_SUCH_SUBJECT}
        assert "removed" in caught.value.sentence
    await ann.join()
    await scene.send(b"a", stream=Stream(9))
    assert (await ann.pull()).payloads == [b"a"]


@staged
async def test_a_paused_consumer_is_told_too(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.switch(Lever.PAUSE_CONSUMER, is_on=True, consumer="ann")
    pull = asyncio.ensure_future(ann.pull(wait_s=5))
    await scene.sleep(1)
    await remove(scene, force=True)
    with pytest.raises(Refused):
        await asyncio.wait_for(pull, 1)


@staged
async def test_a_stream_goes_on_in_a_new_one(scene: Scene) -> None:
    stream = Stream(5)
    await scene.send(b"a", stream=stream)
    await remove(scene, force=True)
    assert await refused(scene.send(b"b", stream=stream)) is Code.UNKNOWN_PRODUCER
    assert (await scene.send(b"b", stream=Stream(6))).first_sequence == 1


@staged
async def test_dead_letters_can_be_removed_alone(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    letters = f"dead:{GROUP}:{SUBJECT}"
    assert "1 dead letter" in await sentence_of(scene, letters)
    await remove(scene, letters, force=True)
    assert await names(scene) == {SUBJECT}
    assert (await scene.describe()).dead == 0
    await scene.send(b"b")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    assert (await scene.describe()).dead == 1


@staged
async def test_inboxes_are_not_removed_alone(scene: Scene) -> None:
    assert await refused(remove(scene, f"inbox:{GROUP}:{SUBJECT}")) is Code.BAD_NAME


@staged
async def test_a_group_is_removed_and_its_dead_letters_stay(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    assert await refused(remove_group(scene)) is Code.BAD_REQUEST
    await ann.leave()
    assert await remove_group(scene) == Removed(True, groups=1)
    assert await names(scene) == {SUBJECT, f"dead:{GROUP}:{SUBJECT}"}
    assert await remove_group(scene) == Removed(False)
    bob = await scene.worker("bob")
    assert (await bob.pull()).payloads == [b"a", b"b"]


@staged
async def test_a_group_goes_with_its_dead_letters_where_that_is_asked_for(scene: Scene) -> None:
    ann = await scene.worker("ann")
    await scene.send(b"a", b"b")
    await ann.reject(await ann.pull())
    await scene.sleep(1)
    await scene.redrive()
    await ann.leave()
    assert await refused(remove_group(scene, dead=True)) is Code.BAD_REQUEST
    removed = await remove_group(scene, force=True, dead=True)
    assert (removed.existed, removed.messages) == (True, 2)
    await scene.kill()
    assert await names(scene) == {SUBJECT}
    assert len(scene.broker.coordinator.groups) == 0


@staged
async def test_a_removal_that_finds_no_room_changes_nothing(scene: Scene) -> None:
    await scene.send(b"a")
    scene.disk.publish("filler", [bytes(scene.disk.free_bytes())])
    with pytest.raises(Refused):
        await remove(scene, force=True)
    scene.disk.remove("filler")
    await scene.sleep(1)
    assert await names(scene) == {SUBJECT}
    await remove(scene, force=True)


# --- subjects that nobody uses ---------------------------------------------------------------------------------------


@staged
async def test_a_subject_that_was_never_used_goes_after_an_hour(scene: Scene) -> None:
    ann = await scene.worker("ann", subject="typo")
    await ann.leave()
    await scene.ask(RemoveGroup("typo", GROUP), Removed)
    await scene.send(b"a")
    await scene.worker("bob", subject="joined")
    await scene.switch(Lever.READ_ONLY, is_on=True, subject="switched")
    assert await names(scene) == {"typo", SUBJECT, "joined", "switched"}
    await scene.sleep(0.9 * HOUR_S)
    assert "typo" in await names(scene)
    await scene.sleep(0.2 * HOUR_S)
    assert await names(scene) == {SUBJECT, "joined", "switched"}
    await scene.kill()
    assert await names(scene) == {SUBJECT, "joined", "switched"}


@staged
async def test_use_begins_the_hour_again_and_so_does_a_restart(scene: Scene) -> None:
    for name in ("typo", "late"):
        ann = await scene.worker("ann", subject=name)
        await ann.leave()
        await scene.ask(RemoveGroup(name, GROUP), Removed)
    await scene.sleep(0.8 * HOUR_S)
    await scene.send(b"a", subject="late")
    await scene.restart()
    await scene.sleep(0.9 * HOUR_S)
    assert await names(scene) == {"typo", "late"}
    await scene.sleep(0.2 * HOUR_S)
    assert await names(scene) == {"late"}


# --- the rate --------------------------------------------------------------------------------------------------------


def _rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECTS_CREATED_BURST", 8)
    monkeypatch.setattr(limits, "SUBJECTS_CREATED_PER_S", 2)


def test_one_connection_makes_half_of_what_all_may_make(monkeypatch: pytest.MonkeyPatch) -> None:
    _rate(monkeypatch)

    async def story(scene: Scene) -> None:
        flood, honest = await scene.connect(), await scene.connect()
        made, told = 0, []
        for number in range(20):
            try:
                await flood.produce(f"flood-{number}", Stream(100 + number).batch([b"x"]))
                made += 1
            except Refused as full:
                told.append((full.code, bool(full.retry_after_ms)))
        assert made == 4
        assert set(told) == {(Code.BUSY, True)}
        await flood.produce("flood-0", Stream(90).batch([b"x"]))  # what exists takes messages all the while
        for number in range(4):
            await honest.produce(f"mine-{number}", Stream(200 + number).batch([b"x"]))
        assert await refused(honest.produce("mine-9", Stream(209).batch([b"x"]))) is Code.BUSY
        join = m.Join("mine-10", GROUP, "ann", 0, 0, m.Whence.EARLIEST, False, None, bytes(16))
        assert await refused(honest.ask(join, m.Joined)) is Code.BUSY
        await scene.sleep(1)
        await honest.produce("mine-9", Stream(209).batch([b"x"]))
        assert scene.broker.creation_rate.refused == 18

    Scene("rate").play(story)
