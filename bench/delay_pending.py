"""Many pending messages in a real delay server: memory, files, disk; killed, started again, asked.

They are due between two hours and two years from now, in ten subjects, each with a key. A broker stands beside. When
all are stored, a thousand more are scheduled, which are in their bucket when the delay server is killed, and come due
while it is dead: their way to the broker is the first dispatch after the restart.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table

import fairway
from tests.support.ports import free_port

BATCH = 1_000
BATCHES_AT_ONCE = 64
SUBJECTS = 10
FROM_S, TO_S = 2 * 3_600, 730 * 86_400
OVERDUE = 1_000
OVERDUE_S, OVERDUE_FEW_S = 8, 4  # until they are due; the latter where few are pending
FEW = 10_000
MOVED_S = 2  # by then what was answered is in its bucket
CANCELS = 20
START_S_MAX = 120.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

BARS = {  # at most
    "resident after scheduling, MiB": 1_024.0,
    "resident after the restart, MiB": 1_024.0,
    "files": 150.0,
    "restart to ready, s": 10.0,
    "cancel by key, slowest, ms": 100.0,
}


class Stage:
    """A broker and a delay server as their commands, on one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._broker_port, self._port, self._http_port = free_port(), free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"fairway://127.0.0.1:{self._broker_port}?delay=127.0.0.1:{self._port}"

    @property
    def data(self) -> Path:
        return self._folder / "delay"

    def start(self, name: str) -> None:
        words = ["broker", "--data", str(self._folder / "broker"), "--port", str(self._broker_port)]
        if name == "delay":
            ports = ["--port", str(self._port), "--http-port", str(self._http_port)]
            words = ["delay", "serve", "--data", str(self.data), *ports, "--broker", f"127.0.0.1:{self._broker_port}"]
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "fairway", *words]
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def await_ready(self) -> None:
        """Until the delay server has read its files."""
        deadline_s = time.perf_counter() + START_S_MAX
        while self._says() != "ready":
            if time.perf_counter() > deadline_s or self._processes["delay"].poll() is not None:
                raise RuntimeError(f"the delay server is not ready: {(self._folder / 'delay.log').read_text()[-500:]}")
            time.sleep(0.01)

    def _says(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/readyz", timeout=5) as page:
                found: str = page.read().decode().strip()
        except (urllib.error.URLError, OSError):
            return ""
        return found

    def kill(self) -> None:
        self._processes["delay"].kill()
        self._processes["delay"].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def memory_mib(self, field: str = "VmRSS") -> float:
        status = Path(f"/proc/{self._processes['delay'].pid}/status")
        if not status.exists():
            return 0.0
        line = next(each for each in status.read_text().splitlines() if each.startswith(field))
        return int(line.split()[1]) / 1_024

    def files(self) -> tuple[int, int]:
        """How many, and their bytes on the disk."""
        found = [each.stat() for each in self.data.rglob("*") if each.is_file()]
        return len(found), sum(each.st_blocks * 512 for each in found)


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    stage = Stage(folder)
    try:
        for name in ("broker", "delay"):
            stage.start(name)
        stage.await_ready()
        yield stage
    finally:
        stage.stop()


def measure(folder: Path, messages: int) -> dict[str, float]:
    """Figures by name."""
    found: dict[str, float] = {"messages": messages}
    with staged(folder) as stage, fairway.connect(stage.url, patience=30) as client:
        found["scheduled, messages/s"] = messages / fill(client, messages)
        time.sleep(MOVED_S)
        found["resident after scheduling, MiB"] = stage.memory_mib()
        found["highest resident while scheduling, MiB"] = stage.memory_mib("VmHWM")
        found["files"], size = stage.files()
        found["disk, bytes/message"] = size / messages
        wait_s = OVERDUE_S if messages > FEW else OVERDUE_FEW_S
        due_s = time.time() + wait_s
        client.send_many("bench.first", [b"x" * 100] * OVERDUE, after=wait_s)
        client.flush(60)
        time.sleep(MOVED_S)
        stage.kill()
        time.sleep(max(0.0, due_s + 0.5 - time.time()))
        began_s, began = time.time(), time.perf_counter()
        stage.start("delay")
        stage.await_ready()
        found["restart to ready, s"] = time.perf_counter() - began
        found["first dispatch after the restart, s"] = first_dispatch_s(client) - began_s
        found["resident after the restart, MiB"] = stage.memory_mib()
        found |= ask(client, messages)
        found["highest resident after the restart, MiB"] = stage.memory_mib("VmHWM")
    return found


def fill(client: fairway.Client, messages: int) -> float:
    """So many in all subjects by turns; how long it took."""
    rng = random.Random(1)
    began = time.perf_counter()
    now = datetime.now(UTC)
    pending = []
    for number in range(0, messages, BATCH):
        size = min(BATCH, messages - number)
        at = [now + timedelta(milliseconds=rng.randrange(FROM_S * 1_000, TO_S * 1_000)) for _ in range(size)]
        keys = [f"order-{place}" for place in range(number, number + size)]
        pending.append(client.send_many(subject_of(number), [b"x" * 100] * size, keys=keys, at=at))
        if len(pending) >= BATCHES_AT_ONCE:
            pending.pop(0).result()
    for each in pending:
        each.result()
    return time.perf_counter() - began


def subject_of(number: int) -> str:
    return f"bench.{number // BATCH % SUBJECTS}"


def first_dispatch_s(client: fairway.Client) -> float:
    """When the broker stored the first of those that had come due; waits for all of them."""
    stamps: list[datetime] = []
    with client.consumer("bench.first", group="first") as consumer:
        while len(stamps) < OVERDUE:
            messages = consumer.take(OVERDUE, timeout=60)
            if not messages:
                raise RuntimeError(f"{len(stamps)} of {OVERDUE} messages came")
            stamps += [each.appended_at for each in messages]
            consumer.ack(messages)
    return (min(stamps) - _EPOCH).total_seconds()


def ask(client: fairway.Client, messages: int) -> dict[str, float]:
    cancels = []
    for number in random.Random(3).sample(range(messages), CANCELS):
        began = time.perf_counter()
        decision = client.delayed.cancel(subject=subject_of(number), key=f"order-{number}")
        cancels.append((time.perf_counter() - began) * 1e3)
        if (decision.fate, decision.messages) != ("cancelled", 1):
            raise RuntimeError(f"order-{number}: {decision}")
    began = time.perf_counter()
    count = client.delayed.count()
    counted = time.perf_counter()
    if count != messages - CANCELS:
        raise RuntimeError(f"{count:,} are pending of {messages:,}")
    client.delayed.histogram(timedelta(days=1), "bench.0")
    histogram = time.perf_counter()
    next(iter(client.delayed.list(limit=100)))
    listed = time.perf_counter()
    return {
        "cancel by key, median, ms": statistics.median(cancels),
        "cancel by key, slowest, ms": max(cancels),
        "count, ms": (counted - began) * 1e3,
        "histogram by day, ms": (histogram - counted) * 1e3,
        "list of 100, ms": (listed - histogram) * 1e3,
    }


def table(found: dict[str, float]) -> Table:
    shown = Table(f"{found['messages']:,.0f} pending over two years", title="many pending", title_justify="left")
    for head in ("figure", "at most", ""):
        shown.add_column(head, justify="right")
    for name, figure in found.items():
        bar = BARS.get(name)
        verdict = "" if bar is None else "met" if figure <= bar else "not met"
        text = f"{figure:,.0f}" if figure >= 100 or figure == int(figure) else f"{figure:.2f}"
        shown.add_row(name, text, "" if bar is None else f"{bar:,.0f}", verdict)
    return shown
