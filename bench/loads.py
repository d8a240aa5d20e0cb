"""Loads for benches, each in a process of its own: producers, crowds of consumers, one that asks at a steady pace."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from bench.processes import Child, commands
from bench.wire import Wire
from fairway import batch
from fairway.errors import Code, Refused
from fairway.protocol import ControlMessage
from fairway.protocol import messages as m
from fairway.protocol.admin_messages import Seek, Sought
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run

IN_FLIGHT = 32  # batches of one producer


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


class CrowdProcess(Child):
    """`start`, `stop_pulling`, and `counts`: messages and pulls so far."""

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


class _Consumer:
    """Pulls, settles without waiting for the answer, pulls again."""

    def __init__(self, wire: Wire, crowd: Crowd, group: str, name: str, tally: dict[str, int]) -> None:
        self._wire = wire
        self._crowd = crowd
        self._place = (crowd.subject, group, name)
        self._arrived = 0
        self._tally = tally
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
                self._tally["messages"] += sum(span.count for lot in answer.lots for span in lot.spans)
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
    if crowd.gives_way:
        os.nice(19)
    run(_run_crowd(port, crowd, pipe))


async def _run_crowd(port: int, crowd: Crowd, pipe: Pipe) -> None:
    tally = {"messages": 0, "pulls": 0, "refused": 0}
    consumers = []
    for number in range(crowd.consumers):
        group = crowd.groups[number % len(crowd.groups)]
        consumer = _Consumer(await Wire.connect(port), crowd, group, f"consumer-{port}-{number}", tally)
        await consumer.join()
        consumers.append(consumer)
    pipe.send("ready")

    async def answer(command: str) -> Any:
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

    def send_for(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> dict[str, float]:
        """Messages sent, how long the slowest receipt took, CPU; `meanwhile` is called over and over."""
        self.tell("send", seconds)
        while meanwhile is not None and not self.has_spoken():
            meanwhile()
        found: dict[str, float] = self.hear()
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

    async def send(_command: str, seconds: float) -> dict[str, float]:
        nonlocal sent, slowest_s
        begin, slowest_s, cpu_s = sent, 0.0, time.process_time()
        started_s = due_s = time.perf_counter()
        while due_s < started_s + seconds:
            data = batch.encode([bytes(100)] * each, producer_id=producer_id, first_sequence=sent, created_ms=1)
            await window.acquire()
            wire.request(m.Produce(subject), partial(answered, time.perf_counter()), [data])
            sent += each
            due_s += each / per_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return {"sent": sent - begin, "slowest_ms": slowest_s * 1e3, "cpu_s": time.process_time() - cpu_s}

    await commands(pipe, send)
