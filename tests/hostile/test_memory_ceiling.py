"""All that clients can make a server hold, at once: it stays below its ceiling, and good clients go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from fairway.errors import Code, Refused
from fairway.limits import MIB
from fairway.runtime.process import Child
from tests.hostile.broker_attacks import allow_descriptors, client, peak_bytes
from tests.hostile.memory_attacks import MEMORY_ATTACKS, drain, hold
from tests.support.accounts import Figures, figures
from tests.support.client import Client, Stream
from tests.unit.cli.test_broker import running

T = TypeVar("T")

MEMORY_MIB = 896
BUFFER_MIB = 66
ROUNDS_S = 10.0
IN_MEMORY = Path("/dev/shm")
BESIDE = ("half_frames", "large_batches", "deaf_consumers", "waiting_scans")


class Good:
    """A client that sends, pulls and acks, waits where it is told to, and remembers what was acknowledged."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self._stream = Stream(os.getpid())
        self._arrived = 0

    async def go_on(self, one: Client, until: asyncio.Event) -> None:
        while not until.is_set():
            payload = f"{len(self.sent)}".encode()
            data = self._stream.batch([payload])
            await _patient(partial(one.produce, "good", data))
            self.sent.append(payload)
            await self.take(one)

    async def take(self, one: Client) -> bool:
        """A lease ends where a request takes longer than it lasts: then it joins again. What it said too late comes
        again."""
        try:
            got = await _patient(partial(one.pull, "good", "group", "ann", arrived=self._arrived, wait_ms=2_000))
            self._arrived = got.number or self._arrived
            if got.lots:
                await one.settle("good", "group", "ann", got.lots, arrived=got.number)
                self.received += got.payloads.values()
        except Refused as refused:
            if refused.code is not Code.NOT_A_MEMBER:
                raise
            await _patient(partial(one.join, "good", "group", "ann"))
            self._arrived = 0
            return True
        return bool(got.lots)


async def _patient(ask: Callable[[], Awaitable[T]]) -> T:
    """Do as BUSY says, for a while."""
    end = time.monotonic() + 30
    while True:
        try:
            return await ask()
        except Refused as refused:
            if refused.retry_after_ms is None or time.monotonic() > end:
                raise
            await asyncio.sleep(refused.retry_after_ms / 1_000)


@contextlib.contextmanager
def _attackers(port: int, names: tuple[str, ...]) -> Iterator[None]:
    """A process for each attack, over and over."""
    with contextlib.ExitStack() as stack:
        for name in names:
            attacker = stack.enter_context(Child("tests.hostile.broker_attacks", name, str(port), "5"))
            attacker.line(timeout_s=60)
        yield


async def _go_on_beside_attacks(port: int, pages: str, good: Good, names: tuple[str, ...]) -> tuple[Figures, Figures]:
    """What the accounts held at the end of it, and their bounds."""
    over, one = asyncio.Event(), await client(port)
    await one.join("good", "group", "ann")
    with _attackers(port, names):
        working = asyncio.create_task(good.go_on(one, over))
        await asyncio.sleep(ROUNDS_S)
        over.set()
        await working
        found = await asyncio.to_thread(figures, pages)
    one.abort()
    return found


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a directory: a slow disk would hold up the attackers."""
    if not IN_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="fairway-hostile-", dir=IN_MEMORY) as folder:
        yield Path(folder)


def test_a_broker_stays_below_its_ceiling_whatever_fills_its_accounts(fast_path: Path) -> None:
    allow_descriptors()
    options = ("--memory-mib", str(MEMORY_MIB), "--buffer-mib", str(BUFFER_MIB), "--http-port", "0")
    names = (*(attack.__name__ for attack in MEMORY_ATTACKS), *BESIDE)
    good = Good()
    with running(fast_path / "data", *options) as (child, port, pages):
        held, bounds = asyncio.run(_go_on_beside_attacks(port, pages, good, names))
        assert len(good.received) >= 2, "a good client went on"
        assert peak_bytes(child.pid) < MEMORY_MIB * MIB
        assert bounds["process"] == MEMORY_MIB * MIB
        print(f"peak {peak_bytes(child.pid) // MIB} MiB of {MEMORY_MIB}", held, bounds)
        for what in ("streams", "names", "key_windows", "waiting"):
            assert held[what] <= bounds[what]
        # Groups that have little in hand grow by little, whatever the account says. Their reserves count all the same.
        assert held["groups"] <= 5 * bounds["groups"] // 3
        asyncio.run(_finish(port, good))
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout_s=60) == 0
    with running(fast_path / "data", *options) as (child, port, _):
        asyncio.run(_finish(port, good))
        assert sorted(good.received, key=int) == good.sent, "what was acknowledged is there, once"
        assert peak_bytes(child.pid) < MEMORY_MIB * MIB


async def _finish(port: int, good: Good) -> None:
    """Whatever is left comes, once the attackers have hung up."""
    one = await client(port)
    await _patient(partial(one.join, "good", "group", "ann"))
    while await good.take(one):
        pass
    one.abort()


def test_what_attackers_held_is_free_when_their_leases_have_ended(tmp_path: Path) -> None:
    options = ("--memory-mib", str(MEMORY_MIB), "--buffer-mib", str(BUFFER_MIB), "--http-port", "0")
    with running(tmp_path / "data", *options) as (_, port, pages):
        empty = figures(pages)[0]["groups"]
        asyncio.run(_hold_and_hang_up(port, pages, empty))


async def _hold_and_hang_up(port: int, pages: str, empty: int) -> None:
    one = await client(port)
    await hold(one, "held", lease_ms=1_000, messages=4_000)
    held = (await asyncio.to_thread(figures, pages))[0]["groups"]
    assert held > empty + 1_000_000
    one.abort()
    other = await client(port)
    now, end = held, time.monotonic() + 20
    while now > held // 2 and time.monotonic() < end:
        await asyncio.sleep(0.2)
        await drain(other, "held")
        now = (await asyncio.to_thread(figures, pages))[0]["groups"]
    assert now <= held // 2
    other.abort()


@pytest.mark.parametrize("verb", ["broker", "up"])
def test_parts_that_do_not_fit_are_refused_at_the_start(tmp_path: Path, verb: str) -> None:
    data = ("--data", str(tmp_path / "data"), "--port", "0")
    command = [sys.executable, "-m", "fairway", verb, *data, "--memory-mib", "512", "--buffer-mib", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert re.search(r"--memory-mib 512 is too little.*Give --memory-mib \d+", done.stderr, re.DOTALL)
    assert not (tmp_path / "data").exists()
