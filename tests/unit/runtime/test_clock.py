"""The wall clock is set, and nothing goes out early."""

from __future__ import annotations

from fairway.runtime.clock import HOLD_MS, ManualClock, Timekeeper

DAY_MS = 86_400_000


def test_time_passes() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    clock.advance(1_234)
    assert time.now_ms() == clock.wall_ms()


def test_a_clock_that_goes_back_is_believed_at_once() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    clock.jump(-DAY_MS)
    assert time.now_ms() == clock.wall_ms()


def test_a_small_correction_is_believed_at_once_and_so_is_drift() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    clock.jump(900)
    assert time.now_ms() == clock.wall_ms()
    clock.advance(DAY_MS)
    clock.jump(20_000)  # a day without a look: a clock may well be off by so much
    assert time.now_ms() == clock.wall_ms()
    assert time.jumps == 0


def test_a_leap_forward_is_believed_after_a_minute() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    true_ms = clock.wall_ms()
    clock.jump(DAY_MS)
    for second in range(60):
        assert time.now_ms() == true_ms + second * 1_000
        clock.advance(1_000)
    assert time.now_ms() == clock.wall_ms() == true_ms + DAY_MS + HOLD_MS
    assert time.jumps == 1


def test_a_leap_that_is_taken_back_never_happened() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    true_ms = clock.wall_ms()
    for _ in range(3):
        clock.jump(DAY_MS)
        assert time.now_ms() == true_ms
        clock.advance(HOLD_MS - 1)
        true_ms += HOLD_MS - 1
        assert time.now_ms() == true_ms
        clock.jump(-DAY_MS)
        assert time.now_ms() == true_ms


def test_a_second_leap_begins_a_minute_of_its_own() -> None:
    clock = ManualClock()
    time = Timekeeper(clock)
    true_ms = clock.wall_ms()
    clock.jump(DAY_MS)
    assert time.now_ms() == true_ms
    clock.advance(HOLD_MS - 1)
    clock.jump(DAY_MS)
    assert time.now_ms() == true_ms + HOLD_MS - 1
    clock.advance(HOLD_MS - 1)
    assert time.now_ms() == true_ms + 2 * HOLD_MS - 2
    clock.advance(1)
    assert time.now_ms() == clock.wall_ms()
