"""The cap on the rate of a replay: never faster than it allows, however time has passed before."""

from __future__ import annotations

import random
from itertools import pairwise

from fairway.runtime.clock import ManualClock
from fairway.spark.jobs.replay import Cap

NS = 1_000_000_000


def begun(cap: Cap, clock: ManualClock, portions: list[int], stalls_ms: list[int]) -> list[int]:
    """When each portion began, if each waits as it is told and then takes so long."""
    times_ns = []
    for rows, stall_ms in zip(portions, stalls_ms, strict=True):
        while (early_s := cap.early_s()) > 0:
            clock.advance(early_s * 1_000 + 0.001)  # who sleeps never wakes early
        times_ns.append(clock.monotonic_ns())
        cap.begin(rows)
        clock.advance(stall_ms)
    return times_ns


def test_no_stretch_of_time_has_more_than_the_rate_allows() -> None:
    rng = random.Random(7)
    for rate in (1, 10, 500, 100_000):
        clock = ManualClock()
        portions = [rng.randint(1, rate) for _ in range(40)]
        stalls_ms = [rng.choice((0, 0, 50, 90_000)) for _ in portions]  # a broker that is away is not made up for
        clock.advance(600_000)  # nor is a selection that took long
        times_ns = begun(Cap(rate, clock), clock, portions, stalls_ms)
        for start, since_ns in enumerate(times_ns):
            rows = 0
            for portion, until_ns in zip(portions[start:], times_ns[start + 1 :], strict=False):
                rows += portion
                assert rows * NS <= rate * (until_ns - since_ns) + NS, "one row of rounding"


def test_who_is_never_held_up_gets_the_whole_rate() -> None:
    clock = ManualClock()
    times_ns = begun(Cap(10, clock), clock, [10] * 5, [0] * 5)
    assert all(abs(later - sooner - NS) < NS // 100 for sooner, later in pairwise(times_ns))


def test_no_cap_never_waits() -> None:
    clock = ManualClock()
    assert begun(Cap(0, clock), clock, [1_000_000] * 5, [0] * 5) == [0] * 5
