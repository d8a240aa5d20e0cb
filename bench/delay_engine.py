"""The cost of the delay engine, without a network: ten million pending over two years, a restart, due messages.

    python -m bench.delay_engine                       10 M messages, about 5 GB of disk and several minutes
    python -m bench.delay_engine --messages 500000     the same, smaller
    python -m bench.delay_engine --json                the figures for a program

Each phase is a process of its own, so that its memory is its own. The first one schedules and then dies without closing
anything; the second one starts on what it left. Due messages are noted as sent at once: the cost of a broker is not
measured here (bench/delay does).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.presenting import Rows
from fairway import batch
from fairway.delay.engine import Engine
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.runtime.clock import RealClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage.message_log import AppendReceipt

MESSAGES = 10_000_000
BATCH = 1_000
SINGLES = 20_000
DUE_PER_SECOND = 20_000
DUE_SECONDS = 15
SUBJECTS = [Subject.parse(f"bench.{number}") for number in range(10)]
PAYLOAD = b"x" * 100
FROM_MS, TO_MS = 2 * 3_600_000, 730 * 86_400_000
OVERDUE = 1_000  # due when the restarted engine comes up
IN_FLIGHT = 64  # batches
SINGLES_IN_FLIGHT = 1_000


class Pump:
    """Calls `on_time` when it wants to be called, and takes every intent for sent."""

    def __init__(self, directory: Path, *, is_late_down: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self.sent = 0
        self.busy_s = 0.0
        self.steps_ms: list[float] = []
        self.first_s: float | None = None
        self.lateness_ms: list[NDArray[np.int64]] = []
        disk = RealDisk(directory, post=loop.call_soon_threadsafe)
        self.engine = Engine(
            disk,
            RealClock(),
            RealRng(),
            defer=loop.call_soon,
            route=lambda subject: None if is_late_down and subject == SUBJECTS[-1] else "bench",
            on_ready=self.wake.set,
        )
        self.task = loop.create_task(self.run())

    async def run(self) -> None:
        while True:
            self.wake.clear()
            begun = time.perf_counter()
            intents = self.engine.on_time()
            now_ms = time.time_ns() // 1_000_000
            for each in intents:
                self.first_s = self.first_s or time.perf_counter()
                self.lateness_ms.append(now_ms - self.engine.sent(each.number))
                self.sent += each.messages
            took = time.perf_counter() - begun
            self.busy_s += took
            self.steps_ms.append(took * 1_000)
            wait_ms = self.engine.wait_ms()
            if wait_ms == 0:
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), wait_ms / 1_000)

    async def until(self, is_so: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.perf_counter() + seconds
        while not is_so() and time.perf_counter() < deadline:  # noqa: ASYNC110, of things that nobody announces
            await asyncio.sleep(0.001)


class Feeder:
    """Schedules batches of its own streams."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        self._producer = random.Random(seed).getrandbits(60) | 1
        self._next = [0] * len(SUBJECTS)
        self.count = 0

    def batch(self, which: int, size: int, due_ms: NDArray[np.int64]) -> bytes:
        first = self._next[which]
        self._next[which] += size
        keys = [f"order-{self.count + number}" for number in range(size)]
        self.count += size
        return batch.encode(
            [PAYLOAD] * size,
            producer_id=self._producer + which,
            first_sequence=first,
            created_ms=time.time_ns() // 1_000_000,
            keys=keys,
            due_ms=due_ms.tolist(),
        )

    def far(self, size: int) -> NDArray[np.int64]:
        return time.time_ns() // 1_000_000 + self._random.integers(FROM_MS, TO_MS, size)

    async def schedule(self, which: int, size: int, due_ms: NDArray[np.int64]) -> None:
        await self._engine.store.durable(await self._send(which, self.batch(which, size, due_ms)))

    async def _send(self, which: int, data: bytes) -> AppendReceipt:
        while True:
            try:
                return self._engine.schedule(SUBJECTS[which], data)
            except Refused as refused:
                if refused.code is not Code.BUSY:
                    raise
                await asyncio.sleep(0.01)

    async def all_of(self, due_ms: list[NDArray[np.int64]]) -> None:
        """A batch for each, one behind the other."""
        subjects = [number % len(SUBJECTS) for number in range(len(due_ms))]
        sent = [
            await self._send(which, self.batch(which, len(each), each))
            for which, each in zip(subjects, due_ms, strict=True)
        ]
        await asyncio.gather(*map(self._engine.store.durable, sent))

    async def many(self, total: int, size: int) -> float:
        """Messages per second, encoding left out."""
        spent = 0.0
        in_flight = SINGLES_IN_FLIGHT if size == 1 else IN_FLIGHT
        for start in range(0, total // size, in_flight):
            group = [
                (number % len(SUBJECTS), self.batch(number % len(SUBJECTS), size, self.far(size)))
                for number in range(start, min(start + in_flight, total // size))
            ]
            begun = time.perf_counter()
            receipts = [await self._send(which, data) for which, data in group]
            await asyncio.gather(*map(self._engine.store.durable, receipts))
            spent += time.perf_counter() - begun
        return total // size * size / spent


def memory_mib(field: str = "VmRSS") -> float:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) / 1024


def footprint(directory: Path) -> tuple[int, int]:
    files = [each for each in directory.rglob("*") if each.is_file()]
    return len(files), sum(each.stat().st_blocks * 512 for each in files)


async def fill(directory: Path, messages: int) -> dict[str, float]:
    pump = Pump(directory, is_late_down=True)
    feeder = Feeder(pump.engine, 1)
    batched = await feeder.many(messages, BATCH)
    busy_s = pump.busy_s
    await pump.until(lambda: pump.engine.is_idle)
    single = await feeder.many(min(SINGLES, messages), 1)
    await feeder.schedule(len(SUBJECTS) - 1, OVERDUE, np.full(OVERDUE, time.time_ns() // 1_000_000))
    await pump.until(lambda: pump.engine.is_idle)
    files, size = footprint(directory)
    figures = {
        "scheduled batched, messages/s": batched,
        "scheduled one by one, messages/s": single,
        "longest step while scheduling, ms": max(pump.steps_ms),
        "files": files,
        "disk, bytes/message": size / feeder.count,
        "resident after scheduling, MiB": memory_mib(),
        "time in on_time while scheduling, s": busy_s,
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # as if killed


async def restart(directory: Path, messages: int) -> dict[str, float]:
    begun = time.perf_counter()
    pump = Pump(directory)
    await pump.until(lambda: pump.engine.is_loaded)
    ready_s = time.perf_counter() - begun
    loading_ms = max(pump.steps_ms)
    await pump.until(lambda: pump.sent >= OVERDUE, seconds=90)
    figures = {
        "restart to ready, s": ready_s,
        "first dispatch after restart, s": (pump.first_s or float("nan")) - begun,
        "longest step while loading, ms": loading_ms,
        "resident after restart, MiB": memory_mib(),
    }
    engine = pump.engine
    found = []
    for number in random.Random(3).sample(range(messages // BATCH * BATCH), 20):
        begun = time.perf_counter()
        decision = engine.cancel_key(SUBJECTS[number // BATCH % len(SUBJECTS)], f"order-{number}")
        await engine.store.actions.log.flusher.durable(decision.end)
        found.append((time.perf_counter() - begun) * 1_000)
        if decision.messages != 1:
            raise SystemExit(f"order-{number} is {decision.answer.value}")
    figures["cancel by key, ms (median)"] = statistics.median(found)
    figures["cancel by key, ms (max)"] = max(found)
    begun = time.perf_counter()
    count = await engine.tally(engine.filter(SUBJECTS[0]), 86_400_000)
    figures["histogram by day, ms"] = (time.perf_counter() - begun) * 1_000
    begun = time.perf_counter()
    page = await engine.page(engine.filter(), "", 700)
    figures["page of 700, ms"] = (time.perf_counter() - begun) * 1_000
    if not count.count or not page.messages:
        raise SystemExit("nothing is pending")
    figures |= await due(pump)
    figures["highest resident, MiB"] = memory_mib("VmHWM")
    begun = time.perf_counter()
    pump.task.cancel()
    await engine.close()
    figures["close, s"] = time.perf_counter() - begun
    return figures


async def due(pump: Pump) -> dict[str, float]:
    """20,000 due a second, while scheduling goes on; then as many as there are at once."""
    feeder = Feeder(pump.engine, 2)
    figures: dict[str, float] = {}
    sent, pump.lateness_ms, pump.steps_ms = pump.sent, [], []
    start_ms = time.time_ns() // 1_000_000 + 15_000
    total = DUE_PER_SECOND * DUE_SECONDS
    order = np.random.default_rng(5).permutation(total) * 1_000 // DUE_PER_SECOND
    await feeder.all_of([start_ms + order[at : at + BATCH] for at in range(0, total, BATCH)])
    await pump.until(lambda: time.time_ns() // 1_000_000 >= start_ms - 100)
    busy_s, cpu_s = pump.busy_s, time.process_time()
    while pump.sent - sent < total and time.time_ns() // 1_000_000 < start_ms + DUE_SECONDS * 4_000:
        await feeder.schedule(0, BATCH, feeder.far(BATCH))
        await asyncio.sleep(0.05)
    lateness = np.concatenate(pump.lateness_ms)
    figures["due messages that went out"] = pump.sent - sent
    figures["lateness at 20 k/s, ms (p50)"] = float(np.percentile(lateness, 50))
    figures["lateness at 20 k/s, ms (p99)"] = float(np.percentile(lateness, 99))
    figures["lateness at 20 k/s, ms (max)"] = float(lateness.max())
    figures["earliest, ms"] = float(lateness.min())
    figures["on_time at 20 k/s, µs/message"] = (pump.busy_s - busy_s) / total * 1e6
    figures["CPU at 20 k/s, µs/message"] = (time.process_time() - cpu_s) / total * 1e6
    figures["longest step at 20 k/s, ms"] = max(pump.steps_ms)
    sent, start_ms = pump.sent, time.time_ns() // 1_000_000 + 8_000
    await feeder.all_of([np.full(BATCH, start_ms)] * 100)
    await pump.until(lambda: time.time_ns() // 1_000_000 >= start_ms)
    busy_s, begun = pump.busy_s, time.perf_counter()
    await pump.until(lambda: pump.sent >= sent + 100_000, seconds=60)
    figures["100,000 due at once, ms"] = (time.perf_counter() - begun) * 1_000
    figures["on_time of them, µs/message"] = (pump.busy_s - busy_s) / 100_000 * 1e6
    return figures


PHASES = {"fill": fill, "restart": restart}


def measure(messages: int) -> Rows:
    directory = Path(tempfile.mkdtemp(prefix="fairway-delay-engine-"))
    rows: Rows = []
    try:
        for phase in PHASES:
            command = [sys.executable, "-m", "bench.delay_engine", "--messages", str(messages)]
            done = subprocess.run(
                [*command, "--phase", phase, "--data", str(directory)], stdout=subprocess.PIPE, check=True
            )
            found: dict[str, Any] = json.loads(done.stdout)
            rows += [{"what": what, "figure": figure} for what, figure in found.items()]
    finally:
        shutil.rmtree(directory)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the delay engine costs.")
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.phase:
        print(json.dumps(asyncio.run(PHASES[options.phase](options.data, options.messages))))
        return 0
    rows = measure(options.messages)
    if options.json:
        print(json.dumps({"messages": options.messages, "rows": rows}))
        return 0
    for row in rows:
        print(f"{row['what']:<42}{row['figure']:>14,.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
