"""The bench of many subjects runs to its end, so that it does not rot; how fast it is here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import subjects


@pytest.mark.slow
@pytest.mark.xdist_group("zookeeper")
def test_a_tiny_run_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert subjects.main(["--tiny", "--json", "--data", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    for form in ("sqlite", "zookeeper"):
        assert told[form]["sizes"].keys() == {"0", "50"}
        assert told[form]["ready_s"] > 0


def test_each_goal_counts() -> None:
    sizes = {0: {"ready_s": 1.0, "create_cpu_ms": 1.0}, 9: {"ready_s": 2.0, "create_cpu_ms": 1.4, "pause_seen_s": 0.5}}
    assert subjects.summarise({"sqlite": sizes})["sqlite"]["met"]
    for figure, value in (("ready_s", 11.0), ("create_cpu_ms", 1.6), ("pause_seen_s", 2.5)):
        worse = {**sizes, 9: {**sizes[9], figure: value}}
        assert not subjects.summarise({"sqlite": worse})["sqlite"]["met"]


def test_a_tiny_run_of_the_broker_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert subjects.main(["--broker", "--tiny", "--json", "--data", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)["broker"]
    assert all(told[figure] > 0 for figure in ("first_us", "last_us", "restart_s", "killed_s"))


def test_each_goal_of_the_broker_counts() -> None:
    told = {"first_us": 10.0, "last_us": 14.0, "restart_cpu_s": 2.0, "killed_cpu_s": 2.0}
    assert subjects.summarise_broker(told)["met"]
    for figure, value in (("last_us", 16.0), ("restart_cpu_s", 3.1), ("killed_cpu_s", 3.1)):
        assert not subjects.summarise_broker({**told, figure: value})["met"]


@pytest.mark.slow
def test_a_tiny_run_of_one_holder_prints_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert subjects.main(["--holder", "--tiny", "--json", "--data", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)["holder"]
    assert told["meta_growth"] >= 0
    assert told["client_first_ms"] > 0


def test_each_goal_of_the_holder_counts() -> None:
    told = {"meta_first_ms": 1.0, "meta_last_ms": 1.4, "client_first_ms": 1.0, "client_last_ms": 1.4}
    assert subjects.summarise_held(told)["met"]
    for figure in ("meta_last_ms", "client_last_ms"):
        assert not subjects.summarise_held({**told, figure: 1.6})["met"]
