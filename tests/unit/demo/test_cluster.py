"""`fairway demo cluster`: what a newcomer sees of a cluster, and that nothing of it stays behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import fairway
from fairway.demo.cluster import Traffic
from fairway.runtime.process import Child
from tests.unit.cli.running import Cli, up

SHOW_S = 180.0
NOBODY = Cli("fairway://127.0.0.1:1")


def said(show: Child, word: str) -> str:
    """The next line with that word."""
    while (line := show.line(timeout_s=SHOW_S)) is not None:
        if word in line:
            return line
    raise AssertionError(f"it ended without a word of {word!r}")


def is_running(pid: str) -> bool:
    return Path("/proc", pid).exists()


def test_every_order_is_accounted_for(tmp_path: Path) -> None:
    with up(tmp_path / "data") as (_, url), fairway.connect(url) as client:
        unheard = Traffic(client, "unheard")  # whose consumer is not started
        unheard.send(client, 0.02)
        with Traffic(client, "orders") as traffic:
            traffic.send(client, 0.1)
            assert traffic.sent == 20
            for _ in range(600):
                if traffic.is_complete():  # two of them are for later
                    break
                time.sleep(0.05)
        assert traffic.received == traffic.stored == set(range(1, 21))
        sums = traffic.sum_up()
        assert "20 orders sent, 20 stored; 2 were for later" in sums[0]
        assert "0 lost" in sums[-1]
        assert not unheard.is_complete()
        assert unheard.lost == {1, 2, 3, 4}
        assert "4 lost" in unheard.sum_up()[-1]


def test_without_java_it_says_what_is_missing() -> None:
    assert (
        "install version 17 or later, or set JAVA_HOME"
        in NOBODY.both("demo", "cluster", status=2, PATH="", JAVA_HOME="")[1]
    )


@pytest.mark.slow
def test_a_cluster_loses_nothing_although_a_master_is_killed_and_nothing_stays_behind(tmp_path: Path) -> None:
    with Child("fairway", "demo", "cluster", "--seconds", "16", "--data", str(tmp_path / "data")) as show:
        processes = re.findall(r"[\w-]+ (\d+)", said(show, "processes:"))
        assert len(processes) == 9
        assert "which leads g1" in said(show, "kill -9 ")
        assert "which leads d1" in said(show, "kill -9 ")
        assert "later, of which a session" in said(show, "under epoch 2")
        assert "later, of which a session" in said(show, "under epoch 2")
        assert "0 lost" in said(show, " lost")
        assert show.wait(timeout_s=SHOW_S) == 0
    assert not [pid for pid in processes if is_running(pid)]


@pytest.mark.slow
def test_it_ends_when_it_is_told_to_and_removes_what_it_made() -> None:
    with Child("fairway", "demo", "cluster") as show:
        processes = re.findall(r"[\w-]+ (\d+)", said(show, "processes:"))
        command = Path("/proc", processes[3], "cmdline").read_bytes().split(b"\0")
        directory = Path(command[command.index(b"--data") + 1].decode())
        assert directory.is_dir()
        show.terminate()
        assert "0 lost" in said(show, " lost")
        assert show.wait(timeout_s=SHOW_S) == 0
    assert not [pid for pid in processes if is_running(pid)]
    assert not directory.parent.exists()
