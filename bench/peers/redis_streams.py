"""Redis Streams through redis-py and hiredis: pipelines without transactions, consumer groups.

A pipeline is how redis-py sends many commands without a round trip each; XADD takes one message, so there is no call
for many. `one_per_request` is a pipeline of a thousand: each XADD is a request of its own.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import redis  # type: ignore[import-not-found]

from bench.peers.driving import (
    CHUNK,
    IN_FLIGHT,
    PAYLOAD,
    Driver,
    Gate,
    Result,
    Task,
    age_us,
    latency_count,
    paced,
    stamped,
)

GROUP = "bench"


def connect(task: Task) -> Any:
    return redis.Redis(host="127.0.0.1", port=task.port)


def pump(client: Any, subject: str, until_s: float, pipelined: int) -> int:
    sent = 0
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
    return Result(sent, time.perf_counter() - start_s)


def produce_one_per_request(task: Task, gate: Gate) -> Result:
    return produce(task, gate, IN_FLIGHT)


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
    return Result(taken, time.perf_counter() - start_s)


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
    return Result(taken, time.perf_counter() - start_s)


def joined(task: Task) -> Any:
    client = connect(task)
    client.xgroup_create(task.subject, GROUP, id="0", mkstream=True)
    return client


def send_paced(task: Task, gate: Gate) -> Result:
    client = connect(task)
    start_s = gate.open()
    for _ in paced(task):
        client.xadd(task.subject, {"v": stamped()})
    return Result(latency_count(task), time.perf_counter() - start_s)


def receive_paced(task: Task, gate: Gate) -> Result:
    """Acks on a connection of their own, from a thread, so that no message waits for another's ack."""
    client = joined(task)
    acks = Acks(task)
    start_s = gate.open()
    ways: list[int] = []
    while len(ways) < latency_count(task):
        for _, messages in client.xreadgroup(GROUP, "one", {task.subject: ">"}, count=CHUNK, block=20_000):
            ways += [age_us(fields[b"v"]) for _, fields in messages]
            acks.put([place for place, _ in messages])
    acks.close()
    return Result(len(ways), time.perf_counter() - start_s, tuple(ways))


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
    "one_per_request": produce_one_per_request,
    "consume_batches": consume_batches,
    "consume_each": consume_each,
    "send_paced": send_paced,
    "receive_paced": receive_paced,
}
