"""What time it is, whatever the wall clock does: for all that happens because a time has come.

Due times, ages and append times are wall times, and a wall clock may be set. The monotonic clock shows by how much, as
long as the process lives:

    back            believed at once: what is due waits for its time by the new clock. Whoever dates things with it asks
                    for the same guard as forward (`holds_back`).
    forward, small  believed at once: up to 1 s, and a thousandth of the time since the last look, as NTP corrects.
    forward, large  not believed before both clocks have gone on side by side for a while. Until then time goes on from
                    before the jump, so that a clock set wrong and put right again has done no harm. A machine that was
                    asleep looks the same.

How long a jump is held back depends on what a wrong time would do. A delayed message waits for a minute (`HOLD_MS`):
longer would make it late after every sleep. What is deleted by age waits for an hour (`AGE_HOLD_MS`): nobody misses the
room that soon, and a deleted group does not come back.

At a start there is nothing to compare with but what the process before wrote down. Whoever deletes gives that time
(`since_ms`), and a clock far ahead of it is held back as well: a long pause and a wrong clock look the same, too.
A clock far behind it is believed, unless `holds_back`. Without `since_ms` the wall clock is believed.
"""

from __future__ import annotations

from fairway.world.clock import Clock

TOLERANCE_MS = 1_000
HOLD_MS = 60_000
AGE_HOLD_MS = 3_600_000


class Timekeeper:
    """Turns two clocks into one, which is a `Clock` itself."""

    def __init__(
        self, clock: Clock, *, hold_ms: int = HOLD_MS, since_ms: int | None = None, holds_back: bool = False
    ) -> None:
        self._clock = clock
        self._hold_ms = hold_ms
        self._holds_back = holds_back
        wall_ms = clock.wall_ms()
        since_ms = wall_ms if since_ms is None else since_ms
        self._believed_ms = since_ms if holds_back else min(wall_ms, since_ms)
        self._seen_ms = self._monotonic_ms()
        self._jump_ms = 0  # how far ahead the wall clock is said to be; negative: behind
        self._jumped_at_ms: int | None = None  # monotonic
        self.jumps = 0  # that were held back

    def now_ms(self) -> int:
        """The time by which things are due, or old."""
        wall_ms, seen_ms = self._clock.wall_ms(), self._monotonic_ms()
        passed_ms = seen_ms - self._seen_ms
        expected_ms = self._believed_ms + passed_ms
        ahead_ms = wall_ms - expected_ms
        far_ms = abs(ahead_ms) if self._holds_back else ahead_ms
        if far_ms <= TOLERANCE_MS + passed_ms // 1_000 or self._is_confirmed(ahead_ms, seen_ms):
            self._jumped_at_ms = None
            expected_ms = wall_ms
        self._believed_ms, self._seen_ms = expected_ms, seen_ms
        return expected_ms

    def wait_ms(self) -> int | None:
        """Until a jump that is held back can be confirmed; None: there is none."""
        if self._jumped_at_ms is None:
            return None
        return max(self._jumped_at_ms + self._hold_ms - self._monotonic_ms(), 0)

    def _is_confirmed(self, ahead_ms: int, seen_ms: int) -> bool:
        if self._jumped_at_ms is None or abs(ahead_ms - self._jump_ms) > TOLERANCE_MS:
            self.jumps += 1
            self._jump_ms, self._jumped_at_ms = ahead_ms, seen_ms
        return seen_ms - self._jumped_at_ms >= self._hold_ms

    def wall_ms(self) -> int:
        return self.now_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _monotonic_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
