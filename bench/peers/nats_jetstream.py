"""NATS JetStream through nats-py on uvloop: publishing with a window of confirmations, push consumers.

Each message is a request, so the ways to produce differ in their window only. The driver keeps the window itself,
over plain publishes with a reply address. On the same server that did five to fifteen times what the client's own
`publish_async` does, which makes a random name and a Future for each message. Consumers are pushed to, which did three
times what fetches do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import Any

import nats  # type: ignore[import-not-found]
import uvloop
from nats.js import api  # type: ignore[import-not-found]

from bench.peers.driving import (
    CHUNK,
    IDLE_S_MAX,
    PAYLOAD,
    Driver,
    Gate,
    Result,
    Task,
    age_us,
    in_closed_loops,
    latency_count,
    stamped,
    timetable,
)

WINDOW = 4_000  # the default of the client's own asynchronous publishing


async def connect(task: Task) -> tuple[Any, Any]:
    client = await nats.connect(task.url, pending_size=64 << 20)
    stream = client.jetstream(timeout=IDLE_S_MAX)
    for subject in {"warm", task.subject}:
        await stream.add_stream(name=subject, subjects=[subject], storage=api.StorageType.FILE)
    return client, stream


class Window:
    """Messages that go out with a reply address each; the server confirms each to it, or says why not."""

    def __init__(self, client: Any, size: int) -> None:
        self._client = client
        self._size = size
        self._inbox = client.new_inbox()
        self._missing = 0
        self._refused = b""
        self._room: asyncio.Future[None] | None = None
        self._wanted = 0

    async def open(self) -> None:
        await self._client.subscribe(f"{self._inbox}.*", cb=self._told)

    async def send(self, subject: str, payload: bytes) -> None:
        if self._missing >= self._size:
            await self._until(self._size * 3 // 4)
        self._missing += 1
        await self._client.publish(subject, payload, reply=f"{self._inbox}.{self._missing}")

    async def confirmed(self, subject: str, payload: bytes) -> None:
        await self.send(subject, payload)
        await self.drained()

    async def close(self) -> None:
        await self._client.close()

    async def drained(self) -> None:
        await self._until(0)
        if self._refused:
            raise RuntimeError(f"the server refused a message: {self._refused.decode()}")

    async def _until(self, missing: int) -> None:
        if self._missing > missing:
            self._wanted = missing
            self._room = asyncio.get_running_loop().create_future()
            await asyncio.wait_for(self._room, IDLE_S_MAX)

    async def _told(self, message: Any) -> None:
        self._missing -= 1
        if b'"error"' in message.data or not message.data:  # empty: no stream listens
            self._refused = message.data or b"no stream"
        if self._room is not None and self._missing <= self._wanted:
            self._room.set_result(None)
            self._room = None


async def pump(window: Window, subject: str, until_s: float) -> int:
    sent = 0
    while time.perf_counter() < until_s:
        for _ in range(50):
            await window.send(subject, PAYLOAD)
        sent += 50
    await window.drained()
    return sent


async def produce_on_connections(task: Task, gate: Gate) -> Result:
    """A client for each connection, one confirmation outstanding on each."""
    windows = [Window((await connect(task))[0], 1) for _ in range(task.connections)]
    for window in windows:
        await window.open()

    async def pump(subject: str, until_s: float) -> int:
        return await in_closed_loops([partial(window.confirmed, subject, PAYLOAD) for window in windows], until_s)

    await pump("warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    result = gate.result(await pump(task.subject, start_s + task.seconds))
    for window in windows:
        await window.close()
    return result


async def produce(task: Task, gate: Gate, size: int = WINDOW) -> Result:
    client, _ = await connect(task)
    window = Window(client, size)
    await window.open()
    await pump(window, "warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    sent = await pump(window, task.subject, start_s + task.seconds)
    result = gate.result(sent)
    await client.close()
    return result


async def consume(task: Task, gate: Gate, policy: Any, ack_every: int) -> Result:
    """The server pushes; with `AckPolicy.ALL` an ack stands for all up to it."""
    client, stream = await connect(task)
    taken = 0
    done = asyncio.Event()

    async def handle(message: Any) -> None:
        nonlocal taken
        taken += 1
        if taken % ack_every == 0 or taken == task.count:
            await message.ack()
        if taken == task.count:
            done.set()

    limits = {"pending_msgs_limit": -1, "pending_bytes_limit": -1}  # else the client drops what it has no time for
    gate.open()
    await stream.subscribe(
        task.subject, durable=policy.value, cb=handle, manual_ack=True, config=consumer(policy), **limits
    )
    with contextlib.suppress(TimeoutError):  # the time is up: what was taken counts
        await asyncio.wait_for(done.wait(), task.seconds)
    await client.flush()
    result = gate.result(taken)
    await client.close()
    return result


def consumer(policy: Any) -> Any:
    return api.ConsumerConfig(ack_policy=policy, max_ack_pending=20_000)


async def send_paced(task: Task, gate: Gate) -> Result:
    client, _ = await connect(task)
    window = Window(client, WINDOW)
    await window.open()
    gate.open()
    for due_s in timetable(task):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await window.send(task.subject, stamped())
    await window.drained()
    result = gate.result(latency_count(task))
    await client.close()
    return result


async def receive_paced(task: Task, gate: Gate) -> Result:
    """A push consumer: what the server has is sent without being asked for."""
    client, stream = await connect(task)
    ways: list[int] = []
    done = asyncio.Event()

    async def handle(message: Any) -> None:
        ways.append(age_us(message.data))
        await message.ack()
        if len(ways) == latency_count(task):
            done.set()

    await stream.subscribe(
        task.subject, durable="paced", cb=handle, manual_ack=True, config=consumer(api.AckPolicy.EXPLICIT)
    )
    await client.flush()
    gate.open()
    await done.wait()
    result = gate.result(len(ways), ways)
    await client.close()
    return result


DRIVERS: dict[str, Driver] = {
    "produce_many": lambda task, gate: uvloop.run(produce(task, gate)),
    "produce_each": lambda task, gate: uvloop.run(produce(task, gate)),
    "one_at_a_time": lambda task, gate: uvloop.run(produce(task, gate, task.in_flight)),
    "many_connections": lambda task, gate: uvloop.run(produce_on_connections(task, gate)),
    "consume_batches": lambda task, gate: uvloop.run(consume(task, gate, api.AckPolicy.ALL, CHUNK)),
    "consume_each": lambda task, gate: uvloop.run(consume(task, gate, api.AckPolicy.EXPLICIT, 1)),
    "send_paced": lambda task, gate: uvloop.run(send_paced(task, gate)),
    "receive_paced": lambda task, gate: uvloop.run(receive_paced(task, gate)),
}
