"""What a user's own test may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fairway.client.app import App
from fairway.client.handler_results import Reject, Retry
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker, StillWaiting

pytest_plugins = ("pytester",)

SUBJECT = "order.changed"


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    with MemoryBroker() as made:
        yield made


def test_what_is_sent_is_received(broker: MemoryBroker) -> None:
    fw = broker.connect()
    receipt = fw.send(SUBJECT, b"paid", key="o-42", tags=("paid",), headers={"source": "pos"}).result()
    assert receipt.sequence == 0
    with fw.consumer(SUBJECT, group="hotel") as consumer:
        message = consumer.poll(timeout=1)
        assert message is not None
        assert (message.payload, message.key, message.tags) == (b"paid", "o-42", ("paid",))
        assert message.headers == {"source": "pos"}
        message.ack()


def test_a_retry_comes_when_the_clock_says_so(broker: MemoryBroker) -> None:
    fw = broker.connect()
    fw.send(SUBJECT, b"paid").result()
    consumer = fw.consumer(SUBJECT, group="hotel")
    _next(consumer.poll(timeout=1)).retry(after=3_600)
    broker.clock.advance(minutes=59)
    assert consumer.poll(timeout=1) is None
    broker.clock.advance(minutes=1)
    assert _next(consumer.poll(timeout=1)).attempt == 2


def test_time_does_not_pass_by_itself(broker: MemoryBroker) -> None:
    before = broker.clock.now()
    broker.connect().send(SUBJECT, b"paid").result()
    assert (broker.clock.now() - before).total_seconds() < 1
    broker.clock.advance(days=3)
    assert (broker.clock.now() - before).days == 3


def test_the_wall_clock_can_jump_alone(broker: MemoryBroker) -> None:
    before = broker.clock.now()
    broker.clock.jump(-3_600)
    assert (before - broker.clock.now()).total_seconds() == 3_600


@pytest.mark.parametrize("trouble", ["restart", "kill"])
def test_nothing_confirmed_is_lost_when_the_broker_goes(broker: MemoryBroker, trouble: str) -> None:
    fw = broker.connect()
    fw.send_many(SUBJECT, [b"%d" % each for each in range(100)]).result()
    getattr(broker, trouble)()
    consumer = fw.consumer(SUBJECT, group="hotel")
    seen: list[bytes] = []
    while found := consumer.take(timeout=30):
        seen += [message.payload for message in found]
        consumer.ack(found)
    assert seen == [b"%d" % each for each in range(100)]


def test_a_wait_that_nothing_ends_says_so(broker: MemoryBroker) -> None:
    consumer = broker.connect().consumer(SUBJECT, group="hotel")
    with pytest.raises(StillWaiting, match="give a timeout"):
        consumer.poll()


def test_handlers_run_as_in_production(broker: MemoryBroker) -> None:
    app, seen = App(broker.url), list[str]()

    @app.listener(SUBJECT, group="plain")
    def plain(message: Message) -> None:
        if message.payload == b"bad":
            raise Reject("bad")
        if message.attempt == 1:
            raise Retry(after=60)
        seen.append(f"plain {message.payload.decode()}")

    @app.listener(SUBJECT, group="async")
    async def coroutine(message: Message) -> None:
        await asyncio.sleep(1)
        seen.append(f"async {message.payload.decode()}")

    @app.listener(SUBJECT, group="many", batch=True)
    def many(messages: list[Message]) -> None:
        seen.append(f"many {len(messages)}")

    fw = broker.connect()
    fw.send_many(SUBJECT, [b"good", b"bad"]).result()
    assert broker.handle(app) == 6
    assert sorted(seen) == ["async bad", "async good", "many 2"]
    broker.clock.advance(minutes=1)
    assert broker.handle(app) == 1
    assert "plain good" in seen
    assert _dead(broker) == 1


def test_coroutines_run_on_the_brokers_loop(broker: MemoryBroker) -> None:
    async def story() -> bytes:
        async with broker.aio_connect() as fw:
            await fw.send(SUBJECT, b"paid")
            await asyncio.sleep(86_400)
            async with fw.consumer(SUBJECT, group="hotel") as consumer:
                async for message in consumer:
                    message.ack()
                    return message.payload
        raise AssertionError

    before = broker.clock.now()
    assert broker.run(story()) == b"paid"
    assert (broker.clock.now() - before).days == 1


def test_the_same_seed_gives_the_same_run() -> None:
    assert _id_of_a_message(seed=7) == _id_of_a_message(seed=7) != _id_of_a_message(seed=8)


def test_pytest_finds_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(fairway_broker):
            assert fairway_broker.connect().send("order.changed", b"paid").result().sequence == 0
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def _next(message: Message | None) -> Message:
    assert message is not None
    return message


def _dead(broker: MemoryBroker) -> int:
    [subject] = broker.connect().describe(SUBJECT, "plain").subjects
    return subject.groups[0].dead


def _id_of_a_message(seed: int) -> str:
    with MemoryBroker(seed) as broker:
        return broker.connect().send(SUBJECT, b"paid").result().id
