"""Time as a parameter: wall time for what people and files see, monotonic time for leases and slices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

SIMULATED_START_MS = 1_700_000_000_000  # 14 November 2023, 22:13:20 UTC: any round instant would do


class Clock(Protocol):
    """What the product asks of a clock."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970 UTC; may jump."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some start; never goes back."""


class RealClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, wall_ms: int = SIMULATED_START_MS) -> None:
        self._wall_ns = wall_ms * 1_000_000
        self._monotonic_ns = 0

    def wall_ms(self) -> int:
        return self._wall_ns // 1_000_000

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, ms: float) -> None:
        """Let time pass: both clocks move."""
        ns = int(ms * 1_000_000)
        if ns < 0:
            raise ValueError("time does not go back: use jump() to move the wall clock alone")
        self._wall_ns += ns
        self._monotonic_ns += ns

    def jump(self, ms: float) -> None:
        """Move the wall clock alone, as an administrator or NTP would."""
        self._wall_ns += int(ms * 1_000_000)


class SimClock:
    """A clock on virtual time, such as `SimLoop.now_ns`; each simulated host may have its own, off by some amount."""

    def __init__(self, now_ns: Callable[[], int], wall_ms: int = SIMULATED_START_MS) -> None:
        self._now_ns = now_ns
        self._wall_start_ns = wall_ms * 1_000_000 - now_ns()

    def wall_ms(self) -> int:
        return (self._wall_start_ns + self._now_ns()) // 1_000_000

    def monotonic_ns(self) -> int:
        return self._now_ns()

    def jump(self, ms: float) -> None:
        """Move the wall clock alone, as an administrator or NTP would."""
        self._wall_start_ns += int(ms * 1_000_000)
