"""Equal requests of tasks, on virtual time: the twin behaves as the threads' coordinator does."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

import fairway
import fairway.aio
from fairway.simulation import Simulation, simulate


def run(story: Any) -> None:
    simulate(story, seed=7)


def coordinator_of(world: Simulation, **options: Any) -> fairway.aio.QueueCoordinator[str]:
    return fairway.aio.QueueCoordinator(clock=world.clock, **options)


def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


def test_one_works_one_waits_the_rest_is_declined() -> None:
    async def story(world: Simulation) -> None:
        coordinator, log = coordinator_of(world), list[str]()

        async def handle(name: str) -> None:
            async with coordinator.acquire("k") as turn:
                if turn.is_mine:
                    log.append(f"{name} begins")
                    await asyncio.sleep(1)
                    log.append(f"{name} ends")

        await asyncio.gather(*(handle(str(number)) for number in range(5)))
        assert log == ["0 begins", "0 ends", "1 begins", "1 ends"]
        told = coordinator.statistics()
        assert (told.accepted, told.waited, told.promoted, told.declined, told.keys) == (1, 1, 1, 3, 0)

    run(story)


def test_dead_head_is_evicted_at_its_time_and_not_before() -> None:
    async def story(world: Simulation) -> None:
        coordinator = coordinator_of(world, timeout=60)
        dead = coordinator.acquire("k")
        await asyncio.sleep(20)
        tail = coordinator.acquire("k")
        assert await tail.wait()
        assert world.clock.monotonic_ns() == 60 * 10**9
        assert dead.status is fairway.RequestStatus.EVICTED
        assert not dead.release()
        assert tail.renew()
        assert tail.release()

    run(story)


def test_head_that_renews_is_waited_for() -> None:
    async def story(world: Simulation) -> None:
        coordinator = coordinator_of(world, timeout=60)
        head, tail = coordinator.acquire("k"), coordinator.acquire("k")
        waiting = started(tail.wait())
        for _ in range(5):
            await asyncio.sleep(50)
            assert head.renew()
        assert not waiting.done()
        head.release()
        assert await waiting

    run(story)


def test_task_that_is_cancelled_gives_up_its_place() -> None:
    async def story(world: Simulation) -> None:
        coordinator = coordinator_of(world)
        head, tail = coordinator.acquire("k"), coordinator.acquire("k")
        waiting = started(tail.wait())
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert tail.status is fairway.RequestStatus.WITHDRAWN
        assert coordinator.acquire("k").status is fairway.RequestStatus.WAITING
        assert head.is_mine

    run(story)


def test_task_that_is_cancelled_as_its_turn_comes_lets_the_next_go() -> None:
    async def story(world: Simulation) -> None:
        coordinator = coordinator_of(world)
        head, tail = coordinator.acquire("k"), coordinator.acquire("k")
        waiting = started(tail.wait())
        await asyncio.sleep(1)
        head.release()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert coordinator.statistics().keys == 0

    run(story)


def test_waiting_has_a_limit_if_one_is_given_and_latest_displaces() -> None:
    async def story(world: Simulation) -> None:
        coordinator = coordinator_of(world, keep="latest")
        head, second = coordinator.acquire("k"), coordinator.acquire("k")
        waiting = started(second.wait())
        await asyncio.sleep(1)
        third = coordinator.acquire("k")
        assert not await waiting
        assert not await third.wait(2)
        assert world.clock.monotonic_ns() == 3 * 10**9
        assert third.status is fairway.RequestStatus.WITHDRAWN
        assert head.release()
        assert coordinator.sweep() == 0

    run(story)


def test_async_handlers_are_coalesced() -> None:
    async def story(world: Simulation) -> None:
        coordinator, handled = coordinator_of(world), list[str]()

        @coordinator.coalesced(lambda request: request or None)
        async def handle(request: str) -> str:
            await asyncio.sleep(1)
            handled.append(request)
            return request

        assert inspect.iscoroutinefunction(handle)  # what a listener looks at
        assert await asyncio.gather(*map(handle, ["k", "k", "k", "", ""])) == ["k", "k", None, "", ""]
        assert sorted(handled) == ["", "", "k", "k"]
        with pytest.raises(fairway.Misuse):
            coordinator.acquire(None)  # type: ignore[arg-type]

    run(story)
