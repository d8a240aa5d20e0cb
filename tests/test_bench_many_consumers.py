"""The bench of many consumers on a client runs to its end, so that it does not rot; costs here say nothing."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from bench import many_consumers


def test_a_tiny_run_prints_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert many_consumers.main(["--tiny", "--json", "--consumers", "1", "3"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert list(ways) == list(many_consumers.WAYS)
    for rows in ways.values():
        assert [row["consumers"] for row in rows] == [1, 3]
        assert rows[0]["ratio"] == 1
        assert all(row["client_us"] > 0 and row["broker_us"] > 0 for row in rows)
    console = Console(width=100, record=True)
    many_consumers.show(ways, console)
    shown = console.export_text()
    assert all(way in shown for way in many_consumers.WAYS)
