"""A client with the addresses of several copies of one broker: it finds the one that leads, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import fairway
import fairway.aio
from fairway.client.core import ClientOptions
from fairway.errors import Code
from fairway.protocol.admin_messages import Depth, Describe
from tests.support.stub_server import Follower
from tests.unit.client.broker import WAIT_S, Running


@pytest.fixture
def follower() -> Iterator[Follower]:
    with Follower() as started:
        yield started


@pytest.fixture
def url(broker: Running, follower: Follower) -> str:
    return f"fairway://127.0.0.1:{follower.port},127.0.0.1:{broker.port}"


def test_a_message_reaches_the_one_that_leads(url: str, subject: str, follower: Follower) -> None:
    with fairway.connect(url) as client:
        assert [client.send(subject, b"%d" % each).result(WAIT_S).sequence for each in range(3)] == [0, 1, 2]
    assert follower.heard, "it was asked first"


def test_a_consumer_joins_the_one_that_leads(url: str, subject: str, broker: Running) -> None:
    with fairway.connect(broker.url) as direct:
        direct.send(subject, b"a").result(WAIT_S)
    with fairway.connect(url) as client, client.consumer(subject, "g") as consumer:
        message = consumer.poll(WAIT_S)
        assert message is not None
        message.ack()
        assert consumer.flush(WAIT_S)


def test_a_question_is_answered_by_the_one_that_leads(url: str, subject: str) -> None:
    with fairway.connect(url) as client:
        assert client.describe().broker.is_master


def test_where_nobody_leads_a_question_is_refused_when_its_time_is_up(follower: Follower) -> None:
    client = fairway.connect(f"fairway://127.0.0.1:{follower.port}")
    with pytest.raises(fairway.Refused) as caught:
        client.ask(Describe(Depth.SUBJECTS), timeout=0.3)
    assert caught.value.code is Code.NOT_MASTER
    client.abandon()


def test_where_nobody_leads_a_message_is_not_sent_and_the_reason_is_named(follower: Follower, subject: str) -> None:
    options = ClientOptions(producer=fairway.ProducerOptions(delivery_timeout_ms=300))
    with fairway.connect(f"fairway://127.0.0.1:{follower.port}", options=options) as client:
        error = client.send(subject, b"a").exception(WAIT_S)
    assert isinstance(error, fairway.NotSent)
    assert "NOT_MASTER" in str(error)


def test_a_client_of_asyncio_finds_it_too(url: str, subject: str) -> None:
    async def main() -> int:
        async with fairway.aio.connect(url) as client:
            receipt = await client.send(subject, b"a")
            async with client.consumer(subject, "g") as consumer:
                message = await consumer.poll(WAIT_S)
                assert message is not None
                message.ack()
            return receipt.sequence

    assert asyncio.run(main()) == 0
