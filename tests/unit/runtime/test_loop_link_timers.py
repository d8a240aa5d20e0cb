"""The one timer of a link on a loop, on asyncio's loop and on uvloop's: deadlines of any length are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import RealClock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import RealNet
from tests.unit.runtime.loops import LOOPS, on_loop

# uvloop returns a plain handle, without `when`, for what it rounds to 0 ms.
DELAYS_NS = (0, 1_000, 100_000, 400_000, 499_999, 500_001, 900_000, 1_500_000, 5_000_000)


class Metronome:
    """A core that has deadlines and nothing to say; it never dials."""

    def __init__(self) -> None:
        self.due_ns: int | None = None
        self.seen_ns: list[int] = []  # when `take` was called, at the deadline or behind it
        self.early = 0  # calls before the deadline
        self.is_closed = False

    def take(self, now_ns: int) -> Sequence[Bytes]:
        if self.due_ns is not None and now_ns >= self.due_ns:
            self.seen_ns.append(now_ns)
            self.due_ns = None
        elif self.due_ns is not None:
            self.early += 1
        return ()

    def next_deadline(self) -> int | None:
        return self.due_ns

    def dial_due(self) -> int | None:
        return 1 << 62

    def moves_on(self) -> bool:
        return False

    def move(self, now_ns: int) -> None:
        """There is nowhere to go."""

    def connected(self, now_ns: int) -> None:
        """Never."""

    def unreachable(self, sentence: str, now_ns: int) -> None:
        """Never."""

    def lost(self, sentence: str, now_ns: int) -> None:
        """Never."""

    def feed(self, data: bytes, now_ns: int) -> None:
        """Never."""

    def is_over(self) -> bool:
        return False

    def callbacks(self) -> Sequence[Callable[[], None]]:
        return ()

    def close(self, now_ns: int) -> None:
        self.is_closed = True


async def with_link(check: Callable[[LoopLink, Metronome], Coroutine[Any, Any, None]]) -> None:
    core = Metronome()
    link = LoopLink(core, [("127.0.0.1", 1)], RealNet(), RealClock())
    try:
        await check(link, core)
    finally:
        link.abort()


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("first_ns", DELAYS_NS)
@pytest.mark.parametrize("second_ns", DELAYS_NS)
def test_a_deadline_that_moves_is_kept(kind: str, first_ns: int, second_ns: int) -> None:
    async def check(link: LoopLink, core: Metronome) -> None:
        clock = RealClock()
        core.due_ns = clock.monotonic_ns() + first_ns
        link.pump()  # sets the timer
        core.seen_ns.clear()
        due_ns = core.due_ns = clock.monotonic_ns() + second_ns
        link.pump()  # looks at it again
        assert await link.wait(lambda: bool(core.seen_ns), 30)
        assert core.seen_ns[0] >= due_ns
        link.check()

    on_loop(kind, with_link(check))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_timer_does_not_spin_until_its_deadline(kind: str) -> None:
    async def check(link: LoopLink, core: Metronome) -> None:
        clock = RealClock()
        for _ in range(20):
            core.seen_ns.clear()
            core.due_ns = clock.monotonic_ns() + 1_400_000  # which uvloop would round to 1 ms
            link.pump()
            assert await link.wait(lambda: bool(core.seen_ns), 30)
        assert core.early <= 2 * 20  # the pump that set it, and at most one more

    on_loop(kind, with_link(check))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_link_that_was_aborted_sets_no_timer(kind: str) -> None:
    async def check(link: LoopLink, core: Metronome) -> None:
        core.due_ns = RealClock().monotonic_ns() + 1_000_000
        link.pump()
        link.abort()
        await asyncio.sleep(0.01)
        assert not core.seen_ns

    on_loop(kind, with_link(check))
