"""A standalone cluster of Spark on this machine: one master, one worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyspark

from tests.support.ports import free_port

HOME = Path(pyspark.__file__).parent
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


@contextmanager
def running_cluster(tmp_path: Path) -> Iterator[Cluster]:
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
