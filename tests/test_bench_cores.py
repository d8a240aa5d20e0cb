"""The cores bench runs to its end, so that it does not rot; how fast it is here says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import cores


def test_a_tiny_run_prints_every_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "CONNECTIONS", 3)
    arguments = ["--tiny", "--json", "--brokers", "2", "--clients", "2", "--directory", str(tmp_path)]
    assert cores.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)["workloads"]
    assert list(told) == list(cores.WORKLOADS)
    for rows in told.values():
        assert list(rows) == [cores.ALONE, "2 behind a meta server"]
        for row in rows.values():
            assert min(row["messages_per_s"], row["brokers_us"], row["clients_us"], row["ratio"]) > 0
    assert not list(tmp_path.iterdir()), "it cleans up"
    console = Console(width=100, record=True)
    cores.show(told, console)
    assert "2 behind a meta server" in console.export_text()
