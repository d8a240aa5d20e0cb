"""On a real cluster of one master and one worker, by spark-submit; and through kill -9 of drivers, executors and
brokers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import fairway
from fairway.client.sync.client import Client
from fairway.spark.jobs import archive
from tests.spark.conftest import Server
from tests.spark.helpers import batch_reader, rows
from tests.spark.jobs import rows as archived
from tests.spark.jobs import send
from tests.spark.standalone import ENVIRONMENT, HOME, SMALL, WAIT_S, Cluster

PROGRAM = Path(__file__).parent / "copying.py"


def payloads(url: str, subject: str) -> list[int]:
    return [int(row["payload"]) for row in rows(batch_reader(url, subject))]


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Spark programs in process groups of their own; none outlives its test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """The driver with its JVM, at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    if process.stdout is not None:
        process.stdout.close()


def submit(*arguments: str, master: str, program: Path = PROGRAM) -> subprocess.Popen[str]:
    command = [str(HOME / "bin" / "spark-submit"), "--master", master, *SMALL, str(program), *arguments]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_standalone_cluster_by_spark_submit(
    cluster: Cluster, drivers: list[subprocess.Popen[str]], client: Client, url: str, tmp_path: Path
) -> None:
    client.send_many("submit.from", [b"%d" % at for at in range(1_000)]).result(30)
    drivers.append(submit(url, "submit.from", "submit.to", str(tmp_path / "checkpoint"), master=cluster.url))
    printed, _ = drivers[0].communicate(timeout=WAIT_S)
    assert drivers[0].returncode == 0, printed
    assert re.search(r"stored=1000\b", printed), printed
    assert "batches=2" in printed
    assert payloads(url, "submit.to") == list(range(1_000))


@pytest.mark.slow
def test_job_is_a_program_for_spark_submit(
    drivers: list[subprocess.Popen[str]], client: Client, url: str, tmp_path: Path
) -> None:
    send(client, "submit.job", 100)
    path, arguments = str(tmp_path / "archive"), ("submit.job", "--once", "--url", url, "--json")
    drivers.append(submit(*arguments, "--path", path, master="local[2]", program=Path(archive.__file__)))
    printed, _ = drivers[0].communicate(timeout=WAIT_S)
    assert drivers[0].returncode == 0, printed
    assert '"rows": 100' in printed
    assert pq.read_table(path).num_rows == 100


@pytest.mark.slow
def test_copy_is_exact_through_kills_of_driver_and_broker(drivers: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    served = Server(tmp_path / "data")
    try:
        with fairway.connect(served.url) as client:
            client.send_many("kill.from", [b"%d" % at for at in range(5_000)]).result(30)
            client.send("kill.to", b"-1").result(30)
        arguments = (served.url, "kill.from", "kill.to", str(tmp_path / "checkpoint"))
        drivers.append(submit(*arguments, "for-ever", master="local[2]"))
        _wait_for_rows(served.url, "kill.to", 1_400)
        kill(drivers[0])
        drivers.append(submit(*arguments, master="local[2]"))
        _wait_for_rows(served.url, "kill.to", min(len(payloads(served.url, "kill.to")) + 1, 5_001))
        served.stop(signal.SIGKILL)
        served.start()
        printed, _ = drivers[1].communicate(timeout=WAIT_S)
        assert drivers[1].returncode == 0, printed
        copied = payloads(served.url, "kill.to")
    finally:
        served.stop()
    assert copied == [-1, *range(5_000)]


@pytest.mark.slow
def test_copy_is_exact_through_lost_executors(
    cluster: Cluster, drivers: list[subprocess.Popen[str]], client: Client, url: str, tmp_path: Path
) -> None:
    client.send_many("lost.from", [b"%d" % at for at in range(5_000)]).result(30)
    client.send("lost.to", b"-1").result(30)
    drivers.append(submit(url, "lost.from", "lost.to", str(tmp_path / "checkpoint"), master=cluster.url))
    for count in (600, 2_600):
        _wait_for_rows(url, "lost.to", count)
        cluster.kill_executor()
    printed, _ = drivers[0].communicate(timeout=WAIT_S)
    assert drivers[0].returncode == 0, printed
    assert payloads(url, "lost.to") == [-1, *range(5_000)]


@pytest.mark.slow
def test_archive_is_exact_through_lost_executors(
    cluster: Cluster,
    drivers: list[subprocess.Popen[str]],
    spark: SparkSession,
    client: Client,
    url: str,
    tmp_path: Path,
) -> None:
    path, sent = str(tmp_path / "archive"), 200
    send(client, "lost.one", sent)
    command = [sys.executable, "-m", "fairway", "pipeline", "archive", "lost.one", "--path", path]
    flags = ["--interval-s", "0", "--url", url, "--master", cluster.url, "--json"]
    drivers.append(subprocess.Popen([*command, *flags], env=ENVIRONMENT, text=True, start_new_session=True))
    end = time.monotonic() + WAIT_S
    for _ in range(2):
        reached = sent
        while not Path(path).exists() or (archive.contents(spark, path).end("lost.one") or 0) < reached:
            assert time.monotonic() < end, "the job does not go on"
            send(client, "lost.one", 50, first=sent)  # messages flow meanwhile
            sent += 50
            time.sleep(0.2)
        cluster.kill_executor()
    kill(drivers[0])
    archive.run(spark, archive.ArchiveOptions(path, ("lost.one",), url, once=True))
    live = spark.read.format("fairway").options(url=url, subject="lost.one").load()
    assert archived(archive.read(spark, path)) == archived(live)
    assert live.count() == sent


def _wait_for_rows(url: str, subject: str, count: int) -> None:
    end = time.monotonic() + WAIT_S
    while len(payloads(url, subject)) < count:
        assert time.monotonic() < end
        time.sleep(0.1)
