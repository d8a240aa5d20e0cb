"""What a server leaves behind in its process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from fairway.runtime import service

NUMBERS = [signal.SIGINT, signal.SIGTERM]


async def _end_at(number: int) -> bool:
    asked = service.asked_to_end()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(10):
        return await asked.wait()


async def _fail() -> None:
    service.asked_to_end()
    raise ZeroDivisionError


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_asks_for_the_end_and_is_itself_again_afterwards(number: int) -> None:
    before = signal.getsignal(number)
    assert service.run(_end_at(number))
    assert signal.getsignal(number) == before


def test_a_server_that_cannot_start_leaves_the_signals_alone() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(ZeroDivisionError):
        service.run(_fail())
    assert [signal.getsignal(number) for number in NUMBERS] == before
