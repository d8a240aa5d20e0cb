"""The isolation bench runs to its end, so that it does not rot; how isolated loads are here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import isolation
from bench.isolation import CASES, Side


def test_a_tiny_run_prints_both_sides_of_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With each kind of load once."""
    words = ["same subject", "a batch consumer", "scans", "admin beside a cold group"]
    assert isolation.main(["--tiny", "--json", "--directory", str(tmp_path), "--only", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {(row["case"], row["what"]) for row in rows if row["alone"] > 0 and row["beside"] > 0}
    names = [case.name for case in CASES if any(word in case.name for word in words)]
    assert len(names) == len(words)
    assert {name for name, what in found if what.endswith("p99 ms")} == set(names)
    assert {name for name, what in found if what.startswith("large load")} == set(names)
    assert not list(tmp_path.iterdir()), "it cleans up"


def test_ratios_are_taken_round_by_round_and_held_against_what_is_asked() -> None:
    case = next(case for case in CASES if case.most == {"send p50": 2.0})
    rounds = [
        {
            "small": Side({"send p50": small_ms}, 0.0, 0.0),
            "large": Side({}, 1_000.0, 0.0),
            "both": Side({"send p50": 6.0}, per_s, 0.1),
        }
        for small_ms, per_s in ((6.0, 950.0), (2.0, 850.0), (1.0, 990.0))
    ]
    latency, rate = isolation.rows_of(case, rounds)
    assert (latency["ratios"], latency["ratio"], isolation.verdict(latency)) == ([1, 3, 6], 3, "≤ 2: missed")
    assert (rate["ratio"], isolation.verdict(rate), rate["queued"]) == (0.95, "≥ 0.9: held", 0.1)
    console = Console(width=100, record=True)
    isolation.show([latency, rate], console)
    shown = console.export_text()
    assert all(text in shown for text in (case.name, "send p50 ms", "≤ 2: missed", "10%"))
