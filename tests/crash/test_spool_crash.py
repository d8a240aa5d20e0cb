"""Producers that share a spool, killed with their broker away; and proof that the checker sees what it is for."""

from __future__ import annotations

from typing import Any

import pytest

from fairway.client.spool.spool_directory import JournalReport, SpoolReport
from tests.crash import spool_rounds
from tests.crash.spool_rounds import SpoolCounts, is_sound_but_torn, judge

SECONDS = 2.0


def test_nothing_is_lost_when_producers_with_a_spool_and_their_broker_are_killed() -> None:
    counts = spool_rounds.run(SECONDS, 4, SpoolCounts())
    assert counts.clean, (counts.breaches[:3], counts.failures)
    assert counts.producer_kills >= 1
    assert counts.broker_kills >= 2
    assert counts.by_spool > 100


SAID: list[list[Any]] = [["sent", 0, 3], ["kept", 0, 1, "broker"], ["kept", 1, 2, "spool"], ["left"]]


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ([0, 1, 2], (0, 0, 0, 0)),
        ([0, 1], (1, 0, 0, 0)),
        ([0, 1, 2, 1], (0, 1, 0, 1)),
        ([0, 1, 2, 3], (0, 0, 1, 0)),
        ([0, 2, 1], (0, 0, 0, 1)),
    ],
    ids=["good", "lost", "twice", "invented", "disordered"],
)
def test_checker_judges(stored: list[int], found: tuple[int, ...]) -> None:
    counts = SpoolCounts()
    judge([("p", number) for number in stored], {"p": SAID}, counts)
    assert (counts.lost, counts.twice, counts.invented, counts.disordered) == found
    assert counts.clean is not any(found)


@pytest.mark.parametrize(
    ("damaged", "trouble", "is_fine"),
    [
        ([], "", True),
        (["kept/torn-00000000001669a0"], "", True),
        (["kept/torn-00000000001669a0", "kept/rotten-0000000000000038"], "", False),
        (["kept/torn-00000000001669a0"], "it cannot be read", False),
    ],
    ids=["sound", "torn by a kill", "rotten", "unreadable"],
)
def test_a_torn_end_is_what_a_kill_leaves_and_no_other_damage_is(
    damaged: list[str], trouble: str, is_fine: bool
) -> None:
    journal = JournalReport("1", None, 0, 0, 0, None, [], damaged, trouble)
    assert is_sound_but_torn(SpoolReport("spool", [journal])) is is_fine
