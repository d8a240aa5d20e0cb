"""Producers that share one spool are killed, and their broker too, which stays away for a while; then all is counted.

After the spool was drained and the broker was killed once more, the log of the broker is compared with what every
producer wrote down. A message with a receipt of either kind is there exactly once. Nothing is there that nobody sent,
or twice. What one life of a producer sent is in order.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import fairway
from fairway.cli.output import Exit
from fairway.client.spool.spool_directory import SpoolReport, survey
from fairway.runtime.clock import RealClock
from fairway.runtime.process import Child
from tests.crash.spool_worker import Orders
from tests.tidy.source import ROOT

SUBJECT = "orders"
FACES = ("sync", "many", "aio")
PRODUCERS = 3
READY_S = 60.0
DRAIN_S = 60.0
LEAVE_S = 60.0
ACT_S_MAX = 0.5  # between two acts of violence
AWAY_S_MAX = 1.2


@dataclass
class SpoolCounts:
    """What the rounds came to."""

    runs: int = 0
    producer_kills: int = 0
    broker_kills: int = 0
    lives: int = 0
    sent: int = 0
    by_broker: int = 0  # receipts
    by_spool: int = 0
    stored: int = 0
    lost: int = 0
    twice: int = 0
    invented: int = 0
    disordered: int = 0
    breaches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.twice or self.invented or self.disordered or self.failures)

    def figures(self) -> dict[str, Any]:
        names = (
            "runs", "producer_kills", "broker_kills", "lives", "sent", "by_broker", "by_spool", "stored", "lost",
            "twice", "invented", "disordered",
        )  # fmt: skip
        return {name.replace("_", " "): getattr(self, name) for name in names} | {"failed": len(self.failures)}


class Producer:
    """One life of one producer."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.orders = orders
        self._said = folder / f"{orders.name}.said"
        self._errors = folder / f"{orders.name}.errors"
        command = [sys.executable, "-m", "tests.crash.spool_worker", msgspec.json.encode(orders).decode()]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with self._said.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> str:
        """Told to end; what went wrong, if anything."""
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.orders.name} did not end within {LEAVE_S:g} s"
        return f"{self.orders.name} ended with {status}: {self._errors.read_text()[-1_500:]}" if status else ""

    @property
    def has_begun(self) -> bool:
        return self._said.stat().st_size > 0 or self._process.poll() is not None

    def lines(self) -> list[list[Any]]:
        *whole, _ = self._said.read_bytes().split(b"\n")  # the last one may be cut short
        return [msgspec.json.decode(line) for line in whole]


class Stage:
    """The processes of one run."""

    def __init__(self, folder: Path, seed: int, counts: SpoolCounts) -> None:
        self._folder = folder
        self._seed = seed
        self._counts = counts
        self._port = 0
        self._broker: Child | None = None
        self._spool = folder / "spool"
        self._playing: list[Producer] = []
        self._all: list[Producer] = []

    @property
    def url(self) -> str:
        return f"fairway://127.0.0.1:{self._port}"

    def start_broker(self) -> None:
        self._broker = Child("tests.crash.broker_server", str(self._folder / "data"), str(self._port))
        ready = re.fullmatch(r"ready (\d+)", self._broker.line(timeout_s=READY_S) or "")
        if ready is None:
            raise RuntimeError("the broker did not start: see its messages above")
        self._port = int(ready[1])

    def kill_broker(self) -> None:
        if self._broker is not None:
            self._broker.__exit__(None, None, None)
            self._broker = None
            self._counts.broker_kills += 1

    def start_producer(self, number: int) -> None:
        name = f"p{number}-{len(self._all)}"
        face = FACES[number % len(FACES)]
        orders = Orders(name, face, self.url, str(self._spool), SUBJECT, f"{self._seed}/{name}")
        producer = Producer(self._folder, orders)
        self._all.append(producer)
        self._playing.append(producer)

    def await_begun(self) -> None:
        deadline = time.monotonic() + READY_S
        while not all(each.has_begun for each in self._playing) and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill_producer(self, rng: random.Random) -> None:
        """Another takes its place, and finds what it left."""
        index = rng.randrange(len(self._playing))
        victim = self._playing.pop(index)
        victim.kill()
        self._counts.producer_kills += 1
        self.start_producer(FACES.index(victim.orders.face))

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everybody leaves, the rest is drained, the broker dies once more; then all is counted."""
        if self._broker is None:
            self.start_broker()
        self.await_begun()
        for producer in self._playing:
            self._fail(producer.leave())
        self._drain()
        self.kill_broker()
        self.start_broker()
        self._judge()
        self.kill_broker()

    def _drain(self) -> None:
        command = [sys.executable, "-m", "fairway", "spool", "drain", str(self._spool), "--url", self.url]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [*command, "--timeout-s", str(DRAIN_S)], capture_output=True, text=True, check=False, env=environment
        )
        left = survey(str(self._spool), RealClock())
        if done.returncode and not (done.returncode == Exit.DAMAGE and is_sound_but_torn(left)):
            self._fail(f"fairway spool drain: status {done.returncode}: {done.stdout} {done.stderr}")
        if left.messages or not is_sound_but_torn(left):
            self._fail(f"in the spool: {left}")

    def _fail(self, sentence: str) -> None:
        if sentence:
            self._counts.failures.append(sentence)

    def _judge(self) -> None:
        with fairway.connect(self.url) as client:
            stored = [bytes(each).split(b":") for page in client.scan(SUBJECT) for each in page.batch.payloads]
        places = [(name.decode(), int(number)) for name, number, _ in stored]
        judge(places, {each.orders.name: each.lines() for each in self._all}, self._counts)

    def close(self) -> None:
        for producer in self._playing:
            producer.kill()
        self.kill_broker()


def is_sound_but_torn(report: SpoolReport) -> bool:
    """Whether nothing is wrong beyond torn ends. A kill in the middle of a write leaves one, and nobody has a receipt
    for what was cut off there; `judge` finds what is lost."""
    return not any(
        each.set_aside or each.trouble or any(not name.startswith("kept/torn-") for name in each.damaged)
        for each in report.journals
    )


def judge(places: list[tuple[str, int]], said: dict[str, list[list[Any]]], counts: SpoolCounts) -> None:
    """The broker's log against what the producers wrote down."""
    stored = Counter(places)
    sent: set[tuple[str, int]] = set()
    for name, lines in said.items():
        counts.lives += 1
        for what, *fields in lines:
            if what == "left":
                continue
            first, count, *kind = fields
            numbers = [(name, number) for number in range(first, first + count)]
            if what == "sent":
                sent.update(numbers)
                continue
            counts.by_spool += count if kind == ["spool"] else 0
            counts.by_broker += count if kind == ["broker"] else 0
            lost = [each for each in numbers if each not in stored]
            counts.lost += len(lost)
            counts.breaches += [f"{each} had a receipt from the {kind[0]}, and is lost" for each in lost]
    twice = [each for each, times in stored.items() if times > 1]
    invented = [each for each in stored if each not in sent]
    counts.sent += len(sent)
    counts.stored += len(places)
    counts.twice += len(twice)
    counts.invented += len(invented)
    counts.breaches += [f"{each} is stored twice" for each in twice] + [f"nobody sent {each}" for each in invented]
    last: dict[str, int] = {}
    for name, number in places:
        if number < last.get(name, -1):
            counts.disordered += 1
            counts.breaches.append(f"{name}: {number} is stored behind {last[name]}")
        last[name] = number


def run(seconds: float, seed: int, counts: SpoolCounts) -> SpoolCounts:
    """One run: violence for so many seconds, then the reckoning."""
    rng = random.Random(f"spool/{seed}")
    counts.runs += 1
    with tempfile.TemporaryDirectory(prefix="fairway-spool-") as name:
        stage = Stage(Path(name), seed, counts)
        try:
            stage.start_broker()
            for number in range(PRODUCERS):
                stage.start_producer(number)
            stage.await_begun()
            end = time.monotonic() + seconds
            _away(stage, rng)
            stage.kill_producer(rng)
            while time.monotonic() < end:
                time.sleep(rng.random() * ACT_S_MAX)
                if rng.randrange(5) < 3:
                    stage.kill_producer(rng)
                else:
                    _away(stage, rng)
            stage.finish()
        finally:
            stage.close()
    return counts


def _away(stage: Stage, rng: random.Random) -> None:
    """The broker is killed and does not return for a while; perhaps a producer dies meanwhile."""
    stage.kill_broker()
    time.sleep(0.2 + rng.random() * AWAY_S_MAX / 2)
    if rng.randrange(2):
        stage.kill_producer(rng)
    time.sleep(rng.random() * AWAY_S_MAX / 2)
    stage.start_broker()
