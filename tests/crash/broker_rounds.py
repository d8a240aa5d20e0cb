"""A broker that is killed and started again for a while, clients that go on, and the judgement of what they saw.

Producers and consumers are processes too, and now and then a consumer is killed as well. When the time is over
everything is drained, and the model of tests/simulation reads what all of them wrote down. Everything acknowledged was
delivered, nothing is invented, and payloads are exact. Nothing acked is handed out again, and nothing is handed out
twice without a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fairway.errors import FairwayError
from fairway.protocol.admin_messages import Depth, Describe, Described
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from tests.crash.broker_witness import Reading
from tests.crash.broker_worker import LEASE_MS, Orders
from tests.simulation.broker_truth import Breach, Promise, Truth
from tests.support.client import Client

REPOSITORY = Path(__file__).resolve().parents[2]
START_S_MAX = 30.0
DRAIN_S_MAX = 60.0
LIFE_S_MAX = 1.2
LIVES_MIN = 3  # of a broker that is killed, however slow the machine is
SUBJECTS = ("orders", "trips")
GROUPS = 2
CONSUMERS = 2  # per group and subject
STOPS_ONE_IN = 6  # broker lives that end cleanly
CONSUMER_KILLS_ONE_IN = 3  # broker lives in which a consumer dies too


@dataclass
class Counts:
    """What the rounds came to."""

    kills: int = 0
    stops: int = 0
    consumer_kills: int = 0
    lines: int = 0
    acknowledged: int = 0
    delivered: int = 0
    acked: int = 0
    again: Counter[str] = field(default_factory=Counter)
    breaches: list[Breach] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.breaches and not self.failures

    def figures(self) -> dict[str, Any]:
        found = Counter(each.promise for each in self.breaches)
        named = (Promise.LOST, Promise.PHANTOM, Promise.RENAMED, Promise.ACKED_AGAIN, Promise.DUPLICATE)
        return {
            "broker kills": self.kills,
            "clean stops": self.stops,
            "consumer kills": self.consumer_kills,
            "acknowledged": self.acknowledged,
            "delivered": self.delivered,
            "acked": self.acked,
            **{each.name.lower(): found[each] for each in named},
            "other breaches": sum(found.values()) - sum(found[each] for each in named),
            "delivered again": dict(sorted(self.again.items())),
            "failed": len(self.failures),
        }


class Process:
    """A child, what it says in a file, what it complains about in another. `under`: a command that starts it."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: str, under: Sequence[str] = ()) -> None:
        self.name = name
        self.said = folder / f"{name}.said"
        self._errors = folder / f"{name}.errors"
        environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": "1"}
        with self.said.open("ab") as out, self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [*under, sys.executable, "-m", module, *arguments], stdout=out, stderr=errors, env=environment
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def failure(self) -> str:
        """What it said when it ended by itself, and not well."""
        if self._process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM):
            return ""
        return f"{self.name}: status {self._process.returncode}: {self.complaints}"

    @property
    def complaints(self) -> str:
        return self._errors.read_text()[-1_500:]


class Stage:
    """The processes of one run in one folder."""

    def __init__(self, folder: Path, seed: int, counts: Counts) -> None:
        self._folder = folder
        self._seed = seed
        self._counts = counts
        self._rng = random.Random(f"broker/{seed}")
        self._clock = RealClock()
        self._own: list[list[Any]] = []  # lines of our own
        self._host = "127.0.0.1"
        self._port = 0
        self._lives = 0
        self._broker: Process | None = None
        self._producers: list[Process] = []
        self._consumers: dict[str, Process] = {}
        self._orders: dict[str, Orders] = {}
        self._dead: list[Path] = []

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """On the same directory and, from the second time on, the same port."""
        self._lives += 1
        name = f"broker-{self._lives}"
        self._broker = broker = Process(
            self._folder, name, "tests.crash.broker_server", str(self._folder / "data"), str(self._port)
        )
        deadline = time.monotonic() + START_S_MAX
        while not broker.said.read_text().startswith("ready ") and broker.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        words = broker.said.read_text().split()
        if len(words) != 2:
            self._counts.failures.append(f"the broker does not start: {broker.failure}")
            raise FairwayError("no broker")
        self._port = int(words[1])

    def start_clients(self) -> None:
        for number in range(3):
            subject = SUBJECTS[number % len(SUBJECTS)]
            orders = Orders(f"p{number}", f"{self._seed}/p{number}", self._port, subject)
            self._producers.append(self._start_worker(orders))
        for group in range(GROUPS):
            for subject in SUBJECTS:
                for number in range(CONSUMERS):
                    name = f"g{group}-{subject}-c{number}"
                    orders = Orders(name, f"{self._seed}/{name}", self._port, subject, f"g{group}")
                    self._orders[name] = orders
                    self._consumers[name] = self._start_worker(orders)

    def _start_worker(self, orders: Orders) -> Process:
        return Process(self._folder, orders.name, "tests.crash.broker_worker", msgspec.json.encode(orders).decode())

    def end_life(self) -> None:
        """Of the broker: mostly by SIGKILL."""
        broker = self._broker
        if broker is None:
            return
        if self._rng.randrange(STOPS_ONE_IN) == 0:
            broker.send(signal.SIGTERM)
            if not broker.wait(START_S_MAX):
                self._counts.failures.append("the broker does not stop")
                broker.kill()
            self._counts.stops += 1
        else:
            broker.kill()
            self._own.append([self._clock.monotonic_ns(), "crash", [self._clock.monotonic_ns()]])
            self._counts.kills += 1
        if broker.failure:
            self._counts.failures.append(broker.failure)

    def kill_consumer(self) -> None:
        """Another takes its name, and remembers nothing."""
        name = self._rng.choice(sorted(self._consumers))
        self._consumers[name].kill()
        self._counts.consumer_kills += 1
        seed = f"{self._seed}/{name}/{self._counts.consumer_kills}"
        orders = msgspec.structs.replace(self._orders[name], is_back=True, seed=seed)
        self._consumers[name] = self._start_worker(orders)

    def close(self) -> None:
        for process in [*self._producers, *self._consumers.values(), *([self._broker] if self._broker else [])]:
            if process.is_alive:
                process.kill()

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self, seconds: float, tick: Callable[[], object]) -> None:
        """Play, drain, judge, and leave nothing running. What had to be given up is a failure."""
        try:
            self.play(seconds, tick)
            self.drain()
            self.judge()
        except FairwayError as error:
            self._counts.failures.append(f"given up: {error}")
        finally:
            self.close()

    def play(self, seconds: float, tick: Callable[[], object]) -> None:
        self.start_broker()
        self.start_clients()
        time.sleep(1.0)  # until the clients have begun: their interpreters take their time
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or self._counts.kills + self._counts.stops < LIVES_MIN:
            time.sleep(self._rng.random() * LIFE_S_MAX)
            if self._rng.randrange(CONSUMER_KILLS_ONE_IN) == 0:
                self.kill_consumer()
            self.end_life()
            self.start_broker()
            tick()

    def drain(self) -> None:
        """Producers finish, consumers take what is there; then everybody goes home."""
        self.calm_down()
        self.send_home()

    def calm_down(self) -> None:
        for process in [*self._producers, *self._consumers.values()]:
            process.send(signal.SIGUSR1)
        for process in self._producers:
            if not process.wait(DRAIN_S_MAX):
                self._counts.failures.append(f"{process.name} cannot get rid of its batches")
        self.await_empty()

    def await_empty(self) -> None:
        left = asyncio.run(self._await_empty())
        if left:
            self._counts.failures.append(f"not drained after {DRAIN_S_MAX} s: {left}")

    def send_home(self) -> None:
        time.sleep(CALM_S)
        for process in self._consumers.values():
            process.send(signal.SIGTERM)
        for process in [*self._producers, *self._consumers.values()]:
            if not process.wait(START_S_MAX):
                self._counts.failures.append(f"{process.name} does not end")
            elif process.failure:
                self._counts.failures.append(process.failure)

    async def _await_empty(self) -> str:
        """What the groups still have to do when patience is at its end; empty if nothing."""
        left = "unknown"
        deadline = time.monotonic() + DRAIN_S_MAX
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            with contextlib.suppress(FairwayError):
                client = await Client.connect(RealNet(), self._clock, self._host, self._port)
                try:
                    described, _ = await client.ask(Describe(Depth.GROUPS), Described)
                finally:
                    client.abort()
                states = [(one.name, each) for one in described.subjects for each in one.groups]
                left = ", ".join(
                    f"{each.name} on {subject}: {each.lag} and {each.lots}"
                    for subject, each in states
                    if each.lag or each.lots
                )
        await asyncio.sleep(0.05)  # the last connection is closed by the loop, which is about to end
        return left

    def judge(self) -> None:
        truth = Truth()
        paths = [process.said for process in [*self._producers, *self._consumers.values()]]
        self._count(truth, Reading(truth, LEASE_MS).read(paths, self._own))

    def _count(self, truth: Truth, lines: int) -> None:
        counts = self._counts
        counts.lines += lines
        truth.check_drained()
        counts.acknowledged += truth.acknowledged
        counts.delivered += truth.delivered
        counts.acked += sum(len(owner.acked) for owner in truth.owners.values())
        counts.again.update(truth.reasons)
        counts.breaches += truth.breaches


CALM_S = 0.5  # for the last answers to be written down


def run(seconds: float, seed: int, counts: Counts, tick: Callable[[], object] = lambda: None) -> Counts:
    """One run of so many seconds, drained and judged."""
    with tempfile.TemporaryDirectory(prefix="fairway-broker-") as name:
        stage = Stage(Path(name), seed, counts)
        stage.run(seconds, tick)
    return counts
