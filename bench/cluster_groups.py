"""Brokers as commands in processes of their own, for `bench.cluster` and `bench.cores`.

Alone, in groups on a real ZooKeeper, or several on one host behind a meta server that keeps the registry itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.kernel_counters import cpu_s
from fairway.registry.layout import MASTER, GroupRecord, RegisteredCopy
from fairway.runtime.process import Child
from tests.crash.cluster_view import View
from tests.support.ports import free_port
from tests.support.zookeeper import Ensemble

START_S = 60.0
READY = re.compile(r"fairway \w+: ready at .*")


def started(*arguments: str) -> Child:
    """A command of ours that has said that it is ready."""
    child = Child("fairway", *arguments)
    try:
        said = child.line(timeout_s=START_S)
    except BaseException:
        child.kill()
        raise
    if READY.fullmatch(said or "") is None:
        child.kill()
        raise RuntimeError(f"`fairway {' '.join(arguments)}` does not start")
    return child


def end(child: Child) -> None:
    """SIGKILL, and close the pipe that it spoke through."""
    with child:
        pass


class Alone:
    """A broker without replicas and without a registry."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._child = started("broker", "--data", str(folder / "alone"), "--port", str(self.port))

    @property
    def url(self) -> str:
        return f"fairway://127.0.0.1:{self.port}"

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._child.pid,)

    def cpu_s(self) -> float:
        return cpu_s(self._child.pid)

    def close(self) -> None:
        end(self._child)


class OneHost:
    """So many brokers without replicas and the meta server of all; each new subject is on every broker."""

    def __init__(self, folder: Path, brokers: int) -> None:
        port = free_port()
        self.url = f"meta://127.0.0.1:{port}"
        self._children: list[Child] = []
        try:
            registry = ("--registry", f"sqlite:{folder / f'registry-{brokers}'}")
            self._start("meta", *registry, "--port", str(port), "--spread", str(brokers))
            for number in range(brokers):
                data = ("--data", str(folder / f"broker-{number}-of-{brokers}"))
                group = ("--registry", self.url, "--group", f"core-{number}")
                self._start("broker", *data, "--port", str(free_port()), *group)
            self._await_led(brokers)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the brokers, not of the meta server."""
        return tuple(child.pid for child in self._children[1:])

    def close(self) -> None:
        for child in self._children:
            end(child)

    def _start(self, *arguments: str) -> None:
        self._children.append(started(*arguments))

    def _await_led(self, brokers: int) -> None:
        deadline = time.monotonic() + START_S
        command = [sys.executable, "-m", "fairway", "cluster", "--url", self.url, "--json", "--check"]
        while time.monotonic() < deadline:
            told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_S)
            if not told.returncode and len(json.loads(told.stdout)["groups"]) == brokers:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the {brokers} brokers behind {self.url} are not all led")


class BrokerGroup:
    """So many copies of one broker."""

    def __init__(self, folder: Path, zookeeper: Ensemble, name: str, copies: int, session_ms: int) -> None:
        self.name = name
        self.ports = [free_port() for _ in range(copies)]
        self._folder = folder
        self._zookeeper = zookeeper
        self._session_ms = session_ms
        self._children: dict[int, Child] = {}
        for port in self.ports:
            self.start(port)
        self.await_whole()

    def start(self, port: int) -> None:
        registry = f"zookeeper://{self._zookeeper.hosts}"
        self._children[port] = started(
            *("broker", "--data", str(self._folder / f"{self.name}-{port}"), "--port", str(port)),
            *("--registry", registry, "--group", self.name, "--session-ms", str(self._session_ms)),
        )

    @property
    def url(self) -> str:
        return "fairway://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def cpu_s(self) -> float:
        return sum(cpu_s(child.pid) for child in self._children.values())

    def kill(self, port: int) -> None:
        end(self._children.pop(port))

    def close(self) -> None:
        for child in self._children.values():
            end(child)

    # --- what the registry says --------------------------------------------------------------------------------------

    def await_whole(self) -> int:
        """Until all copies are in sync; the port of the one that leads."""
        record, members = self._await(lambda record: len(record.in_sync) == len(self.ports))
        return members[record.master].port

    def await_master(self, without: int) -> int:
        """Until another copy than that one leads; its port."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            record, members = self._await(lambda record: bool(record.in_sync))
            master = members.get(record.master)
            if master is not None and master.port != without and master.role == MASTER:
                return master.port
            time.sleep(0.05)
        raise RuntimeError(f"nobody takes over in group {self.name}")

    def _await(self, is_so: Callable[[GroupRecord], bool]) -> tuple[GroupRecord, dict[str, RegisteredCopy]]:
        view = View(self._zookeeper.hosts, self.name)
        deadline = time.monotonic() + START_S
        try:
            while time.monotonic() < deadline:
                record, members = view.record, view.members()
                if record is not None and set(record.in_sync) <= members.keys() and is_so(record):
                    return record, members
                time.sleep(0.05)
        finally:
            view.close()
        raise RuntimeError(f"group {self.name} does not become whole")


@contextmanager
def meta(zookeeper: Ensemble, subject: str, groups: Sequence[str]) -> Iterator[str]:
    """A meta server, which has been told that these groups carry the subject; its URL."""
    port = free_port()
    url = f"meta://127.0.0.1:{port}"
    with ExitStack() as running:
        child = started("meta", "--registry", f"zookeeper://{zookeeper.hosts}", "--port", str(port))
        running.callback(end, child)
        chosen = [word for group in groups for word in ("--on", group)]
        with Child("fairway", "subject", "create", subject, *chosen, "--url", url) as asked:
            if asked.wait(timeout_s=START_S) != 0:
                raise RuntimeError("the meta server does not make the subject: see its words above")
        yield url
