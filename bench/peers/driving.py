"""The parts that every driver shares: its task, the gate at which it waits, the load it makes, its results.

A driver is a client process of one peer: `python -m bench.peers.drive MODULE TASK`. It imports the standard library and
that peer's client, nothing else, and runs in the environment that has it. It sets up, says `ready` at the gate, waits
for a line on its standard input, works, and prints one line of JSON. The gate stops the clock, and says what processor
time the servers' and the driver's processes have used meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench.kernel_counters import family_cpu_s

PAYLOAD_BYTES = 100
CHUNK = 500  # messages between two looks at the clock; a pipeline, a fetch, a batch
IN_FLIGHT = 1_000
IDLE_S_MAX = 20.0  # a consumer that hears nothing for so long has failed

_STAMP = struct.Struct("<Q")
PAYLOAD = bytes(range(PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class Task:
    """One workload on one server."""

    workload: str
    url: str
    subject: str
    seconds: float = 1.0
    warm_s: float = 0.3
    count: int = 0  # consumers: how many messages there are to take
    rate_per_s: int = 0  # latency: the pace
    variant: str = ""  # what a driver needs to know of the server, such as the type of queue
    nice: int = 0  # how much it gives way to the servers, where they are what is measured
    connections: int = 1
    in_flight: int = IN_FLIGHT  # requests of one connection, where each message is one
    server_pids: tuple[int, ...] = ()  # whose processor time is counted, with that of what they have started

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Result:
    """How many in which time, and at what cost; for latency, also each message's way in microseconds, and until it was
    stored."""

    messages: int
    elapsed_s: float
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    latencies_us: tuple[int, ...] = ()
    stored_us: tuple[int, ...] = ()


Driver: TypeAlias = Callable[[Task, "Gate"], Result]


class Gate:
    """Where a driver that has set up waits for its turn, and where it says that it is done."""

    def __init__(self, task: Task) -> None:
        self._server_pids = task.server_pids
        self._began_cpu_s = (0.0, 0.0)
        self._began_s = 0.0

    def open(self) -> float:
        """Say `ready`, wait for the word; the time at which it came."""
        print("ready", flush=True)
        sys.stdin.readline()
        self._began_cpu_s = self._cpu_s()
        self._began_s = time.perf_counter()
        return self._began_s

    def result(self, messages: int, latencies_us: Sequence[int] = (), stored_us: Sequence[int] = ()) -> Result:
        """What was done since the gate was opened. Call it before connections are closed, which is no part of it."""
        elapsed_s = time.perf_counter() - self._began_s
        server_s, client_s = (now - began for now, began in zip(self._cpu_s(), self._began_cpu_s, strict=True))
        return Result(messages, elapsed_s, server_s, client_s, tuple(latencies_us), tuple(stored_us))

    def _cpu_s(self) -> tuple[float, float]:
        return family_cpu_s(self._server_pids), family_cpu_s([os.getpid()])


async def in_closed_loops(sends: Sequence[Callable[[], Awaitable[object]]], until_s: float) -> int:
    """Every sender again and again, each waiting for its answer before it sends the next; how many were answered."""

    async def one(send: Callable[[], Awaitable[object]]) -> int:
        sent = 0
        while time.perf_counter() < until_s:
            await send()
            sent += 1
        return sent

    return sum(await asyncio.gather(*map(one, sends)))


def stamped() -> bytes:
    """A payload that carries the time at which it was made: CLOCK_MONOTONIC, one for all processes of a machine."""
    return _STAMP.pack(time.monotonic_ns()) + PAYLOAD[_STAMP.size :]


def age_us(payload: bytes) -> int:
    made_ns: int = _STAMP.unpack_from(payload)[0]
    return (time.monotonic_ns() - made_ns) // 1_000


def paced(task: Task) -> Iterator[None]:
    """Yield at the task's rate, on a fixed timetable, sleeping in between; for a producer that blocks."""
    for due_s in timetable(task):
        time.sleep(max(0.0, due_s - time.monotonic()))
        yield


def timetable(task: Task) -> Iterator[float]:
    start_s = time.monotonic() + 0.05
    for place in range(latency_count(task)):
        yield start_s + place / task.rate_per_s


def latency_count(task: Task) -> int:
    return max(1, int(task.rate_per_s * task.seconds))


def run_one(drivers: dict[str, Driver], task: Task) -> dict[str, Any]:
    return asdict(drivers[task.workload](task, Gate(task)))
