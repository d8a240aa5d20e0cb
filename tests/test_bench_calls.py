"""The bench of calls counts what one produce and one pull call in the broker, and names the files."""

from __future__ import annotations

import json
import sys

import pytest

from bench import calls
from fairway import batch


def test_a_run_names_the_files_and_counts_their_calls(capsys: pytest.CaptureFixture[str]) -> None:
    calls.main(["--rounds", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"produce", "pull"}
    for kind, by_file in found.items():
        assert f"broker/{'consume' if kind == 'pull' else 'produce'}.py" in by_file
        assert sum(by_file.values()) > len(by_file) > 5
        assert not [file for file in by_file if file.startswith(("client/", "simulation/"))]


def test_calls_outside_of_the_product_do_not_count() -> None:
    counter = calls.CallCounter()
    sys.setprofile(counter)
    try:
        json.dumps({})
        batch.encode([b"x"], producer_id=7, first_sequence=1, created_ms=1)
    finally:
        sys.setprofile(None)
    assert counter.calls
    assert all(file.startswith("batch/") for file in counter.calls)
