"""Order, rates and coalescing as programs ask for them, on the broker in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fairway.client.app import App
from fairway.client.handler_results import Retry
from fairway.client.sync.client import Client
from fairway.client.sync.consumer import Consumer
from fairway.errors import Code, Misuse, Refused
from fairway.groups import AfterDead, GroupConfig, Order
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker

SUBJECT = "order.changed"


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as made:
        yield made


def send(fw: Client, *texts: str) -> None:
    """ "a1" is a message of key a."""
    fw.send_many(SUBJECT, [text.encode() for text in texts], keys=[text[0] for text in texts]).result()


def taken(consumer: Consumer, most: int = 100, timeout: float = 1) -> list[str]:
    return [message.payload.decode() for message in consumer.take(most, timeout)]


def test_a_consumer_makes_a_group_by_key(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1", "b1", "a2")
    with fw.consumer(SUBJECT, "ledger", order="key") as ann:
        first = ann.take(10, 1)
        assert [message.payload for message in first] == [b"a1", b"b1"]
        assert all(message.fence for message in first)
        ben = fw.consumer(SUBJECT, "ledger", order="key")
        assert ben.take(10, 0.1) == []
        first[0].ack()
        second = ann.take(10, 1)
        assert [message.payload for message in second] == [b"a2"]
        assert second[0].fence == first[0].fence, "they were handed out together"
        ann.close()
        again = ben.take(10, 1)
        assert [message.payload for message in again] == [b"b1", b"a2"]
        assert all(message.fence > first[0].fence and message.attempt == 1 for message in again)
        ben.close()


def test_a_program_that_counts_on_another_order_does_not_begin(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1")
    fw.consumer(SUBJECT, "ledger", order="key").close()
    fw.consumer(SUBJECT, "ledger").close()  # who states nothing takes what holds
    with pytest.raises(Refused, match="its order is 'key' and not 'strict': configure it") as refused:
        fw.consumer(SUBJECT, "ledger", order="strict").take(1, 5)
    assert refused.value.code is Code.STALE_CONFIG
    with pytest.raises(Refused, match=r"its rate_per_s is 0\.0 and not 5"):
        fw.consumer(SUBJECT, "ledger", rate_per_s=5).take(1, 5)


@pytest.mark.parametrize("settings", [{"order": "rank"}, {"coalesce": "never"}])
def test_a_policy_that_there_is_not_is_misuse(broker: MemoryBroker, settings: dict[str, str]) -> None:
    with pytest.raises(Misuse, match="is one of none, "):
        broker.connect().consumer(SUBJECT, "ledger", **settings)  # type: ignore[arg-type]


def test_handlers_keep_the_order_of_a_key_that_fails(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1", "b1", "a2", "b2", "a3")
    app = App(broker.url)
    done: list[str] = []

    @app.listener(SUBJECT, group="ledger", order="key")
    def handle(message: Message) -> None:
        if message.payload == b"a1" and message.attempt < 3:
            raise Retry(after=60)
        done.append(message.payload.decode())

    for _ in range(4):
        broker.handle(app)
        broker.clock.advance(minutes=1)
    broker.handle(app)
    assert [text for text in done if text[0] == "a"] == ["a1", "a2", "a3"]
    assert done[:2] == ["b1", "b2"]


def test_in_strict_order_nothing_overtakes_a_message_that_failed(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, *(f"k{at:02}" for at in range(40)))
    seen: list[tuple[str, int]] = []
    with fw.consumer(SUBJECT, "ledger", order="strict") as consumer:
        for message in consumer:
            text = message.payload.decode()
            seen.append((text, message.attempt))
            if text in ("k05", "k23") and message.attempt < 3:
                message.retry(after=1)
            else:
                message.ack()
            if text == "k39":
                break
    expected = [(f"k{at:02}", each) for at in range(40) for each in ((1, 2, 3) if at in (5, 23) else (1,))]
    assert seen == expected


def test_in_strict_order_another_takes_over(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, "a1", "a2", "a3")
    ann = fw.consumer(SUBJECT, "ledger", order="strict")
    ben = fw.consumer(SUBJECT, "ledger", order="strict")
    first = ann.poll(1)
    assert first is not None
    first.ack()
    assert ben.poll(1) is None
    ann.close()
    assert taken(ben) == ["a2", "a3"]


def test_strict_order_is_one_handler_at_a_time() -> None:
    with pytest.raises(Misuse, match="concurrency is 1, not 4"):
        App("fairway://x").listener(SUBJECT, group="ledger", order="strict", concurrency=4)


def test_a_key_that_halted_goes_on_when_told(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.configure(SUBJECT, "ledger", GroupConfig(order=Order.KEY, after_dead=AfterDead.HALT), expected_version=0)
    send(fw, "a1", "a2")
    with fw.consumer(SUBJECT, "ledger", order="key") as consumer:
        (message,) = consumer.take(1, 1)
        message.reject("no")
        assert taken(consumer) == []
        assert fw.go_on(SUBJECT, "ledger", "a").was_on
        assert taken(consumer) == ["a2"]
        assert not fw.go_on(SUBJECT, "ledger").was_on


def test_requests_that_others_do_are_declined(broker: MemoryBroker) -> None:
    fw = broker.connect()
    app = App(broker.url)
    done: list[str] = []

    @app.listener(SUBJECT, group="refresh", coalesce="decline")
    def handle(message: Message) -> None:
        done.append(message.payload.decode())

    send(fw, *(f"{'ab'[at % 2]}{at:03}" for at in range(200)))
    broker.handle(app)
    (group,) = fw.describe(SUBJECT, "refresh").subjects[0].groups
    assert len(done) + group.declined == 200
    assert len(done) < 20


def test_a_rate_holds_for_all_members(broker: MemoryBroker) -> None:
    fw = broker.connect()
    send(fw, *(f"{'abc'[at % 3]}{at:03}" for at in range(100)))
    members = [fw.consumer(SUBJECT, "mailer", rate_per_s=10) for _ in range(3)]
    begin = broker.clock.now()
    count = 0
    while (broker.clock.now() - begin).total_seconds() < 3:
        for member in members:
            found = member.take(5, 0.1)
            count += len(found)
            member.ack(found)
    assert 35 <= count <= 10 + 10 * 4
