"""Child processes that can be killed at any instant: a Python module, and a real ZooKeeper.

`Child` is a Python module that runs on its own and writes lines. For demonstrations and crash campaigns, which show how
a process dies. The child sees the modules that this process sees, has no stdin, and shares stderr, unless that goes to
a file. Its lines come through a pipe. So lines that it wrote whole are still read after a kill; half a line is not.

`ensemble` is a ZooKeeper for development and tests: one server or three, from the jars that pyspark ships, on loopback.

    with ensemble() as zookeeper:                 one server, on a free port, gone with its data at the end
        KazooClient(zookeeper.hosts)
    with ensemble(3, tick_ms=500) as zookeeper:   three; sessions last from 2 to 20 ticks
        zookeeper.servers[0].kill()               or suspend and resume; `start` begins again, with its data
        zookeeper.leader()

The servers sync nothing and authenticate nobody: never use them for data that matters. They end with the process that
started them, even if that is killed, where the system can do this.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from fairway.errors import FairwayError, Misuse
from fairway.runtime.file_system import make_private
from fairway.runtime.host import free_port

_CHUNK_BYTES = 1 << 16


class ChildSilent(FairwayError):
    """The child wrote nothing for longer than its caller waits."""


class Child:
    """A Python module in a process of its own. Leaving its `with` kills the process."""

    def __init__(self, module: str, *arguments: str, errors_to: Path | None = None) -> None:
        """`errors_to`: the file that gets the child's stderr, appended."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with nullcontext() if errors_to is None else errors_to.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter, and no shell
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for this process; leaving the `with` ends the child
            )
        stdout = self._process.stdout
        self._fd = stdout.fileno() if stdout is not None else -1
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)
        self._unread = b""
        self._is_at_end = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, *, timeout_s: float) -> str | None:
        """The next whole line, without its end; None when there are no more. `ChildSilent` if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread and not self._is_at_end:
            if not self._selector.select(max(deadline - time.monotonic(), 0)):
                raise ChildSilent(f"process {self.pid} said nothing for {timeout_s:g} s: see its messages above")
            data = os.read(self._fd, _CHUNK_BYTES)
            self._unread += data
            self._is_at_end = not data
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return line.decode("utf-8", "replace")

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end: no handler runs, nothing is flushed, the child's locks are free."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM. A child that has ended already is fine."""
        self._process.terminate()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, *, timeout_s: float) -> int:
        """The exit status, once the child has ended by itself; negative is the signal that ended it."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ChildSilent(f"process {self.pid} has not ended after {timeout_s:g} s") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


READY_S = 60.0
TICK_MS = 200
_JVM = ("-Xms32m", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-XX:-UsePerfData")
# Few jars: with all of pyspark's, the JVM opens 300 files and starts three times as slowly.
_JARS = ("zookeeper-", "slf4j-api-", "log4j-api-", "log4j-core-", "log4j-slf4j2-", "netty-", "snappy-", "metrics-core-")
_SERVING = ("leader", "follower", "standalone")
_ANSWER_S = 5.0


class ZooKeeperFailed(FairwayError):
    """A server does not do what it should; the message has the end of its log."""


class ZooKeeperServer:
    """One server: its port and its data stay the same through all its restarts."""

    def __init__(self, number: int, home: Path) -> None:
        self.number = number
        self.port = free_port()
        self.peer_ports = (free_port(), free_port())
        self._home = home / str(number)
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, tick_ms: int, everybody: list[ZooKeeperServer]) -> None:
        """Write the server's configuration."""
        data = self._home / "data"
        make_private(str(data.absolute()))
        (data / "myid").write_text(f"{self.number}\n")
        settings = {
            "tickTime": tick_ms,
            "dataDir": data,
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            "maxClientCnxns": 0,
            "initLimit": 50,
            "syncLimit": 10,
            "forceSync": "no",  # nobody cuts its power
        }
        if len(everybody) > 1:
            settings |= {f"server.{each.number}": each.quorum_address for each in everybody}
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        (self._home / "zoo.cfg").write_text("".join(lines))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def quorum_address(self) -> str:
        return "127.0.0.1:{}:{}".format(*self.peer_ports)

    # --- process -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, or start again; `await_serving` returns once the server answers."""
        setpriv = shutil.which("setpriv")
        leash = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        command = [*leash, _java(), *_JVM, f"-Djava.io.tmpdir={self._home}", "-cp", _class_path(),
                   "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self._home / "zoo.cfg")]  # fmt: skip
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  no shell
                command, cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int | None:
        """The process id; None: the server does not run."""
        return self._process.pid if self.is_alive and self._process is not None else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """Send SIGSTOP: the server lives, and does nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ZooKeeperFailed(f"server {self.number} does not run")
        os.kill(self._process.pid, number)

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, word: str) -> str:
        """The answer to a four-letter word of ZooKeeper; "" if nobody answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=_ANSWER_S) as connection:
                connection.sendall(word.encode())
                parts = []
                while part := connection.recv(_CHUNK_BYTES):
                    parts.append(part)
        except OSError:
            return ""
        return b"".join(parts).decode(errors="replace")

    @property
    def mode(self) -> str:
        """leader, follower or standalone; "" while the server does not serve."""
        lines = [line.partition(":")[2].strip() for line in self.ask("srvr").splitlines() if line.startswith("Mode:")]
        return lines[0] if lines else ""

    def await_serving(self) -> None:
        deadline = time.monotonic() + READY_S
        while self.mode not in _SERVING:
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                log = (self._home / "log").read_text(errors="replace")
                raise ZooKeeperFailed(f"ZooKeeper server {self.number} does not start: {log[-2_000:]}")
            time.sleep(0.05)


class Ensemble:
    """Servers that make up one ZooKeeper."""

    def __init__(self, servers: list[ZooKeeperServer]) -> None:
        self.servers = servers

    @property
    def hosts(self) -> str:
        """The addresses for kazoo's client."""
        return ",".join(server.address for server in self.servers)

    def leader(self) -> ZooKeeperServer:
        """The current leader."""
        return next(server for server in self.servers if server.mode in ("leader", "standalone"))


@contextmanager
def ensemble(servers: int = 1, *, tick_ms: int = TICK_MS, home: Path | None = None) -> Iterator[Ensemble]:
    """Running servers, gone at the end with their data, unless that has a `home` of its own."""
    with tempfile.TemporaryDirectory(prefix="fairway-zookeeper-", ignore_cleanup_errors=True) as made:
        everybody = [ZooKeeperServer(number, home or Path(made)) for number in range(1, servers + 1)]
        try:
            for server in everybody:
                server.prepare(tick_ms, everybody)
                server.start()
            for server in everybody:
                server.await_serving()
            yield Ensemble(everybody)
        finally:
            for server in everybody:
                server.kill()


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin" if home else None) or shutil.which("java")
    if found is None:
        raise Misuse("no Java was found, which ZooKeeper runs on: install version 17 or later, or set JAVA_HOME")
    return found


def _class_path() -> str:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise Misuse("ZooKeeper is taken from pyspark, which is not installed: pip install 'fairway[spark]'")
    jars = Path(spec.origin).parent / "jars"
    found = [str(path) for path in sorted(jars.glob("*.jar")) if path.name.startswith(_JARS)]
    if not any("zookeeper-" in path for path in found):
        raise Misuse(f"pyspark's jars in {jars} have no ZooKeeper: install pyspark anew")
    return ":".join(found)
