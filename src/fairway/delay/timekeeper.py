"""What time it is for the delay server, whatever the wall clock does. Never early is decided here.

Due times are wall times, and a wall clock may be set. The monotonic clock shows by how much, as long as the process
lives:

    back            believed at once: messages wait for their time by the new clock. What went out was due by the old.
    forward, small  believed at once: up to 1 s, and a thousandth of the time since the last look, as NTP corrects.
    forward, large  not believed before both clocks have gone on side by side for a minute. Until then time goes on from
                    before the jump, so that a clock set wrong and put right again has sent nothing early. A machine
                    that was asleep looks the same: its messages are late by that minute.

At a start there is nothing to compare with: the wall clock is believed.
"""

from __future__ import annotations

from fairway.world.clock import Clock

TOLERANCE_MS = 1_000
HOLD_MS = 60_000


class Timekeeper:
    """Turns two clocks into one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._believed_ms = clock.wall_ms()
        self._seen_ms = self._monotonic_ms()
        self._jump_ms = 0  # how far ahead the wall clock is said to be
        self._jumped_at_ms: int | None = None  # monotonic
        self.jumps = 0  # forward ones that were held back

    def now_ms(self) -> int:
        """The time by which messages are due."""
        wall_ms, seen_ms = self._clock.wall_ms(), self._monotonic_ms()
        passed_ms = seen_ms - self._seen_ms
        expected_ms = self._believed_ms + passed_ms
        ahead_ms = wall_ms - expected_ms
        if ahead_ms <= TOLERANCE_MS + passed_ms // 1_000 or self._is_confirmed(ahead_ms, seen_ms):
            self._jumped_at_ms = None
            expected_ms = wall_ms
        self._believed_ms, self._seen_ms = expected_ms, seen_ms
        return expected_ms

    def _is_confirmed(self, ahead_ms: int, seen_ms: int) -> bool:
        if self._jumped_at_ms is None or abs(ahead_ms - self._jump_ms) > TOLERANCE_MS:
            self.jumps += 1
            self._jump_ms, self._jumped_at_ms = ahead_ms, seen_ms
        return seen_ms - self._jumped_at_ms >= HOLD_MS

    def _monotonic_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
