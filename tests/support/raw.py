"""A connection without manners: sends whatever it is told to, when it is told to, and reads only if it likes."""

from __future__ import annotations

import asyncio
from typing import Self

from fairway.protocol import Connection, ControlMessage, HandshakeDone, Role
from fairway.protocol.frames import write
from fairway.protocol.messages import Verb
from fairway.runtime.net import Net

PING = b"".join(write(Verb.PING, 0, 1, 0, b"\x90"))
MIB = 1 << 20


class Raw(asyncio.Protocol):
    """Bytes out, bytes in; what came is decoded by a client's connection where it can be."""

    def __init__(self) -> None:
        self.connection = Connection(Role.CLIENT, 0)
        self.transport: asyncio.Transport | None = None
        self.received = 0
        self.answered = 0
        self.is_lost = False
        self.lost = asyncio.get_running_loop().create_future()
        self.greeted = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, net: Net, host: str, port: int, *, greet: bool = True) -> Self:
        transport, raw = await net.connect(cls, host, port)
        raw.transport = transport
        if greet:
            raw.send(*raw.connection.take())
            await raw.greeted
        return raw

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        events = self.connection.feed(data, 0)
        for event in events:
            if isinstance(event, HandshakeDone) and not self.greeted.done():
                self.greeted.set_result(None)
            else:
                self.answered += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for future in (self.lost, self.greeted):
            if not future.done():
                future.set_result(None)

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        if self.transport is not None and not self.is_lost:
            self.transport.writelines(parts)

    async def sent(self) -> None:
        """Return when all that was sent has left, or nobody is there to take it."""
        while self._has_unsent():  # noqa: ASYNC110  a transport does not say when it is empty
            await asyncio.sleep(0.001)

    def _has_unsent(self) -> bool:
        return not self.is_lost and self.transport is not None and self.transport.get_write_buffer_size() > 0

    def ask(self, message: ControlMessage, attachments: tuple[bytes, ...] = ()) -> None:
        """A request that nobody waits for."""
        self.connection.request(message, attachments)
        self.send(*self.connection.take())

    def stop_reading(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def beginning_of_a_frame(size: int, sent: int) -> bytes:
    """The first `sent` bytes of a sound PRODUCE frame of `size` bytes, whose batch never ends."""
    data = bytearray(sent)
    head = b"".join(write(Verb.PRODUCE, 0, 1, 7, b"\x91\xa6orders", (_FakeBatch(size - 32),)))
    data[: len(head)] = head
    return bytes(data)


class _FakeBatch(bytes):
    """As long as it says, and nowhere in memory."""

    def __new__(cls, size: int) -> _FakeBatch:
        made = super().__new__(cls)
        made.size = size
        return made

    size: int

    def __len__(self) -> int:
        return self.size
