"""A delay server in a cluster: it is in the registry by itself, and its messages reach whoever leads their group."""

from __future__ import annotations

import pytest

from fairway.errors import WrongDirectory
from fairway.lookup.routes import home
from fairway.names import Subject
from fairway.protocol.admin_messages import Removed, RemoveSubject
from fairway.protocol.route_messages import RouteChange
from fairway.registry import layout
from fairway.registry.layout import SubjectRecord
from fairway.replication.leadership import change_master
from tests.unit.delay.cluster import Cluster, in_cluster
from tests.unit.delay.scene import PORT

MINUTE_S = 60


# --- in the registry --------------------------------------------------------------------------------------------------


@in_cluster()
async def test_it_registers_itself_and_is_gone_when_it_stops(cluster: Cluster) -> None:
    record = await cluster.record()
    [member] = await cluster.members_shown()
    assert (record.kind, record.epoch, record.master, record.in_sync) == (
        "delay",
        1,
        member.directory,
        [member.directory],
    )
    assert (member.host, member.port, member.role, member.epoch) == ("delay", PORT, "master", 1)
    assert member.kind == "delay"
    await cluster.stop_copy("delay")
    assert await cluster.members_shown() == []
    assert await cluster.record() == record, "the group stays, with what is pending"


@in_cluster()
async def test_every_start_has_the_next_epoch_and_takes_the_place_of_the_life_before(cluster: Cluster) -> None:
    for life in range(2, 5):
        cluster.kill_delay()
        await cluster.start_delay()  # before the session of the life before has ended
        await cluster.sleep(3)
        [member] = await cluster.members_shown()
        assert ((await cluster.record()).epoch, member.epoch) == (life, life)
        await cluster.sleep(30)
        assert len(await cluster.members_shown()) == 1, "the end of the old session takes nothing with it"


@in_cluster()
async def test_it_leads_again_after_a_lost_session(cluster: Cluster) -> None:
    await cluster.create("orders")
    await cluster.schedule([b"a"], after_s=30)
    cluster.ensemble.expire(cluster.registries["delay"].name)
    await cluster.sleep(5)
    await cluster.led()
    [member] = await cluster.members_shown()
    assert (member.role, member.epoch) == ("master", 2)
    await cluster.sleep(30)
    assert await cluster.payloads() == [b"a"]


@in_cluster()
async def test_answers_that_are_lost_leave_neither_two_members_nor_two_lives_with_one_epoch(cluster: Cluster) -> None:
    for _ in range(6):
        before = (await cluster.record()).epoch
        cluster.kill_delay()
        cluster.ensemble.lose(requests=0.05, replies=0.1)
        await cluster.start_delay()
        await cluster.sleep(20)
        cluster.ensemble.lose()
        await cluster.sleep(20)
        await cluster.led()
        [member] = await cluster.members_shown()
        assert member.epoch == (await cluster.record()).epoch > before


@in_cluster()
async def test_the_name_of_a_broker_group_is_refused(cluster: Cluster) -> None:
    cluster.group = "g1"
    with pytest.raises(WrongDirectory, match="g1 is a group of brokers, and this is one of delay servers"):
        await cluster.start_copy("other")
    del cluster.members["other"]


@in_cluster()
async def test_a_copy_of_its_directory_is_refused(cluster: Cluster) -> None:
    await cluster.stop_copy("delay")
    cluster.disks["other"] = cluster.disks["delay"].beside().crash()
    await cluster.start_delay()
    other = await cluster.start_copy("other")
    await other.failed()
    with pytest.raises(WrongDirectory, match="this directory is a copy of that one's"):
        await other.stop()
    del cluster.members["other"]
    assert len((await cluster.record()).in_sync) == 1


@in_cluster()
async def test_it_tells_others_where_to_find_it(cluster: Cluster) -> None:
    cluster.group = "d2"
    await cluster.start_copy("other", advertise=("outside.example", 7_000))
    await cluster.sleep(1)
    [member] = await cluster.members_shown()
    assert (member.host, member.port) == ("outside.example", 7_000)
    await cluster.stop_copy("other")


@in_cluster()
async def test_a_group_that_the_registry_has_lost_waits_until_it_is_made_anew(cluster: Cluster) -> None:
    await cluster.create("orders")
    await cluster.schedule([b"a"], after_s=10)
    [member] = await cluster.members_shown()
    [place] = await cluster.hand.children(layout.members_path("d1"))
    await cluster.hand.remove(layout.member_path("d1", place))
    await cluster.hand.remove(layout.members_path("d1"))
    await cluster.hand.remove(layout.group_path("d1"))
    await cluster.sleep(30)
    assert "the registry knows no group d1" in cluster.members["delay"].sentence()
    assert await cluster.payloads() == []
    await change_master(cluster.hand, "d1", member.directory, accepts_data_loss=True)
    await cluster.led()
    await cluster.sleep(5)
    assert await cluster.payloads() == [b"a"]
    assert (await cluster.record()).kind == "delay"


# --- where messages go ------------------------------------------------------------------------------------------------


@in_cluster("g1", "g2")
async def test_a_message_goes_to_a_group_of_its_subject(cluster: Cluster) -> None:
    for group in ("g1", "g2"):
        await cluster.create(f"only-{group}", group)
        await cluster.schedule([group.encode()], after_s=5, subject=f"only-{group}")
    await cluster.sleep(6)
    for group in ("g1", "g2"):
        assert await cluster.payloads(f"only-{group}", group) == [group.encode()]


@in_cluster("g1", "g2")
async def test_a_subject_that_nobody_knows_is_made_when_its_first_message_is_due(cluster: Cluster) -> None:
    await cluster.schedule([b"a"], after_s=5, subject="fresh")
    await cluster.sleep(7)
    path = layout.subject_path("fresh")
    node = await cluster.hand.get(path, fresh=True)
    assert node is not None
    [group] = layout.unpack(SubjectRecord, path, node.value).groups
    assert await cluster.payloads("fresh", group) == [b"a"]


@in_cluster("g1", "g2")
async def test_subjects_are_spread_over_the_groups_that_take_them(cluster: Cluster) -> None:
    subjects = [f"subject-{number}" for number in range(12)]
    for subject in subjects:
        await cluster.create(subject, "g1", "g2")
        await cluster.schedule([b"a", b"b"], after_s=5, subject=subject)
    await cluster.sleep(10)
    homes = {
        subject: (await cluster.payloads(subject, "g1"), await cluster.payloads(subject, "g2")) for subject in subjects
    }
    assert set(map(str, homes.values())) == {"([b'a', b'b'], [])", "([], [b'a', b'b'])"}


@in_cluster("g1", "g2")
async def test_a_group_that_is_down_delays_only_its_own_subjects(cluster: Cluster) -> None:
    await cluster.create("east", "g1")
    await cluster.create("west", "g2")
    cluster.kill_broker("g2")
    await cluster.leave("g2")
    for subject in ("east", "west"):
        await cluster.schedule([subject.encode()], after_s=5, subject=subject)
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads("east") == [b"east"]
    assert cluster.delay.engine.held_back == 1
    await cluster.start_broker("g2")
    await cluster.lead("g2")
    await cluster.sleep(10)
    assert await cluster.payloads("west") == [b"west"]


async def homes_of_orders(cluster: Cluster) -> tuple[str, str]:
    """The group that a subject on both belongs to, once both are connected; and the other one."""
    await cluster.create("orders", "g1", "g2")
    assert cluster.delay.dispatch_sender.route(Subject("orders")) is None, "nobody has said where it is"
    await cluster.sleep(5)
    home = cluster.delay.dispatch_sender.route(Subject("orders"))
    assert home is not None
    return home, {"g1": "g2", "g2": "g1"}[home]


@in_cluster("g1", "g2")
async def test_while_a_group_is_down_its_subjects_go_to_their_other_groups(cluster: Cluster) -> None:
    home, other = await homes_of_orders(cluster)
    cluster.kill_broker(home)  # whether or not its session has ended
    await cluster.sleep(3)
    await cluster.schedule([b"second"], after_s=2)
    await cluster.sleep(10)
    assert await cluster.payloads("orders", other) == [b"second"]
    await cluster.start_broker(home)
    await cluster.sleep(5)
    await cluster.schedule([b"third"], after_s=2)
    await cluster.sleep(10)
    assert await cluster.payloads("orders", home) == [b"third"]


@in_cluster("g1", "g2")
async def test_what_was_made_for_a_group_goes_to_that_group_whatever_happens(cluster: Cluster) -> None:
    """On its way when the group was lost, through a restart of the delay server, while another takes the subject."""
    home, other = await homes_of_orders(cluster)
    cluster.sim.net.partition("delay", home)  # nobody is told: the line still counts as open
    await cluster.schedule([b"second"], after_s=2)
    await cluster.sleep(3)
    cluster.kill_delay(is_power_cut=True)
    await cluster.start_delay()
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads("orders", other) == []
    assert cluster.delay.dispatch_sender.messages == 1
    await cluster.schedule([b"third"], after_s=2)
    await cluster.sleep(10)
    assert await cluster.payloads("orders", other) == [b"third"]
    cluster.sim.net.heal("delay", home)
    await cluster.sleep(20)
    assert await cluster.payloads("orders", home) == [b"second"]
    assert cluster.delay.dispatch_sender.messages == 0


@in_cluster("g1", "heir")
async def test_messages_follow_the_master_of_their_group(cluster: Cluster) -> None:
    await cluster.create("orders", "g1")
    await cluster.schedule([b"before"], after_s=2)
    await cluster.sleep(5)
    cluster.kill_broker("g1")
    await cluster.leave("g1")
    await cluster.schedule([b"after"], after_s=2)
    await cluster.sleep(5)
    await cluster.lead("g1", host="heir")
    await cluster.sleep(5)
    assert await cluster.payloads("orders", "heir") == [b"after"]


@in_cluster("g1", "g2")
async def test_a_read_only_subject_waits_until_it_is_opened(cluster: Cluster) -> None:
    await cluster.create("orders", "g1")
    await cluster.govern(RouteChange.READ_ONLY, "orders")
    await cluster.schedule([b"a"], after_s=5)
    await cluster.sleep(MINUTE_S)
    assert await cluster.payloads() == []
    await cluster.govern(RouteChange.READ_ONLY, "orders", is_on=False)
    await cluster.sleep(5)
    assert await cluster.payloads() == [b"a"]


@in_cluster("g1", "g2")
async def test_the_keys_of_an_ordered_subject_stay_with_their_group(cluster: Cluster) -> None:
    """The group that clients send them to as well; while it is away they wait for it, and nobody else does."""
    await cluster.govern(RouteChange.CREATE, "orders", "g1", "g2", options={"ordered": "true"})
    cluster.delay.dispatch_sender.route(Subject("orders"))
    await cluster.sleep(5)
    keys = [f"key-{number}" for number in range(40)]
    homes = {key: ("g1", "g2")[home(key, ("g1", "g2"))] for key in keys}
    assert set(homes.values()) == {"g1", "g2"}
    await cluster.schedule([key.encode() for key in keys], after_s=5, keys=[*keys])
    await cluster.sleep(10)
    for name in ("g1", "g2"):
        there = [key.encode() for key in keys if homes[key] == name]
        assert await cluster.payloads("orders", name) == there
    cluster.kill_broker("g2")
    await cluster.sleep(3)
    await cluster.schedule([b"again " + key.encode() for key in keys], after_s=5, keys=[*keys])
    await cluster.sleep(10)
    assert sum(each.startswith(b"again ") for each in await cluster.payloads("orders", "g1")) == [
        *homes.values()
    ].count("g1")
    await cluster.start_broker("g2")
    await cluster.sleep(10)
    assert len(await cluster.payloads("orders", "g2")) == 2 * [*homes.values()].count("g2")


@in_cluster("g1", "g2")
async def test_keys_that_wait_by_the_thousand_hold_back_no_other_key(cluster: Cluster) -> None:
    await cluster.govern(RouteChange.CREATE, "orders", "g1", "g2", options={"ordered": "true"})
    cluster.delay.dispatch_sender.route(Subject("orders"))
    await cluster.sleep(5)
    east, west = (next(key for key in map(str, range(100)) if home(key, ("g1", "g2")) == group) for group in (0, 1))
    cluster.kill_broker("g2")
    await cluster.sleep(3)
    for _ in range(3):
        await cluster.schedule([b"west"] * 1_000, after_s=20, keys=[west] * 1_000)
    await cluster.schedule([b"east"], after_s=20, keys=[east])
    await cluster.sleep(30)
    assert await cluster.payloads("orders") == [b"east"]
    await cluster.start_broker("g2")
    await cluster.sleep(30)
    assert len(await cluster.payloads("orders", "g2")) == 3_000


@in_cluster("g1", "g2")
async def test_a_group_that_no_subject_names_any_more_is_left_in_peace(cluster: Cluster) -> None:
    for group in ("g1", "g2"):
        await cluster.create(f"only-{group}", group)
        await cluster.schedule([b"a"], after_s=1, subject=f"only-{group}")
    await cluster.sleep(5)
    assert {target.name for target in cluster.delay.dispatch_sender} == {"g1", "g2"}
    at_g1 = await cluster.client("g1")
    await at_g1.ask(RemoveSubject("only-g1", is_forced=True), Removed)  # or the route would name it again
    path = layout.subject_path("only-g1")
    node = await cluster.hand.get(path, fresh=True)
    assert node is not None
    await cluster.hand.put(path, layout.pack(SubjectRecord(["g2"], ["g2"])), node.version)
    await cluster.sleep(5)
    assert {target.name for target in cluster.delay.dispatch_sender} == {"g2"}
    await cluster.schedule([b"b"], after_s=1, subject="only-g1")
    await cluster.sleep(5)
    assert await cluster.payloads("only-g1", "g2") == [b"b"]


# --- meta servers -----------------------------------------------------------------------------------------------------


@in_cluster("g1")
async def test_what_is_known_stays_in_force_without_meta_servers(cluster: Cluster) -> None:
    await cluster.create("orders", "g1")
    await cluster.schedule([b"a"], after_s=5)
    await cluster.sleep(10)
    await cluster.metas.pop("m1").stop()
    await cluster.schedule([b"b"], after_s=5)
    await cluster.sleep(10)
    assert await cluster.payloads() == [b"a", b"b"]
    await cluster.schedule([b"c"], after_s=5, subject="unheard-of")
    await cluster.sleep(10)
    await cluster.start_meta("m2")  # which it finds in the registry
    await cluster.sleep(10)
    assert await cluster.payloads("unheard-of") == [b"c"]


@in_cluster("g1")
async def test_more_subjects_than_a_question_holds_take_turns(cluster: Cluster) -> None:
    assert cluster.server is not None
    assert cluster.server._target_finder is not None
    cluster.server._target_finder._subjects_max = 3
    subjects = [f"subject-{number}" for number in range(12)]
    for subject in subjects:
        await cluster.schedule([subject.encode()], after_s=5, subject=subject)
    await cluster.sleep(MINUTE_S)
    assert [await cluster.payloads(subject) for subject in subjects] == [[subject.encode()] for subject in subjects]
    assert not cluster.delay.dispatch_sender.route(Subject("never-seen"))
