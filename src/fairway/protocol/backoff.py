"""How long to wait before the next attempt: twice as long each time, up to a bound, and never all at one moment."""

from __future__ import annotations

from fairway.world.rng import Rng

NS_PER_MS = 1_000_000


class RetryDelays:
    """The waits of one thing that is tried again and again.

    Half of a wait is fixed and half is chance: a thousand clients that lost the same broker come back spread out, and
    none of them at once. A wait that the other side asked for is the least, and the chance comes on top of it.
    """

    __slots__ = ("_failures", "_first_ms", "_most_ms", "_rng")

    def __init__(self, rng: Rng, *, first_ms: int, most_ms: int) -> None:
        self._rng = rng
        self._first_ms = first_ms
        self._most_ms = most_ms
        self._failures = 0

    def next_ns(self, retry_after_ms: int | None = None) -> int:
        """The wait after one more failure."""
        wait_ms = min(self._first_ms << min(self._failures, 30), self._most_ms)
        self._failures += 1
        fixed_ms = wait_ms / 2 if retry_after_ms is None else retry_after_ms
        return round((fixed_ms + self._rng.uniform() * wait_ms / 2) * NS_PER_MS)

    def reset(self) -> None:
        """It worked."""
        self._failures = 0
