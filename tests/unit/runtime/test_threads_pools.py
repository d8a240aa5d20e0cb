"""Blocking jobs beside the loop: the loop goes on, and nobody returns while a job still uses its files."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fairway.errors import StorageFault
from fairway.runtime.rng import SeededRng
from fairway.runtime.threads import ThreadRunner
from tests.support.threads import SimRunner


def test_the_loop_goes_on_while_a_job_blocks() -> None:
    async def scenario() -> str:
        may_end = threading.Event()

        def job() -> str:
            assert may_end.wait(10), "the loop did not go on"
            return "done"

        asyncio.get_running_loop().call_soon(may_end.set)
        return await ThreadRunner().run(job)

    assert asyncio.run(scenario()) == "done"


def test_an_error_of_a_job_is_its_callers() -> None:
    def job() -> None:
        raise StorageFault("no such disk")

    with pytest.raises(StorageFault, match="no such disk"):
        asyncio.run(ThreadRunner().run(job))


def test_a_caller_that_is_cancelled_waits_until_its_job_has_ended() -> None:
    async def scenario() -> list[str]:
        may_end, seen = threading.Event(), []

        def job() -> None:
            assert may_end.wait(10)
            seen.append("job")

        task = asyncio.ensure_future(ThreadRunner().run(job))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [*seen, "caller"]

    assert asyncio.run(scenario()) == ["job", "caller"]


def test_in_a_simulation_the_result_is_late() -> None:
    async def scenario() -> int:
        return await SimRunner(SeededRng("jobs"), late_s=0.01).run(lambda: 7)

    assert asyncio.run(scenario()) == 7
