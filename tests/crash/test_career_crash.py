"""Candidates that are stopped, cut off and killed for a few seconds, on a real ZooKeeper and a real PostgreSQL; and
proof that the judgement sees what it is for."""

from __future__ import annotations

import pytest

from tests.crash import career_rounds
from tests.crash.career_rounds import CareerCounts, Line, Row, judge, percentile
from tests.support import zookeeper

pytestmark = pytest.mark.xdist_group("zookeeper")

SECONDS_MAX = 60.0  # a plan ends before


def run(url: str, *plan: str, is_fenced: bool = True) -> CareerCounts:
    ensemble = zookeeper.shared()
    planned = iter(plan)
    return career_rounds.run(SECONDS_MAX, 7, CareerCounts(), ensemble, url, planned=planned, is_fenced=is_fenced)


def test_nothing_of_a_deposed_leader_is_accepted(postgres_url: str) -> None:
    counts = run(postgres_url, "stop", "freeze", "kill", "term")
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert sum(counts.deeds.values()) == 4
    assert counts.reigns >= 5
    assert counts.rows > counts.reigns


@pytest.mark.slow
def test_without_a_fence_the_same_stops_let_deposed_leaders_through(postgres_url: str) -> None:
    counts = run(postgres_url, *["stop"] * 6, is_fenced=False)
    assert any("was accepted after token" in breach for breach in counts.breaches), counts.figures()


# --- planted rows and lines -------------------------------------------------------------------------------------------

ROWS = [Row(1, 10, "a"), Row(2, 10, "a"), Row(3, 20, "b"), Row(4, 30, "a")]
LINES = [
    Line(100, "inaugurated", 10, "a"),
    Line(110, "wrote", 10, "a"),
    Line(150, "handed over", 10, "a"),
    Line(160, "inaugurated", 20, "b"),
    Line(170, "wrote", 20, "b"),
]


@pytest.mark.parametrize(
    ("rows", "lines", "sentences"),
    [
        (ROWS, LINES, []),
        ([], [], []),
        ([*ROWS, Row(5, 20, "b")], LINES, ["row 5 of token 20 was accepted after token 30"]),
        ([*ROWS, Row(5, 30, "b")], LINES, ["token 30 is of a and of b"]),
        (ROWS[1:], [*LINES, Line(120, "wrote", 10, "a")], ["token 10 wrote 2 rows, and 1 are there"]),
        (ROWS, [*LINES, Line(155, "inaugurated", 30, "a")], []),
        (
            ROWS,
            [*LINES, Line(149, "inaugurated", 30, "a")],
            ["token 10 was in office and handing over when a later one was inaugurated"],
        ),
        (ROWS, [*LINES, Line(200, "handed over late", 20, "b"), Line(180, "inaugurated", 30, "a")], []),
    ],
)
def test_judgement(rows: list[Row], lines: list[Line], sentences: list[str]) -> None:
    assert judge(rows, lines) == sentences


def test_percentiles_of_few_samples() -> None:
    assert [percentile([], 50), percentile([7], 99)] == [0, 7]
    assert [percentile(range(101), 50), percentile(range(101), 99)] == [50, 99]
