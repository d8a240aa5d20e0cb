"""A protocol that remembers what happened to it, for the tests of both nets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class Recorder(asyncio.Protocol):
    """`events` holds the names of the calls in order, repeated data_received folded into one."""

    transport: asyncio.Transport

    def __init__(self, *, keep_open: bool = False) -> None:
        self.keep_open = keep_open
        self.events: list[str] = []
        self.chunks: list[bytes] = []
        self.problem: Exception | None = None

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def lost(self) -> bool:
        return "connection_lost" in self.events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of asyncio's
        self.events.append("connection_made")

    def data_received(self, data: bytes) -> None:
        assert data
        self.chunks.append(data)
        if self.events[-1] != "data_received":
            self.events.append("data_received")

    def eof_received(self) -> bool:
        self.events.append("eof_received")
        return self.keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.problem = exc
        self.events.append("connection_lost")

    def pause_writing(self) -> None:
        self.events.append("pause_writing")

    def resume_writing(self) -> None:
        self.events.append("resume_writing")


class Door:
    """A factory of recorders that remembers whom it let in."""

    def __init__(self, *, keep_open: bool = False) -> None:
        self.keep_open = keep_open
        self.guests: list[Recorder] = []

    def __call__(self) -> Recorder:
        self.guests.append(Recorder(keep_open=self.keep_open))
        return self.guests[-1]


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, on real and on virtual time, 20 s at least."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")
