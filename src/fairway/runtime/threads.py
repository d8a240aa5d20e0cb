"""Synchronization between threads.

Bell               wakes one thread, again and again; any other thread rings it
Lock               protects a few instructions
Gate               opens once; one thread waits at it
Hub                a lock, and a wait for changes that several links bring
Latch              opens once; threads, and tasks of any loop, wait at it
ConditionVariable  a lock, and a wait for changes under it
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from fairway.runtime.clock import Clock


class Bell:
    """A ring without a listener is kept for the next one; two rings count as one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it was rung within the timeout."""
        heard = self._event.wait(timeout_s)
        self._event.clear()
        return heard


Lock = threading.Lock  # for a few instructions at a time; never across a wait


class Gate:
    """Opened once, by any thread; one thread waits at it. A lock is the cheapest thing that a thread can wait for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):  # the gate is open already
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


_LOOK_S = 1.0  # a failed link announces nothing: the wait checks this often


class Hub:
    """A lock, and a wait for changes under it."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._changed = threading.Condition(self.lock)

    def announce(self) -> None:
        """Wake the waiting threads, which look again. Call it with the lock."""
        self._changed.notify_all()

    def wait(self, is_ready: Callable[[], bool], check: Callable[[], None], timeout_s: float | None) -> bool:
        """Wait until `is_ready` is true; False after the timeout. `is_ready` is called with the lock, `check` without
        it. `check` raises if no change will ever come."""
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            check()
            left_s = _LOOK_S if end_ns is None else min(_LOOK_S, (end_ns - self._clock.monotonic_ns()) / 1e9)
            with self._changed:
                if self._changed.wait_for(is_ready, max(left_s, 0)):
                    return True
            if left_s <= 0:
                return False


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
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(event.set)

    def wait(self) -> None:
        """Block this thread."""
        self._event.wait()

    async def wait_async(self) -> None:
        """Wait without blocking the loop."""
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()


class ConditionVariable:
    """A lock and a condition. Use `with` to read or to change; `ring` after a change; `wait` for a change."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._changed.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._changed.release()

    def ring(self) -> None:
        """Announce a change. Call it with the lock."""
        self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Release the lock until another thread rings, or until the timeout. Call it with the lock."""
        self._changed.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
