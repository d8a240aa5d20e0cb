"""A cluster of processes: a meta server with an SQLite registry, and brokers that register with it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fairway.protocol.route_messages import Govern, Governed, GroupRoute, RouteChange
from fairway.spark.server_groups import BROKER, DELAY, ServerGroups

WAIT_S = 60
SESSION_MS = "2000"  # after so long a copy that was killed is gone


class Process:
    """One server; it is ready when it has said where."""

    def __init__(self, *command: str) -> None:
        self._command = [sys.executable, "-m", "fairway", *command, "--port", "0"]
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.port = ""

    def ready(self) -> Process:
        assert self._process is not None
        assert self._process.stdout is not None
        found = re.search(r"ready at (?:\w+://)?[\d.]+:(\d+)", self._process.stdout.readline())
        assert found, f"{self._command} did not start"
        self.port = found[1]
        return self

    def tell(self, number: int = signal.SIGTERM) -> None:
        """To end; it takes its time."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self.tell(number)
            self._process.wait(WAIT_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Servers:
    """The cluster. `copies` are the servers, by names such as g1.a: group and copy; delay servers have groups whose
    names begin with d."""

    def __init__(self, home: Path, *copies: str) -> None:
        self._home = home
        self._meta = Process("meta", "--registry", f"sqlite:{home / 'meta'}", "--session-ms", SESSION_MS).ready()
        self.url = f"meta://{self._meta.address}"
        self.copies: dict[str, Process] = {}
        try:
            self._start(*copies)
        except BaseException:
            self.stop()
            raise

    def kill(self, name: str) -> None:
        """Without a word; the others hear of it when its session is over."""
        self.copies.pop(name).stop(signal.SIGKILL)

    def start_again(self, name: str) -> None:
        self._start(name)

    def _start(self, *copies: str) -> None:
        for name in copies:
            group = name.partition(".")[0]
            told = ["--registry", self.url, "--group", group, "--data", str(self._home / name)]
            verb = ("delay", "serve", "--http-port", "0") if name.startswith("d") else ("broker",)
            self.copies[name] = Process(*verb, *told, "--session-ms", SESSION_MS)
        for name in copies:
            self.copies[name].ready()
        for group in {name.partition(".")[0] for name in copies}:
            wanted = sum(name.partition(".")[0] == group for name in self.copies)
            self.until(lambda route, wanted=wanted: bool(route.master) and _in_sync(route) == wanted, group)

    def until(self, is_so: object, group: str) -> GroupRoute:
        """Wait until that is true of a group."""
        end = time.monotonic() + WAIT_S
        while True:
            route = self.route(group)
            if route is not None and is_so(route):  # type: ignore[operator]
                return route
            assert time.monotonic() < end, f"{group} does not become as it should: {route}"
            time.sleep(0.05)

    def route(self, group: str) -> GroupRoute | None:
        with ServerGroups(self.url, WAIT_S) as server_groups:
            return server_groups.groups(DELAY if group.startswith("d") else BROKER).get(group)

    def create(self, subject: str, groups: Sequence[str], change: RouteChange = RouteChange.CREATE) -> None:
        with ServerGroups(self.url, WAIT_S) as server_groups:
            server_groups.ask(Govern(change, subject, list(groups)), Governed)

    def extend(self, subject: str, *groups: str) -> None:
        self.create(subject, groups, RouteChange.EXTEND)

    def master_of(self, group: str) -> str:
        """The name of the copy that leads."""
        route = self.until(lambda route: bool(route.master), group)
        return next(name for name, copy in self.copies.items() if copy.address == route.master)

    def stop(self) -> None:
        for each in self.copies.values():
            each.tell()
        for each in (*self.copies.values(), self._meta):
            each.stop()


def _in_sync(route: GroupRoute) -> int:
    return sum(copy.is_in_sync for copy in route.copies)
