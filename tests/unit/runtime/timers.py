"""A few timers in a heap: as much of a loop as a simulated disk needs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Handle:
    """Of a timer: cancels it."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """Timers that ring when told to, in the order of their times, then of their making."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...], Handle]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> Handle:
        handle = Handle()
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), callback, args, handle))
        return handle

    def ring_one(self) -> bool:
        """The next timer; False if there is none."""
        if not self._heap:
            return False
        self.now_s, _, callback, args, handle = heapq.heappop(self._heap)
        if not handle.is_cancelled:
            callback(*args)
        return True

    def ring_until(self, now_s: float) -> None:
        """All timers up to that time."""
        while self._heap and self._heap[0][0] <= now_s:
            self.ring_one()
        self.now_s = now_s

    def ring_all(self) -> None:
        while self.ring_one():
            pass
