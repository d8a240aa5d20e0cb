"""A line on a (simulated) net, driven by a loop: as small as an owner of a line can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fairway.errors import Unreachable
from fairway.protocol.line import ClientSession, Line
from fairway.runtime.clock import Clock
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng


class LoopLine(asyncio.Protocol):
    """Connects for ever; `wake` is what a session's `on_change` calls."""

    def __init__(self, net: Net, clock: Clock, rng: Rng, host: str, port: int) -> None:
        self.line = Line(rng, now_ns=clock.monotonic_ns())
        self._net = net
        self._clock = clock
        self._address = host, port
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._task = self._loop.create_task(self._dial())

    def add(
        self, session: ClientSession, on_lost: Callable[[], None] | None = None, *, is_on_call: bool = False
    ) -> None:
        self.line.add(session, self._clock.monotonic_ns(), on_lost, is_on_call=is_on_call)
        self.wake()

    def wake(self) -> None:
        self._loop.call_soon(self.flush)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self.line.close(self._clock.monotonic_ns())
        self.flush()
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._timer is not None:
            self._timer.cancel()

    async def _dial(self) -> None:
        while (due_ns := self.line.dial_due()) is not None:
            await asyncio.sleep(max(due_ns - self._clock.monotonic_ns(), 0) / 1e9)
            self._gone.clear()
            try:
                async with asyncio.timeout(5):
                    await self._net.connect(lambda: self, *self._address)
            except (Unreachable, TimeoutError) as error:
                self.line.unreachable(str(error), self._clock.monotonic_ns())
                continue
            await self._gone.wait()

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.line.connected(self._clock.monotonic_ns())
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.line.feed(data, self._clock.monotonic_ns())
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.line.lost("gone", self._clock.monotonic_ns())
        self._gone.set()
        self.flush()

    def flush(self) -> None:
        out = self.line.take(self._clock.monotonic_ns())
        if self._transport is not None:
            if out:
                self._transport.writelines(out)
            if self.line.is_over():
                self._transport.close()
        for callback in self.line.callbacks():
            callback()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self.line.next_deadline()
        if due_ns is not None:
            delay_s = max(due_ns - self._clock.monotonic_ns(), 0) / 1e9
            self._timer = self._loop.call_later(delay_s + 1e-6, self.flush)
