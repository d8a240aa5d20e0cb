"""Delayed messages whose broker group is drained and given up while its answers are lost: each is delivered."""

from __future__ import annotations

import asyncio

import pytest

from fairway import batch
from fairway.errors import Code, Refused
from fairway.protocol.delay_messages import Resend, Resent, TransitReport
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.route_messages import RouteChange
from tests.simulation.drain_world import DrainWorld

SUBJECT = "orders"


def played(seed: str, story: object, *groups: str) -> None:
    DrainWorld(seed, groups or ("east", "west")).play(story)  # type: ignore[arg-type]


async def in_doubt(world: DrainWorld) -> None:
    """`west` has stored a batch, and its answer was lost; another batch was made for it, and never arrived."""
    await world.create(SUBJECT, "west", "east")
    await world.govern(RouteChange.RETREAT, SUBJECT, "east")
    await world.schedule([b"first"])
    await world.sleep(5)
    world.sim.net.partition("west", "delay", one_way=True)
    await world.schedule([b"stored"])
    await world.sleep(0.2)
    world.sim.net.partition("delay", "west", one_way=True)
    await world.schedule([b"not stored"])
    await world.sleep(0.2)
    assert await world.payloads(host="west") == [b"first", b"stored"]
    world.kill_group("west")
    await world.sleep(60)  # what the network still holds of the answer is of no use once the connection is given up
    world.sim.net.heal("delay", "west")
    await world.govern(RouteChange.DRAIN, "west")
    await world.sleep(5)
    assert await world.in_transit() == [TransitReport("west", 2, is_reachable=False)]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_when_a_group_dies_is_drained_and_given_up(seed: int) -> None:
    async def story(world: DrainWorld) -> None:
        rng = world.sim.rng.child("story")
        world.subjects = tuple(f"{SUBJECT}.{number}" for number in range(6))  # each group is home to some of them
        for subject in world.subjects:
            await world.create(subject, "east", "west")
        payloads = [b"%d" % number for number in range(180)]
        for at in range(0, 180, 3):
            subject = world.subjects[rng.below(6)]
            await world.schedule(payloads[at : at + 3], after_s=1 + rng.below(4_000) / 1_000, subject=subject)
        await asyncio.sleep(1 + rng.below(3_000) / 1_000)
        world.sim.net.partition("west", "delay", one_way=True)
        await asyncio.sleep(rng.below(500) / 1_000)
        world.kill_group("west", is_power_cut=rng.below(2) == 0)
        await asyncio.sleep(60)
        world.sim.net.heal("west", "delay", one_way=True)
        await world.govern(RouteChange.DRAIN, "west")
        if rng.below(2):
            world.kill_delay()
            await world.start_delay()
        await world.start_broker("west")
        await world.sleep(rng.below(20))
        await world.decommissioned("west")
        await world.sleep(60)
        assert await world.in_transit() == []
        assert await world.delivered("east") == dict.fromkeys(payloads, 1)

    played(f"drain {seed}", story)


def test_a_group_that_drains_takes_what_it_may_have_and_nothing_else() -> None:
    async def story(world: DrainWorld) -> None:
        await world.create(SUBJECT, "west")
        data = [batch.encode([b"%d" % at], producer_id=7, first_sequence=at, created_ms=1) for at in range(3)]
        client = await world.client("west")
        await client.ask(Produce(SUBJECT), Produced, [data[0]])
        await world.govern(RouteChange.DRAIN, "west")
        await world.sleep(2)
        for each in data[:2]:
            with pytest.raises(Refused) as refused:
                await client.ask(Produce(SUBJECT), Produced, [each])
            assert refused.value.code is Code.READ_ONLY
        again, _ = await client.ask(Produce(SUBJECT, is_pinned=True), Produced, [data[0]])
        assert again.is_duplicate
        stored, _ = await client.ask(Produce(SUBJECT, is_pinned=True), Produced, [data[1]])
        assert not stored.is_duplicate
        await world.govern(RouteChange.DECOMMISSION, "west")
        await world.sleep(1)
        with pytest.raises(Refused, match="is given up, by command, and takes nothing any more"):
            await client.ask(Produce(SUBJECT, is_pinned=True), Produced, [data[2]])

    played("what it may have", story)


def test_a_group_is_not_given_up_while_delayed_messages_wait_for_it() -> None:
    async def story(world: DrainWorld) -> None:
        await in_doubt(world)
        world.sim.net.partition("delay", "west")
        await world.start_broker("west")
        await world.sleep(2)
        with pytest.raises(
            Refused, match=r"2 delayed messages wait for it at delay servers \(d1 2\), and only it can say"
        ):
            await world.govern(RouteChange.DECOMMISSION, "west")
        record = await world.group_record("west")
        assert record is not None
        assert not record.is_closed, "it takes what it may have, or nobody could deliver it"
        world.sim.net.heal("delay", "west")
        await world.decommissioned("west")
        assert await world.group_record("west") is None
        assert await world.in_transit() == []
        assert await world.delivered("east") == {b"first": 1, b"stored": 1, b"not stored": 1}

    played("not given up", story)


@pytest.mark.parametrize("end", ["none", "stop", "kill"])
def test_a_group_that_was_given_up_opens_again_for_what_a_restored_delay_server_asks(end: str) -> None:
    """A delay server restored from a backup has batches for the group again. Only the group can answer for them."""

    async def story(world: DrainWorld) -> None:
        await in_doubt(world)
        world.back_up_delay()
        await world.start_broker("west")
        await world.sleep(10)
        assert "stop its servers" in await world.govern(RouteChange.DECOMMISSION, "west")
        if end == "stop":
            await world.stop_group("west")
        elif end == "kill":
            world.kill_group("west")
        await world.restore_delay()
        await world.sleep(10)
        with pytest.raises(Refused, match=r"2 delayed messages wait for it at delay servers \(d1 2\)"):
            await world.govern(RouteChange.DECOMMISSION, "west")
        record = await world.group_record("west")
        assert record is not None
        assert not record.is_closed
        assert not record.is_done
        if end != "none":
            await world.start_broker("west")
        await world.sleep(30)
        assert await world.in_transit() == []
        await world.decommissioned("west")
        assert await world.delivered("east") == {b"first": 1, b"stored": 1, b"not stored": 1}

    played("opens again", story)


def test_delay_servers_are_not_given_up_while_their_messages_are_on_their_way() -> None:
    async def story(world: DrainWorld) -> None:
        await in_doubt(world)
        await world.govern(RouteChange.DRAIN, "d1", is_forced=True)
        await world.sleep(2)
        with pytest.raises(Refused, match=r"2 are on their way to their broker groups \(west 2\)"):
            await world.govern(RouteChange.DECOMMISSION, "d1")
        await world.start_broker("west")
        await world.sleep(10)
        assert "stop its servers" in await world.govern(RouteChange.DECOMMISSION, "d1")

    played("delay servers", story)


def test_what_waits_for_a_group_that_is_gone_goes_to_another_by_command() -> None:
    """What the lost group had stored is stored once more, and nothing is stored a third time after a crash."""

    async def story(world: DrainWorld) -> None:
        await in_doubt(world)
        assert "forgotten" in await world.govern(RouteChange.DECOMMISSION, "west", is_forced=True)
        await world.sleep(5)
        assert await world.ask(Resend("west"), Resent) == Resent(2, 0)
        await world.sleep(5)
        assert sorted(await world.payloads(host="east")) == [b"not stored", b"stored"]
        assert await world.in_transit() == []
        world.kill_delay(is_power_cut=True)
        await world.start_delay()
        await world.sleep(10)
        assert await world.ask(Resend("west"), Resent) == Resent(0, 0)
        await world.schedule([b"later"])
        await world.sleep(5)
        assert sorted(await world.payloads(host="east")) == [b"later", b"not stored", b"stored"]

    played("gone", story)


@pytest.mark.parametrize("seed", range(6))
def test_a_crash_while_messages_go_to_another_group_sends_each_once(seed: int) -> None:
    async def story(world: DrainWorld) -> None:
        rng = world.sim.rng.child("story")
        await in_doubt(world)
        await world.govern(RouteChange.DECOMMISSION, "west", is_forced=True)
        await world.sleep(5)
        asked = asyncio.ensure_future(world.ask(Resend("west"), Resent))
        await asyncio.sleep(rng.below(6_000) / 1e6)
        world.kill_delay(is_power_cut=rng.below(2) == 0)
        asked.cancel()
        await world.start_delay()
        await world.sleep(5)
        await world.ask(Resend("west"), Resent)
        await world.sleep(10)
        assert sorted(await world.payloads(host="east")) == [b"not stored", b"stored"]
        assert await world.in_transit() == []

    played(f"crash {seed}", story)


def test_nothing_is_taken_from_a_group_that_can_be_asked() -> None:
    async def story(world: DrainWorld) -> None:
        await in_doubt(world)
        world.sim.net.partition("west", "delay", one_way=True)
        await world.start_broker("west")
        await world.sleep(0.2)
        world.sim.net.heal("west", "delay", one_way=True)
        await world.sleep(10)
        assert await world.ask(Resend("west"), Resent) == Resent(0, 0)
        assert sorted(await world.payloads(host="west")) == [b"first", b"not stored", b"stored"]

    played("can be asked", story)
