"""A broker that stands alone, asked as one would ask a meta server."""

from __future__ import annotations

import asyncio

import pytest

from fairway.errors import Code, Refused
from fairway.protocol.route_messages import ClientRole, Govern, Governed, Route, RouteChange, Routed
from tests.unit.broker.scene import Scene, staged


async def routed(scene: Scene, asker: ClientRole, *subjects: str, known: int = 0, wait_ms: int = 0) -> Routed:
    return (await (await scene.control()).ask(Route(asker, list(subjects), known, wait_ms), Routed))[0]


@staged
async def test_every_subject_is_here(scene: Scene) -> None:
    answer = await routed(scene, ClientRole.PRODUCER, "orders", "mails", "orders")
    assert [(each.name, each.groups, each.writable) for each in answer.subjects] == [
        ("orders", ["here"], ["here"]),
        ("mails", ["here"], ["here"]),
    ]
    [group] = answer.groups
    assert (group.name, group.kind, group.is_writable) == ("here", "broker", True)
    assert group.master.endswith(f":{scene.broker.port}")


@staged
async def test_without_a_delay_server_delayed_messages_are_nowhere(scene: Scene) -> None:
    [subject] = (await routed(scene, ClientRole.SCHEDULER, "orders")).subjects
    assert subject.groups == []
    assert "fairway up" in subject.why


@staged
async def test_tools_see_the_subjects_that_there_are(scene: Scene) -> None:
    await scene.send(b"a", subject="orders")
    answer = await routed(scene, ClientRole.TOOL)
    assert [each.name for each in answer.subjects] == ["orders"]
    assert [copy.role for copy in answer.groups[0].copies] == ["master"]


@staged
async def test_a_question_that_waits_for_news_waits_and_gives_way_to_the_next(scene: Scene) -> None:
    known = (await routed(scene, ClientRole.CONSUMER, "orders")).version
    first = asyncio.ensure_future(routed(scene, ClientRole.CONSUMER, "orders", known=known, wait_ms=20_000))
    await asyncio.sleep(1)
    second = asyncio.ensure_future(routed(scene, ClientRole.CONSUMER, "orders", "mails", known=known, wait_ms=5_000))
    await asyncio.sleep(1)
    assert (first.done(), second.done()) == (True, False)
    assert (await second).subjects == []


@staged
async def test_what_only_a_meta_server_decides_is_refused_with_the_remedy(scene: Scene) -> None:
    with pytest.raises(Refused, match="fairway meta") as refused:
        await (await scene.control()).ask(Govern(RouteChange.CREATE, "orders"), Governed)
    assert refused.value.code is Code.UNSUPPORTED
    assert scene.broker.waiting.taken_bytes == 0
    with pytest.raises(Refused, match="bad subject name"):
        await routed(scene, ClientRole.PRODUCER, "no/slash")
    assert scene.broker.waiting.taken_bytes == 0
