"""The delay bench runs to its end, so that it does not rot; how fast it is here says nothing. No peer is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import delay, delay_pending


def test_a_tiny_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert delay.main(["--tiny", "--json", "--only", "fairway", "--data", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["skipped"] == {}
    for name in ("fairway", "fairway up"):
        assert min(summary["rates"][name]["many"] + summary["rates"][name]["each"]) > 0
        [row] = summary["lateness"][name]
        assert (row["messages"], row["missing"], row["early"]) == (100, 0, 0)
    assert summary["lateness"]["fairway"][0]["receipt_p99_ms"] > 0
    assert delay_pending.BARS.keys() <= summary["pending"].keys()
    assert all(figure > 0 for figure in summary["pending"].values())
    assert not list(tmp_path.iterdir()), "it cleans up"
    console = Console(width=160, record=True)
    delay.show(summary, console)
    shown = console.export_text()
    assert all(text in shown for text in ("rate of scheduling", "receipt p99", "restart to ready, s"))


def test_a_percentile_of_what_a_histogram_counts_in_between() -> None:
    before = exposed({"0.01": 5, "0.02": 5, "0.03": 5, "+Inf": 5})
    after = exposed({"0.01": 5, "0.02": 95, "0.03": 105, "+Inf": 105})
    assert delay.percentile_of(after, before, "x_seconds", 45) == pytest.approx(15)
    assert delay.percentile_of(after, before, "x_seconds", 95) == pytest.approx(25)
    assert delay.percentile_of(after, after, "x_seconds", 99) == 0


def exposed(buckets: dict[str, int]) -> str:
    return "\n".join(f'x_seconds_bucket{{le="{bound}"}} {count}' for bound, count in buckets.items())
