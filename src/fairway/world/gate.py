"""What a thread waits at, and what keeps threads apart."""

from __future__ import annotations

import contextlib
import threading

Lock = threading.Lock  # for a few instructions at a time; never across a wait


class Gate:
    """Opened once, by anybody; one thread waits at it. A lock is the cheapest thing that a thread can wait for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
