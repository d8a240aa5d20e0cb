"""A group that is switched off in the registry gets nothing from a broker, whoever pulls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from fairway.broker.broker_copy import AGAIN_S, GroupSwitches
from fairway.names import GroupName, Subject
from fairway.registry.layout import SubjectRecord, pack, subject_path, unpack
from fairway.registry.port import Registry, RegistryError
from fairway.simulation import Simulation, simulate
from fairway.simulation.registry import SimEnsemble, SimulatedFaults

ORDERS, BILLING = Subject("orders"), GroupName("billing")
RECORD = SubjectRecord(["east"], ["east"])


@asynccontextmanager
async def looking(
    world: Simulation, registry: Registry, on_change: Callable[[Subject], None] = lambda _: None
) -> AsyncIterator[GroupSwitches]:
    switches = GroupSwitches(registry, world.clock, on_change)
    task = asyncio.ensure_future(switches.run())
    try:
        yield switches
    finally:
        task.cancel()


async def turn(registry: Registry, subject: Subject, *paused: str) -> None:
    path = subject_path(str(subject))
    node = await registry.get(path, fresh=True)
    value = pack(msgspec.structs.replace(RECORD, paused=list(paused)))
    if node is None:
        await registry.create(path, value)
    else:
        await registry.put(path, value, node.version)


def test_a_switch_is_seen_and_whoever_waits_is_told() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        operator = ensemble.client("operator")
        told: list[Subject] = []
        async with looking(world, ensemble.client("broker"), told.append) as switches:
            assert not switches.is_off(ORDERS, BILLING), "nobody knows the subject yet"
            await asyncio.sleep(1)
            await turn(operator, ORDERS, "billing")
            await asyncio.sleep(1)
            assert switches.is_off(ORDERS, BILLING)
            assert not switches.is_off(ORDERS, GroupName("shipping"))
            assert told == [ORDERS]
            await turn(operator, ORDERS)
            await asyncio.sleep(1)
            assert not switches.is_off(ORDERS, BILLING)
            assert told == [ORDERS, ORDERS]

    simulate(scenario, 1)


def test_what_was_known_stays_in_force_while_the_registry_is_away() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        operator = ensemble.client("operator")
        await turn(operator, ORDERS, "billing")
        async with looking(world, ensemble.client("broker")) as switches:
            switches.is_off(ORDERS, BILLING)
            await asyncio.sleep(1)
            assert switches.is_off(ORDERS, BILLING), "the first look is at once"
            ensemble.cut("broker")
            await asyncio.sleep(20)
            assert switches.is_off(ORDERS, BILLING)
            ensemble.mend("broker")
            await turn(operator, ORDERS)
            await asyncio.sleep(20)
            assert not switches.is_off(ORDERS, BILLING)

    simulate(scenario, 1)


def test_many_subjects_are_looked_at_and_forgotten_when_nobody_pulls() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        subjects = [Subject(f"s{number}") for number in range(200)]
        operator = ensemble.client("operator")
        await turn(operator, subjects[-1], "billing")
        async with looking(world, ensemble.client("broker")) as switches:
            for each in subjects:
                switches.is_off(each, BILLING)
            await asyncio.sleep(1)
            off = [each for each in subjects if switches.is_off(each, BILLING)]
            assert off == [subjects[-1]]
            await asyncio.sleep(2 * AGAIN_S + 10)
            await turn(operator, subjects[0], "billing")
            await asyncio.sleep(1)
            assert not switches.is_off(subjects[0], BILLING), "it was forgotten, and is looked at anew"
            assert switches.is_off(subjects[-1], BILLING), "who pulls seldom gets nothing either"
            await asyncio.sleep(1)
            assert switches.is_off(subjects[0], BILLING)
            await turn(operator, subjects[-1])
            await asyncio.sleep(1)
            assert not switches.is_off(subjects[-1], BILLING)

    simulate(scenario, 1)


def test_of_thousands_of_subjects_a_switch_is_seen_within_two_seconds() -> None:
    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world)
        operator = ensemble.client("operator")
        subjects = [Subject(f"s{number}") for number in range(3_000)]
        for each in subjects:
            await turn(operator, each)
        async with looking(world, ensemble.client("broker")) as switches:
            for each in subjects:
                switches.is_off(each, BILLING)
            await asyncio.sleep(2)
            for each in subjects[::1_000]:
                await turn(operator, each, "billing")
                await asyncio.sleep(2)
                assert switches.is_off(each, BILLING)

    simulate(scenario, 1)


@pytest.mark.parametrize("seed", range(30))
def test_no_switch_is_missed_however_the_registry_behaves(seed: int) -> None:
    """Late watches, lost requests and replies, stale reads, connections that break, sessions that end."""

    async def scenario(world: Simulation) -> None:
        ensemble = SimEnsemble(world, simulated_faults=SimulatedFaults(watch_late_us=500_000, stale_us=300_000))
        operator = ensemble.client("operator")
        rng = world.rng.child("switches")
        subjects = [Subject(f"s{number}") for number in range(20)]
        async with looking(world, ensemble.client("broker", session_ms=2_000)) as switches:
            for _ in range(40):
                if rng.below(4) == 0:
                    (ensemble.drop, ensemble.expire)[rng.below(2)]("broker")
                ensemble.lose(requests=0.1 * rng.below(3), replies=0.1 * rng.below(3))
                each = subjects[rng.below(len(subjects))]
                switches.is_off(each, BILLING)
                with suppress(RegistryError):
                    await turn(operator, each, *(["billing"] if rng.below(2) else []))
                await asyncio.sleep(rng.uniform() * 0.5)
            ensemble.lose()
            await asyncio.sleep(5)
            for each in subjects:
                node = ensemble.tree.get(subject_path(str(each)))
                paused = [] if node is None else unpack(SubjectRecord, node.path, node.value).paused
                if each in switches._seen:
                    assert switches.is_off(each, BILLING) == (paused == ["billing"])

    simulate(scenario, seed)
