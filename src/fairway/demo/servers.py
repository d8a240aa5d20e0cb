"""The servers of the demo cluster, each a process of its own: started, restarted after a kill, ended.

    zookeeper       from the jars that pyspark ships
    m1, m2          meta servers
    g1-a, g1-b      a broker group, two copies
    g2-a, g2-b      another
    d1-a, d1-b      a group of delay servers, two copies

A killed server stays away for a while, so that the user sees a failover. Then it restarts on its directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fairway.errors import FairwayError
from fairway.runtime.clock import RealClock
from fairway.runtime.host import free_port

if TYPE_CHECKING:
    from fairway.runtime.process import Child, Ensemble

HOST = "127.0.0.1"
AWAY_S = 15.0  # longer than the others need to notice
SESSION_MS = 4_000
_TICK_MS = 400  # ZooKeeper grants sessions of 2 to 20 of these
_START_S = 60.0  # a machine that swaps is slow, not broken
_END_S = 20.0
_PORT = re.compile(r"ready at \S*?:(\d+)")


class ServerFailed(FairwayError):
    """One of the servers did not start."""


class _Absence:
    """How long a process has been dead."""

    def __init__(self) -> None:
        self._clock = RealClock()
        self._since_ns: int | None = None

    def is_over(self, *, is_alive: bool) -> bool:
        """Whether it is time to restart the server."""
        now_ns = self._clock.monotonic_ns()
        if is_alive:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = now_ns
        return self._since_ns is not None and now_ns - self._since_ns >= AWAY_S * 1e9


class DemoServer:
    """`fairway ...` in a process of its own; its port and its directory stay through all its lives."""

    def __init__(self, name: str, group: str, logs: Path, *arguments: str) -> None:
        self.name = name
        self.group = group  # the server group; empty for a server in none
        self.port = free_port()
        self.lives = 0
        self._log = logs / f"{name}.log"
        self._arguments = (*arguments, "--port", str(self.port))
        self._absence = _Absence()
        self._child: Child | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process ID; None while the server is dead."""
        return self._child.pid if self._child is not None and self._child.is_alive else None

    def start(self) -> None:
        """Start the process; `await_ready` waits until it is ready."""
        from fairway.runtime.process import Child

        self._child = Child("fairway", *self._arguments, errors_to=self._log)
        self.lives += 1

    def await_ready(self) -> None:
        ready = None if self._child is None else self._child.line(timeout_s=_START_S)
        if ready is None or _PORT.search(ready) is None:
            raise ServerFailed(f"{self.name} did not start: {self.last_words()}")

    def revive(self) -> bool:
        """Restart the server if it has been dead for a while; returns whether it was."""
        if not self._absence.is_over(is_alive=self.pid is not None):
            return False
        self._close()
        self.start()
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._child is not None:
            self._child.kill()

    def ask_to_end(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""
        from fairway.runtime.process import ChildSilent

        if self._child is not None:
            try:
                self._child.wait(timeout_s=_END_S)
            except ChildSilent:
                pass
            finally:
                self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None

    def last_words(self) -> str:
        """The last lines of its stderr."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.is_file() else []
        return lines[-1] if lines else "it said nothing"


class Cluster:
    """All servers of the cluster."""

    def __init__(self, root: Path, zookeeper: Ensemble) -> None:
        self._zookeeper = zookeeper
        self._absence = _Absence()
        self._root = root
        registry = f"zookeeper://{zookeeper.hosts}"
        member = ("--registry", registry, "--session-ms", str(SESSION_MS))
        metas = [DemoServer(name, "", root, "meta", *member) for name in ("m1", "m2")]
        brokers = [
            DemoServer(
                f"{group}-{copy}", group, root, "broker", *self._data(f"{group}-{copy}"), *member, "--group", group
            )
            for group in ("g1", "g2")
            for copy in "ab"
        ]
        delays = [
            DemoServer(name, "d1", root, "delay", "serve", *self._data(name), *member, "--group", "d1")
            for name in ("d1-a", "d1-b")
        ]
        self.servers = [*metas, *brokers, *delays]
        self.url = "meta://" + ",".join(meta.address for meta in metas)

    def _data(self, name: str) -> tuple[str, str]:
        return "--data", str(self._root / name)

    @property
    def zookeeper_pid(self) -> int | None:
        return self._zookeeper.servers[0].pid

    def at(self, address: str) -> DemoServer | None:
        """The server that listens at the address."""
        return next((each for each in self.servers if each.address == address), None)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.await_ready()

    def revive(self) -> list[str]:
        """Restart servers that have been dead for a while; returns their names."""
        back = [server.name for server in self.servers if server.revive()]
        return back + (["zookeeper"] if self._revive_zookeeper() else [])

    def _revive_zookeeper(self) -> bool:
        [server] = self._zookeeper.servers
        if not self._absence.is_over(is_alive=server.is_alive):
            return False
        server.kill()
        server.start()
        return True

    def stop(self) -> None:
        """Stop all servers; the meta servers last, because the others deregister there."""
        for server in reversed(self.servers):
            server.ask_to_end()
        for server in reversed(self.servers):
            server.stop()


@contextmanager
def running(root: Path) -> Iterator[Cluster]:
    """A ready cluster, with all its data in the directory."""
    from fairway.runtime.held_directory import make_private
    from fairway.runtime.process import ensemble

    make_private(str(root.absolute()))
    with ensemble(tick_ms=_TICK_MS, home=root / "zookeeper") as zookeeper:
        cluster = Cluster(root, zookeeper)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
