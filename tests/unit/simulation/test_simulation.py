"""A world from one seed, and how a run in it ends."""

from __future__ import annotations

import asyncio

import pytest

from fairway.simulation import Simulation, simulate


async def draw(world: Simulation) -> int:
    drawn = world.rng.bits(20)
    await asyncio.sleep(drawn / 1_000)
    return drawn


def test_a_seed_decides_result_and_hash() -> None:
    assert simulate(draw, seed=1) == simulate(draw, seed=1)
    first, second = simulate(draw, seed=1), simulate(draw, seed=2)
    assert first.result != second.result
    assert first.trace_hash != second.trace_hash


def test_runs_follow_one_another_on_the_same_clock() -> None:
    with Simulation(1) as world:
        start_ms = world.clock.wall_ms()
        world.run(asyncio.sleep(60))
        world.run(asyncio.sleep(60))
        assert world.clock.wall_ms() == start_ms + 120_000


async def fail_late() -> None:
    try:
        await asyncio.sleep(3_600)
    finally:
        raise LookupError("while cancelled")


async def leave_something_behind() -> asyncio.Task[None]:
    task = asyncio.create_task(fail_late())
    await asyncio.sleep(1)
    return task


def test_what_fails_at_the_end_is_raised_at_the_end() -> None:
    world = Simulation(1)
    task = world.run(leave_something_behind())
    with pytest.raises(ExceptionGroup) as caught:
        world.close()
    assert [str(each) for each in caught.value.exceptions] == ["while cancelled"]
    assert task.done()


def test_what_fails_at_the_end_does_not_hide_what_failed_before() -> None:
    held = []

    async def main(world: Simulation) -> None:
        held.append(await leave_something_behind())
        raise LookupError("in the run")

    with pytest.raises(LookupError, match="in the run") as caught:
        simulate(main, seed=1)
    assert held[0].done()
    assert "at the end of the simulation ExceptionGroup" in caught.value.__notes__[0]
