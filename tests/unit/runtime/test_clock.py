"""The wall clock is set, and nothing goes out early."""

from __future__ import annotations

from fairway.runtime.clock import HOLD_MS, HeldJump, ManualClock, Timekeeper

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


def next_process(clock: ManualClock, before: Timekeeper, pause_ms: int = 0) -> Timekeeper:
    """A timekeeper that goes on where another one ended."""
    written_ms, held = before.now_ms(), before.held()
    clock.advance(pause_ms)
    return Timekeeper(clock, since_ms=written_ms, holds_back=True, held=held)


def test_a_jump_is_held_back_for_as_long_by_two_processes_as_by_one() -> None:
    clock = ManualClock()
    time = Timekeeper(clock, holds_back=True)
    start_ms = clock.wall_ms()
    clock.jump(DAY_MS)
    time.now_ms()
    clock.advance(HOLD_MS // 2)
    assert time.now_ms() == start_ms + HOLD_MS // 2
    assert time.held() == HeldJump(clock.wall_ms(), HOLD_MS // 2)
    time = next_process(clock, time)
    clock.advance(HOLD_MS // 2 - 1)
    assert time.now_ms() == start_ms + HOLD_MS - 1
    clock.advance(1)
    assert time.now_ms() == clock.wall_ms()
    assert time.held() is None


def test_the_pause_between_two_processes_is_held_back_for_itself() -> None:
    clock = ManualClock()
    time = Timekeeper(clock, holds_back=True)
    clock.jump(DAY_MS)
    time.now_ms()
    clock.advance(HOLD_MS // 2)
    jumped_to_ms = clock.wall_ms()
    time = next_process(clock, time, pause_ms=DAY_MS)
    clock.advance(HOLD_MS // 2)
    assert time.now_ms() == jumped_to_ms + HOLD_MS // 2
    time.now_ms()
    clock.advance(HOLD_MS)
    assert time.now_ms() == clock.wall_ms() == jumped_to_ms + DAY_MS + HOLD_MS // 2 + HOLD_MS


def test_a_jump_that_was_put_right_between_two_processes_never_happened() -> None:
    clock = ManualClock()
    time = Timekeeper(clock, holds_back=True)
    start_ms = clock.wall_ms()
    clock.jump(DAY_MS)
    time.now_ms()
    clock.advance(HOLD_MS - 1)
    time.now_ms()
    clock.jump(-DAY_MS // 2)  # half of it
    time = Timekeeper(clock, since_ms=start_ms + HOLD_MS - 1, holds_back=True, held=time.held())
    time.now_ms()
    clock.advance(HOLD_MS - 1)
    assert time.now_ms() == start_ms + 2 * HOLD_MS - 2
    clock.jump(-DAY_MS // 2)
    assert time.now_ms() == clock.wall_ms() == start_ms + 2 * HOLD_MS - 2
    assert time.held() is None


def test_processes_that_never_live_as_long_as_a_jump_is_held_back_follow_the_clock() -> None:
    clock = ManualClock()
    time = Timekeeper(clock, holds_back=True)
    for _ in range(50):
        time = next_process(clock, time, pause_ms=DAY_MS)
        for _ in range(5):
            time.now_ms()
            clock.advance(HOLD_MS // 6)
        assert clock.wall_ms() - time.now_ms() <= 3 * DAY_MS
