"""What `sync_herd` is to threads, on a loop: tasks wait here for any of a consumer's broker groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fairway.client.client_log import ClientLog
from fairway.client.herd import ClusterConsumer
from fairway.protocol.consumption import ConsumerOptions
from fairway.world.clock import Clock
from fairway.world.rng import Rng

if TYPE_CHECKING:
    from fairway.client.aio_way import AioServerConnection


class AioConsumerLink:
    """The part of `world.loop_link.LoopLink` that consumers use."""

    def __init__(
        self, options: ConsumerOptions, meta: AioServerConnection, clock: Clock, rng: Rng, log: ClientLog | None
    ) -> None:
        self._meta = meta
        self._waiters: list[asyncio.Future[None]] = []
        self.herd: ClusterConsumer[AioServerConnection] = ClusterConsumer(
            options, clock, rng, nullcontext(), self.announce, log
        )

    def announce(self) -> None:
        """Let those who wait look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def check(self) -> None:
        """Raise if nothing will ever come from some of them."""
        self._meta.check()
        for link in self.herd.links:
            link.check()

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return when news make it so; False: it took too long."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while not is_ready():
                    self.check()
                    waiter = loop.create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            return is_ready()
        return True

    def stir(self) -> None:
        for link in self.herd.links:
            link.stir()
        self.announce()

    def pump(self) -> None:
        for link in self.herd.links:
            link.pump()
