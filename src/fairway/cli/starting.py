"""A server that is told to end while it still starts: it waits for a registry, perhaps, that is being stopped, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
