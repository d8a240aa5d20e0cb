"""Redis Streams through redis-py and hiredis: pipelines without transactions, consumer groups.

A pipeline is how redis-py sends many commands without a round trip each; XADD takes one message, so there is no call
for many. `one_at_a_time` is a pipeline of a thousand, each XADD a request of its own, or one XADD after the other.
`many_connections` is a client of redis.asyncio for each, on uvloop.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import redis.asyncio  # type: ignore[import-not-found]
import uvloop

from bench.peers.driving import (
    CHUNK,
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

GROUP = "bench"


def connect(task: Task) -> Any:
    return redis.Redis(host="127.0.0.1", port=task.port)


def pump(client: Any, subject: str, until_s: float, pipelined: int) -> int:
    sent = 0
    while pipelined == 1 and time.perf_counter() < until_s:
        client.xadd(subject, {"v": PAYLOAD})
        sent += 1
    while time.perf_counter() < until_s:
        pipe = client.pipeline(transaction=False)
        for _ in range(pipelined):
            pipe.xadd(subject, {"v": PAYLOAD})
        sent += len(pipe.execute())
    return sent


def produce(task: Task, gate: Gate, pipelined: int = CHUNK) -> Result:
    client = connect(task)
    pump(client, "warm", time.perf_counter() + task.warm_s, pipelined)
    start_s = gate.open()
    sent = pump(client, task.subject, start_s + task.seconds, pipelined)
    return gate.result(sent)


def produce_one_at_a_time(task: Task, gate: Gate) -> Result:
    return produce(task, gate, task.in_flight)


async def produce_on_connections(task: Task, gate: Gate) -> Result:
    clients = [
        redis.asyncio.Redis(host="127.0.0.1", port=task.port, single_connection_client=True)
        for _ in range(task.connections)
    ]

    async def pump(subject: str, until_s: float) -> int:
        return await in_closed_loops([partial(client.xadd, subject, {"v": PAYLOAD}) for client in clients], until_s)

    await pump("warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    result = gate.result(await pump(task.subject, start_s + task.seconds))
    for client in clients:
        await client.aclose()
    return result


def consume_batches(task: Task, gate: Gate) -> Result:
    """A read of many, one XACK for all of them."""
    client = joined(task)
    start_s = gate.open()
    taken = 0
    while taken < task.count and time.perf_counter() < start_s + task.seconds:
        found = client.xreadgroup(GROUP, "one", {task.subject: ">"}, count=CHUNK)
        ids = [place for place, _ in found[0][1]]
        client.xack(task.subject, GROUP, *ids)
        taken += len(ids)
    return gate.result(taken)


def consume_each(task: Task, gate: Gate) -> Result:
    """The code handles and acks one message after the other; the acks of a read go in one pipeline."""
    client = joined(task)
    start_s = gate.open()
    taken = 0
    while taken < task.count and time.perf_counter() < start_s + task.seconds:
        found = client.xreadgroup(GROUP, "one", {task.subject: ">"}, count=CHUNK)
        pipe = client.pipeline(transaction=False)
        for place, fields in found[0][1]:
            taken += len(fields)
            pipe.xack(task.subject, GROUP, place)
        pipe.execute()
    return gate.result(taken)


def joined(task: Task) -> Any:
    client = connect(task)
    client.xgroup_create(task.subject, GROUP, id="0", mkstream=True)
    return client


def send_paced(task: Task, gate: Gate) -> Result:
    client = connect(task)
    gate.open()
    for _ in paced(task):
        client.xadd(task.subject, {"v": stamped()})
    return gate.result(latency_count(task))


def receive_paced(task: Task, gate: Gate) -> Result:
    """Acks on a connection of their own, from a thread, so that no message waits for another's ack."""
    client = joined(task)
    acks = Acks(task)
    gate.open()
    ways: list[int] = []
    while len(ways) < latency_count(task):
        for _, messages in client.xreadgroup(GROUP, "one", {task.subject: ">"}, count=CHUNK, block=20_000):
            ways += [age_us(fields[b"v"]) for _, fields in messages]
            acks.put([place for place, _ in messages])
    acks.close()
    return gate.result(len(ways), ways)


class Acks:
    """What is put is acked, by a thread, everything that waits in one command."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._waiting: list[bytes] = []
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, ids: list[bytes]) -> None:
        with self._changed:
            self._waiting += ids
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        client = connect(self._task)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._is_open)
                ids, self._waiting = self._waiting, []
            if not ids:
                return
            client.xack(self._task.subject, GROUP, *ids)


DRIVERS: dict[str, Driver] = {
    "produce_many": produce,
    "produce_each": produce,
    "one_at_a_time": produce_one_at_a_time,
    "many_connections": lambda task, gate: uvloop.run(produce_on_connections(task, gate)),
    "consume_batches": consume_batches,
    "consume_each": consume_each,
    "send_paced": send_paced,
    "receive_paced": receive_paced,
}
