"""Where threads wait for news that several links bring."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fairway.world.clock import Clock

_LOOK_S = 1.0  # a link that has failed brings no news: so often it is looked at


class Hub:
    """A lock, and a wait for whatever is changed under it."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._changed = threading.Condition(self.lock)

    def announce(self) -> None:
        """Let those who wait look again. Call it with the lock."""
        self._changed.notify_all()

    def wait(self, is_ready: Callable[[], bool], check: Callable[[], None], timeout_s: float | None) -> bool:
        """Wait until it is so; False: it took too long. `is_ready` is called with the lock, `check` without it: it
        raises where nothing will ever come."""
        end_ns = None if timeout_s is None else self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            check()
            left_s = _LOOK_S if end_ns is None else min(_LOOK_S, (end_ns - self._clock.monotonic_ns()) / 1e9)
            with self._changed:
                if self._changed.wait_for(is_ready, max(left_s, 0)):
                    return True
            if left_s <= 0:
                return False
