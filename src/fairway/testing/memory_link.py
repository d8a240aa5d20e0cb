"""In the place of the threaded link: the same calls, answered by running the simulated loop until they are.

The sync face asks little of its link: a lock, a wait, a push. Here the lock is none, because there is one thread, and
to wait is to let virtual time pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fairway.errors import FairwayError
from fairway.world.loop_link import LoopLink

if TYPE_CHECKING:
    from fairway.client.url import BrokerAddress
    from fairway.protocol.line import Line
    from fairway.world.clock import Clock
    from fairway.world.net import Net
    from fairway.world.simulation import Simulation

FOR_EVER_S = 600.0  # virtual: longer than any lease, backoff or heartbeat that could bring something about by itself


class StillWaiting(FairwayError):
    """A wait without a timeout that nothing in this test will ever end."""


class MemoryLink:
    """A link of `fairway.Client` on a simulated loop."""

    in_reader = False
    is_orphan = False

    def __init__(
        self, world: Simulation, line: Line, addresses: Sequence[BrokerAddress], net: Net, clock: Clock
    ) -> None:
        self._world = world
        self._inner = world.run(_made(line, addresses, net, clock))
        self.lock: AbstractContextManager[None] = nullcontext()

    def start(self) -> None:
        """It runs whenever somebody waits."""

    def check(self) -> None:
        self._inner.check()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let virtual time pass until it is so, or until the timeout has passed."""
        limit_s = FOR_EVER_S if timeout_s is None else timeout_s
        is_so = self._world.run(self._inner.wait(is_ready, limit_s))
        if timeout_s is None and not is_so:
            raise StillWaiting(f"nothing came in {FOR_EVER_S:g} virtual seconds: give a timeout, or advance the clock")
        return is_so

    def wait_told(self, register: Callable[[Callable[[], None]], None], timeout_s: float | None = None) -> bool:
        """The same for who is told: here there is nobody else to wake."""
        told: list[bool] = []
        register(lambda: told.append(True))
        return self.wait(lambda: bool(told), timeout_s)

    def announce(self) -> None:
        """There is no other thread that waits."""

    def pump(self) -> None:
        self._world.run(self._pump())

    async def _pump(self) -> None:
        self._inner.pump()

    def stir(self) -> None:
        self._inner.stir()

    def close(self, timeout_s: float) -> None:
        self._world.run(self._inner.close(timeout_s))


async def _made(line: Line, addresses: Sequence[BrokerAddress], net: Net, clock: Clock) -> LoopLink:
    return LoopLink(line, addresses, net, clock)
