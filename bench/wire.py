"""A lean client for benches: requests with callbacks, no decoding, so that the broker is what is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fairway.protocol import Bytes, Connection, ControlMessage, HandshakeDone, RefusalReceived, ResponseReceived, Role
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet

Answered: TypeAlias = Callable[[ControlMessage | Exception], None]

_CLOCK = RealClock()


class Wire(asyncio.Protocol):
    """One connection. Attachments are counted, not kept. What is asked while an answer is looked at, such as the next
    pull behind an ack, leaves in one piece."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(Role.CLIENT, _CLOCK.monotonic_ns())
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Answered] = {}
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.received_bytes = 0
        self._is_feeding = False

    @classmethod
    async def connect(cls, port: int) -> Wire:
        _, wire = await RealNet().connect(cls, "127.0.0.1", port)
        await wire.ready
        return wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has no common base
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._is_feeding = True
        for event in self._connection.feed(data, _CLOCK.monotonic_ns()):
            if isinstance(event, ResponseReceived):
                self.received_bytes += sum(map(len, event.attachments))
                self._waiting.pop(event.correlation)(event.message)
            elif isinstance(event, RefusalReceived):
                self._waiting.pop(event.correlation)(event.refused)
            elif isinstance(event, HandshakeDone):
                self.ready.set_result(None)
        self._is_feeding = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()

    def request(self, message: ControlMessage, answered: Answered, attachments: Sequence[Bytes] = ()) -> None:
        self._waiting[self._connection.request(message, attachments)] = answered
        if not self._is_feeding:
            self._flush()

    async def ask(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> ControlMessage:
        told: asyncio.Future[ControlMessage] = self._loop.create_future()

        def answered(answer: ControlMessage | Exception) -> None:
            if told.done():
                return
            if isinstance(answer, Exception):
                told.set_exception(answer)
            else:
                told.set_result(answer)

        self.request(message, answered, attachments)
        return await told

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        out = self._connection.take()
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(out)
