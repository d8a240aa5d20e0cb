"""Runs of one key in the hands of real consumers: one message after another, and back when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from fairway.client.app import App
from fairway.client.handler_results import Reject, Retry
from fairway.client.sync.client import Client
from fairway.groups import AfterDead, Backoff, GroupConfig, Order
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker

SUBJECT = "order.changed"
BY_KEY: dict[str, Any] = {"order": Order.KEY, "backoff": Backoff(first_ms=10_000, jitter=0), "lease_ms": 2_000}


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as made:
        made.connect().configure(SUBJECT, "ledger", GroupConfig(**BY_KEY), expected_version=0)
        yield made


def send(fw: Client, *texts: str) -> None:
    """ "a1" is a message of key a."""
    fw.send_many(SUBJECT, [text.encode() for text in texts], keys=[text[0] for text in texts]).result()


def texts(messages: list[Message]) -> list[str]:
    return [message.payload.decode() for message in messages]


def test_the_next_of_a_key_comes_when_the_one_before_it_is_acked(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1", "a2", "b1", "a3", "b2")
    with fw.consumer(SUBJECT, "ledger") as consumer:
        first = consumer.take(10, 1)
        assert texts(first) == ["a1", "b1"]
        assert consumer.take(10, 0.1) == [], "the others are here, and wait"
        assert fw.describe(SUBJECT, "ledger").subjects[0].groups[0].in_flight == 5
        first[1].ack()
        assert texts(consumer.take(10, 1)) == ["b2"]
        first[0].ack()
        second = consumer.take(10, 1)
        assert texts(second) == ["a2"]
        consumer.ack(second)
        assert texts(consumer.take(10, 1)) == ["a3"]


@pytest.mark.parametrize("outcome", ["retry", "release"])
def test_what_is_behind_a_failure_goes_back_and_comes_after_it(broker: MemoryBroker, outcome: str) -> None:
    fw = broker.connect()
    send(fw, "a1", "a2", "a3", "a4")
    with fw.consumer(SUBJECT, "ledger") as ann:
        (first,) = ann.take(10, 1)
        first.ack()
        (second,) = ann.take(10, 1)
        second.retry() if outcome == "retry" else second.release()
    (group,) = fw.describe(SUBJECT, "ledger").subjects[0].groups
    assert (group.in_flight, group.returned + group.retrying, group.parked) == (0, 1, 2)
    seen: list[tuple[str, int]] = []
    with fw.consumer(SUBJECT, "ledger") as ben:
        while len(seen) < 3:
            for message in ben.take(10, 30):
                seen.append((message.payload.decode(), message.attempt))
                message.ack()
    assert seen == [("a2", 2 if outcome == "retry" else 1), ("a3", 1), ("a4", 1)]


def test_who_closes_hands_its_runs_to_the_others(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1", "a2", "a3")
    with fw.consumer(SUBJECT, "ledger") as ann:
        (first,) = ann.take(10, 1)
        first.ack()
    with fw.consumer(SUBJECT, "ledger") as ben:
        assert texts(ben.take(10, 1)) == ["a2"]


def test_a_consumer_that_rests_keeps_no_run(broker: MemoryBroker) -> None:
    """All its workers are busy with other things for long: others may go on with the key."""
    fw = broker.connect()
    send(fw, "a1", "b1", "a2", "a3")
    with fw.consumer(SUBJECT, "ledger") as ann:
        first = ann.take(10, 1)
        first[0].ack()
        ann.flush()
        while ann.rest():  # a pull that is under way may bring it back once
            ann.flush()
        with fw.consumer(SUBJECT, "ledger") as ben:
            assert texts(ben.take(10, 1)) == ["a2"]


def test_handlers_get_every_key_in_order_and_one_message_at_a_time(broker: MemoryBroker) -> None:
    fw = broker.connect()
    app = App(broker.url)
    seen: dict[str, list[int]] = {}
    tries: dict[bytes, int] = {}

    @app.listener(SUBJECT, group="ledger", order="key")
    def handle(message: Message) -> None:
        key, number = str(message.key), int(message.payload[1:])
        tries[message.payload] = tries.get(message.payload, 0) + 1
        if number % 7 == 3 and message.attempt < 3:
            raise Retry(after=1)
        seen.setdefault(key, []).append(number)

    send(fw, *(f"{'abc'[at % 3]}{at}" for at in range(120)))
    for _ in range(60):
        broker.handle(app)
        broker.clock.advance(2)
    assert seen == {key: list(range(first, 120, 3)) for first, key in enumerate("abc")}
    assert all(count == (3 if int(payload[1:]) % 7 == 3 else 1) for payload, count in tries.items())


def test_a_rejected_message_halts_its_key_by_choice(broker: MemoryBroker) -> None:
    fw = broker.connect()
    halting = GroupConfig(version=2, after_dead=AfterDead.HALT, **BY_KEY)
    fw.configure(SUBJECT, "ledger", halting, expected_version=1)
    app = App(broker.url)
    done: list[str] = []

    @app.listener(SUBJECT, group="ledger", order="key")
    def handle(message: Message) -> None:
        if message.payload == b"a2":
            raise Reject("no good")
        done.append(message.payload.decode())

    send(fw, "a1", "b1", "a2", "b2", "a3", "b3")
    broker.handle(app)
    assert sorted(done) == ["a1", "b1", "b2", "b3"]
    fw.go_on(SUBJECT, "ledger", "a")
    broker.handle(app)
    assert sorted(done) == ["a1", "a3", "b1", "b2", "b3"]


def test_tasks_on_a_loop_keep_keys_apart(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, *(f"{'ab'[at % 2]}{at}" for at in range(40)))
    seen: dict[str, list[int]] = {"a": [], "b": []}
    busy: set[str] = set()

    async def work(consumer: Any) -> None:
        async for message in consumer:
            key = str(message.key)
            assert key not in busy
            busy.add(key)
            await asyncio.sleep(0.001)
            busy.discard(key)
            seen[key].append(int(message.payload[1:]))
            message.ack()

    async def main() -> None:
        async with broker.aio_connect() as client, client.consumer(SUBJECT, "ledger") as consumer:
            tasks = [asyncio.create_task(work(consumer)) for _ in range(4)]
            for _ in range(200):
                if sum(map(len, seen.values())) == 40:
                    break
                await asyncio.sleep(0.05)
            consumer.stop()
            await asyncio.gather(*tasks)

    broker.run(main())
    assert seen == {"a": list(range(0, 40, 2)), "b": list(range(1, 40, 2))}
