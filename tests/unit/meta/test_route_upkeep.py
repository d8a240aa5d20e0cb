"""Routes of subjects that nobody uses expire, and no message that a broker has acknowledged is without a route."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from fairway import limits
from fairway.meta.cluster_state import GroupView
from fairway.meta.decommission_check import Masters
from fairway.protocol.admin_messages import SubjectDescription
from fairway.protocol.route_messages import ClientRole, RouteChange
from fairway.registry import layout
from fairway.registry.layout import SubjectRecord
from tests.unit.meta.brokers import GroupOfOne
from tests.unit.meta.scene import Scene, staged

UNUSED_S = 60
AUDIT_S = limits.ROUTES_AUDITED_EVERY_MS / 1_000 + 2


@pytest.fixture(autouse=True)
def _short_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUBJECT_UNUSED_MS", UNUSED_S * 1_000)


async def make(scene: Scene, *subjects: str, meta: str = "m1") -> None:
    """Ask for subjects, as a client that never sends."""
    client = await scene.dial(meta)
    routed = await scene.route(ClientRole.PRODUCER, *subjects, may_create=True, client=client)
    assert all(each.groups for each in routed.subjects)
    client.close()


async def exists(scene: Scene, subject: str) -> bool:
    return await scene.hand.get(layout.subject_path(subject), fresh=True) is not None


async def groups_of(scene: Scene, subject: str) -> tuple[list[str], list[str]]:
    record = await scene.subject(subject)
    return record.groups, record.writable


class Moment:
    """Runs something right after masters have answered for the nth time which subjects they have."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, deed: Callable[[], Awaitable[None]], number: int, *, before: bool = False
    ) -> None:
        self._answers = 0
        self._has_come = asyncio.Event()
        original = Masters.subjects

        async def subjects(masters: Masters, view: GroupView, names: Sequence[str]) -> dict[str, SubjectDescription]:
            self._answers += 1
            is_due = self._answers == number
            if is_due and before:
                await deed()
            found = await original(masters, view, names)
            if is_due and not before:
                await deed()
            if is_due:
                self._has_come.set()
            return found

        monkeypatch.setattr(Masters, "subjects", subjects)

    async def come(self) -> None:
        """Return a second after that."""
        async with asyncio.timeout(2 * UNUSED_S):
            await self._has_come.wait()
        await asyncio.sleep(1)


# --- expiry -----------------------------------------------------------------------------------------------------------


@staged()
async def test_a_route_that_nobody_uses_goes_after_the_hour_and_not_before(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await make(scene, "orders")
    await asyncio.sleep(UNUSED_S - 3)
    assert await exists(scene, "orders")
    await asyncio.sleep(6)
    assert not await exists(scene, "orders")
    assert "orders" not in scene.metas["m1"].cluster_state.subjects
    assert scene.metas["m1"].upkeep.expired == 1
    await make(scene, "orders")  # and whoever wants it has it again


@staged()
async def test_a_subject_that_its_broker_has_keeps_its_route(scene: Scene) -> None:
    group = await GroupOfOne.lead(scene, "g1")
    await make(scene, "written", "joined")
    await group.send("written")
    await group.make_group("joined", "billing")
    await asyncio.sleep(4 * UNUSED_S)
    assert await exists(scene, "written")
    assert await exists(scene, "joined")
    await group.remove_group("joined", "billing")  # the broker forgets the subject in its time, the meta server after
    await asyncio.sleep(4 * UNUSED_S)
    assert not await exists(scene, "joined")
    assert await exists(scene, "written")


@staged()
async def test_what_an_operator_has_made_or_changed_stays(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await GroupOfOne.lead(scene, "g2")
    names = ["paused", "set", "wide", "locked", "kept", "drained"]
    await make(scene, *names)
    await scene.govern(RouteChange.CREATE, "made")
    await scene.govern(RouteChange.PAUSE, "paused", "billing", is_on=True)
    await scene.govern(RouteChange.OPTIONS, "set", options={"team": "shop"})
    await scene.govern(RouteChange.EXTEND, "wide", number=2)
    await scene.govern(RouteChange.READ_ONLY, "locked", is_on=True)
    assert await scene.govern(RouteChange.CREATE, "kept") == ""
    await scene.govern(RouteChange.DRAIN, "g2", is_on=True)  # a decision about a group of servers
    await asyncio.sleep(3 * UNUSED_S)
    assert [name for name in [*names, "made"] if not await exists(scene, name)] == ["drained"]


@staged()
async def test_records_of_earlier_versions_stay(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await scene.hand.create(layout.subject_path("orders"), b'{"groups":["g1"],"writable":["g1"]}')
    await asyncio.sleep(3 * UNUSED_S)
    assert await exists(scene, "orders")


@staged(create_subjects=False)
async def test_nothing_goes_where_clients_cannot_make_it_again(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await scene.write(layout.subject_path("orders"), SubjectRecord(["g1"], ["g1"], is_on_first_use=True))
    await asyncio.sleep(3 * UNUSED_S)
    assert await exists(scene, "orders")


@staged(spread=2)
async def test_every_group_must_answer(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    other = await GroupOfOne.lead(scene, "g2")
    await make(scene, "orders")
    assert (await scene.subject("orders")).groups == ["g1", "g2"]
    await other.stop()
    await asyncio.sleep(3 * UNUSED_S)
    assert await exists(scene, "orders")
    await other.start()
    await asyncio.sleep(3 * UNUSED_S)
    assert not await exists(scene, "orders")


@staged()
async def test_a_route_that_a_client_waits_for_stays(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await make(scene, "orders")
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version

    async def polls() -> None:
        client = await scene.dial()
        while True:
            await scene.route(
                ClientRole.PRODUCER, "orders", client=client, known=known, wait_ms=30_000, may_create=True
            )

    polling = asyncio.ensure_future(polls())
    await asyncio.sleep(3 * UNUSED_S)
    assert scene.metas["m1"].upkeep.expired == 0
    polling.cancel()
    await asyncio.sleep(3 * UNUSED_S)
    assert not await exists(scene, "orders")


@staged("m1", "m2")
async def test_one_meta_server_does_it_and_another_takes_over(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await make(scene, "one", meta="m2")
    await asyncio.sleep(2 * UNUSED_S)
    assert not await exists(scene, "one")
    expired = [scene.metas[name].upkeep.expired for name in ("m1", "m2")]
    assert expired == [1, 0]
    await make(scene, "two", meta="m2")
    await scene.stop("m1")
    await asyncio.sleep(2 * UNUSED_S)
    assert not await exists(scene, "two")


@staged()
async def test_a_restart_begins_the_hour_again(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await make(scene, "orders")
    await asyncio.sleep(UNUSED_S - 10)
    await scene.stop("m1")
    await scene.start("m1")
    await asyncio.sleep(UNUSED_S - 5)
    assert await exists(scene, "orders")
    await asyncio.sleep(20)
    assert not await exists(scene, "orders")


@staged()
async def test_a_second_removes_no_more_than_its_bound(scene: Scene) -> None:
    await GroupOfOne.lead(scene, "g1")
    await make(scene, *(f"s{number}" for number in range(3 * limits.ROUTES_EXPIRED_AT_ONCE)))
    unused, seen = scene.metas["m1"].upkeep, [0]
    await asyncio.sleep(UNUSED_S - 3)
    for _ in range(20):
        await asyncio.sleep(1)
        seen.append(unused.expired)
    assert seen[-1] == 3 * limits.ROUTES_EXPIRED_AT_ONCE
    most = max(after - before for before, after in itertools.pairwise(seen))
    assert most <= limits.ROUTES_EXPIRED_AT_ONCE


# --- races ------------------------------------------------------------------------------------------------------------


def play(story: Callable[[Scene], Any], *metas: str, **options: Any) -> None:
    Scene(metas or ("m1",), options).play(story)


@pytest.mark.parametrize(
    ("number", "before"), [(1, True), (1, False), (2, True)], ids=["before asking", "after asking", "after removal"]
)
def test_a_message_at_any_step_of_an_expiry_has_a_route(
    monkeypatch: pytest.MonkeyPatch, number: int, before: bool
) -> None:
    async def story(scene: Scene) -> None:
        group = await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")
        moment = Moment(monkeypatch, lambda: group.send("orders"), number, before=before)
        await moment.come()
        assert await groups_of(scene, "orders") == (["g1"], ["g1"])
        assert scene.metas["m1"].upkeep.expired == 0
        assert scene.metas["m1"].upkeep.repaired == 0  # it was not needed
        await asyncio.sleep(3 * UNUSED_S)
        assert await exists(scene, "orders")

    play(story)


def test_a_message_after_the_last_step_has_a_route_one_audit_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        group = await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")
        moment = Moment(monkeypatch, lambda: group.send("orders"), 2)
        await moment.come()
        client = await scene.dial()
        known = (await scene.route(ClientRole.CONSUMER, "orders", client=client)).version
        poll = scene.route(ClientRole.CONSUMER, "orders", client=client, known=known, wait_ms=60_000)
        async with asyncio.timeout(AUDIT_S):
            routed = await poll
        assert [each.groups for each in routed.subjects] == [["g1"]]
        assert scene.metas["m1"].upkeep.repaired == 1

    play(story)


@staged()
async def test_a_message_beside_a_route_to_another_group_is_found(scene: Scene) -> None:
    """The producer had the route to g1, which expired; the subject was made again, on g2."""
    old = await GroupOfOne.lead(scene, "g1")
    await GroupOfOne.lead(scene, "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g2")
    await old.send("orders")
    await asyncio.sleep(AUDIT_S)
    assert await groups_of(scene, "orders") == (["g2", "g1"], ["g2"])
    assert not (await scene.subject("orders")).is_on_first_use


def test_a_meta_server_that_stops_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        group = await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")
        is_removed = asyncio.Event()

        async def hang() -> None:
            await group.send("orders")
            is_removed.set()
            await asyncio.Event().wait()

        Moment(monkeypatch, hang, 2, before=True)
        async with asyncio.timeout(2 * UNUSED_S):
            await is_removed.wait()
        assert not await exists(scene, "orders")
        await scene.stop("m1")
        await scene.start("m1")
        await asyncio.sleep(AUDIT_S)
        assert await groups_of(scene, "orders") == (["g1"], ["g1"])

    play(story)


def test_an_operator_who_changes_the_subject_meanwhile_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")

        async def pause() -> None:
            await scene.govern(RouteChange.PAUSE, "orders", "billing", is_on=True)

        Moment(monkeypatch, pause, 1)
        await asyncio.sleep(3 * UNUSED_S)
        assert (await scene.subject("orders")).paused == ["billing"]

    play(story)


def test_the_answer_of_a_master_that_was_deposed_meanwhile_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")
        Moment(monkeypatch, lambda: scene.change_group("g1", epoch=2), 1)
        await asyncio.sleep(UNUSED_S + 10)
        assert await exists(scene, "orders")

    play(story)


def test_a_group_that_is_silent_after_the_removal_gets_its_route_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        group = await GroupOfOne.lead(scene, "g1")
        await make(scene, "orders")
        Moment(monkeypatch, group.stop, 2, before=True)
        await asyncio.sleep(UNUSED_S + 10)
        assert (await scene.subject("orders")).groups == ["g1"]

    play(story)


# --- the audit --------------------------------------------------------------------------------------------------------


@staged()
async def test_the_audit_reads_page_after_page(scene: Scene) -> None:
    group = await GroupOfOne.lead(scene, "g1")
    page, limits.ROUTES_AUDITED_AT_ONCE = limits.ROUTES_AUDITED_AT_ONCE, 2
    try:
        for number in range(7):
            await group.send(f"s{number}")
        await asyncio.sleep(4 * AUDIT_S)
    finally:
        limits.ROUTES_AUDITED_AT_ONCE = page
    assert sorted(scene.metas["m1"].cluster_state.subjects) == [f"s{number}" for number in range(7)]
    assert scene.metas["m1"].upkeep.repaired == 7


@staged()
async def test_the_audit_leaves_alone_what_holds_no_message(scene: Scene) -> None:
    group = await GroupOfOne.lead(scene, "g1")
    await group.make_group("joined", "billing")
    await asyncio.sleep(2 * AUDIT_S)
    assert not await exists(scene, "joined")


@staged()
async def test_a_group_on_its_way_out_gets_no_route(scene: Scene) -> None:
    group = await GroupOfOne.lead(scene, "g1")
    await scene.change_group("g1", is_draining=True, is_done=True, is_closed=True)
    await group.send("orders")
    await asyncio.sleep(2 * AUDIT_S)
    assert not await exists(scene, "orders")


def test_a_route_says_whether_it_was_made_on_first_use() -> None:
    made = SubjectRecord(["g1"], ["g1"], is_on_first_use=True)
    assert layout.unpack(SubjectRecord, "/x", layout.pack(made)) == made
    older = msgspec.json.encode({"groups": ["g1"], "writable": ["g1"]})
    assert not layout.unpack(SubjectRecord, "/x", older).is_on_first_use
