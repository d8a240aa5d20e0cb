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
from typing import NamedTuple

import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import SparkSession

import fairway
from fairway.client.sync import Client
from fairway.spark.jobs import archive
from tests.spark.conftest import Server
from tests.spark.helpers import batch_reader, rows
from tests.spark.jobs import rows as archived
from tests.spark.jobs import send
from tests.support.ports import free_port

HOME = Path(pyspark.__file__).parent
PROGRAM = Path(__file__).parent / "copying.py"
WAIT_S = 240
ENVIRONMENT = {
    **os.environ,
    "SPARK_HOME": str(HOME),
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_NO_DAEMONIZE": "1",
}
SMALL = ("--driver-memory", "512m", "--driver-java-options", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")


class Cluster(NamedTuple):
    """A master and its worker."""

    url: str
    worker_pid: int

    def kill_executor(self) -> None:
        """One that runs now, as soon as there is one; the worker starts another in its place."""
        end = time.monotonic() + WAIT_S
        while not (running := self._executors()):
            assert time.monotonic() < end, "no executor has started"
            time.sleep(0.1)
        os.kill(running[0], signal.SIGKILL)

    def _executors(self) -> list[int]:
        children = Path(f"/proc/{self.worker_pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text(encoding="ascii").split()]
        return [pid for pid in pids if b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def payloads(url: str, subject: str) -> list[int]:
    return [int(row["payload"]) for row in rows(batch_reader(url, subject))]


def deploy(kind: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *arguments, "--webui-port", "0"]
    environment = {**ENVIRONMENT, "SPARK_DAEMON_MEMORY": "256m", "SPARK_WORKER_DIR": str(log.parent / "work")}
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out)


def wait_for(log: Path, words: str) -> None:
    end = time.monotonic() + WAIT_S
    while words not in log.read_text(encoding="utf-8", errors="replace"):
        assert time.monotonic() < end, log.read_text(encoding="utf-8")
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    port = str(free_port())
    url = f"spark://127.0.0.1:{port}"
    master_log, worker_log = tmp_path / "master.log", tmp_path / "worker.log"
    started = [deploy("master.Master", "--host", "127.0.0.1", "--port", port, log=master_log)]
    try:
        wait_for(master_log, "I have been elected leader")
        started.append(
            deploy("worker.Worker", "--host", "127.0.0.1", "--cores", "2", "--memory", "1g", url, log=worker_log)
        )
        wait_for(worker_log, "Successfully registered with master")
        yield Cluster(url, started[1].pid)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


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
    command = [sys.executable, "-m", "fairway.cli.main", "pipeline", "archive", "lost.one", "--path", path]
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
    archive.run(spark, archive.Options(path, ("lost.one",), url, once=True))
    live = spark.read.format("fairway").options(url=url, subject="lost.one").load()
    assert archived(archive.read(spark, path)) == archived(live)
    assert live.count() == sent


def _wait_for_rows(url: str, subject: str, count: int) -> None:
    end = time.monotonic() + WAIT_S
    while len(payloads(url, subject)) < count:
        assert time.monotonic() < end
        time.sleep(0.1)
