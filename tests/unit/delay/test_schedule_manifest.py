"""Which stretch of time a due time belongs to: in UTC, ever finer as it comes near, a hundred or so in two years."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS, Grain, TimeRange, check_horizon, is_to_split, span_of
from fairway.errors import Code, Refused
from fairway.limits import DELAY_HORIZON_MS


def at(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp() * 1_000)  # type: ignore[misc,arg-type]


NOW_MS = at(2026, 3, 10, 9, 30)


@pytest.mark.parametrize(
    ("due_ms", "expected"),
    [
        (at(2026, 3, 10, 9, 31), (Grain.HOUR, at(2026, 3, 10, 9), at(2026, 3, 10, 10))),
        (at(2026, 3, 11, 23, 59), (Grain.HOUR, at(2026, 3, 11, 23), at(2026, 3, 12))),
        (at(2026, 3, 12), (Grain.DAY, at(2026, 3, 12), at(2026, 3, 13))),
        (at(2026, 3, 31, 23), (Grain.DAY, at(2026, 3, 31), at(2026, 4, 1))),
        (at(2026, 4, 1), (Grain.MONTH, at(2026, 4, 1), at(2026, 5, 1))),
        (at(2027, 12, 31), (Grain.MONTH, at(2027, 12, 1), at(2028, 1, 1))),
        (at(2028, 2, 29), (Grain.MONTH, at(2028, 2, 1), at(2028, 3, 1))),
    ],
)
def test_a_due_time_has_one_stretch(due_ms: int, expected: TimeRange) -> None:
    assert span_of(due_ms, NOW_MS) == expected


def test_what_is_past_due_is_put_where_now_is() -> None:
    assert span_of(at(2020, 1, 1), NOW_MS) == span_of(NOW_MS, NOW_MS)
    assert span_of(0, NOW_MS).start_ms <= NOW_MS < span_of(0, NOW_MS).end_ms


def test_the_night_of_a_clock_change_has_as_many_hours_as_every_other() -> None:
    now_ms = at(2026, 3, 28, 12)  # Europe puts its clocks on in the night that follows
    hours = {span_of(now_ms + minute * 60_000, now_ms) for minute in range(24 * 60)}
    assert len(hours) == 24
    assert {each.end_ms - each.start_ms for each in hours} == {HOUR_MS}


def test_two_years_are_about_a_hundred_stretches_on_every_day() -> None:
    for day in range(0, 400, 37):
        now_ms = NOW_MS + day * DAY_MS
        spans = {span_of(now_ms + hour * HOUR_MS, now_ms) for hour in range(DELAY_HORIZON_MS // HOUR_MS)}
        assert len(spans) <= 111


def test_a_stretch_only_becomes_finer() -> None:
    due_ms = at(2027, 5, 17, 13, 45)
    now_ms, before = NOW_MS, span_of(due_ms, NOW_MS)
    while now_ms < due_ms:
        found = span_of(due_ms, now_ms)
        assert before.start_ms <= found.start_ms <= due_ms < found.end_ms <= before.end_ms
        assert is_to_split(before, now_ms) == (found != before)
        now_ms, before = now_ms + 7 * HOUR_MS, found
    assert before.grain is Grain.HOUR


def test_a_stretch_that_is_past_is_not_split() -> None:
    assert not is_to_split(span_of(at(2026, 4, 1), NOW_MS), at(2026, 6, 1))


def test_beyond_the_horizon_is_refused_with_the_bound() -> None:
    check_horizon(NOW_MS + 10 * DAY_MS, NOW_MS, 10 * DAY_MS)
    with pytest.raises(Refused, match=r"2026-03-20T09:30:00.001.*10 days") as caught:
        check_horizon(NOW_MS + 10 * DAY_MS + 1, NOW_MS, 10 * DAY_MS)
    assert caught.value.code is Code.BAD_REQUEST


def test_the_last_instant_that_can_be_said_has_a_stretch() -> None:
    assert span_of(253_402_300_799_999, NOW_MS).grain is Grain.MONTH
