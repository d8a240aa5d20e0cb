"""Loads for benches, each in a process of its own: producers, crowds of consumers, one that asks at a steady pace."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from bench.processes import Child, commands
from bench.wire import Wire
from fairway import batch
from fairway.errors import Code, Refused
from fairway.protocol import ControlMessage
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Scan, Scanned, Seek, Sought
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run

IN_FLIGHT = 32  # batches of one producer
YIELDING = 19  # a nice value: the others go first
SCAN_BYTES = 4 << 20  # in an answer: what the Spark source asks for


@dataclass(frozen=True, slots=True)
class Crowd:
    """Consumers of groups on one subject, all pulling as fast as they are answered."""

    subject: str
    groups: tuple[str, ...]
    consumers: int  # in all, dealt out to the groups
    messages_max: int = 1_000
    bytes_max: int = 128 * 1024
    wait_ms: int = 1_000
    gives_way: bool = False  # its process yields the cores to others: what the broker does to them is to be seen alone


class Arrival(NamedTuple):
    """A run of messages that a consumer was handed, and when, on the clock of `time.perf_counter`."""

    at_s: float
    first: int
    messages: int


def rate_of(arrivals: Sequence[Arrival], began_s: float, seconds: float) -> float:
    """Messages a second in that time; of a load that had nothing left to do, until its last message."""
    inside = [each for each in arrivals if began_s <= each.at_s <= began_s + seconds]
    is_over = bool(inside) and inside[-1] is arrivals[-1]
    took_s = inside[-1].at_s - began_s if is_over else seconds
    return sum(each.messages for each in inside) / max(took_s, 1e-9)


class CrowdProcess(Child):
    """`start`, `pause`, and `counts`: messages and pulls so far; `arrivals`: what came since this was last asked."""

    def __init__(self, port: int, crowd: Crowd) -> None:
        super().__init__(_crowd, port, crowd)
        self.hear()

    def start(self) -> None:
        self.ask("start")

    def pause(self) -> None:
        self.ask("pause")

    def counts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("counts")
        return found

    def arrivals(self) -> list[Arrival]:
        return [Arrival(*each) for each in self.ask("arrivals")]


class _Consumer:
    """Pulls, settles without waiting for the answer, pulls again."""

    def __init__(
        self,
        wire: Wire,
        crowd: Crowd,
        group: str,
        name: str,
        tally: dict[str, int],
        arrivals: list[tuple[float, int, int]],
    ) -> None:
        self._wire = wire
        self._crowd = crowd
        self._place = (crowd.subject, group, name)
        self._arrived = 0
        self._tally = tally
        self._arrivals = arrivals
        self._loop = asyncio.get_running_loop()
        self.is_pulling = False
        self._is_under_way = False

    async def join(self) -> None:
        await self._wire.ask(m.Join(*self._place, 0, 0))

    def go(self) -> None:
        self.is_pulling = True
        if not self._is_under_way:
            self._pull()

    def _pull(self) -> None:
        crowd = self._crowd
        self._is_under_way = True
        pull = m.Pull(*self._place, crowd.messages_max, crowd.bytes_max, crowd.wait_ms, self._arrived)
        self._wire.request(pull, self._pulled)

    def _pulled(self, answer: ControlMessage | Exception) -> None:
        self._is_under_way = False
        if isinstance(answer, m.Pulled):
            self._arrived = max(self._arrived, answer.number)
            if answer.lots:
                now_s = time.perf_counter()
                spans = [span for lot in answer.lots for span in lot.spans]
                self._arrivals += [(now_s, span.first, span.count) for span in spans]
                self._tally["messages"] += sum(span.count for span in spans)
                self._tally["pulls"] += 1
                outcomes = [m.Settle(m.Settlement.ACK, lot.first, lot.attempt, lot.spans) for lot in answer.lots]
                self._wire.request(m.SettleAll(*self._place, outcomes, self._arrived), self._settled)
            if self.is_pulling:
                self._pull()
        elif self.is_pulling:
            self._tally["refused"] += 1
            self._loop.call_later(0.05, self.go)

    def _settled(self, answer: ControlMessage | Exception) -> None:
        if isinstance(answer, Exception):
            self._tally["refused"] += 1


def _crowd(port: int, crowd: Crowd, pipe: Pipe) -> None:
    os.nice(YIELDING if crowd.gives_way else 0)
    run(_run_crowd(port, crowd, pipe))


async def _run_crowd(port: int, crowd: Crowd, pipe: Pipe) -> None:
    tally = {"messages": 0, "pulls": 0, "refused": 0}
    arrivals: list[tuple[float, int, int]] = []
    consumers = []
    for number in range(crowd.consumers):
        group = crowd.groups[number % len(crowd.groups)]
        consumer = _Consumer(await Wire.connect(port), crowd, group, f"consumer-{port}-{number}", tally, arrivals)
        await consumer.join()
        consumers.append(consumer)
    pipe.send("ready")

    async def answer(command: str) -> Any:
        if command == "arrivals":
            taken = arrivals.copy()
            arrivals.clear()
            return taken
        for consumer in consumers:
            if command == "start":
                consumer.go()
            elif command == "pause":
                consumer.is_pulling = False
        return dict(tally) | {"cpu_s": time.process_time()}

    await commands(pipe, answer)


# --- one that asks at a steady pace ----------------------------------------------------------------------------------


class PacedProcess(Child):
    """One consumer that pulls a few messages at a steady pace; how long each answer took."""

    def __init__(self, port: int, subject: str, group: str) -> None:
        super().__init__(_paced, port, subject, group)
        self.hear()

    def measure(self, seconds: float, per_s: int) -> dict[str, list[float]]:
        """Milliseconds: of `pull`s, and of `settle`s, which wait for a sync."""
        found: dict[str, list[float]] = self.ask("measure", seconds, per_s)
        return found


def _paced(port: int, subject: str, group: str, pipe: Pipe) -> None:
    run(_run_paced(port, subject, group, pipe))


async def _run_paced(port: int, subject: str, group: str, pipe: Pipe) -> None:
    wire = await Wire.connect(port)
    place = (subject, group, "paced")
    await wire.ask(m.Join(*place, 0, 0))
    pipe.send("ready")
    arrived = 0

    async def measure(_command: str, seconds: float, per_s: int) -> dict[str, list[float]]:
        nonlocal arrived
        pulls: list[float] = []
        settles: list[float] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            started_s = time.perf_counter()
            pulled = await wire.ask(m.Pull(*place, 10, 64 * 1024, 0, arrived))
            pulls.append((time.perf_counter() - started_s) * 1e3)
            if not isinstance(pulled, m.Pulled) or not pulled.lots:
                await wire.ask(Seek(subject, group, m.Whence.EARLIEST, 0))
                continue
            arrived = max(arrived, pulled.number)
            settled_s = time.perf_counter()
            outcomes = [m.Settle(m.Settlement.ACK, lot.first, lot.attempt, lot.spans) for lot in pulled.lots]
            await wire.ask(m.SettleAll(*place, outcomes, arrived))
            settles.append((time.perf_counter() - settled_s) * 1e3)
            await asyncio.sleep(max(0.0, started_s + 1 / per_s - time.perf_counter()))
        return {"pull": pulls, "settle": settles}

    await commands(pipe, measure)


# --- scanning --------------------------------------------------------------------------------------------------------


class ScanProcess(Child):
    """Tasks of a batch job that read parts of a subject over and over, with scans as the Spark source asks for them.

    An answer is not decoded: the next request leaves at once. The process yields the cores to others, unless told
    otherwise.
    """

    def __init__(self, port: int, subject: str, tasks: int = 2, *, gives_way: bool = True) -> None:
        super().__init__(_scan, port, subject, tasks, gives_way)
        self.hear()

    def begin(self, seconds: float) -> None:
        self.tell("scan", seconds)

    def end(self) -> list[Arrival]:
        found: list[Arrival] = self.hear()
        return found


def _scan(port: int, subject: str, tasks: int, gives_way: bool, pipe: Pipe) -> None:
    os.nice(YIELDING if gives_way else 0)
    run(_run_scan(port, subject, tasks, pipe))


async def _run_scan(port: int, subject: str, tasks: int, pipe: Pipe) -> None:
    wires = [await Wire.connect(port) for _ in range(tasks)]
    found = await wires[0].ask(Scan(subject, m.Whence.SEQUENCE, 0, None, 0))
    if not isinstance(found, Scanned):
        raise TypeError(found)
    edges = [found.committed_end * part // tasks for part in range(tasks + 1)]
    pipe.send("ready")

    async def read(wire: Wire, begin: int, end: int, until_s: float, arrivals: list[Arrival]) -> None:
        at = begin
        while time.perf_counter() < until_s:
            try:
                scanned = await wire.ask(Scan(subject, m.Whence.SEQUENCE, at, end, SCAN_BYTES))
            except Refused as refused:
                if refused.retry_after_ms is None:
                    raise
                await asyncio.sleep(refused.retry_after_ms / 1e3)
                continue
            if not isinstance(scanned, Scanned):
                raise TypeError(scanned)
            arrivals.append(Arrival(time.perf_counter(), at, scanned.next_sequence - at))
            at = scanned.next_sequence if scanned.next_sequence < end else begin

    async def scan(_command: str, seconds: float) -> list[Arrival]:
        arrivals: list[Arrival] = []
        until_s = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for wire, begin, end in zip(wires, edges, edges[1:], strict=False):
                group.create_task(read(wire, begin, end, until_s, arrivals))
        return arrivals

    await commands(pipe, scan)


# --- producing -------------------------------------------------------------------------------------------------------


async def fill(port: int, subject: str, batches: int, messages: int, payload_bytes: int) -> None:
    """A backlog."""
    wire = await Wire.connect(port)
    payload = bytes(range(256)) * (payload_bytes // 256 + 1)
    payloads = [payload[:payload_bytes]] * messages
    producer_id = RealRng().below(1 << 60) + 1
    window = asyncio.Semaphore(IN_FLIGHT)

    async def send(number: int) -> None:
        data = batch.encode(payloads, producer_id=producer_id, first_sequence=number * messages, created_ms=1)
        while True:
            try:
                await wire.ask(m.Produce(subject), [data])
                break
            except Refused as refused:
                if refused.code is not Code.BUSY:
                    raise
                await asyncio.sleep(0.05)
        window.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(batches):
            await window.acquire()
            tasks.create_task(send(number))
    wire.abort()


async def seek(port: int, subject: str, group: str) -> None:
    """Send a group back to the beginning."""
    wire = await Wire.connect(port)
    answer = await wire.ask(Seek(subject, group, m.Whence.EARLIEST, 0))
    if not isinstance(answer, Sought):
        raise TypeError(answer)
    wire.abort()


class PaceProducer(Child):
    """Messages at a steady rate, in a process of its own, one batch every 10 ms."""

    def __init__(self, port: int, subject: str, per_s: int) -> None:
        super().__init__(_produce, port, subject, per_s)
        self.hear()

    def send_for(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> dict[str, Any]:
        """Messages sent, how long the slowest receipt took, CPU; `meanwhile` is called over and over.

        Also the first message's number, how many a batch had, and when each batch was sent, on the clock of
        `time.perf_counter`.
        """
        self.tell("send", seconds)
        while meanwhile is not None and not self.has_spoken():
            meanwhile()
        found: dict[str, Any] = self.hear()
        return found


def _produce(port: int, subject: str, per_s: int, pipe: Pipe) -> None:
    run(_run_produce(port, subject, per_s, pipe))


async def _run_produce(port: int, subject: str, per_s: int, pipe: Pipe) -> None:
    wire = await Wire.connect(port)
    each = max(1, per_s // 100)
    producer_id = RealRng().below(1 << 60) + 1
    sent = 0
    pipe.send("ready")

    window = asyncio.Semaphore(IN_FLIGHT)
    slowest_s = 0.0

    def answered(asked_s: float, _answer: ControlMessage | Exception) -> None:
        nonlocal slowest_s
        slowest_s = max(slowest_s, time.perf_counter() - asked_s)
        window.release()

    async def send(_command: str, seconds: float) -> dict[str, Any]:
        nonlocal sent, slowest_s
        begin, slowest_s, cpu_s = sent, 0.0, time.process_time()
        sent_at_s: list[float] = []
        started_s = due_s = time.perf_counter()
        while due_s < started_s + seconds:
            data = batch.encode([bytes(100)] * each, producer_id=producer_id, first_sequence=sent, created_ms=1)
            await window.acquire()
            sent_at_s.append(time.perf_counter())
            wire.request(m.Produce(subject), partial(answered, sent_at_s[-1]), [data])
            sent += each
            due_s += each / per_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return {
            "sent": sent - begin,
            "slowest_ms": slowest_s * 1e3,
            "cpu_s": time.process_time() - cpu_s,
            "first": begin,
            "each": each,
            "sent_at_s": sent_at_s,
        }

    await commands(pipe, send)
