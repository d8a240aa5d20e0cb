"""The rates that `top` computes from two looks, and positions in a subject."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from fairway.cli import arguments, output
from fairway.cli.top import GroupRow, RateMeter
from fairway.errors import Misuse
from fairway.protocol.admin_messages import ActorState, GroupDescription, SubjectDescription
from fairway.runtime.clock import SIMULATED_START_MS, ManualClock

S_NS = 1_000_000_000


def _subject(
    *, end: int, cursor: int, in_flight: int = 0, served_ns: int | None = None, cold_ns: int = 0, oldest_ms: int = 0
) -> SubjectDescription:
    actor = None if served_ns is None else ActorState("idle", 0, 0, 1, served_ns, cold_ns, 0)
    group = GroupDescription(
        name="g",
        cursor=cursor,
        oldest_unacked=cursor,
        lag=end - cursor,
        in_flight=in_flight,
        returned=0,
        retrying=0,
        dying=0,
        dead=0,
        lost=0,
        inbox=0,
        lots=0,
        weight=1.0,
        is_paused=False,
        config_version=1,
        consumers_count=1,
        actor=actor,
        oldest_ms=oldest_ms or None,
    )
    return SubjectDescription("s", 0, end, False, 1, [group])


def _two_looks(before: SubjectDescription, after: SubjectDescription, elapsed_s: float = 2.0) -> GroupRow:
    watch = RateMeter()
    [first] = watch.look([before], now_ns=S_NS, now_ms=5_000)
    assert (first.rate, first.rate_in, first.share, first.cold_share) == (0, 0, 0, 0)
    [second] = watch.look([after], now_ns=S_NS + int(elapsed_s * S_NS), now_ms=7_000)
    return second


def test_rates_are_of_what_is_done_with() -> None:
    row = _two_looks(_subject(end=100, cursor=50, in_flight=10), _subject(end=300, cursor=150, in_flight=20))
    assert (row.rate_in, row.rate, row.lag, row.in_flight) == (100.0, 45.0, 150, 20)


def test_shares_are_of_the_time_between() -> None:
    before = _subject(end=1, cursor=1, served_ns=S_NS, cold_ns=0)
    row = _two_looks(before, _subject(end=1, cursor=1, served_ns=S_NS + S_NS // 2, cold_ns=S_NS // 2))
    assert (row.share, row.cold_share) == (0.25, 0.5)


def test_an_actor_that_was_removed_begins_again() -> None:
    row = _two_looks(
        _subject(end=1, cursor=1, served_ns=9 * S_NS), _subject(end=1, cursor=1, served_ns=S_NS, cold_ns=0)
    )
    assert row.share == 0.5
    assert _two_looks(_subject(end=1, cursor=1, served_ns=S_NS), _subject(end=1, cursor=1)).share == 0


def test_a_group_that_was_moved_back_has_settled_nothing() -> None:
    assert _two_looks(_subject(end=100, cursor=100), _subject(end=100, cursor=0)).rate == 0


def test_the_oldest_has_an_age() -> None:
    assert _two_looks(_subject(end=1, cursor=1), _subject(end=2, cursor=1, oldest_ms=6_500)).oldest_s == 0.5
    assert _two_looks(_subject(end=1, cursor=1), _subject(end=1, cursor=1)).oldest_s is None


NOW = datetime.fromtimestamp(SIMULATED_START_MS / 1_000, UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("0", 0),
        ("12345", 12345),
        ("90s", NOW - timedelta(seconds=90)),
        ("15m", NOW - timedelta(minutes=15)),
        ("1.5h", NOW - timedelta(hours=1.5)),
        ("3d", NOW - timedelta(days=3)),
        ("2026-03-01T12:00Z", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("2026-03-01T12:00+02:00", datetime(2026, 3, 1, 10, tzinfo=UTC)),
    ],
)
def test_places(text: str, expected: object) -> None:
    assert arguments.parse(text, ManualClock()) == expected


@pytest.mark.parametrize("text", ["", "-1", "noon", "5w", "٣", "2026-03-01"])
def test_no_places(text: str) -> None:
    with pytest.raises(Misuse):
        arguments.parse(text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds: float, shown: str) -> None:
    assert output.age(seconds) == shown


def test_shares() -> None:
    assert [output.share(part) for part in (0, 0.001, 0.5, 1)] == ["0 %", "<1 %", "50 %", "100 %"]
