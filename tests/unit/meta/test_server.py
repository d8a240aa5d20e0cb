"""A meta server as its clients see it: routes, changes by long poll, subjects on first use, a registry that is away."""

from __future__ import annotations

import asyncio

import pytest

from fairway import limits
from fairway.errors import Code, Misuse, Refused
from fairway.meta.server import MetaOptions
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.protocol.route_messages import Act, ClientRole, Register, Registered
from fairway.registry import layout
from fairway.registry.layout import SubjectRecord
from tests.unit.meta.scene import Scene, staged

ON_G1 = SubjectRecord(["g1"], ["g1"])


# --- routes -----------------------------------------------------------------------------------------------------------


@staged()
async def test_a_subject_is_told_with_its_groups(scene: Scene) -> None:
    await scene.lead("g1", port=7)
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    routed = await scene.route(ClientRole.CONSUMER, "orders")
    [subject], [group] = routed.subjects, routed.groups
    assert (subject.groups, group.name, group.master, group.is_writable) == (["g1"], "g1", "g1:7", True)
    assert not routed.is_old


@staged()
async def test_a_consumer_that_comes_too_early_is_told_when_the_subject_is_there(scene: Scene) -> None:
    await scene.lead("g1")
    first = await scene.route(ClientRole.CONSUMER, "orders")
    assert first.subjects[0].groups == []
    assert "first message" in first.subjects[0].why
    poll = asyncio.ensure_future(scene.route(ClientRole.CONSUMER, "orders", known=first.version, wait_ms=30_000))
    await scene.route(ClientRole.PRODUCER, "orders", may_create=True)
    assert [each.groups for each in (await poll).subjects] == [["g1"]]


@staged()
async def test_a_new_master_is_told_to_those_who_wait_within_a_second(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version
    began_ns = 0

    async def told_of_epoch_2() -> int:
        """When, in ns; what is told before that is the new copy, which may be seen first."""
        client, seen = await scene.dial(), known
        while True:
            routed = await scene.route(ClientRole.PRODUCER, "orders", client=client, known=seen, wait_ms=30_000)
            assert began_ns, "nothing has changed yet"
            if any(group.epoch == 2 for group in routed.groups):
                return scene.sim.clock.monotonic_ns()
            seen = routed.version

    waiting = [asyncio.ensure_future(told_of_epoch_2()) for _ in range(150)]
    await asyncio.sleep(1)
    began_ns = scene.sim.clock.monotonic_ns()
    await scene.lead("g1", "g1-b", port=2)
    assert max(await asyncio.gather(*waiting)) - began_ns < 1_000_000_000


@staged()
async def test_what_concerns_others_wakes_nobody(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version
    poll = asyncio.ensure_future(scene.route(ClientRole.PRODUCER, "orders", known=known, wait_ms=5_000))
    await scene.write(layout.subject_path("mails"), SubjectRecord(["g2"], ["g2"]))
    await scene.die("g2")
    await scene.live("g1", "g1-a", load={"bytes_per_s": 7.0})  # how busy it is interests nobody but tools
    await asyncio.sleep(4)
    assert not poll.done()
    routed = await poll
    assert (routed.subjects, routed.groups) == ([], [])
    assert routed.version > known


@staged()
async def test_one_poll_of_a_kind_waits_on_a_connection(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version
    first = asyncio.ensure_future(scene.route(ClientRole.PRODUCER, "orders", known=known, wait_ms=30_000))
    other = asyncio.ensure_future(scene.route(ClientRole.CONSUMER, "orders", known=known, wait_ms=30_000))
    await asyncio.sleep(0.1)
    second = asyncio.ensure_future(scene.route(ClientRole.PRODUCER, "orders", known=known, wait_ms=30_000))
    await asyncio.sleep(0.1)
    assert (first.done(), second.done(), other.done()) == (True, False, False)
    assert len(scene.metas["m1"].routes) == 2
    second.cancel()
    other.cancel()


@staged()
async def test_a_subject_that_joins_a_poll_is_told_by_it(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    first = await scene.route(ClientRole.PRODUCER, "orders")
    assert (first.joined, first.polls_max) == (0, limits.ROUTE_POLLS_MAX)
    assert (await scene.route(ClientRole.PRODUCER, "mails", poll=1)).joined == 0, "no poll waits"
    poll = asyncio.ensure_future(
        scene.route(ClientRole.PRODUCER, "orders", known=first.version, wait_ms=30_000, poll=1)
    )
    other = asyncio.ensure_future(
        scene.route(ClientRole.PRODUCER, "orders", known=first.version, wait_ms=30_000, poll=2)
    )
    await asyncio.sleep(0.1)
    held_bytes = scene.metas["m1"].waiting.taken_bytes
    made = await scene.route(ClientRole.PRODUCER, "mails", may_create=True, poll=1)
    assert (made.joined, made.subjects[0].name) == (1, "mails")
    await asyncio.sleep(1)
    assert not poll.done(), "it is told of changes after the answer alone"
    assert scene.metas["m1"].waiting.taken_bytes > held_bytes + limits.ROUTE_SUBJECT_BYTES
    record = await scene.subject("mails")
    await scene.write(layout.subject_path("mails"), SubjectRecord(["g1", "g2"], record.writable))
    told = await poll
    assert [each.name for each in told.subjects] == ["mails"]
    assert told.subjects[0].groups == ["g1", "g2"]
    assert not other.done()
    other.cancel()


@staged()
async def test_a_change_of_the_group_of_a_joined_subject_is_told(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.write(layout.subject_path("mails"), SubjectRecord(["g2"], ["g2"]))
    await scene.settle()
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version
    poll = asyncio.ensure_future(scene.route(ClientRole.PRODUCER, "orders", known=known, wait_ms=30_000, poll=1))
    await asyncio.sleep(0.1)
    assert (await scene.route(ClientRole.PRODUCER, "mails", poll=1)).joined == 1
    await scene.die("g2")
    told = await poll
    assert [each.name for each in told.subjects] == ["mails"]
    assert [each.name for each in told.groups] == ["g2"]


@staged()
async def test_polls_hold_no_more_subjects_than_a_request_and_no_memory_beyond_the_allowance(scene: Scene) -> None:
    await scene.lead("g1")
    meta = scene.metas["m1"]
    client = await scene.dial()
    names = [f"s{number}" for number in range(limits.ROUTE_SUBJECTS_MAX)]
    first = await scene.route(ClientRole.CONSUMER, *names[:-1], client=client)
    polls = [
        asyncio.ensure_future(
            scene.route(ClientRole.CONSUMER, *names[:-1], client=client, known=first.version, wait_ms=30_000, poll=1)
        )
    ]
    await asyncio.sleep(0.1)
    assert (await scene.route(ClientRole.CONSUMER, "last", client=client, poll=1)).joined == 1
    assert (await scene.route(ClientRole.CONSUMER, "last", client=client, poll=1)).joined == 1, "it is in it already"
    assert (await scene.route(ClientRole.CONSUMER, "beyond", client=client, poll=1)).joined == 0
    assert meta.waiting.taken_bytes > limits.ROUTE_SUBJECTS_MAX * limits.ROUTE_SUBJECT_BYTES
    with pytest.raises(Refused, match="numbers go to 256"):
        await scene.route(ClientRole.CONSUMER, "last", client=client, poll=limits.ROUTE_POLLS_MAX + 1)
    more = scene.route(ClientRole.CONSUMER, "x", client=client, known=first.version, wait_ms=9_000, poll=2)
    polls.append(asyncio.ensure_future(more))
    await asyncio.sleep(0.1)
    meta.waiting.bytes_max = (
        3 * meta.waiting.taken_bytes
    )  # of which polls may have half: there is room for answers only
    assert (await scene.route(ClientRole.CONSUMER, "y", client=client, poll=2)).joined == 0
    client.abort()
    await asyncio.sleep(1)
    assert meta.waiting.taken_bytes == 0
    assert len(meta.routes) == 0
    await asyncio.gather(*polls, return_exceptions=True)


@staged()
async def test_a_dead_group_is_gone_around_by_producers_and_named_to_consumers(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.write(layout.subject_path("orders"), SubjectRecord(["g1", "g2"], ["g1", "g2"]))
    await scene.settle()
    await scene.die("g1")
    await scene.settle()
    produced = await scene.route(ClientRole.PRODUCER, "orders")
    assert produced.subjects[0].writable == ["g2"]
    consumed = await scene.route(ClientRole.CONSUMER, "orders")
    assert [(each.name, each.master) for each in consumed.groups] == [("g1", ""), ("g2", "g2:1")]


@staged()
async def test_a_delayed_message_goes_to_delay_servers(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.settle()
    nobody = await scene.route(ClientRole.SCHEDULER, "orders", may_create=True)
    assert "no delay server" in nobody.subjects[0].why
    poll = asyncio.ensure_future(scene.route(ClientRole.SCHEDULER, "orders", known=nobody.version, wait_ms=30_000))
    await scene.lead("w1", kind="delay", port=9)
    assert (await poll).subjects[0].groups == ["w1"]
    await scene.settle()
    routed = await scene.route(ClientRole.SCHEDULER, "orders")
    assert (routed.subjects[0].writable, routed.groups[0].master) == (["w1"], "w1:9")


@staged()
async def test_tools_are_told_of_everything(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    routed = await scene.route(ClientRole.TOOL)
    assert [each.name for each in routed.subjects] == ["orders"]
    assert [copy.role for copy in routed.groups[0].copies] == ["follower"]
    assert routed.metas == ["m1:20882"]


@staged()
async def test_all_subjects_come_page_by_page(scene: Scene) -> None:
    for number in range(1_005):
        scene.metas["m1"].cluster_state.put_subject(f"s{number:04}", ON_G1)
    first = await scene.route(ClientRole.TOOL)
    assert (len(first.subjects), first.has_more) == (1_000, True)
    rest = await scene.route(ClientRole.TOOL, after=first.subjects[-1].name)
    assert ([each.name for each in rest.subjects], rest.has_more) == ([f"s{n}" for n in range(1_000, 1_005)], False)


# --- on first use -----------------------------------------------------------------------------------------------------


@staged()
async def test_a_subject_is_made_on_first_use_on_the_least_loaded_group(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.settle()
    homes = []
    for number in range(4):
        routed = await scene.route(ClientRole.PRODUCER, f"s{number}", may_create=True)
        homes += routed.subjects[0].writable
    assert sorted(homes) == ["g1", "g1", "g2", "g2"]
    assert (await scene.subject("s0")).groups == homes[:1]


@staged(spread=2)
async def test_a_new_subject_is_spread_over_as_many_groups_as_was_chosen(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.settle()
    early = await scene.route(ClientRole.PRODUCER, "early", may_create=True)
    assert early.subjects[0].writable == ["g1"], "there are no others yet"
    await scene.lead("g2")
    await scene.lead("g3")
    await scene.settle()
    routed = await scene.route(ClientRole.PRODUCER, "orders", may_create=True)
    assert routed.subjects[0].writable == ["g2", "g3"]


@staged(create_subjects=False)
async def test_where_policy_says_no_nothing_is_made(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.settle()
    routed = await scene.route(ClientRole.PRODUCER, "orders", may_create=True)
    assert "fairway subject create orders" in routed.subjects[0].why
    assert await scene.hand.children(layout.SUBJECTS) == []


@staged()
async def test_a_subject_that_nobody_can_carry_yet_is_made_when_a_group_comes(scene: Scene) -> None:
    first = await scene.route(ClientRole.PRODUCER, "orders", may_create=True)
    assert "1 broker group is asked for and 0 take messages now" in first.subjects[0].why
    poll = asyncio.ensure_future(
        scene.route(ClientRole.PRODUCER, "orders", known=first.version, wait_ms=30_000, may_create=True)
    )
    await scene.lead("g1")
    assert (await poll).subjects[0].writable == ["g1"]


@staged("m1", "m2")
async def test_two_meta_servers_agree_on_where_a_new_subject_is(scene: Scene) -> None:
    for name in ("g1", "g2", "g3"):
        await scene.lead(name)
    await scene.settle()
    names = [f"s{number}" for number in range(20)]
    asked = [
        scene.route(ClientRole.PRODUCER, name, meta=meta, may_create=True) for name in names for meta in ("m1", "m2")
    ]
    answers = await asyncio.gather(*asked)
    for here, there in zip(answers[::2], answers[1::2], strict=True):
        assert here.subjects[0].groups == there.subjects[0].groups
    assert (await scene.route(ClientRole.TOOL)).metas == ["m1:20882", "m2:20882"]


@staged()
async def test_lost_replies_of_the_registry_make_no_second_subject(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.lead("g2")
    await scene.settle()
    scene.ensemble.lose(replies=0.2)
    for number in range(10):
        await scene.route(ClientRole.PRODUCER, f"s{number}", may_create=True)
    scene.ensemble.lose()
    await asyncio.sleep(30)
    for number in range(10):
        routed = await scene.route(ClientRole.PRODUCER, f"s{number}", may_create=True)
        assert routed.subjects[0].groups == (await scene.subject(f"s{number}")).groups


# --- a registry that is away ------------------------------------------------------------------------------------------


@staged()
async def test_without_the_registry_it_answers_from_what_it_knows_and_says_so(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    scene.ensemble.cut("m1")
    await asyncio.sleep(60)
    routed = await scene.route(ClientRole.CONSUMER, "orders")
    assert (routed.subjects[0].groups, routed.is_old) == (["g1"], True)
    assert any("cannot be reached" in remark for remark in scene.remarks)
    assert (await scene.ask(Describe(Depth.SUBJECTS), Described)).broker.is_read_only
    new = await scene.route(ClientRole.PRODUCER, "new", may_create=True)
    assert new.subjects[0].groups == []
    await scene.lead("g1", "g1-b", port=2)
    scene.ensemble.mend("m1")
    await asyncio.sleep(30)
    routed = await scene.route(ClientRole.CONSUMER, "orders")
    assert (routed.groups[0].master, routed.is_old) == ("g1:2", False)
    assert (await scene.route(ClientRole.TOOL)).metas == ["m1:20882"], "its node is made again in the new session"


@staged("m1", "m2")
async def test_a_meta_server_that_is_gone_is_seen_to_be(scene: Scene) -> None:
    await scene.settle()
    await scene.stop("m2")
    await scene.settle()
    assert (await scene.route(ClientRole.TOOL)).metas == ["m1:20882"]


@staged()
async def test_a_node_that_cannot_be_read_is_mentioned_and_leaves_things_as_they_were(scene: Scene) -> None:
    await scene.lead("g1")
    await scene.write(layout.subject_path("orders"), ON_G1)
    await scene.settle()
    node = await scene.hand.get(layout.group_path("g1"))
    assert node is not None
    await scene.hand.put(node.path, b"{not json", node.version)
    await scene.settle()
    assert (await scene.route(ClientRole.CONSUMER, "orders")).groups[0].master == "g1:1"
    assert any("/fairway/groups/g1 cannot be read" in remark for remark in scene.remarks)


# --- bounds -----------------------------------------------------------------------------------------------------------


@staged()
async def test_what_is_no_question_for_a_meta_server_is_refused_with_the_remedy(scene: Scene) -> None:
    client = await scene.client()
    with pytest.raises(Refused, match="meta://HOST:PORT"):
        await client.pull("orders", "g", "c")
    with pytest.raises(Refused, match="only tools"):
        await scene.route(ClientRole.PRODUCER)
    with pytest.raises(Refused, match="at most 5000"):
        await scene.route(ClientRole.PRODUCER, *(f"s{number}" for number in range(5_001)))
    with pytest.raises(Refused) as bad:
        await scene.route(ClientRole.PRODUCER, "no/slash")
    assert bad.value.code is Code.BAD_NAME
    with pytest.raises(Refused, match="zookeeper://HOST:PORT"):
        await scene.ask(Register(Act.GET, 1, "/fairway"), Registered)
    with pytest.raises(Refused):
        await client.ask(m.Leave("orders", "g", "c", 0), m.Done)


def test_an_address_that_others_can_reach_must_be_meant() -> None:
    with pytest.raises(Misuse, match="--allow-remote"):
        MetaOptions(host="0.0.0.0")
    with pytest.raises(Misuse, match="--spread"):
        MetaOptions(spread=0)
