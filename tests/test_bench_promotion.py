"""The bench of promotions runs to its end, so that it does not rot; how fast it is here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import promotion


@pytest.mark.slow
@pytest.mark.xdist_group("zookeeper")
def test_a_tiny_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert promotion.main(["--tiny", "--json", "--data", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["promote_ms"] > 0
    assert told["kill_ms"] > 0
    assert told["ratio"] == told["promote_ms"] / told["kill_ms"]


def test_the_slowest_promotion_decides_whether_the_goal_is_met() -> None:
    assert promotion.summarise({"promote": [100.0, 200.0, 999.0], "kill": [4_000.0] * 3})["met"]
    told = promotion.summarise({"promote": [100.0, 200.0, 1_001.0], "kill": [4_000.0] * 3})
    assert not told["met"]
    assert told["ratio"] == 0.05
