"""All attacks of tests/hostile at once, for minutes, beside good traffic: what is lost, how fast, in how much memory?

One broker, and a process for each attack, repeated without a pause. Beside them one good client:

    producer        500 messages a second, in order, each of which gets a receipt or counts as not sent
    consumer        takes them as they come; its lag at the end of the attacks is shown
    slow consumers  groups of their own that handle 20 messages a second and never catch up

Afterwards the attackers are killed, the consumer drains the subject, and the books are compared:

    lost            messages with a receipt that the consumer never saw; must be 0
    rate            receipts in the attack ÷ what the producer meant to send; must be 0.9 at least
    memory          the broker's largest resident size; must stay below the ceiling
    recovery        from the end of the attacks until a send takes no longer than twice the p99 before them

Attackers yield to the broker and the good client (`nice`), as on a machine of their own; their processor time is shown,
because an attacker that finds no time is none. Exit status 4: a message was lost, too few were stored, the broker died,
or it went past its ceiling.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import fairway.aio
from bench.hostile import GOOD_NICE, IN_MEMORY, LOWEST_NICE
from fairway.client.aio.client import AioClient
from fairway.errors import FairwayError
from fairway.limits import MIB
from fairway.runtime.process import Child, ChildSilent
from tests.hostile.broker_attacks import ATTACKS, give_way

RATE_PER_S = 500
RATE_MIN = 0.9  # of that, under attack
TICK_S = 0.02
SLOW_GROUPS = 3
SLOW_PAUSE_S = 0.05
QUIET_S = 5.0
DRAIN_S_MAX = 60.0
RECOVERY_S_MAX = 30.0
FAILED = 4
SUBJECT = "good"


@dataclass
class Books:
    """What the good client was promised and what it got."""

    meant: int = 0
    stored: set[int] = field(default_factory=set)
    refused: int = 0
    seen: set[int] = field(default_factory=set)
    slow_seen: int = 0
    send_ms: list[float] = field(default_factory=list)

    @property
    def lost(self) -> set[int]:
        return self.stored - self.seen


@dataclass(frozen=True)
class Phase:
    """One stretch of good traffic."""

    meant: int
    stored: int
    p50_ms: float
    p99_ms: float

    @property
    def rate(self) -> float:
        return self.stored / self.meant if self.meant else 0.0


class GoodClient:
    """A producer at a steady pace, a consumer, and slow consumers, over one connection each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.books = Books()
        self._tasks: set[asyncio.Task[None]] = set()

    async def produce(self, client: AioClient, seconds: float) -> Phase:
        """At the pace meant, whatever the answers do: what cannot be sent in time counts as not stored."""
        books = self.books
        meant, stored = books.meant, len(books.stored)
        books.send_ms = []
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            due = meant + int(passed * RATE_PER_S)
            while books.meant < due:
                self._send(client, books.meant)
                books.meant += 1
            await asyncio.sleep(TICK_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await asyncio.gather(*self._tasks)
        took = books.send_ms or [0.0, 0.0]
        return Phase(
            books.meant - meant,
            len(books.stored) - stored,
            statistics.median(took),
            statistics.quantiles(took, n=100)[98] if len(took) > 1 else took[0],
        )

    def _send(self, client: AioClient, number: int) -> None:
        task = asyncio.create_task(self._stored(client, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stored(self, client: AioClient, number: int) -> None:
        begun = time.monotonic()
        try:
            await client.send(SUBJECT, str(number).encode())
        except FairwayError:
            self.books.refused += 1
        else:
            self.books.stored.add(number)
            self.books.send_ms.append((time.monotonic() - begun) * 1_000)

    async def consume(self, client: AioClient) -> None:
        async with client.consumer(SUBJECT, group="steady") as consumer:
            async for message in consumer:
                self.books.seen.add(int(message.payload))
                message.ack()

    async def consume_slowly(self, client: AioClient, group: str) -> None:
        async with client.consumer(SUBJECT, group=group) as consumer:
            async for message in consumer:
                await asyncio.sleep(SLOW_PAUSE_S)
                message.ack()
                self.books.slow_seen += 1


@dataclass(frozen=True)
class Result:
    """What the run is judged by."""

    lost: int
    rate: float
    peak_bytes: int

    def failures(self, ceiling_bytes: int) -> list[str]:
        """A sentence for each promise that did not hold."""
        found = []
        if self.lost:
            found.append(f"{self.lost:,} messages with a receipt were lost")
        if self.rate < RATE_MIN:
            found.append(f"only {self.rate:.3f} of the good traffic was stored, and {RATE_MIN:g} are promised")
        if self.peak_bytes > ceiling_bytes:
            found.append(f"the broker took {self.peak_bytes / MIB:,.0f} MiB of {ceiling_bytes / MIB:,.0f}")
        return found


async def _soak(url: str, port: int, seconds: float, attacks: Sequence[str], broker_pid: int) -> Result:
    good = GoodClient(url)
    async with fairway.aio.connect(url) as sending, fairway.aio.connect(url) as receiving:
        tasks = [asyncio.create_task(good.consume(receiving))]
        tasks += [asyncio.create_task(good.consume_slowly(receiving, f"slow-{n}")) for n in range(SLOW_GROUPS)]
        quiet = await good.produce(sending, QUIET_S)
        _show_phase("before", quiet)
        with Progress(console=Console(stderr=True), transient=True) as progress, _attackers(port, attacks) as pids:
            progress.add_task("all attacks at once", total=None)
            used = {pid: _processor_s(pid) for pid in (*pids, broker_pid)}
            attacked = await good.produce(sending, seconds)
            spent = {pid: _processor_s(pid) - before for pid, before in used.items()}
            lag = len(good.books.lost)
        _show_phase("attacked", attacked)
        recovery_s = await _recovery_s(good, sending, 2 * quiet.p99_ms)
        _show_phase("after", await good.produce(sending, QUIET_S))
        await _drained(good)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    shares = [spent[pid] / seconds for pid in pids]
    broker_share = spent[broker_pid] / seconds
    print(f"processor   attackers {sum(shares):.2f} cores (least {min(shares):.3f}), broker {broker_share:.2f}")
    print(f"consumer    {lag:,} behind when the attacks ended; slow ones handled {good.books.slow_seen:,}")
    print(f"recovery    {recovery_s:.2f} s")
    print(f"lost        {len(good.books.lost):,} of {len(good.books.stored):,} with a receipt")
    return Result(len(good.books.lost), attacked.rate, _peak_bytes(broker_pid))


def _show_phase(name: str, phase: Phase) -> None:
    print(
        f"{name:<11} {phase.stored:,} of {phase.meant:,} stored ({phase.rate:.3f}), "
        f"send p50 {phase.p50_ms:.1f} ms, p99 {phase.p99_ms:.1f} ms",
        flush=True,
    )


async def _recovery_s(good: GoodClient, client: AioClient, bound_ms: float) -> float:
    """How long until a send takes no longer than the bound."""
    begun = time.monotonic()
    while time.monotonic() - begun < RECOVERY_S_MAX:
        sent = time.monotonic()
        number = good.books.meant
        good.books.meant += 1
        with suppress(FairwayError):
            await client.send(SUBJECT, str(number).encode())
            good.books.stored.add(number)
            if (time.monotonic() - sent) * 1_000 <= bound_ms:
                break
    return time.monotonic() - begun


async def _drained(good: GoodClient) -> None:
    end = time.monotonic() + DRAIN_S_MAX
    while good.books.lost and time.monotonic() < end:  # noqa: ASYNC110  the books say nothing when they balance
        await asyncio.sleep(0.1)


@contextmanager
def _attackers(port: int, attacks: Sequence[str]) -> Iterator[list[int]]:
    """The process ids of all attackers, while they attack; one that gives up ends the run."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("tests.hostile.broker_attacks", name, str(port), str(LOWEST_NICE), "together"))
            for name in attacks
        ]
        for child in children:
            child.line(timeout_s=60)
        yield [child.pid for child in children]
        for name, child in zip(attacks, children, strict=True):
            with suppress(ChildSilent):
                while child.line(timeout_s=0) is not None:
                    pass
                raise SystemExit(f"the attacker gave up: {name}")


def _processor_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1_024
    raise SystemExit("the broker died under attack")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench hostile_soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [attack.__name__ for attack in ATTACKS]
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--attack", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--memory-mib", type=int, default=1_536, help="the broker's ceiling")
    parser.add_argument(
        "--data", type=Path, default=IN_MEMORY if IN_MEMORY.is_dir() else None, help="where to put data"
    )
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fairway-bench-", dir=chosen.data) as folder:
        flags = ("--data", folder, "--port", "0", "--keep-gib", "2", "--memory-mib", str(chosen.memory_mib))
        with Child("fairway", "broker", *flags) as broker:
            ready = broker.line(timeout_s=60)
            if ready is None:
                raise SystemExit("the broker did not start: see its sentence above")
            port = int(ready.split(",")[0].rsplit(":", 1)[1])
            with suppress(PermissionError):
                give_way(broker.pid, GOOD_NICE)
                give_way(os.getpid(), GOOD_NICE)
            result = asyncio.run(
                _soak(f"fairway://127.0.0.1:{port}", port, chosen.seconds, chosen.attack or names, broker.pid)
            )
    print(f"memory      {result.peak_bytes / MIB:,.0f} MiB at most, ceiling {chosen.memory_mib:,} MiB")
    failures = result.failures(chosen.memory_mib * MIB)
    for sentence in failures:
        print(f"FAILED      {sentence}")
    return FAILED if failures else 0
