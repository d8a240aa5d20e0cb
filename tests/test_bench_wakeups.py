"""The wake-ups bench runs to its end and counts what strace reports; how many there are here says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from bench import wakeups

REPORT = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 84.59    0.072085        1287        56        28 futex
  3.02    0.002572           2      1222           epoll_pwait
  2.02    0.002572           2         3           pwritev2
  1.02    0.002572           2         4           gettid
------ ----------- ----------- --------- --------- ----------------
100.00    0.085216          14      1285        28 total
"""


def test_a_tiny_run_counts_without_strace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert wakeups.main(["--tiny", "--json", "--directory", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["skipped"] == "no strace on this machine"
    for row in told["rates"].values():
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["syncs"] > 0
        for who in wakeups.WHO:
            assert row["counters"][who]["cpu_s"] > 0
            assert row["counters"][who]["voluntary_switches"] > 0
    assert not list(tmp_path.iterdir()), "it cleans up"
    console = Console(width=100, record=True)
    wakeups.show(told, console)
    assert "skipped: system calls: no strace on this machine" in console.export_text()


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_a_tiny_run_with_strace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wakeups, "RATES_PER_S", (100,))
    assert wakeups.main(["--tiny", "--directory", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "futex" in shown or "strace may not look on" in shown


def test_system_calls_by_kind() -> None:
    calls = wakeups.calls_of(REPORT)
    assert calls["futex"] == 56
    assert calls["waits: epoll, poll, select"] == 1_222
    assert calls["file writes, synced in them"] == 3
    assert calls["sends"] == 0
    assert calls[wakeups.ALL] == 1_285
