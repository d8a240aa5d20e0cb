"""Clocks: wall time for people and files, monotonic time for leases and slices, and a timekeeper that distrusts jumps.

A `Clock` is a parameter everywhere. `RealClock` is the machine's, `SimClock` follows virtual time.

Due times, ages and append times are wall times, and a wall clock may be set. The monotonic clock shows by how much, as
long as the process lives. `Timekeeper` compares the two:

    back            believed at once: due work waits for its time by the new clock. With `holds_back`, a step back is
                    held back like a large step forward; clocks that date records use this.
    forward, small  believed at once: up to 1 s, and a thousandth of the time since the last look, as NTP corrects.
    forward, large  not believed before both clocks have run side by side for a while. Until then time continues from
                    before the jump, so that a wrong clock that is put right again does no harm. A machine that was
                    asleep looks the same.

The harm of a wrong time decides how long a jump is held back. A delayed message waits for a minute (`HOLD_MS`): longer
would make it late after every sleep. Deletion by age waits for an hour (`AGE_HOLD_MS`): nobody misses the space that
soon, and a deleted group does not come back.

At a start there is nothing to compare with but the time that the previous process wrote down. Code that deletes passes
that time (`since_ms`), and a clock far ahead of it is held back as well: a long pause and a wrong clock look the same.
A clock far behind it is believed, unless `holds_back`. Without `since_ms` the wall clock is believed.

A process that ends before it believes a jump hands the jump on (`HeldJump`), so that the waits of both processes add
up. Otherwise a program that is killed within every hour would never follow its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """The handle that a loop returns for a pending callback."""

    def cancel(self) -> None:
        """Do not make the call."""


ScheduleTimer: TypeAlias = Callable[[float, Callable[[], None]], Timer]  # a loop's `call_later`

SIMULATED_START_MS = 1_700_000_000_000  # 14 November 2023, 22:13:20 UTC: any round instant would do


class Clock(Protocol):
    """The clock port."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970 UTC; may jump."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some start; never goes back."""


class RealClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)  # a method of our own would be a tenth of a broker's calls

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only by `advance` and `jump`."""

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


TOLERANCE_MS = 1_000
HOLD_MS = 60_000
AGE_HOLD_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class HeldJump:
    """A jump forward that is not believed yet."""

    to_ms: int  # the time now, if the clock is right
    for_ms: int  # how long it has been held back


class Timekeeper:
    """Turns wall and monotonic time into one time without jumps; a `Clock` itself."""

    def __init__(
        self,
        clock: Clock,
        *,
        hold_ms: int = HOLD_MS,
        since_ms: int | None = None,
        holds_back: bool = False,
        held: HeldJump | None = None,
    ) -> None:
        """`held`: the previous process held this jump back when it wrote down `since_ms`."""
        self._clock = clock
        self._hold_ms = hold_ms
        self._holds_back = holds_back
        wall_ms = clock.wall_ms()
        since_ms = wall_ms if since_ms is None else since_ms
        self._believed_ms = since_ms if holds_back else min(wall_ms, since_ms)
        self._seen_ms = self._monotonic_ms()
        self._jump_ms = 0  # how far ahead the wall clock is; negative: behind
        self._jumped_at_ms: int | None = None  # monotonic
        self._is_carried = False  # the jump is a previous process's; the wall clock may be ahead of it by a pause
        self.jumps = 0  # that were held back
        if held is not None and held.to_ms > self._believed_ms + TOLERANCE_MS:
            self._jump_ms, self._jumped_at_ms = held.to_ms - self._believed_ms, self._seen_ms - held.for_ms
            self._is_carried = True

    def now_ms(self) -> int:
        """The time by which things are due, or old."""
        wall_ms, seen_ms = self._clock.wall_ms(), self._monotonic_ms()
        passed_ms = seen_ms - self._seen_ms
        expected_ms = self._believed_ms + passed_ms
        ahead_ms = wall_ms - expected_ms
        far_ms = abs(ahead_ms) if self._holds_back else ahead_ms
        if far_ms <= TOLERANCE_MS + passed_ms // 1_000:
            self._jumped_at_ms = None
            expected_ms = wall_ms
        elif self._is_confirmed(ahead_ms, seen_ms):
            self._jumped_at_ms = None
            expected_ms = expected_ms + self._jump_ms if self._is_carried else wall_ms
        self._believed_ms, self._seen_ms = expected_ms, seen_ms
        return expected_ms

    def held(self) -> HeldJump | None:
        """The jump forward that is held back, as of the last look."""
        if self._jumped_at_ms is None or self._jump_ms <= 0:
            return None
        return HeldJump(self._believed_ms + self._jump_ms, self._seen_ms - self._jumped_at_ms)

    def wait_ms(self) -> int | None:
        """Milliseconds until a held-back jump can be confirmed; None: there is none."""
        if self._jumped_at_ms is None:
            return None
        return max(self._jumped_at_ms + self._hold_ms - self._monotonic_ms(), 0)

    def _is_confirmed(self, ahead_ms: int, seen_ms: int) -> bool:
        further_ms = ahead_ms - self._jump_ms
        is_same = further_ms >= -TOLERANCE_MS if self._is_carried else abs(further_ms) <= TOLERANCE_MS
        if self._jumped_at_ms is None or not is_same:
            self.jumps += 1
            self._jump_ms, self._jumped_at_ms, self._is_carried = ahead_ms, seen_ms, False
        return seen_ms - self._jumped_at_ms >= self._hold_ms

    def wall_ms(self) -> int:
        return self.now_ms()

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def _monotonic_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
