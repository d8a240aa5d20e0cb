"""A wait for one's turn that ends by its timeout, on the real loops: uvloop returns a plain handle for short ones."""

from __future__ import annotations

import pytest

import fairway.aio
from tests.unit.runtime.loops import LOOPS, on_loop


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("timeout_s", [0.0001, 0.0004, 0.002])
def test_a_turn_that_does_not_come_in_time(kind: str, timeout_s: float) -> None:
    async def story() -> None:
        coordinator: fairway.aio.QueueCoordinator[str] = fairway.aio.QueueCoordinator()
        async with coordinator.acquire("k") as first:
            assert first.is_mine
            second = coordinator.acquire("k")
            await second.wait(timeout_s)
            assert not second.is_mine
        third = coordinator.acquire("k")
        await third.wait(timeout_s)
        assert third.is_mine

    on_loop(kind, story())
