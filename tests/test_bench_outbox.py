"""The outbox bench runs to its end, so that it does not rot; how fast it is here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import outbox


@pytest.mark.slow
def test_a_tiny_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox.main(["--tiny", "--workers", "1", "--json", "--data", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary["ways"]) == set(outbox.WAYS)
    assert all(row["per_s"] > 0 for row in summary["ways"].values())
    console = Console(width=120, record=True)
    outbox.show(summary["ways"], console)
    assert "transactions/s" in console.export_text()


def test_ratios_are_taken_round_by_round() -> None:
    none = [outbox.Figure(rate, 0.0) for rate in (100.0, 200.0, 400.0)]
    ours = [outbox.Figure(rate, rest_s) for rate, rest_s in ((90.0, 0.1), (100.0, 0.3), (360.0, 0.2))]
    told = outbox.summarise({"none": none, "outbox": ours})
    assert told["outbox"] == {"per_s": 100.0, "rest_s": 0.3, "ratio": 0.9, "ratio_min": 0.5, "ratio_max": 0.9}
    assert outbox.is_met(told["outbox"])
    assert not outbox.is_met(told["outbox"] | {"rest_s": 30.0})  # fast, because it falls behind
