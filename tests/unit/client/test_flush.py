"""`consumer.flush()` says "confirmed" only of what the broker has confirmed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import fairway
import fairway.aio
from fairway import Code
from tests.support.one_session import share_one_secret
from tests.unit.client.broker import WAIT_S, Running


def test_flush_does_not_vouch_for_a_consumer_whose_place_was_taken(
    broker: Running, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_one_secret(monkeypatch)
    with fairway.connect(broker.url) as client, fairway.connect(broker.url) as other:
        client.send(subject, b"paid").result(WAIT_S)
        with client.consumer(subject, group="hotel", consumer="till") as consumer:
            message = consumer.poll(WAIT_S)
            assert message is not None
            with other.consumer(subject, group="hotel", consumer="till") as newer:
                again = newer.poll(WAIT_S)
                assert again is not None
                with contextlib.suppress(fairway.Misuse):  # it may have heard of it by now
                    message.ack()
                with pytest.raises(fairway.Refused) as refused:
                    consumer.flush(WAIT_S)
                assert refused.value.code is Code.FENCED
                again.ack()
                assert newer.flush(WAIT_S)


def test_flush_on_a_loop_does_not_vouch_for_it_either(
    broker: Running, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_one_secret(monkeypatch)

    async def story() -> None:
        async with fairway.aio.connect(broker.url) as client, fairway.aio.connect(broker.url) as other:
            await client.send(subject, b"paid")
            async with client.consumer(subject, group="hotel", consumer="till") as consumer:
                message = await consumer.poll(WAIT_S)
                assert message is not None
                async with other.consumer(subject, group="hotel", consumer="till") as newer:
                    again = await newer.poll(WAIT_S)
                    assert again is not None
                    with contextlib.suppress(fairway.Misuse):  # it may have heard of it by now
                        message.ack()
                    with pytest.raises(fairway.Refused) as refused:
                        await consumer.flush(WAIT_S)
                    assert refused.value.code is Code.FENCED
                    again.ack()
                    assert await newer.flush(WAIT_S)

    asyncio.run(story())
