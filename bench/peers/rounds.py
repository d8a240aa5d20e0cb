"""Rounds: in each, every contender has its turn, on a server of its own that is fresh; the order moves on by one.

So whatever else the machine does, and whatever warms up, falls on all of them, and a ratio is of what ran minutes
apart.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers import workers
from bench.peers.contenders import Contender
from bench.peers.driving import Result, Task
from bench.peers.install import ROOT, NotInstalled
from bench.peers.servers import CannotRun, Server
from bench.peers.syncs import sync_us

READY_S_MAX = 120.0  # a worker program may take its time
DRIVER_S_MAX = 300.0
RATES_PER_S = (100, 1_000)
IN_FLIGHT_ON_ONE = (1, 1_000)
CONNECTIONS = (1, 10, 100, 400)
BACKLOG_OF = {"consume_batches": ("many", "produce_many"), "consume_each": ("each", "produce_each")}

Step = Callable[[str], None]


class DriverFailed(Exception):
    """A client process ended without a result; the message has its last words."""


@dataclass
class Sample:
    """One measurement."""

    messages_per_s: float = 0.0
    messages: int = 0
    server_us: float = 0.0  # of processor time, per message
    client_us: float = 0.0
    latencies_us: tuple[int, ...] = ()
    syncs_us: tuple[int, ...] = ()

    @classmethod
    def of(cls, result: Result, *clients: Result, syncs_us: Sequence[int] = ()) -> Sample:
        """Of a driver's result; `clients` worked beside it, and what they have used counts, too."""
        per_us = 1e6 / max(result.messages, 1)
        return cls(
            result.messages / result.elapsed_s,
            result.messages,
            result.server_cpu_s * per_us,
            sum(each.client_cpu_s for each in (result, *clients)) * per_us,
            result.latencies_us,
            tuple(syncs_us),
        )


@dataclass
class Collected:
    """Samples by workload, by contender, in the order of the rounds; and who was skipped, with the reason."""

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, workload: str, contender: Contender, sample: Sample) -> None:
        self.samples.setdefault(workload, {}).setdefault(contender.name, []).append(sample)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how often, which."""

    rounds: int
    seconds: float
    warm_s: float
    workloads: tuple[str, ...]
    under: str | None  # where data goes


def run(plan: Plan, contenders: Sequence[Contender], step: Step) -> Collected:
    collected = Collected()
    for number in range(plan.rounds):
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            if contender.name not in collected.skipped:
                _turn(plan, contender, collected, step)
    return collected


def _turn(plan: Plan, contender: Contender, collected: Collected, step: Step) -> None:
    workloads = [name for name in contender.workloads if name in plan.workloads]
    if not workloads:
        return
    step(f"{contender.name}: starts")
    try:
        python = contender.python()
        with _directory(plan.under) as data, contender.server(data) as server:
            client = Client(contender, python, server, plan)
            for workload in workloads:
                step(f"{contender.name}: {workload}")
                _workload(client, contender, workload, collected)
    except (NotInstalled, CannotRun) as error:
        collected.skipped[contender.name] = str(error)


def _workload(client: Client, contender: Contender, workload: str, collected: Collected) -> None:
    """A client that fails loses this workload, for good, and nothing else."""
    name = f"{contender.name}, {workload}"
    if name in collected.skipped:
        return
    try:
        for part, sample in client.measure(workload):
            collected.add(part, contender, sample)
    except (DriverFailed, subprocess.TimeoutExpired) as error:
        collected.skipped[name] = f"failed, and is not tried again: {error}"


@contextmanager
def _directory(under: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="peers-", dir=under, ignore_cleanup_errors=True) as made:
        yield Path(made) / "server"


class Client:
    """One contender's client processes, on its running server."""

    def __init__(self, contender: Contender, python: Path, server: Server, plan: Plan) -> None:
        self._contender = contender
        self._python = python
        self._server = server
        self._plan = plan
        self._stored: dict[str, int] = {}  # how many messages each workload left in its subject

    def measure(self, workload: str) -> Iterator[tuple[str, Sample]]:
        if workload == "latency":
            for rate_per_s in RATES_PER_S:
                yield f"latency {rate_per_s}/s", self._latency(rate_per_s)
        elif workload == "one_at_a_time":
            for in_flight in IN_FLIGHT_ON_ONE:
                yield f"{workload} {in_flight}", self._one(replace(self._task(workload, "one"), in_flight=in_flight))
        elif workload == "many_connections":
            for connections in CONNECTIONS:
                task = replace(self._task(workload, "connections"), connections=connections)
                yield f"{workload} {connections}", self._one(task)
        elif workload in BACKLOG_OF:
            yield workload, self._consume(workload)
        else:
            yield workload, self._one(self._task(workload, workload.removeprefix("produce_")))

    def _task(self, workload: str, subject: str) -> Task:
        plan = self._plan
        return Task(
            workload,
            self._server.url,
            subject,
            plan.seconds,
            plan.warm_s,
            variant=self._contender.variant,
            server_pids=self._server.pids,
        )

    def _one(self, task: Task) -> Sample:
        [result] = drive(self._python, self._contender.driver, [task])
        self._stored[task.workload] = result.messages
        return Sample.of(result)

    def _consume(self, workload: str) -> Sample:
        """Of what the producing workload stored; where that was not asked for, it is done first."""
        subject, producing = BACKLOG_OF[workload]
        if producing not in self._stored:
            self._one(self._task(producing, subject))
        return self._one(replace(self._task(workload, subject), count=self._stored[producing]))

    def _latency(self, rate_per_s: int) -> Sample:
        """A sender and a receiver, and syncs of the same disk at the same pace, before and after."""
        task = replace(self._task("receive_paced", f"paced{rate_per_s}"), rate_per_s=rate_per_s)
        beside = self._server.data
        syncs = sync_us(beside, self._plan.seconds / 2)
        tasks = (task, replace(task, workload="send_paced"))
        received, sent = drive(self._python, self._contender.driver, tasks)
        syncs += sync_us(beside, self._plan.seconds / 2)
        return Sample.of(received, sent, syncs_us=syncs)


def drive(python: Path, module: str, tasks: Sequence[Task]) -> list[Result]:
    """Clients at work at the same time, each in a process of its own."""
    with drivers(python, module, tasks) as processes:
        for process in processes:
            process.go()
        return [process.result() for process in processes]


@contextmanager
def drivers(python: Path, module: str, tasks: Sequence[Task]) -> Iterator[list[DriverProcess]]:
    """A process for each task, which has set up and waits for its turn. One after the other: the first makes topics."""
    processes: list[DriverProcess] = []
    try:
        for task in tasks:
            processes.append(DriverProcess(python, module, task))
            processes[-1].await_ready()
        yield processes
    finally:
        for process in processes:
            process.end()


class DriverProcess:
    """A driver: set up, then at the gate, then at work, then a result."""

    def __init__(self, python: Path, module: str, task: Task) -> None:
        self._what = f"{module} {task.workload}"
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # not a pipe, which fills; `end` closes it
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.peers.drive", module, task.to_json()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**environment, workers.URL_VARIABLE: task.url},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], READY_S_MAX)[0] or out.readline().strip() != "ready":
            raise DriverFailed(self._last_words())

    def go(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def result(self) -> Result:
        said, _ = self._process.communicate(timeout=DRIVER_S_MAX)
        if self._process.returncode or not said:
            raise DriverFailed(self._last_words())
        last: dict[str, Any] = json.loads(said.splitlines()[-1])
        fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in last.items()}
        return Result(**fields)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"{self._what}: {lines[-1] if lines else 'it ended without a word'}"
