"""Calls the engine when its time has come, and sooner when there is a reason to.

Whatever asks for a turn while one is due gets the same. A turn that took long, because much is due at once, is followed
by a pause as long as itself: in `fairway up` the broker that is to take what is due runs on the same loop. During a
start there is none: others wait for its end more than for its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fairway.errors import FairwayError
from fairway.world.clock import Clock

_LONG_NS = 2_000_000


class DueTimer:
    """`turn` does what is to be done by now, and says in how many ms the next one is due, at the latest."""

    def __init__(
        self,
        clock: Clock,
        turn: Callable[[], int],
        on_failure: Callable[[Exception], None],
        may_rest: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock
        self._may_rest = may_rest
        self._turn = turn
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._is_poked = False
        self._is_stopped = False
        self._rested_ns = 0  # before that, no turn

    def poke(self) -> None:
        """Something has happened: have a turn soon."""
        if not self._is_poked and not self._is_stopped:
            self._is_poked = True
            self._next_in(0)

    def stop(self) -> None:
        """No further turn."""
        self._is_stopped = True
        self._set(None)

    def _run(self) -> None:
        self._is_poked = False
        self._timer = None
        begun_ns = self._clock.monotonic_ns()
        try:
            wait_ms = self._turn()
        except Exception as error:  # a fault of the store, or a bug of ours: a clock that stops must not go unnoticed
            self.stop()
            self._on_failure(error)
            if not isinstance(error, FairwayError):
                raise
            return
        now_ns = self._clock.monotonic_ns()
        took_ns = now_ns - begun_ns
        self._rested_ns = now_ns + (took_ns if took_ns > _LONG_NS and self._may_rest() else 0)
        if not self._is_stopped:
            self._next_in(0 if self._is_poked else wait_ms / 1_000)

    def _next_in(self, wait_s: float) -> None:
        rest_s = (self._rested_ns - self._clock.monotonic_ns()) / 1e9
        soon_s = max(wait_s, rest_s)
        self._set(self._loop.call_later(soon_s, self._run) if soon_s > 0 else self._loop.call_soon(self._run))

    def _set(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
