"""Clients that make subjects without end: the table is not full for good, and nobody else is kept from theirs."""

from __future__ import annotations

import pytest

from fairway import limits
from fairway.errors import Code, Refused
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described, Removed, RemoveGroup, RemoveSubject
from tests.support.client import Client, Stream
from tests.unit.broker.scene import GROUP, Scene, refused, staged

HOUR_S = 3_600


async def flood(client: Client, prefix: str, number: int) -> int:
    """As many subjects as it gets."""
    made, codes = 0, set()
    for each in range(number):
        try:
            await client.produce(f"{prefix}-{each}", Stream(hash((prefix, each)) % 2**60 + 1).batch([b"x"]))
            made += 1
        except Refused as full:
            codes.add(full.code)
    assert codes <= {Code.BUSY}
    return made


@staged
async def test_a_flood_of_names_leaves_half_for_others(scene: Scene) -> None:
    attacker, honest = await scene.connect(), await scene.connect()
    made = await flood(attacker, "flood", limits.SUBJECTS_CREATED_BURST)
    assert made < limits.SUBJECTS_CREATED_BURST * 0.6
    assert await flood(honest, "mine", 300) == 300  # a service that starts up meanwhile


def test_a_full_table_says_so_and_can_be_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECTS_MAX", 50)

    async def story(scene: Scene) -> None:
        await scene.send(b"a", subject="honest")
        attacker = await scene.connect()
        assert await flood(attacker, "flood", 200) == 49
        await scene.send(b"b", subject="honest")  # what exists goes on
        with pytest.raises(Refused) as full:
            await scene.send(b"x", subject="new", stream=Stream(3))
        assert full.value.code is Code.BUSY
        assert "fairway subject remove" in full.value.sentence
        assert full.value.retry_after_ms
        for number in range(49):
            await scene.ask(RemoveSubject(f"flood-{number}", True), Removed)
        await scene.send(b"x", subject="new", stream=Stream(4))

    Scene("full table").play(story)


def test_names_that_were_only_joined_go_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECTS_MAX", 50)

    async def story(scene: Scene) -> None:
        attacker = await scene.connect()
        for number in range(50):
            await attacker.join(f"joined-{number}", GROUP, "ann")
            await attacker.ask(m.Leave(f"joined-{number}", GROUP, "ann", 0), m.Done)
            await attacker.ask(RemoveGroup(f"joined-{number}", GROUP), Removed)
        assert await refused(scene.send(b"x", subject="new")) is Code.BUSY
        await scene.sleep(1.1 * HOUR_S)
        await scene.send(b"x", subject="new", stream=Stream(5))
        described = await scene.ask(Describe(Depth.SUBJECTS), Described)
        assert [each.name for each in described.subjects] == ["new"]

    Scene("joined").play(story)


@staged
async def test_lists_are_whole_while_somebody_makes_and_removes(scene: Scene) -> None:
    for number in range(30):
        await scene.send(b"x", subject=f"kept-{number:02}", stream=Stream(100 + number))
    attacker = await scene.connect()
    for number in range(60):
        await attacker.produce("churn", Stream(1_000 + number).batch([b"x"]))
        await attacker.ask(RemoveSubject("churn", True), Removed)
        described = await scene.ask(Describe(Depth.SUBJECTS), Described)
        assert [each.name for each in described.subjects] == [f"kept-{each:02}" for each in range(30)]
    subjects = scene.broker.store.messages.views.subjects
    assert len(subjects) == 30
    assert scene.broker.store.messages.views.entries._dropped.isdisjoint(each.id for each in subjects)
