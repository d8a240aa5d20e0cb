"""NATS's scheduled messages through nats-py on uvloop: a window of confirmations, a push consumer on the target.

A stream with `allow_msg_schedules` has one schedule for each subject, so each message has a subject of its own, and the
server publishes it to the target when it is due. There is no call for many.
"""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import nats  # type: ignore[import-not-found]
import uvloop
from nats.js import api  # type: ignore[import-not-found]

from bench.peers.driving import PAYLOAD, Driver, Gate, Result, Task
from bench.peers.due import FAR_S, IDLE_S_MAX, count_of, due_us_of, now_us, payload_of, ticks
from bench.peers.nats_jetstream import WINDOW, Window

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def connect(task: Task) -> Any:
    """A client on a server that has the stream: the subjects of schedules, and where they go."""
    client = await nats.connect(task.url, pending_size=64 << 20)
    config = {
        "name": "delayed",
        "subjects": ["schedule.>", "due.>"],
        "storage": "file",
        "allow_msg_schedules": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
    }
    answer = await client.request("$JS.API.STREAM.CREATE.delayed", json.dumps(config).encode(), timeout=IDLE_S_MAX)
    error = json.loads(answer.data).get("error")
    if error:
        raise RuntimeError(error["description"])
    return client


class Schedules(Window):
    """Publishes with the headers of a schedule."""

    number = 0

    async def schedule(self, kind: str, payload: bytes, due_us: int) -> None:
        if self._missing >= self._size:
            await self._until(self._size * 3 // 4)
        self._missing += 1
        self.number += 1
        due = (_EPOCH + timedelta(microseconds=due_us)).isoformat().replace("+00:00", "Z")
        headers = {"Nats-Schedule": f"@at {due}", "Nats-Schedule-Target": f"due.{kind}"}
        subject, reply = f"schedule.{kind}.{self.number}", f"{self._inbox}.{self.number}"
        await self._client.publish(subject, payload, reply=reply, headers=headers)


async def pump(window: Schedules, kind: str, until_s: float) -> int:
    sent = 0
    while time.perf_counter() < until_s:
        for _ in range(50):
            await window.schedule(kind, PAYLOAD, now_us() + FAR_S * 1_000_000)
        sent += 50
    await window.drained()
    return sent


async def schedule(task: Task, gate: Gate) -> Result:
    client = await connect(task)
    window = Schedules(client, WINDOW)
    await window.open()
    await pump(window, "warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    sent = await pump(window, task.subject, start_s + task.seconds)
    result = gate.result(sent)
    await client.close()
    return result


async def schedule_paced(task: Task, gate: Gate) -> Result:
    client = await connect(task)
    window = Schedules(client, WINDOW)
    await window.open()
    gate.open()
    for send_s, dues in ticks(task):
        await asyncio.sleep(max(0.0, send_s - time.monotonic()))
        for due_us in dues:
            await window.schedule(task.subject, payload_of(due_us), due_us)
    await window.drained()
    result = gate.result(count_of(task))
    await client.close()
    return result


async def receive_due(task: Task, gate: Gate) -> Result:
    client = await connect(task)
    in_hand: list[int] = []
    stored: list[int] = []
    heard_s = time.monotonic()

    async def handle(message: Any) -> None:
        nonlocal heard_s
        heard_s = time.monotonic()
        due_us = due_us_of(message.data)
        in_hand.append(now_us() - due_us)
        stored.append(round(message.metadata.timestamp.timestamp() * 1e6) - due_us)

    stream = client.jetstream(timeout=IDLE_S_MAX)
    config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE)
    limits = {"pending_msgs_limit": -1, "pending_bytes_limit": -1}
    await stream.subscribe(f"due.{task.subject}", cb=handle, config=config, **limits)
    await client.flush()
    gate.open()
    heard_s = time.monotonic()
    while len(in_hand) < count_of(task) and time.monotonic() < heard_s + IDLE_S_MAX:  # noqa: ASYNC110, it ages
        await asyncio.sleep(0.05)
    result = gate.result(len(in_hand), in_hand, stored)
    await client.close()
    return result


DRIVERS: dict[str, Driver] = {
    "schedule_many": lambda task, gate: uvloop.run(schedule(task, gate)),
    "schedule_each": lambda task, gate: uvloop.run(schedule(task, gate)),
    "schedule_paced": lambda task, gate: uvloop.run(schedule_paced(task, gate)),
    "receive_due": lambda task, gate: uvloop.run(receive_due(task, gate)),
}
