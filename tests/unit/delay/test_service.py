"""The clockwork: a turn when it is due, a turn when there is a reason, and never two at once."""

from __future__ import annotations

import asyncio

import pytest

from fairway.delay.service import DueTimer
from fairway.errors import StorageFault
from fairway.runtime.clock import Clock
from fairway.simulation import Simulation, simulate


class Watched:
    """A clockwork whose turns are noted."""

    def __init__(self, clock: Clock, wait_ms: int) -> None:
        self.at_s: list[float] = []
        self.failures: list[Exception] = []
        self.wait_ms = wait_ms
        self.error: Exception | None = None
        self.due_timer = DueTimer(clock, self._turn, self.failures.append)

    def _turn(self) -> int:
        self.at_s.append(round(asyncio.get_running_loop().time(), 3))
        if self.error is not None:
            raise self.error
        return self.wait_ms


def test_it_looks_again_when_it_said_so() -> None:
    async def main(sim: Simulation) -> None:
        watched = Watched(sim.clock, 250)
        start_s = asyncio.get_running_loop().time()
        watched.due_timer.poke()
        await asyncio.sleep(1.1)
        assert [round(each - start_s, 3) for each in watched.at_s] == [0, 0.25, 0.5, 0.75, 1]
        watched.due_timer.stop()

    simulate(main, 0)


def test_many_reasons_are_one_turn_and_it_comes_at_once() -> None:
    async def main(sim: Simulation) -> None:
        watched = Watched(sim.clock, 60_000)
        for _ in range(100):
            watched.due_timer.poke()
        await asyncio.sleep(1)
        assert len(watched.at_s) == 1
        watched.due_timer.poke()
        await asyncio.sleep(30)
        assert len(watched.at_s) == 2
        watched.due_timer.stop()

    simulate(main, 0)


def test_after_a_stop_nothing_turns_any_more() -> None:
    async def main(sim: Simulation) -> None:
        watched = Watched(sim.clock, 10)
        watched.due_timer.poke()
        watched.due_timer.stop()
        watched.due_timer.poke()
        await asyncio.sleep(1)
        assert watched.at_s == []

    simulate(main, 0)


@pytest.mark.parametrize("error", [StorageFault("the disk is gone")])
def test_a_failure_is_told_once_and_ends_it(error: Exception) -> None:
    async def main(sim: Simulation) -> None:
        watched = Watched(sim.clock, 10)
        watched.error = error
        watched.due_timer.poke()
        await asyncio.sleep(1)
        assert watched.failures == [error]
        assert len(watched.at_s) == 1

    simulate(main, 0)
