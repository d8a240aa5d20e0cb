"""Clients that list everything, over and over: each turn of the loop does a little of it, and nobody else waits."""

from __future__ import annotations

import asyncio

from fairway.broker import descriptions
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.route_messages import ClientRole, Route, Routed
from tests.support.client import Stream
from tests.unit.broker.scene import Scene, staged

GROUPS = 300
SUBJECTS = 250


async def fill(scene: Scene) -> None:
    client = await scene.connect()
    for number in range(GROUPS):
        await client.join("orders", f"group-{number:03}", "ann")
    for number in range(SUBJECTS):
        await client.produce(f"subject-{number:03}", Stream(100 + number).batch([b"one"]))


def slices(scene: Scene) -> int:
    """That the actor for commands has had."""
    actor = scene.broker.scheduler.find(("admin",))
    return 0 if actor is None else actor.slices


@staged
async def test_a_page_of_many_groups_is_gathered_in_many_slices(scene: Scene) -> None:
    await fill(scene)
    client = await scene.connect()
    before = slices(scene)
    page, _ = await client.ask(Describe(Depth.GROUPS), Described)
    assert sum(len(subject.groups) for subject in page.subjects) == GROUPS
    assert len(page.subjects) == SUBJECTS + 1
    items = GROUPS + SUBJECTS
    assert slices(scene) - before >= items // descriptions._STEP_ITEMS


@staged
async def test_pages_add_up_to_everything_while_groups_come_and_go(scene: Scene) -> None:
    await fill(scene)
    client, busy = await scene.connect(), await scene.connect()
    found: list[str] = []
    after = ""
    while True:
        page, _ = await client.ask(Describe(Depth.GROUPS, "orders", after=after, items_max=7), Described)
        found += [group.name for subject in page.subjects for group in subject.groups]
        await busy.join("orders", f"later-{len(found):03}", "ann")  # behind the others by name
        after = page.next
        if not after or len(found) >= GROUPS:
            break
    assert found[:GROUPS] == [f"group-{number:03}" for number in range(GROUPS)]


@staged
async def test_a_client_that_goes_away_leaves_no_page_behind(scene: Scene) -> None:
    await fill(scene)
    rude = [await scene.connect() for number in range(5)]
    asked = [asyncio.ensure_future(each.ask(Describe(Depth.GROUPS), Described)) for each in rude for _ in range(20)]
    await asyncio.sleep(0)
    for each in rude:
        each.abort()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(5)
    assert not scene.broker.admin._pages
    await scene.send(b"healthy")


@staged
async def test_subjects_are_listed_by_a_broker_alone_without_sorting_them(scene: Scene) -> None:
    await fill(scene)
    client = await scene.connect()
    names: list[str] = []
    more = True
    while more:
        routed, _ = await client.ask(Route(ClientRole.TOOL, [], after=names[-1] if names else ""), Routed)
        names += [subject.name for subject in routed.subjects]
        more = routed.has_more
    assert names == ["orders", *(f"subject-{number:03}" for number in range(SUBJECTS))]
