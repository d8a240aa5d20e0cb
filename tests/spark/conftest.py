"""One broker for all Spark tests of a process, and one SparkSession for all that need a JVM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import fairway
from fairway.client.sync.client import Client
from fairway.spark import session
from tests.spark.standalone import Cluster, running_cluster

JVM = {"spark", "cluster", "drivers"}  # fixtures that start one


@pytest.hookimpl(tryfirst=True)  # xdist looks at the marks, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that needs a JVM goes to one process of xdist: a session takes seconds to make, and a gigabyte."""
    for item in items:
        if JVM & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("spark"))


class Server:
    """A broker in a process of its own, to be killed and started again."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = "0"
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "fairway", "up", "--data", str(self._data), "--port", self._port]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r"fairway://[\d.]+:(\d+)", self._process.stdout.readline())
        assert found, "the broker did not start"
        self.url, self._port = found[0], found[1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = Server(tmp_path_factory.mktemp("broker"))
    yield served
    served.stop()


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[Client]:
    with fairway.connect(url) as connected:
        yield connected


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Small and quick to start: the first compiler only, the serial collector, no pages to look at."""
    home = tmp_path_factory.mktemp("spark")
    on_interrupt = signal.getsignal(signal.SIGINT)
    made = session(
        "tests",
        "local[2]",
        {
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(home / "warehouse"),
            "spark.local.dir": str(home / "local"),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    signal.signal(signal.SIGINT, on_interrupt)  # Spark takes it, and other tests of this process interrupt themselves
    yield made
    made.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as running:
        yield running
