"""The fairness bench runs to its end, so that it does not rot; how fair it is on a loaded machine says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import fairness


def test_a_tiny_run_prints_every_figure_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "fairness.png"
    arguments = ["--tiny", "--json", "--directory", str(tmp_path), "--plot", str(picture)]
    assert fairness.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    for kind in ("actors", "plain queue"):
        assert 0 <= result["shares"][kind]["small_share"] <= 1
        assert result["cold"][kind]["beside"]["p99_ms"] > 0
    assert result["cold"]["actors"]["beside"]["cold_messages_per_s"] > 0
    assert result["crowd"]["groups"] == 5
    assert result["crowd"]["deliveries_per_s"] > 0
    assert picture.stat().st_size > 10_000
    fairness.show(result)
    assert "Jain" in capsys.readouterr().out


@pytest.mark.parametrize(("shares", "index"), [([1, 1], 1.0), ([1, 0], 0.5), ([3, 1], 0.8)])
def test_jains_index(shares: list[float], index: float) -> None:
    assert fairness.jain(shares) == pytest.approx(index)


def test_percentiles() -> None:
    values = list(map(float, range(100)))
    assert (fairness.percentile(values, 50), fairness.percentile(values, 99)) == (50.0, 99.0)
    assert fairness.percentile([], 99) == 0.0
