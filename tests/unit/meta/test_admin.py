"""What operators decide about subjects and groups of servers, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fairway import batch, limits
from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.errors import Refused
from fairway.limits import MIB
from fairway.protocol.route_messages import ClientRole, RouteChange
from fairway.registry import layout
from fairway.registry.layout import GroupRecord
from fairway.simulation.disk import SimDisk
from fairway.storage.store import StoreOptions
from tests.support.client import Client
from tests.unit.meta.scene import Scene, staged

BROKER_PORT = 1


async def led(scene: Scene, *groups: str) -> None:
    for name in groups:
        await scene.lead(name)
    await scene.settle()


# --- subjects ---------------------------------------------------------------------------------------------------------


@staged()
async def test_a_subject_is_created_by_command_and_twice_does_no_harm(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    assert await scene.govern(RouteChange.CREATE, "orders", "g2") == "subject orders is on g2"
    assert await scene.govern(RouteChange.CREATE, "orders", "g2") == ""
    assert await scene.govern(RouteChange.CREATE, "orders") == ""
    with pytest.raises(Refused, match="exists, on g2: `fairway subject extend orders --to g1`"):
        await scene.govern(RouteChange.CREATE, "orders", "g1")
    with pytest.raises(Refused, match="there is no broker group g9"):
        await scene.govern(RouteChange.CREATE, "mails", "g9")
    with pytest.raises(Refused, match="bad subject name"):
        await scene.govern(RouteChange.CREATE, "no/slash")
    with pytest.raises(Refused, match="BAD_NAME: nameless-7 would stand for a subject whose name is lost"):
        await scene.govern(RouteChange.CREATE, "nameless-7")


@staged()
async def test_a_removed_subject_is_forgotten_and_can_be_made_elsewhere(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    assert await scene.govern(RouteChange.REMOVE, "orders") == "subject orders is removed"
    assert await scene.govern(RouteChange.REMOVE, "orders") == ""
    await scene.settle()
    assert await scene.govern(RouteChange.CREATE, "orders", "g2") == "subject orders is on g2"
    with pytest.raises(Refused, match="bad subject name"):
        await scene.govern(RouteChange.REMOVE, "no/slash")


def test_a_flood_of_creations_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By command it is refused, on first use it is put off; another connection has its own share."""
    monkeypatch.setattr(limits, "SUBJECTS_CREATED_BURST", 20)
    monkeypatch.setattr(limits, "SUBJECTS_CREATED_PER_S", 2)

    async def story(scene: Scene) -> None:
        await led(scene, "g1")
        made = 0
        for number in range(15):
            with contextlib.suppress(Refused):
                made += bool(await scene.govern(RouteChange.CREATE, f"flood-{number}"))
        assert made == 10
        assert await scene.govern(RouteChange.CREATE, "flood-0") == ""  # what exists is no creation
        other = await scene.dial()
        names = [f"used-{number}" for number in range(15)]
        routed = await scene.route(ClientRole.PRODUCER, *names, client=other, may_create=True)
        assert 10 <= sum(bool(each.groups) for each in routed.subjects) < 15
        assert "subjects are made at 2 a second" in routed.subjects[-1].why
        await asyncio.sleep(10)
        routed = await scene.route(ClientRole.PRODUCER, *names, client=other, may_create=True)
        assert all(each.groups for each in routed.subjects)
        other.close()

    Scene(("m1",), {}).play(story)


@staged()
async def test_a_subject_is_extended_to_named_groups_or_to_a_number_in_all(scene: Scene) -> None:
    await led(scene, "g1", "g2", "g3")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    assert await scene.govern(RouteChange.EXTEND, "orders", "g3") == "subject orders is on g1, g3"
    assert await scene.govern(RouteChange.EXTEND, "orders", number=3) == "subject orders is on g1, g3, g2"
    assert await scene.govern(RouteChange.EXTEND, "orders", number=3) == ""
    with pytest.raises(Refused, match="1 more broker group is asked for and 0"):
        await scene.govern(RouteChange.EXTEND, "orders", number=4)
    with pytest.raises(Refused, match="`fairway subject create mails`"):
        await scene.govern(RouteChange.EXTEND, "mails", "g1")
    with pytest.raises(Refused, match="how many"):
        await scene.govern(RouteChange.EXTEND, "orders")


@staged()
async def test_a_subject_is_not_extended_to_a_group_that_is_dead(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    await scene.die("g2")
    await scene.settle()
    with pytest.raises(Refused, match="g2 has no master"):
        await scene.govern(RouteChange.EXTEND, "orders", "g2")


@staged()
async def test_a_subject_retreats_from_a_group_and_is_still_consumed_there(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    assert await scene.govern(RouteChange.RETREAT, "orders", "g1") == "subject orders takes new messages on g2"
    assert (await scene.route(ClientRole.PRODUCER, "orders")).subjects[0].writable == ["g2"]
    assert (await scene.route(ClientRole.CONSUMER, "orders")).subjects[0].groups == ["g1", "g2"]


@staged()
async def test_a_read_only_subject_is_told_to_producers_at_once(scene: Scene) -> None:
    await led(scene, "g1")
    await scene.govern(RouteChange.CREATE, "orders")
    known = (await scene.route(ClientRole.PRODUCER, "orders")).version
    poll = asyncio.ensure_future(
        scene.route(ClientRole.PRODUCER, "orders", client=await scene.dial(), known=known, wait_ms=9_000)
    )
    await asyncio.sleep(0.1)
    assert await scene.govern(RouteChange.READ_ONLY, "orders") == "subject orders is read-only, on g1"
    assert (await poll).subjects[0].writable == []
    assert "takes messages again" in await scene.govern(RouteChange.READ_ONLY, "orders", is_on=False)
    assert (await scene.route(ClientRole.PRODUCER, "orders")).subjects[0].writable == ["g1"]


@staged("m1", "m2")
async def test_consumer_groups_are_switched_off_and_on_for_all_meta_servers(scene: Scene) -> None:
    await led(scene, "g1")
    await scene.govern(RouteChange.CREATE, "orders")
    assert "nothing to billing, mail" in await scene.govern(RouteChange.PAUSE, "orders", "billing", "mail")
    await scene.settle()
    assert (await scene.route(ClientRole.CONSUMER, "orders", meta="m2")).subjects[0].paused == ["billing", "mail"]
    await scene.govern(RouteChange.PAUSE, "orders", "mail", is_on=False, meta="m2")
    assert (await scene.subject("orders")).paused == ["billing"]
    with pytest.raises(Refused, match="no consumer group"):
        await scene.govern(RouteChange.PAUSE, "orders")


@staged()
async def test_options_of_a_subject_are_kept_and_taken_away(scene: Scene) -> None:
    await led(scene, "g1")
    await scene.govern(RouteChange.CREATE, "orders", options={"ordered": "true", "team": "shop"})
    [told] = (await scene.route(ClientRole.PRODUCER, "orders")).subjects
    assert (told.is_ordered, told.options) == (True, {"team": "shop"})
    await scene.govern(RouteChange.OPTIONS, "orders", options={"team": "", "ordered": "false"})
    [told] = (await scene.route(ClientRole.PRODUCER, "orders")).subjects
    assert (told.is_ordered, told.options) == (False, {})
    with pytest.raises(Refused, match="true or false"):
        await scene.govern(RouteChange.OPTIONS, "orders", options={"ordered": "perhaps"})


@staged()
async def test_a_change_is_made_once_whatever_the_registry_loses(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    scene.ensemble.lose(requests=0.05, replies=0.05)

    for number in range(6):
        for _ in range(20):
            with contextlib.suppress(Refused):  # nobody knows: ask again
                await scene.govern(RouteChange.PAUSE, "orders", f"c{number}")
                break
    scene.ensemble.lose()
    await asyncio.sleep(10)
    assert (await scene.subject("orders")).paused == [f"c{number}" for number in range(6)]


# --- groups of servers ------------------------------------------------------------------------------------------------


@staged()
async def test_a_group_that_is_drained_gets_no_new_messages_and_is_still_consumed(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "only", "g1")
    await scene.govern(RouteChange.CREATE, "both", "g1", "g2")
    await scene.govern(RouteChange.CREATE, "other", "g2")
    assert (
        await scene.govern(RouteChange.DRAIN, "g1")
        == "group g1 is being drained: new messages of 2 subjects go elsewhere from now on"
    )
    assert await scene.govern(RouteChange.DRAIN, "g1") == ""
    for name in ("only", "both", "other"):
        assert (await scene.route(ClientRole.PRODUCER, name)).subjects[0].writable == ["g2"]
    assert (await scene.route(ClientRole.CONSUMER, "only")).subjects[0].groups == ["g1", "g2"]
    for number in range(4):
        assert (await scene.route(ClientRole.PRODUCER, f"new{number}", may_create=True)).subjects[0].groups == ["g2"]
    assert "takes messages again, of 2 subjects" in await scene.govern(RouteChange.DRAIN, "g1", is_on=False)
    assert (await scene.route(ClientRole.PRODUCER, "only")).subjects[0].writable == ["g2", "g1"]


@staged()
async def test_the_last_group_is_drained_only_by_force(scene: Scene) -> None:
    await led(scene, "g1")
    await scene.govern(RouteChange.CREATE, "orders")
    with pytest.raises(Refused, match=r"nobody else would take messages of orders.*--force"):
        await scene.govern(RouteChange.DRAIN, "g1")
    assert not (await scene.record(GroupRecord, layout.group_path("g1"))).is_draining
    await scene.govern(RouteChange.DRAIN, "g1", is_forced=True)
    assert (await scene.route(ClientRole.PRODUCER, "orders")).subjects[0].writable == []


class Brokers:
    """Real brokers behind the groups, for questions about what they owe."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.brokers: list[Broker] = []

    async def start(self, group: str) -> None:
        sim = self.scene.sim
        disk = SimDisk(sim.rng.child(group), sim.loop.call_later, capacity_bytes=16 * MIB)
        world = BrokerWorld(sim.clock, disk, sim.net.host(group), sim.rng.child(f"{group} broker"))
        options = BrokerOptions(
            host=group,
            port=BROKER_PORT,
            allow_remote=True,
            store=StoreOptions(low_water_bytes=0, action_segment_bytes=1 << 16),
        )
        self.brokers.append(await Broker.start(world, options))
        await self.scene.lead(group, port=BROKER_PORT)
        await self.scene.settle()

    async def close(self, group: str) -> None:
        """What a master does, of its own accord, once the group's node says that it takes nothing any more."""
        for _ in range(200):
            record = await self.scene.record(GroupRecord, layout.group_path(group))
            directory = f"{group}-a"
            await self.scene.live(group, directory, BROKER_PORT, is_closed=record.is_closed)
            await asyncio.sleep(0.1)

    async def client(self, group: str) -> Client:
        return await Client.connect(self.scene.sim.net.host("client"), self.scene.sim.clock, group, BROKER_PORT)

    async def stop(self) -> None:
        for broker in self.brokers:
            await broker.stop()


async def sent(client: Client, payloads: list[bytes]) -> None:
    await client.produce("orders", batch.encode(payloads, producer_id=1, first_sequence=0, created_ms=1))


@staged()
async def test_a_group_is_decommissioned_when_nobody_is_owed_anything(scene: Scene) -> None:
    brokers = Brokers(scene)
    await brokers.start("g1")
    await led(scene, "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    client = await brokers.client("g1")
    await sent(client, [b"a", b"b"])
    await client.join("orders", "billing", "c1")
    with pytest.raises(Refused, match="`fairway cluster drain g1` first"):
        await scene.govern(RouteChange.DECOMMISSION, "g1")
    await scene.govern(RouteChange.DRAIN, "g1")
    with pytest.raises(Refused, match="its master does not say that it has closed"):
        await scene.govern(RouteChange.DECOMMISSION, "g1")
    assert not (await scene.record(GroupRecord, layout.group_path("g1"))).is_closed
    closing = asyncio.ensure_future(brokers.close("g1"))
    with pytest.raises(Refused, match="2 messages are owed to consumers \\(billing on orders 2\\)"):
        await scene.govern(RouteChange.DECOMMISSION, "g1")
    delivery = await client.pull("orders", "billing", "c1")
    await client.settle("orders", "billing", "c1", delivery.lots, arrived=delivery.number)
    assert "stop its servers" in await scene.govern(RouteChange.DECOMMISSION, "g1")
    assert (await scene.record(GroupRecord, layout.group_path("g1"))).is_closed
    assert (await scene.subject("orders")).writable == ["g2"]
    assert set((await scene.subject("orders")).groups) == {"g1", "g2"}, "senders of doubtful batches find it"
    closing.cancel()
    await scene.die("g1")
    await scene.settle()
    assert "forgotten" in await scene.govern(RouteChange.DECOMMISSION, "g1")
    await scene.settle()
    assert await scene.hand.children(layout.GROUPS) == ["g2"]
    assert (await scene.subject("orders")).groups == ["g2"]
    await brokers.stop()


@staged()
async def test_a_group_is_not_given_up_while_delay_servers_cannot_be_asked(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.lead("d1", kind="delay")
    await scene.die("d1")
    await scene.govern(RouteChange.DRAIN, "g1")
    await scene.die("g1")
    await scene.settle()
    with pytest.raises(Refused, match="group d1 of delay servers has no master to say what it owes to g1: start the"):
        await scene.govern(RouteChange.DECOMMISSION, "g1")
    await scene.change_group("d1", is_draining=True, is_done=True)  # it is stopped, and owed nothing
    await scene.settle()
    assert "forgotten" in await scene.govern(RouteChange.DECOMMISSION, "g1")


@staged()
async def test_a_dead_group_is_decommissioned_only_by_force(scene: Scene) -> None:
    await led(scene, "g1", "g2")
    await scene.govern(RouteChange.CREATE, "orders", "g1")
    await scene.die("g1")
    await scene.settle()
    await scene.govern(RouteChange.DRAIN, "g1")
    with pytest.raises(Refused, match="nobody can say what it still owes"):
        await scene.govern(RouteChange.DECOMMISSION, "g1")
    assert "forgotten" in await scene.govern(RouteChange.DECOMMISSION, "g1", is_forced=True)
    assert (await scene.subject("orders")).groups == ["g2"]
    with pytest.raises(Refused, match="there is no group g1 of servers: there are g2"):
        await scene.govern(RouteChange.DRAIN, "g1")
    await scene.live("g1", "late-comer")
    await scene.settle()
    for change in (RouteChange.DRAIN, RouteChange.DECOMMISSION):
        with pytest.raises(Refused, match="group g1 of servers is not in the registry, though servers of it run"):
            await scene.govern(change, "g1")
    with pytest.raises(Refused, match=r"there is no group g3 of servers: there are g2$"):
        await scene.govern(RouteChange.DRAIN, "g3")


@staged()
async def test_delay_servers_that_owed_nothing_are_forgotten_once_they_are_stopped(scene: Scene) -> None:
    """What is pending they can say only while they live: that it was nothing is remembered."""
    await scene.lead("d1", kind="delay", is_draining=True, is_done=True)
    await scene.die("d1")
    await scene.settle()
    await scene.govern(RouteChange.DRAIN, "d1", is_on=False)
    await scene.govern(RouteChange.DRAIN, "d1")
    with pytest.raises(Refused, match="nobody can say what it still owes"):
        await scene.govern(RouteChange.DECOMMISSION, "d1")  # it took messages again in between
    await scene.change_group("d1", is_done=True)
    await scene.settle()
    assert "forgotten" in await scene.govern(RouteChange.DECOMMISSION, "d1")


@staged()
async def test_a_copy_that_will_not_come_back_is_forgotten(scene: Scene) -> None:
    await led(scene, "g1")
    await scene.change_group("g1", members=["g1-a", "old"], in_sync=["g1-a", "old"])
    await scene.settle()
    with pytest.raises(Refused, match="counts as in sync"):
        await scene.govern(RouteChange.DECOMMISSION, "g1", "old")
    with pytest.raises(Refused, match="lives: stop its server first"):
        await scene.govern(RouteChange.DECOMMISSION, "g1", "g1-a")
    await scene.change_group("g1", in_sync=["g1-a"])
    await scene.settle()
    assert await scene.govern(RouteChange.DECOMMISSION, "g1", "old") == "group g1 has forgotten old"
    assert (await scene.record(GroupRecord, layout.group_path("g1"))).members == ["g1-a"]
