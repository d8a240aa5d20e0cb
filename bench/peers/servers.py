"""Each peer as a real server: a process on loopback, on a free port, on a fresh directory; stopped by its pid.

A server says in `durability` what is safe when it confirms, in the words that the tables print.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from bench.peers import install
from tests.support.ports import free_port

READY_S_MAX = 60.0
STOP_S_MAX = 15.0


class CannotRun(Exception):
    """A server is not installed, or does not start; the message says which."""


@dataclass
class Server:
    """One process, or a helper and one process. Entering starts it and waits until it accepts; leaving stops it."""

    data: Path
    port: int = field(default_factory=free_port)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    scheme: ClassVar[str]

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, without those that they started."""
        return tuple(process.pid for process in self._started)

    def start(self) -> None:
        raise NotImplementedError

    def spawn(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Its output goes to a file beside its data, and is quoted when it does not start."""
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the bench, which then stops its servers in order
            )
        self._started.append(process)

    @property
    def log_path(self) -> Path:
        return self.data / "server.log"

    def __enter__(self) -> Self:
        self.data.mkdir(parents=True, exist_ok=True)
        try:
            self.start()
            self._await_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self.data, ignore_errors=True)

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S_MAX
        while not self.is_ready():
            if self._started[-1].poll() is not None or time.monotonic() > deadline_s:
                said = self.log_path.read_text(encoding="utf-8", errors="replace")
                raise CannotRun(f"{type(self).__name__} did not start: {' '.join(said.split())[-300:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _stop(self) -> None:
        while self._started:
            process = self._started.pop()
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Redis(Server):
    """`everysec` is what Redis ships with once its log is on; `always` syncs before it answers."""

    scheme = "redis"
    fsync = "always"

    def start(self) -> None:
        program = install.program("redis-server")
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.data,
            "save": "",
            "appendonly": "yes",
            "appendfsync": self.fsync,
            "daemonize": "no",
        }
        self.spawn([program, *(str(word) for name, value in options.items() for word in (f"--{name}", value))])


class RedisEverySecond(Redis):
    fsync = "everysec"


class Nats(Server):
    """A file store; `sync_interval: always` syncs each message before it is confirmed."""

    scheme = "nats"
    sync_interval = "always"

    def start(self) -> None:
        program = install.client_program("nats-server")
        store = f'{{ store_dir: "{self.data}", sync_interval: {self.sync_interval} }}'
        config = self.data / "nats.conf"
        config.write_text(f"listen: 127.0.0.1:{self.port}\njetstream: {store}\n", encoding="utf-8")
        self.spawn([program, "--config", config])


class NatsInterval(Nats):
    sync_interval = "2m"  # what it ships with


class RabbitMq(Server):
    """A node of its own name on directories of its own, with a port mapper of its own, as its own child.

    Else the first node on a machine leaves a port mapper behind, which nobody here would stop.
    """

    scheme = "amqp"
    queue_type = "quorum"

    def start(self) -> None:
        program = install.program("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")
        mapper_port, nodes_port = free_port(), free_port()
        environment = {
            "HOME": str(self.data),  # where the cookie goes
            "ERL_EPMD_PORT": str(mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(nodes_port),
            "RABBITMQ_MNESIA_BASE": str(self.data / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.data / "log"),
            "RABBITMQ_PID_FILE": str(self.data / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.data / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(self.data / "no-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.data / "rabbitmq"),
        }
        (self.data / "rabbitmq.conf").write_text("loopback_users = none\n", encoding="utf-8")
        (self.data / "plugins").write_text("[].\n", encoding="utf-8")
        self.spawn([install.program("epmd"), "-port", str(mapper_port), "-address", "127.0.0.1"], environment)
        self.spawn([program], environment)


class Kafka(Server):
    """One node that is broker and controller, no ZooKeeper. `flush.messages=1` syncs before the answer."""

    scheme = "kafka"
    flush_messages: str | None = "1"

    def start(self) -> None:
        jars = install.kafka_jars()
        java = [install.program("java"), "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-cp", f"{jars}/*"]
        config = self.data / "server.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in self._config().items()), encoding="utf-8")
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        formatted = subprocess.run(
            [*map(str, java), "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(config)],
            check=False,
            capture_output=True,
            text=True,
        )
        if formatted.returncode:
            raise CannotRun(f"Kafka's directory cannot be made: {(formatted.stderr or formatted.stdout)[-300:]}")
        self.spawn([*java, "kafka.Kafka", config])

    def _config(self) -> dict[str, str]:
        control_port = free_port()
        config = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{control_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{control_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.data / "logs"),
            "num.partitions": "1",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
        }
        if self.flush_messages is not None:
            config["log.flush.interval.messages"] = self.flush_messages
        return config


class KafkaPageCache(Kafka):
    flush_messages = None  # what it ships with


class Fairway(Server):
    """Ours, as a user starts it."""

    scheme = "fairway"
    durability = "sync"

    def start(self) -> None:
        program: list[str | Path] = [sys.executable, "-m", "fairway", "broker"]
        where: list[str | Path] = ["--data", self.data / "data", "--port", str(self.port)]
        self.spawn([*program, *where, "--durability", self.durability])


class FairwayMemory(Fairway):
    durability = "memory"


class FairwayMetered(Fairway):
    """It says what it has done at `http_port`."""

    def start(self) -> None:
        self.http_port = free_port()
        program: list[str | Path] = [sys.executable, "-m", "fairway", "broker", "--data", self.data / "data"]
        self.spawn([*program, "--port", str(self.port), "--http-port", str(self.http_port)])


def metrics(http_port: int) -> str:
    """A server's figures, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=10) as page:
        text: str = page.read().decode()
    return text


class FairwayUp(Fairway):
    """Broker and delay server in one process, as a newcomer starts them."""

    def start(self) -> None:
        where: list[str | Path] = ["--data", self.data / "data", "--port", str(self.port)]
        self.spawn([sys.executable, "-m", "fairway", "up", *where])


class FairwayDelay(Fairway):
    """A broker, and a delay server in a process of its own, which says how late it is at `http_port`."""

    def start(self) -> None:
        self.delay_port, self.http_port = free_port(), free_port()
        program: list[str | Path] = [sys.executable, "-m", "fairway"]
        self.spawn([*program, "broker", "--data", self.data / "broker", "--port", str(self.port)])
        where: list[str | Path] = ["--data", self.data / "delay", "--port", str(self.delay_port)]
        places = ["--http-port", str(self.http_port), "--broker", f"127.0.0.1:{self.port}"]
        self.spawn([*program, "delay", "serve", *where, *places])

    @property
    def url(self) -> str:
        return f"fairway://127.0.0.1:{self.port}?delay=127.0.0.1:{self.delay_port}"

    def is_ready(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return super().is_ready() and probe.connect_ex(("127.0.0.1", self.delay_port)) == 0


class Beanstalk(Server):
    """`-f0` syncs its log before it answers."""

    scheme = "beanstalk"
    sync_ms = "0"

    def start(self) -> None:
        log: list[str | Path] = ["-b", self.data, "-f", self.sync_ms]
        self.spawn([install.program("beanstalkd"), "-l", "127.0.0.1", "-p", str(self.port), *log])


class BeanstalkInterval(Beanstalk):
    sync_ms = "50"  # what it ships with
