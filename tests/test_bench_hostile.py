"""The short form of the soak under attack: it runs, and it judges what it saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import hostile_soak
from fairway.limits import MIB

SHORT = ["--seconds", "2", "--attack", "new_names", "--attack", "bad_names"]


def test_nothing_is_lost_beside_attacks_and_the_figures_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hostile_soak.main([*SHORT, "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "lost        0 of " in shown
    for row in ("before", "attacked", "after", "processor", "consumer", "recovery", "memory"):
        assert f"\n{row:<11} " in f"\n{shown}"


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (hostile_soak.Result(lost=1, rate=1.0, peak_bytes=1), "lost"),
        (hostile_soak.Result(lost=0, rate=0.89, peak_bytes=1), "0.890"),
        (hostile_soak.Result(lost=0, rate=1.0, peak_bytes=11 * MIB), "11 MiB of 10"),
    ],
)
def test_each_promise_that_does_not_hold_fails_the_soak(result: hostile_soak.Result, word: str) -> None:
    [sentence] = result.failures(10 * MIB)
    assert word in sentence
