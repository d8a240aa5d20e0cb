"""Fairway through its public client: `send_many`, `send`, consumers, and an App with a handler without work.

`one_at_a_time` forbids the client to batch. A stream has at most 64 requests in flight, so a thousand go to sixteen
subjects; one in flight is the sync client, which waits for each receipt. `many_connections` is a client of the asyncio
face for each connection, as it comes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import uvloop

import fairway
from bench.peers import fairway_app, workers
from bench.peers.driving import (
    IDLE_S_MAX,
    PAYLOAD,
    Driver,
    Gate,
    Result,
    Task,
    age_us,
    in_closed_loops,
    latency_count,
    paced,
    stamped,
)
from fairway import aio

MANY = 4_096
LOOK_EVERY = 1_024  # messages between two looks at the clock
STREAM_WINDOW = 64  # requests in flight, at most

Pump = Callable[[fairway.Client, str, float], int]


def pump_many(client: fairway.Client, subject: str, until_s: float) -> int:
    payloads = [PAYLOAD] * MANY
    sent = 0
    while time.perf_counter() < until_s:
        client.send_many(subject, payloads)
        sent += MANY
    client.flush(IDLE_S_MAX)
    return sent


def pump_each(client: fairway.Client, subject: str, until_s: float) -> int:
    sent = 0
    send = client.send
    while time.perf_counter() < until_s:
        for _ in range(LOOK_EVERY):
            send(subject, PAYLOAD)
        sent += LOOK_EVERY
    client.flush(IDLE_S_MAX)
    return sent


def _produce(task: Task, gate: Gate, pump: Pump, options: fairway.ClientOptions | None = None) -> Result:
    with fairway.connect(task.url, options=options) as client:
        pump(client, "warm", time.perf_counter() + task.warm_s)
        start_s = gate.open()
        sent = pump(client, task.subject, start_s + task.seconds)
        return gate.result(sent)


def produce_one_at_a_time(task: Task, gate: Gate) -> Result:
    if task.in_flight == 1:
        return _produce(task, gate, pump_waiting)
    return uvloop.run(produce_in_flight(task, gate))


def pump_waiting(client: fairway.Client, subject: str, until_s: float) -> int:
    sent = 0
    while time.perf_counter() < until_s:
        client.send(subject, PAYLOAD).result(IDLE_S_MAX)
        sent += 1
    return sent


async def produce_in_flight(task: Task, gate: Gate) -> Result:
    """The asyncio face: as many tasks, each waiting for the receipt of its message before it sends the next."""
    producer = fairway.ProducerOptions(batch_messages_max=1, linger_ms=0, window=STREAM_WINDOW)
    subjects = -(-task.in_flight // STREAM_WINDOW)
    async with aio.connect(task.url, options=fairway.ClientOptions(producer=producer)) as client:

        async def pump(subject: str, until_s: float) -> int:
            names = [f"{subject}.{number % subjects}" for number in range(task.in_flight)]
            return await in_closed_loops([partial(client.send, name, PAYLOAD) for name in names], until_s)

        await pump("warm", time.perf_counter() + task.warm_s)
        start_s = gate.open()
        return gate.result(await pump(task.subject, start_s + task.seconds))


async def produce_on_connections(task: Task, gate: Gate) -> Result:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(aio.connect(task.url)) for _ in range(task.connections)]

        async def pump(subject: str, until_s: float) -> int:
            return await in_closed_loops([partial(client.send, subject, PAYLOAD) for client in clients], until_s)

        await pump("warm", time.perf_counter() + task.warm_s)
        start_s = gate.open()
        return gate.result(await pump(task.subject, start_s + task.seconds))


def consume_batches(task: Task, gate: Gate) -> Result:
    with fairway.connect(task.url) as client:
        start_s = gate.open()
        limit_s = start_s + task.seconds
        taken = 0
        with client.consumer(task.subject, group="batches") as consumer:
            while taken < task.count and time.perf_counter() < limit_s:
                messages = consumer.take(1_000, timeout=IDLE_S_MAX)
                consumer.ack(messages)
                taken += len(messages)
            consumer.flush()
            return gate.result(taken)


def consume_each(task: Task, gate: Gate) -> Result:
    with fairway.connect(task.url) as client:
        start_s = gate.open()
        limit_s = start_s + task.seconds
        taken = 0
        with client.consumer(task.subject, group="each") as consumer:
            for message in consumer:
                message.ack()
                taken += 1
                if taken >= task.count or (taken % LOOK_EVERY == 0 and time.perf_counter() > limit_s):
                    break
            consumer.flush()
            return gate.result(taken)


def send_paced(task: Task, gate: Gate) -> Result:
    with fairway.connect(task.url) as client:
        gate.open()
        for _ in paced(task):
            client.send(task.subject, stamped())
        client.flush(IDLE_S_MAX)
        return gate.result(latency_count(task))


def receive_paced(task: Task, gate: Gate) -> Result:
    ways: list[int] = []
    with fairway.connect(task.url) as client, client.consumer(task.subject, group="paced") as consumer:
        gate.open()
        for message in consumer:
            ways.append(age_us(message.payload))
            message.ack()
            if len(ways) == latency_count(task):
                break
        return gate.result(len(ways), ways)


def handle(task: Task, gate: Gate) -> Result:
    """The app is a program of its own beside the sender, as with the task queues."""
    with fairway.connect(task.url) as client:

        def left() -> int:
            """Of what was sent, how many are not acked."""
            client.flush(IDLE_S_MAX)
            described = client.describe(task.subject, fairway_app.GROUP)
            groups = [group for subject in described.subjects for group in subject.groups]
            return (
                sum(group.lag + group.in_flight + group.returned + group.retrying for group in groups) if groups else 1
            )

        command = [sys.executable, "-m", "bench.peers.fairway_app", task.subject]
        return workers.handle(task, gate, command, lambda: client.send(task.subject, PAYLOAD), left)


DRIVERS: dict[str, Driver] = {
    "produce_many": lambda task, gate: _produce(task, gate, pump_many),
    "produce_each": lambda task, gate: _produce(task, gate, pump_each),
    "one_at_a_time": produce_one_at_a_time,
    "many_connections": lambda task, gate: uvloop.run(produce_on_connections(task, gate)),
    "consume_batches": consume_batches,
    "consume_each": consume_each,
    "send_paced": send_paced,
    "receive_paced": receive_paced,
    "handle": handle,
}
