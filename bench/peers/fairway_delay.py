"""Fairway's delayed messages through its public client: `send_many` and `send` with `after`, each with a time."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import fairway
from bench.peers.driving import PAYLOAD, Driver, Gate, Result, Task
from bench.peers.due import FAR_S, IDLE_S_MAX, count_of, due_us_of, now_us, payload_of, ticks

MANY = 4_096
LOOK_EVERY = 1_024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_US = timedelta(microseconds=1)


def schedule_many(task: Task, gate: Gate) -> Result:
    payloads, after = [PAYLOAD] * MANY, [FAR_S + place for place in range(MANY)]

    def pump(client: fairway.Client, subject: str, until_s: float) -> int:
        sent = 0
        while time.perf_counter() < until_s:
            client.send_many(subject, payloads, after=after)
            sent += MANY
        client.flush(IDLE_S_MAX)
        return sent

    with fairway.connect(task.url) as client:
        pump(client, "warm", time.perf_counter() + task.warm_s)
        start_s = gate.open()
        sent = pump(client, task.subject, start_s + task.seconds)
        return gate.result(sent)


def schedule_each(task: Task, gate: Gate) -> Result:
    def pump(client: fairway.Client, subject: str, until_s: float) -> int:
        sent = 0
        send = client.send
        while time.perf_counter() < until_s:
            for place in range(LOOK_EVERY):
                send(subject, PAYLOAD, after=FAR_S + place)
            sent += LOOK_EVERY
        client.flush(IDLE_S_MAX)
        return sent

    with fairway.connect(task.url) as client:
        pump(client, "warm", time.perf_counter() + task.warm_s)
        start_s = gate.open()
        sent = pump(client, task.subject, start_s + task.seconds)
        return gate.result(sent)


def schedule_paced(task: Task, gate: Gate) -> Result:
    with fairway.connect(task.url) as client:
        gate.open()
        for send_s, dues in ticks(task):
            time.sleep(max(0.0, send_s - time.monotonic()))
            at = [_EPOCH + due_us * _US for due_us in dues]
            client.send_many(task.subject, [payload_of(due_us) for due_us in dues], at=at)
        client.flush(IDLE_S_MAX)
        return gate.result(count_of(task))


def receive_due(task: Task, gate: Gate) -> Result:
    """How late each was, in hand and by the broker's stamp, which is in whole milliseconds."""
    in_hand: list[int] = []
    stored: list[int] = []
    count = count_of(task)
    with fairway.connect(task.url) as client, client.consumer(task.subject, group="due") as consumer:
        gate.open()
        while len(in_hand) < count:
            messages = consumer.take(1_000, timeout=IDLE_S_MAX)
            if not messages:
                break
            seen_us = now_us()
            for message in messages:
                due_us = due_us_of(message.payload)
                in_hand.append(seen_us - due_us)
                stored.append((message.appended_at - _EPOCH) // _MS * 1_000 - due_us)
            consumer.ack(messages)
        return gate.result(len(in_hand), in_hand, stored)


DRIVERS: dict[str, Driver] = {
    "schedule_many": schedule_many,
    "schedule_each": schedule_each,
    "schedule_paced": schedule_paced,
    "receive_due": receive_due,
}
