"""Kafka through confluent-kafka: acks=all, compression off, a linger for batches; one partition, one broker.

`produce_batch` is the client's call for many, `produce` for one. `one_at_a_time` forbids the client to batch. Offsets
are committed: for batches after each, waiting for the answer; message by message they are stored with each message and
committed by the client in the background, which is what its documentation recommends.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import confluent_kafka as kafka  # type: ignore[import-not-found]
from confluent_kafka import admin

from bench.peers.driving import (
    CHUNK,
    IDLE_S_MAX,
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

QUEUED_MAX = 200_000


def address(task: Task) -> str:
    return f"127.0.0.1:{task.port}"


def make_topics(task: Task) -> None:
    client = admin.AdminClient({"bootstrap.servers": address(task)})
    names = {"warm", task.subject} - client.list_topics(timeout=IDLE_S_MAX).topics.keys()
    for made in client.create_topics([admin.NewTopic(name, 1, 1) for name in names]).values() if names else ():
        made.result(IDLE_S_MAX)


class Outbox:
    """A producer that counts what was confirmed, and raises for what was not."""

    def __init__(self, task: Task, **options: Any) -> None:
        make_topics(task)
        self._options = {
            "bootstrap.servers": address(task),
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1 << 20,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": QUEUED_MAX,
            "queue.buffering.max.kbytes": 1 << 20,
            **options,
        }
        self.producer = kafka.Producer(self._options)
        self._ends = kafka.Consumer({"bootstrap.servers": address(task), "group.id": "ends"})
        self.failed: Any = None

    def told(self, error: Any, _message: Any) -> None:
        self.failed = self.failed or error

    def flush(self) -> None:
        left = self.producer.flush(IDLE_S_MAX)
        if left or self.failed:
            raise RuntimeError(f"{left} messages were not confirmed: {self.failed}")

    def pump_many(self, topic: str, until_s: float) -> int:
        """No callback each, which would double the cost: that all arrived is read off the end of the log."""
        sent, end = 0, self._end(topic)
        messages = [{"value": PAYLOAD} for _ in range(CHUNK)]
        while time.perf_counter() < until_s:
            sent += self.producer.produce_batch(topic, messages)
            self._make_room(CHUNK)
        self.flush()
        if self._end(topic) != end + sent:
            raise RuntimeError(f"{sent - self._end(topic) + end} messages were not confirmed")
        return sent

    def _end(self, topic: str) -> int:
        found: int = self._ends.get_watermark_offsets(kafka.TopicPartition(topic, 0), timeout=IDLE_S_MAX)[1]
        return found

    def pump_each(self, topic: str, until_s: float) -> int:
        sent = 0
        produce, told = self.producer.produce, self.told
        while time.perf_counter() < until_s:
            for _ in range(CHUNK):
                produce(topic, PAYLOAD, on_delivery=told)
            sent += CHUNK
            self._make_room(CHUNK)
        self.flush()
        return sent

    def pump_window(self, topic: str, until_s: float, in_flight: int) -> int:
        sent = 0
        produce, told = self.producer.produce, self.told
        while time.perf_counter() < until_s:
            while len(self.producer) >= in_flight:
                self.producer.poll(0.01)
            produce(topic, PAYLOAD, on_delivery=told)
            sent += 1
        self.flush()
        return sent

    def _make_room(self, wanted: int) -> None:
        self.producer.poll(0)
        while len(self.producer) + wanted > QUEUED_MAX:
            self.producer.poll(0.001)


def produce_many(task: Task, gate: Gate) -> Result:
    outbox = Outbox(task)
    return _timed(task, gate, outbox.pump_many)


def produce_each(task: Task, gate: Gate) -> Result:
    outbox = Outbox(task)
    return _timed(task, gate, outbox.pump_each)


def produce_one_at_a_time(task: Task, gate: Gate) -> Result:
    options = {"linger.ms": 0, "batch.num.messages": 1, "max.in.flight": task.in_flight}
    return _timed(task, gate, partial(Outbox(task, **options).pump_window, in_flight=task.in_flight))


def _timed(task: Task, gate: Gate, pump: Any) -> Result:
    pump("warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    sent = pump(task.subject, start_s + task.seconds)
    return gate.result(sent)


def joined(task: Task, group: str, **options: Any) -> tuple[Any, int]:
    """A consumer whose partition is assigned, and how many messages came with that.

    A group takes seconds to form, which is not what is measured. To seek back to that first message would throw away
    what the client has fetched.
    """
    make_topics(task)
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": address(task),
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **options,
        }
    )
    consumer.subscribe([task.subject])
    deadline_s = time.monotonic() + IDLE_S_MAX
    while not consumer.assignment():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the group did not form")
        if consumer.poll(0.02) is not None:
            return consumer, 1
    return consumer, 0


def consume_batches(task: Task, gate: Gate) -> Result:
    consumer, taken = joined(task, "batches")
    start_s = gate.open()
    while taken < task.count and time.perf_counter() < start_s + task.seconds:
        messages = consumer.consume(CHUNK * 10, timeout=0.05)
        if messages:
            consumer.commit(message=messages[-1], asynchronous=False)
            taken += len(messages)
    result = gate.result(taken)
    consumer.close()
    return result


def consume_each(task: Task, gate: Gate) -> Result:
    consumer, taken = joined(task, "each", **{"enable.auto.commit": True, "enable.auto.offset.store": False})
    start_s = gate.open()
    limit_s = start_s + task.seconds
    while taken < task.count and time.perf_counter() < limit_s:
        message = consumer.poll(1.0)
        if message is not None:
            consumer.store_offsets(message=message)
            taken += 1
    consumer.commit(asynchronous=False)
    result = gate.result(taken)
    consumer.close()
    return result


def send_paced(task: Task, gate: Gate) -> Result:
    outbox = Outbox(task, **{"linger.ms": 0})
    gate.open()
    for _ in paced(task):
        outbox.producer.produce(task.subject, stamped(), on_delivery=outbox.told)
        outbox.producer.poll(0)
    outbox.flush()
    return gate.result(latency_count(task))


def receive_paced(task: Task, gate: Gate) -> Result:
    options = {"enable.auto.commit": True, "enable.auto.offset.store": False, "fetch.wait.max.ms": 500}
    consumer, _ = joined(task, "paced", **options)
    gate.open()
    ways: list[int] = []
    while len(ways) < latency_count(task):
        message = consumer.poll(1.0)
        if message is not None:
            ways.append(age_us(message.value()))
            consumer.store_offsets(message=message)
    result = gate.result(len(ways), ways)
    consumer.close()
    return result


DRIVERS: dict[str, Driver] = {
    "produce_many": produce_many,
    "produce_each": produce_each,
    "one_at_a_time": produce_one_at_a_time,
    "consume_batches": consume_batches,
    "consume_each": consume_each,
    "send_paced": send_paced,
    "receive_paced": receive_paced,
}
