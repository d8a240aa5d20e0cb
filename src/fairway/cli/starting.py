"""The start of a server: its ports are taken before anything is made on disk, and it may be told to end meanwhile, for
instance while it waits for a registry that is being stopped, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fairway.cli import server_log
from fairway.errors import CannotListen
from fairway.world import service
from fairway.world.net import RealNet

T = TypeVar("T")


@asynccontextmanager
async def ports_taken(host: str, port: int, http_port: int | None) -> AsyncIterator[RealNet]:
    """A net with these ports reserved; `CannotListen` with the remedy where another program has one of them."""
    net = RealNet()
    try:
        for flag, number in (("--port", port), ("--http-port", http_port)):
            if number is not None:
                await _reserve(net, host, number, flag)
        yield net
    finally:
        net.release()


async def _reserve(net: RealNet, host: str, port: int, flag: str) -> None:
    try:
        await net.reserve(host, port)
    except CannotListen as error:
        if not error.is_taken:
            raise
        sentence = f"{error}: stop it, or choose another port with {flag} N (0: any that is free)"
        raise CannotListen(sentence, is_taken=True) from error


async def unless_asked(asked: Callable[[], Awaitable[object]], start: Coroutine[Any, Any, T]) -> T | None:
    """What was started. None: somebody wants the process to end, and the start was called off; what it had opened it
    has let go of."""
    starting, ending = asyncio.ensure_future(start), asyncio.ensure_future(asked())
    try:
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    return None if starting.cancelled() else starting.result()


def settle(role: str) -> None:
    """When a server is ready: what it has loaded is there to stay, and from now on its log says when it is short of
    descriptors."""
    service.settle_memory()
    service.watch_descriptors(lambda sentence: server_log.line(f"fairway {role}: {sentence}"))
