"""A broker among bad clients: it stays up, it stays within its memory, and good clients do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway.limits import MIB
from fairway.runtime.process import Child
from tests.hostile import broker_attacks
from tests.hostile.broker_attacks import ATTACKS, Attack, allow_descriptors, client, idle_connections, resident_bytes
from tests.support.client import Client, Stream
from tests.unit.cli.test_broker import running

BUFFER_MIB = 66
# Three budgets, what is not yet synced (and the frame that is beyond it), and as much again for the copies that are
# under way between them and for what the allocator keeps.
GROWTH_BYTES_MAX = 2 * (3 * BUFFER_MIB + 64 + 66) * MIB


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def broker(home: Path) -> Iterator[tuple[Child, int]]:
    """One for all attacks: each leaves it to the next one."""
    allow_descriptors()
    with running(home / "data", "--buffer-mib", str(BUFFER_MIB)) as (child, port, _):
        yield child, port
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout_s=30) == 0, "it stops as if nothing had been"


class Good:
    """A client that sends, receives and acks, and checks what comes."""

    def __init__(self, one: Client, number: int) -> None:
        self._one = one
        self._subject = f"good-{number}"
        self._stream = Stream(os.getpid() * 1_000 + number)
        self.done = 0

    async def once(self) -> None:
        one, subject = self._one, self._subject
        payload = f"{subject} {self.done}".encode()
        if not self.done:
            await one.join(subject, "group", "ann")
        await one.produce(subject, self._stream.batch([payload]))
        got = await one.pull(subject, "group", "ann", arrived=self.done, wait_ms=5_000)
        assert list(got.payloads.values()) == [payload]
        await one.settle(subject, "group", "ann", got.lots, arrived=got.number)
        self.done += 1

    async def go_on(self, until: asyncio.Event) -> None:
        while not until.is_set():
            await self.once()
            await asyncio.sleep(0.01)


async def _under(attack: Attack, pid: int, port: int, number: int) -> tuple[int, int]:
    """The most that was in memory during the attack, and what good clients got done."""
    over = asyncio.Event()
    one = await client(port)
    good = Good(one, number)
    working = asyncio.create_task(good.go_on(over))
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, resident_bytes(pid))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        await attack(port)
        await asyncio.sleep(0.2)
    finally:
        over.set()
    await asyncio.gather(working, watching)
    one.abort()
    await asyncio.sleep(0.1)  # for connections to be closed on this side too
    return peak, good.done


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_bad_client_hurts_nobody_else(broker: tuple[Child, int], attack: Attack) -> None:
    child, port = broker
    at_rest = resident_bytes(child.pid)
    peak, done = asyncio.run(_under(attack, child.pid, port, ATTACKS.index(attack)))
    assert done >= 2, "a good client went on"
    assert peak - at_rest < GROWTH_BYTES_MAX
    asyncio.run(_newcomer(port, ATTACKS.index(attack)))


async def _newcomer(port: int, number: int) -> None:
    """Whoever comes after the attack is served, too."""
    one = await client(port)
    await Good(one, 100 + number).once()
    one.abort()
    await asyncio.sleep(0.1)


def test_two_thousand_idle_connections_cost_little(broker: tuple[Child, int]) -> None:
    child, port = broker

    async def crowd(port: int) -> None:
        raws = await idle_connections(port)
        assert not any(raw.is_lost for raw in raws)
        await asyncio.sleep(1)
        for raw in raws:
            raw.abort()

    at_rest = resident_bytes(child.pid)
    peak, done = asyncio.run(_under(crowd, child.pid, port, 90))
    assert done >= 2
    assert peak - at_rest < 2_000 * 64 * 1_024  # 64 KiB each


def test_a_thousand_half_frames_at_once_do_not_exhaust_memory(broker: tuple[Child, int]) -> None:
    child, port = broker

    async def attack(port: int) -> None:
        await broker_attacks.half_frames(port, connections=1_000, sent=MIB)

    peak, done = asyncio.run(_under(attack, child.pid, port, 91))
    assert done >= 2
    assert peak < (BUFFER_MIB * 2 + 512) * MIB


def test_names_lead_nowhere(broker: tuple[Child, int], home: Path) -> None:
    child, port = broker
    asyncio.run(_under(broker_attacks.bad_names, child.pid, port, 92))
    found = {path.relative_to(home).parts[0] for path in home.rglob("*")}
    assert found == {"data"}
