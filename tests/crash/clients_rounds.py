"""A broker that is killed among programs that use the public clients, which are killed too; and what they saw.

Sync and asyncio, `send` and `send_many`, consumers and apps, under names of their own or new ones each time. In the end
everything is drained, the broker is killed once more, and what all of them wrote down is told to the model: see
`clients_diary` for what it may excuse.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

import fairway
from fairway.errors import FairwayError
from fairway.groups.config import encode
from tests.crash.broker_rounds import CALM_S, LIVES_MIN, START_S_MAX, Counts, Process, Stage
from tests.crash.broker_worker import CONFIG, LEASE_MS
from tests.crash.clients_diary import ClientReading, ClientTruth
from tests.crash.clients_worker import Orders

LIFE_S_MAX = 2.0
AWAY_S_MAX = 0.4
PRODUCER_KILLS_ONE_IN = 3  # broker lives
CONSUMER_KILLS_ONE_IN = 2
AFTERMATH_S = 1.0  # in which nothing may come: the broker was killed when all was acked
GO_ON_S_MAX = 60.0

ORDERS, TRIPS = "orders", "trips"

Part: TypeAlias = tuple[str, str, str, bool]  # subject, group (none: a producer), face, whether its name is its own
CAST: tuple[Part, ...] = (
    (ORDERS, "", "sync", True),
    (ORDERS, "", "many", True),
    (TRIPS, "", "aio", True),
    (ORDERS, "g0", "sync", True),
    (ORDERS, "g0", "aio", False),
    (ORDERS, "g1", "app", True),
    (ORDERS, "g1", "aio", True),
    (TRIPS, "g0", "aio-app", True),
    (TRIPS, "g0", "sync", False),
)
SMALL_CAST: tuple[Part, ...] = (
    (ORDERS, "", "sync", True),
    (ORDERS, "", "aio", True),
    (ORDERS, "g0", "sync", True),
    (ORDERS, "g0", "aio", True),
    (ORDERS, "g1", "app", True),
)


@dataclass
class ClientCounts(Counts):
    """What the rounds came to."""

    producer_kills: int = 0
    longest_away_s: float = 0.0
    standstills: int = 0  # of consumers

    def figures(self) -> dict[str, Any]:
        told = {
            "producer kills": self.producer_kills,
            "longest without a broker, s": round(self.longest_away_s, 1),
            "consumers stood still": self.standstills,
        }
        return {**super().figures(), **told}


def cast(seed: int, port: int, parts: Sequence[Part]) -> list[Orders]:
    """Everybody, with a name."""
    return [
        Orders(f"{group or 'p'}-{subject}-{face}", face, f"{seed}/{number}", port, subject, group, is_named=is_named)
        for number, (subject, group, face, is_named) in enumerate(parts)
    ]


class ClientStage(Stage):
    """The processes of one run in one folder."""

    def __init__(self, folder: Path, seed: int, counts: ClientCounts) -> None:
        super().__init__(folder, seed, counts)
        self._rng = random.Random(f"clients/{seed}")
        self._client_counts = counts
        self._paths: list[Path] = []
        self._playing: dict[str, tuple[Orders, Process]] = {}

    # --- processes ---------------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self._port

    def start_clients(self) -> None:
        self.start(cast(self._seed, self._port, CAST))

    def start(self, everybody: Sequence[Orders]) -> None:
        with fairway.connect(f"fairway://{self._host}:{self._port}") as client:
            config = encode(msgspec.structs.replace(CONFIG, version=1))
            for subject, group in sorted({(each.subject, each.group) for each in everybody if each.group}):
                client.configure(subject, group, config, expected_version=0)
        for orders in everybody:
            self._start_client(orders)
        self.await_begun()

    def _start_client(self, orders: Orders) -> None:
        text = msgspec.json.encode(orders).decode()
        process = Process(self._folder, f"{orders.name}.{orders.life}", "tests.crash.clients_worker", text)
        self._paths.append(process.said)
        self._playing[orders.name] = orders, process
        self._producers = [each for of, each in self._playing.values() if not of.group]
        self._consumers = {name: each for name, (of, each) in self._playing.items() if of.group}

    def await_begun(self) -> None:
        """Until all mind their signals: before, SIGUSR1 would end them."""
        deadline = time.monotonic() + START_S_MAX
        for _, process in self._playing.values():
            while not process.said.stat().st_size and process.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)

    def kill_client(self, *, is_consumer: bool) -> None:
        """Another takes its place, and remembers nothing."""
        names = [name for name, (orders, _) in self._playing.items() if bool(orders.group) is is_consumer]
        self.kill(self._rng.choice(names))

    def kill(self, name: str) -> None:
        """It is started again at once."""
        orders, process = self._playing[name]
        process.kill()
        if process.failure:
            self._counts.failures.append(process.failure)
        if orders.group:
            self._client_counts.consumer_kills += 1
        else:
            self._client_counts.producer_kills += 1
        self._start_client(msgspec.structs.replace(orders, life=orders.life + 1))

    def kill_broker(self) -> None:
        broker = self._broker
        if broker is not None:
            broker.kill()
            now_ns = self._clock.monotonic_ns()
            self._own.append([now_ns, "crash", [now_ns]])
            self._counts.kills += 1

    def suspend_broker(self) -> None:
        """It answers nobody, and no connection ends."""
        if self._broker is not None:
            self._broker.send(signal.SIGSTOP)

    # --- the run -----------------------------------------------------------------------------------------------------

    def play(self, seconds: float, tick: Callable[[], object]) -> None:
        self.start_broker()
        self.start_clients()
        rng = self._rng
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or self._counts.kills + self._counts.stops < LIVES_MIN:
            time.sleep(rng.random() * LIFE_S_MAX)
            kills = [rng.randrange(PRODUCER_KILLS_ONE_IN) == 0, rng.randrange(CONSUMER_KILLS_ONE_IN) == 0]
            is_before = rng.randrange(2) == 0
            if is_before:
                self._kill_some(kills)
            self.end_life()
            away_s = rng.random() * AWAY_S_MAX
            time.sleep(away_s)
            if not is_before:
                self._kill_some(kills)
            self.start_broker()
            tick()

    def _kill_some(self, kills: list[bool]) -> None:
        for is_consumer, is_killed in enumerate(kills):
            if is_killed:
                self.kill_client(is_consumer=bool(is_consumer))

    def stay_away(self, seconds: float) -> None:
        """The broker is killed and does not return for so long; then everybody goes on."""
        self.start_broker()
        self.start(cast(self._seed, self._port, SMALL_CAST))
        self.await_progress("before the broker goes")
        self.kill_broker()
        time.sleep(seconds)
        counts = self._client_counts
        counts.longest_away_s = max(counts.longest_away_s, seconds)
        self.start_broker()
        self.await_progress("after the broker has returned", self._clock.monotonic_ns())

    def await_progress(self, when: str, since_ns: int = 0) -> None:
        """Until each program has been given a receipt, or messages that were pulled, since then."""
        deadline = time.monotonic() + GO_ON_S_MAX
        waiting = [process for _, process in self._playing.values()]
        while waiting and time.monotonic() < deadline and all(each.is_alive for each in waiting):
            time.sleep(0.1)
            waiting = [each for each in waiting if not any(_is_progress(line, since_ns) for line in lines(each.said))]
        if waiting:
            names = ", ".join(each.name for each in waiting)
            self._counts.failures.append(f"{when} these do not go on: {names}")

    def drain(self) -> None:
        self.await_begun()
        self.calm_down()
        time.sleep(CALM_S)  # an ack whose answer is lost would be sent again, be stale, and be noted as none
        self.kill_broker()  # all is acked, and stays so
        self.start_broker()
        time.sleep(AFTERMATH_S)
        self.await_empty()
        self.send_home()

    def judge(self) -> None:
        self.judge_diaries(ClientTruth())

    def judge_diaries(self, truth: ClientTruth) -> None:
        self._count(truth, ClientReading(truth, LEASE_MS).read(self._paths, self._own))
        self._client_counts.standstills += truth.standstills


def lines(path: Path) -> Iterator[list[Any]]:
    """Those that are whole."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _is_progress(line: list[Any], since_ns: int) -> bool:
    at_ns, method, arguments = line
    if method == "delivery":
        return bool(arguments[4] > since_ns)  # not when it was seen, but when it was pulled
    return method in ("receipt", "claim") and bool(at_ns > since_ns)


def on_stage(seed: int, counts: ClientCounts, act: Callable[[ClientStage], object]) -> ClientCounts:
    """One run: what is acted, drained and judged."""
    with tempfile.TemporaryDirectory(prefix="fairway-clients-") as name:
        stage = ClientStage(Path(name), seed, counts)
        try:
            act(stage)
            stage.drain()
            stage.judge()
        except FairwayError as error:
            counts.failures.append(f"given up: {error}")
        finally:
            stage.close()
    return counts


def run(seconds: float, seed: int, counts: ClientCounts, tick: Callable[[], object] = lambda: None) -> ClientCounts:
    """So many seconds of kills."""
    return on_stage(seed, counts, lambda stage: stage.play(seconds, tick))


def run_away(seconds: float, seed: int, counts: ClientCounts) -> ClientCounts:
    """A broker that is away for so many seconds, once."""
    return on_stage(seed, counts, lambda stage: stage.stay_away(seconds))
