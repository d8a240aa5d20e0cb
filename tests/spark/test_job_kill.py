"""The archive job as a program: the driver is killed at a random moment, and the broker too, while messages flow. In
the end the archive is the log, row for row. And what the command line says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import fairway
from fairway.spark.jobs import archive
from tests.spark.conftest import Server
from tests.spark.jobs import rows, send, visible

_DEADLINE_S = 120.0
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A broker that may be killed."""
    served = Server(tmp_path / "data")
    yield served
    served.stop()


def job(*arguments: str) -> subprocess.Popen[str]:
    """`fairway pipeline ...`, in a session of its own, so that it is killed with all its children."""
    command = [sys.executable, "-m", "fairway", "pipeline", *arguments, "--master", "local[1]", "--json"]
    environment = {**os.environ, "JDK_JAVA_OPTIONS": _JAVA, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )


@pytest.mark.slow
def test_killed_drivers_and_brokers_leave_no_trace(spark: SparkSession, own: Server, tmp_path: Path) -> None:
    chance = random.Random(6)
    path = tmp_path / "archive"
    with fairway.connect(own.url, patience=60) as client:
        send(client, "kill.one", 500)
        driver = job("archive", "kill.one", "--path", str(path), "--interval-s", "0", "--url", own.url)
        try:
            sent, deadline = 500, time.monotonic() + _DEADLINE_S
            while len(visible(path)) < 3 and time.monotonic() < deadline:  # it is at work: messages flow meanwhile
                send(client, "kill.one", 50, first=sent)
                sent += 50
                time.sleep(0.1)
            assert len(visible(path)) >= 3, "the job has archived nothing"
            own.stop(signal.SIGKILL)
            own.start()
            for _ in range(chance.randrange(5, 25)):
                send(client, "kill.one", 50, first=sent)
                sent += 50
                time.sleep(chance.random() / 10)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            assert driver.stdout is not None
            driver.stdout.close()
        before = archive.contents(spark, str(path)).end("kill.one") or 0
        assert 0 < before <= sent
        archive.run(spark, archive.ArchiveOptions(str(path), ("kill.one",), own.url, once=True))
    live = spark.read.format("fairway").options(url=own.url, subject="kill.one").load()
    assert rows(archive.read(spark, str(path))) == rows(live)
    assert live.count() == sent
    assert spark.read.parquet(str(path)).count() == sent  # plain readers see nothing twice


def test_command_line_says_what_is_wrong_in_one_line(url: str) -> None:
    command = [sys.executable, "-m", "fairway", "pipeline"]
    environment = {**os.environ, "FAIRWAY_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([*command, "archive", "--help"], capture_output=True, text=True, env=environment, check=True)
    assert "fairway pipeline archive" in shown.stdout
    assert "--accept-loss" in shown.stdout
    wrong = subprocess.run(
        [*command, "replay", "a", "--to", "b", "--since", "yesterday"], capture_output=True, text=True, env=environment,
        check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1] == (
        "fairway pipeline replay: --since 'yesterday' is no time: write 2026-03-01T12:00Z"
    )
