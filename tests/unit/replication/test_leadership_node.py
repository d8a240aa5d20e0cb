"""The group's node: compare-and-set, and what is concluded where no answer comes."""

from __future__ import annotations

import asyncio

import msgspec

from fairway.registry.layout import GroupRecord, RegisteredCopy, member_path, pack
from fairway.replication.leadership import GroupNode, living
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble, SimulatedFaults

RECORD = GroupRecord("broker", 1, "a", ["a"])


def later(epoch: int) -> GroupRecord:
    return msgspec.structs.replace(RECORD, epoch=epoch)


def test_one_of_two_is_faster() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        one, other = (GroupNode(ensemble.client(name), "g") for name in ("one", "other"))
        assert await one.read() is None
        assert await other.read() is None
        made = await asyncio.gather(one.change(later(1)), other.change(msgspec.structs.replace(RECORD, master="b")))
        assert sorted(made) == [False, True]
        assert one.record == other.record
        assert await one.change(later(2))
        assert not await other.change(later(3)), "it has not seen the second"
        assert other.record == later(2)
        assert await other.change(later(3))

    simulate(scenario, 1)


def test_a_node_that_only_holds_members_is_no_group_yet() -> None:
    async def scenario(world: Simulation) -> None:
        registry = SimEnsemble(world).client("one")
        await registry.create(member_path("g", "a"), pack(RegisteredCopy("a", "host", 1)), is_ephemeral=True)
        node = GroupNode(registry, "g")
        assert await node.read() is None
        assert await node.change(RECORD)
        assert await living(registry, "g") == {"a": RegisteredCopy("a", "host", 1)}

    simulate(scenario, 1)


def test_an_unknown_outcome_is_read_back() -> None:
    """Whatever was lost on the way: what `change` says is what the node says."""

    async def scenario(world: Simulation) -> int:
        ensemble = SimEnsemble(world)
        node = GroupNode(ensemble.client("one"), "g")
        await node.read()
        made = 0
        for epoch in range(1, 30):
            ensemble.lose(requests=0.2, replies=0.2)
            is_made = await node.change(later(epoch))
            ensemble.lose()
            seen = GroupNode(ensemble.client(f"witness-{epoch}"), "g")
            assert (await seen.read(fresh=True) == later(epoch)) == is_made
            made += is_made
        return made

    assert 0 < simulate(scenario, 5).result < 29


def test_a_change_that_was_given_up_is_never_made_later() -> None:
    """A request that was lost may sit in some queue, and come out of it when everybody has gone on."""

    async def scenario(world: Simulation) -> int:
        ensemble = SimEnsemble(world, simulated_faults=SimulatedFaults(late_us=3_000_000))
        node = GroupNode(ensemble.client("one"), "g")
        await node.read()
        given_up = 0
        for epoch in range(1, 40):
            ensemble.lose(requests=0.3, replies=0.1)
            is_made = await node.change(later(epoch))
            ensemble.lose()
            await asyncio.sleep(3.1)
            seen = ensemble.tree.get(node.path)
            assert (seen is not None and seen.value == pack(later(epoch))) == is_made
            given_up += not is_made
        return given_up

    assert sum(simulate(scenario, seed).result for seed in range(4)) > 3


def test_who_leads_changes_only_what_it_has_read_itself() -> None:
    """The member reads the node all the time. What it has seen of an operator's change, such as another master, must
    not let a master that has not seen it write over it."""

    async def scenario(world: Simulation) -> None:
        registry = SimEnsemble(world).client("one")
        member = GroupNode(registry, "g")
        await member.read()
        assert await member.change(later(1))
        leader = member.twin()
        operator = GroupNode(registry, "g")
        await operator.read()
        promoted = msgspec.structs.replace(later(2), master="b")
        assert await operator.change(promoted)
        await member.read(fresh=True)
        assert not await leader.change(msgspec.structs.replace(later(1), in_sync=["a", "c"]))
        assert leader.record == promoted

    simulate(scenario, 1)
