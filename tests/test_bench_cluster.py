"""The cluster bench runs to its end, so that it does not rot; how fast it is here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import cluster

FOUND = {
    "cpu": {
        "produce": {"alone": [2.0, 4.0, 1.0], "replica": [4.0, 6.0, 3.0]},
        "through": {"alone": [5.0, 5.0, 5.0], "replica": [10.0, 10.0, 10.0]},
    },
    "latency": {"alone": [[1.0, 2.0, 3.0]], "replica": [[2.0, 4.0, 6.0]]},
    "failover": [100, 200, 300],
    "split": {"one": 0.5, "two": 0.5},
}


@pytest.mark.slow
@pytest.mark.xdist_group("zookeeper")
def test_a_tiny_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.main(["--tiny", "--json", "--data", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["produce"]["ratio"] > 0
    assert told["through"]["ratio"] > 0
    assert told["latency"]["replica"]["p99_ms"] > 0
    assert told["failover"]["kills"] == 1
    assert sum(told["split"].values()) == pytest.approx(1.0)


def test_ratios_are_taken_round_by_round() -> None:
    told = cluster.summarise(FOUND)
    assert told["produce"] == {
        "alone_cpu_s": 2.0,
        "replica_cpu_s": 4.0,
        "ratio": 2.0,
        "ratio_min": 1.5,
        "ratio_max": 3.0,
    }
    assert told["met"]
    assert told["latency"]["replica"]["p50_ms"] == 4.0
    assert told["failover"]["p50_ms"] == 200


def test_every_figure_is_shown() -> None:
    console = Console(width=120, record=True)
    cluster.show(cluster.summarise(FOUND), console)
    shown = console.export_text()
    for words in ("met: at most 2.2", "latency at 500/s, replica", "200 ms p50", "50.0%, 50.0%"):
        assert words in shown
