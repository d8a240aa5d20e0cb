"""The connections of an outbox: a batch is waited for on the connection that carries it."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest

from fairway import batch
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run
from fairway.sql.outbox_batches import OutboxBatch
from fairway.sql.outbox_sender import AioOutboxSender, OutboxSender
from tests.support.outboxes import Up

ANSWER_S = 8.0
DUE_MS = int(time.time() * 1_000) + 3_600_000


@pytest.fixture
def url(up: Up) -> str:
    """The delay server has a connection of its own."""
    return f"{up.url}?delay={urlsplit(up.url).netloc}"


def delayed(subject: str) -> OutboxBatch:
    producer_id = RealRng().bits(63) or 1
    data = batch.encode([b"later"], producer_id=producer_id, first_sequence=0, created_ms=1, due_ms=[DUE_MS])
    return OutboxBatch(subject, data, is_resent=True)  # waits for the connection


def test_a_delayed_batch_is_waited_for_at_the_delay_server(url: str, subject: str) -> None:
    """A relay waits so for its rows: to wait at the broker would take until the time is over."""
    sender = OutboxSender(url, RealClock(), RealRng(), lambda: None)
    try:
        assert sender.wait_open(ANSWER_S)
        outbox_batch = delayed(subject)
        sender.put([outbox_batch])
        began = time.monotonic()
        assert sender.wait([outbox_batch], ANSWER_S)
        assert time.monotonic() - began < ANSWER_S / 2
        assert outbox_batch.fate is SendOutcome.STORED
    finally:
        sender.close()


def test_the_same_on_a_loop(url: str, subject: str) -> None:
    async def story() -> None:
        sender = AioOutboxSender(url, RealClock(), RealRng(), RealNet())
        try:
            assert await sender.wait_open(ANSWER_S)
            outbox_batch = delayed(subject)
            sender.put([outbox_batch])
            began = time.monotonic()
            assert await sender.wait([outbox_batch], ANSWER_S)
            assert time.monotonic() - began < ANSWER_S / 2
        finally:
            await sender.close()

    run(story())
