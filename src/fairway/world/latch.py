"""Waiting for something to be over, from threads and from tasks of any loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Latch:
    """Closed until `open` is called, once and for all."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with suppress(RuntimeError):  # a loop that has ended waits for nothing
                loop.call_soon_threadsafe(event.set)

    def wait(self) -> None:
        """Block this thread."""
        self._event.wait()

    async def wait_async(self) -> None:
        """Let the loop go on meanwhile."""
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()
