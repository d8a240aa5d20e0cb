"""A cap on the rate of a job: so many rows a second, and no more, whatever happened before.

Each portion pays for the time that its rows may take, from the moment it begins. Time that nobody used, because the
selection took long or the broker was away, is not made up for: whoever set the cap is afraid of just such a burst. So
in any stretch of time no more begin than the rate allows for it, and one portion.
"""

from __future__ import annotations

from fairway.spark.jobs.watching import NS
from fairway.world.clock import Clock, RealClock


class Cap:
    """For one run; a rate of 0 is no cap."""

    def __init__(self, rate_per_s: int, clock: Clock | None = None) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock or RealClock()
        self._free_ns = 0  # when the next portion may begin

    def early_s(self) -> float:
        """How long the next portion has to wait; 0: it may begin."""
        return max(self._free_ns - self._clock.monotonic_ns(), 0) / NS

    def begin(self, rows: int) -> None:
        """A portion of so many rows begins now."""
        if self._rate_per_s:
            self._free_ns = self._clock.monotonic_ns() + rows * NS // self._rate_per_s
