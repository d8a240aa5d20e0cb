"""RabbitMQ through pika's callbacks: persistent messages, publisher confirms in a window, acks of many at once.

AMQP has no call for many messages, so the ways to produce differ in their window only. The queue is quorum, or classic
and durable, as the task's variant says. pika, because on the same server it did twice what aio-pika does. One message
in flight is pika's blocking connection; many connections share an asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pika  # type: ignore[import-not-found]
import uvloop
from pika.adapters.asyncio_connection import AsyncioConnection  # type: ignore[import-not-found]

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
    stamped,
    timetable,
)

PREFETCH = 2_000


class Channel:
    """One connection with one channel, confirms on, its queues declared; then `begin` is called on its loop."""

    def __init__(
        self, task: Task, begin: Callable[[Channel], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """On a loop of pika's own, unless one is given."""
        self._task = task
        self._begin = begin
        self._missing = ["warm", task.subject]
        self.raw: Any = None
        self.confirms = Confirms()
        self.error: Exception | None = None
        kind = pika.SelectConnection if loop is None else AsyncioConnection
        self._connection = kind(
            _parameters(task),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=self._closed,
            on_close_callback=self._closed,
            custom_ioloop=loop,
        )
        self.loop = self._connection.ioloop

    def run(self) -> None:
        self.loop.start()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._connection.close()

    def publish(self, subject: str, payload: bytes) -> None:
        self.confirms.sent += 1
        self.raw.basic_publish("", subject, payload, pika.BasicProperties(delivery_mode=2))

    def _opened(self, raw: Any) -> None:
        self.raw = raw
        raw.add_on_close_callback(lambda _raw, why: self._failed(why))
        raw.basic_qos(prefetch_count=PREFETCH)
        raw.confirm_delivery(self.confirms.told, callback=self._declare)

    def _declare(self, _frame: Any) -> None:
        if not self._missing:
            self._begin(self)
            return
        name = self._missing.pop()
        kind = {"x-queue-type": self._task.variant}
        self.raw.queue_declare(name, durable=True, arguments=kind, callback=self._declare)

    def _failed(self, why: Exception) -> None:
        if not isinstance(why, pika.exceptions.ChannelClosedByClient | pika.exceptions.ConnectionClosedByClient):
            self.error = why

    def _closed(self, _connection: Any, why: Exception) -> None:
        self._failed(why)
        self.loop.stop()


def _parameters(task: Task) -> Any:
    return pika.ConnectionParameters(host="127.0.0.1", port=task.port)


class Confirms:
    """How many messages are not confirmed yet. A confirmation is for one, or for all up to it."""

    def __init__(self) -> None:
        self.sent = 0
        self._floor = 0  # all up to here
        self._loose: set[int] = set()  # and these above it
        self.changed: Callable[[], None] = lambda: None

    @property
    def missing(self) -> int:
        return self.sent - self._floor - len(self._loose)

    def told(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, pika.spec.Basic.Ack):
            raise RuntimeError(f"the server refused message {method.delivery_tag}")
        if method.multiple:
            self._floor = method.delivery_tag
            self._loose = {tag for tag in self._loose if tag > self._floor}
        else:
            self._loose.add(method.delivery_tag)
            while self._floor + 1 in self._loose:
                self._floor += 1
                self._loose.remove(self._floor)
        self.changed()


def produce(task: Task, gate: Gate) -> Result:
    results: list[Result] = []

    def warm(channel: Channel) -> None:
        _pump(channel, "warm", time.perf_counter() + task.warm_s, measure, task.in_flight)

    def measure(channel: Channel) -> None:
        start_s, before = gate.open(), channel.confirms.sent

        def done(channel: Channel) -> None:
            results.append(gate.result(channel.confirms.sent - before))
            channel.close()

        _pump(channel, task.subject, start_s + task.seconds, done, task.in_flight)

    Channel(task, warm).run()
    return results[0]


def produce_one_at_a_time(task: Task, gate: Gate) -> Result:
    """With one in flight `basic_publish` of the blocking connection returns when the message is confirmed."""
    if task.in_flight > 1:
        return produce(task, gate)
    connection = pika.BlockingConnection(_parameters(task))
    channel = connection.channel()
    channel.confirm_delivery()
    for queue in ("warm", task.subject):
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": task.variant})

    def pump(queue: str, until_s: float) -> int:
        sent = 0
        while time.perf_counter() < until_s:
            channel.basic_publish("", queue, PAYLOAD, pika.BasicProperties(delivery_mode=2))
            sent += 1
        return sent

    pump("warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    result = gate.result(pump(task.subject, start_s + task.seconds))
    connection.close()
    return result


def produce_on_connections(task: Task, gate: Gate) -> Result:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    def until_all(begin: Callable[[Callable[[Channel], None]], None]) -> None:
        """Run the loop until each channel was handed to the callback that `begin` is given."""
        finished = loop.create_future()
        handed: list[Channel] = []

        def hand(channel: Channel) -> None:
            handed.append(channel)
            if len(handed) == task.connections:
                finished.set_result(None)

        begin(hand)
        loop.run_until_complete(finished)  # a connection that fails stops the loop, which raises here

    channels: list[Channel] = []
    until_all(lambda hand: channels.extend(Channel(task, hand, loop) for _ in range(task.connections)))

    def pump(subject: str, until_s: float) -> int:
        before = sum(channel.confirms.sent for channel in channels)

        def begin(done: Callable[[Channel], None]) -> None:
            for channel in channels:
                _pump(channel, subject, until_s, done, 1)

        until_all(begin)
        return sum(channel.confirms.sent for channel in channels) - before

    pump("warm", time.perf_counter() + task.warm_s)
    start_s = gate.open()
    return gate.result(pump(task.subject, start_s + task.seconds))


def _pump(
    channel: Channel, subject: str, until_s: float, done: Callable[[Channel], None], in_flight: int = IN_FLIGHT
) -> None:
    """Keep the window full until the time is up; `done` once everything is confirmed."""
    confirms = channel.confirms

    def refill() -> None:
        if time.perf_counter() < until_s:
            if confirms.missing <= in_flight * 3 // 4:  # not for each: a write to the socket per message is slow
                while confirms.missing < in_flight:
                    channel.publish(subject, PAYLOAD)
        elif not confirms.missing:
            confirms.changed = lambda: None
            done(channel)

    confirms.changed = refill
    refill()


def consume(task: Task, gate: Gate, ack_every: int) -> Result:
    """The server pushes within the prefetch; one ack stands for all up to it when `ack_every` is not 1."""
    results: list[Result] = []

    def begin(channel: Channel) -> None:
        start_s = gate.open()
        limit_s = start_s + task.seconds
        taken = 0

        def handle(raw: Any, delivery: Any, _properties: Any, _payload: bytes) -> None:
            nonlocal taken
            if results:
                return
            taken += 1
            is_last = taken >= task.count or time.perf_counter() > limit_s
            if taken % ack_every == 0 or is_last:
                raw.basic_ack(delivery.delivery_tag, multiple=ack_every > 1)
            if is_last:
                results.append(gate.result(taken))
                channel.close()

        channel.raw.basic_consume(task.subject, handle)

    Channel(task, begin).run()
    return results[0]


def send_paced(task: Task, gate: Gate) -> Result:
    results: list[Result] = []

    def begin(channel: Channel) -> None:
        gate.open()

        def done() -> None:
            if not channel.confirms.missing:
                results.append(gate.result(latency_count(task)))
                channel.close()

        _follow(channel, task, timetable(task), done)

    Channel(task, begin).run()
    return results[0]


def _follow(channel: Channel, task: Task, times_s: Iterator[float], done: Callable[[], None]) -> None:
    due_s = next(times_s)

    def tick() -> None:
        nonlocal due_s
        while due_s <= time.monotonic():
            channel.publish(task.subject, stamped())
            following = next(times_s, None)
            if following is None:
                channel.confirms.changed = done
                done()
                return
            due_s = following
        channel.loop.call_later(max(0.0, due_s - time.monotonic()), tick)

    tick()


def receive_paced(task: Task, gate: Gate) -> Result:
    ways: list[int] = []
    results: list[Result] = []

    def begin(channel: Channel) -> None:
        def handle(raw: Any, delivery: Any, _properties: Any, payload: bytes) -> None:
            ways.append(age_us(payload))
            raw.basic_ack(delivery.delivery_tag)
            if len(ways) == latency_count(task):
                results.append(gate.result(len(ways), ways))
                channel.close()

        channel.raw.basic_consume(task.subject, handle)
        gate.open()

    Channel(task, begin).run()
    return results[0]


DRIVERS: dict[str, Driver] = {
    "produce_many": produce,
    "produce_each": produce,
    "one_at_a_time": produce_one_at_a_time,
    "many_connections": produce_on_connections,
    "consume_batches": lambda task, gate: consume(task, gate, CHUNK),
    "consume_each": lambda task, gate: consume(task, gate, 1),
    "send_paced": send_paced,
    "receive_paced": receive_paced,
}
