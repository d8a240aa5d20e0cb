"""Computations beside the loop: the loop goes on, a few run at a time, and `done` comes back to the loop."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from fairway.runtime.rng import SeededRng
from fairway.runtime.threads import ThreadPool
from fairway.simulation import Simulation
from tests.support.threads import SimPool


def test_the_loop_goes_on_while_a_job_runs_and_done_comes_back_to_it() -> None:
    async def scenario() -> None:
        may_end, ended = threading.Event(), asyncio.Event()
        threads: list[int] = []

        def job() -> None:
            assert may_end.wait(10), "the loop did not go on"
            threads.append(threading.get_ident())

        def done() -> None:
            threads.append(threading.get_ident())
            ended.set()

        ThreadPool().run(job, done)
        asyncio.get_running_loop().call_soon(may_end.set)
        await asyncio.wait_for(ended.wait(), 10)
        assert threads[0] != threads[1] == threading.get_ident()

    asyncio.run(scenario())


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_jobs_run_at_a_time_than_there_are_workers(workers: int) -> None:
    async def scenario() -> int:
        lock, ended = threading.Lock(), asyncio.Event()
        running = most = left = 0
        left = 20

        def job() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            with lock:
                running -= 1

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        pool = ThreadPool(workers)
        for _ in range(20):
            pool.run(job, done)
        await asyncio.wait_for(ended.wait(), 30)
        return most

    assert asyncio.run(scenario()) <= workers


def test_a_simulated_pool_ends_jobs_as_the_seed_decides() -> None:
    def order(seed: int) -> list[int]:
        found: list[int] = []

        async def scenario() -> None:
            pool = SimPool(SeededRng(seed), workers=2)
            for number in range(8):
                pool.run(partial(found.append, number), lambda: None)
            await asyncio.sleep(1)

        with Simulation(seed) as world:
            world.run(scenario())
        return found

    assert sorted(order(1)) == list(range(8))
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 1
