"""A consumer with a fixed id, against a real broker: killed and started again, and beside a stranger with its id."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

import fairway
import fairway.aio
from fairway.client.app import App
from fairway.groups import GroupConfig
from fairway.testing import MemoryBroker
from tests.tidy.source import ROOT
from tests.unit.client.broker import WAIT_S, Running
from tests.unit.client.test_app import running, until

LEASE_MS = 3_000
WAITING = "cannot join"
PROGRAM = """
import sys, time, fairway
with fairway.connect(sys.argv[1]) as client:
    consumer = client.consumer(sys.argv[2], group="hotel", consumer="till")
    print(consumer.poll(30).payload.decode(), flush=True)
    time.sleep(600)
"""


def waits(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if WAITING in record.getMessage()]


def kill_a_program(broker: Running, client: fairway.Client, subject: str) -> None:
    """A program that consumes as till has taken a message, and is killed with it in hand."""
    client.configure(subject, "hotel", GroupConfig(lease_ms=LEASE_MS), expected_version=0)
    client.send(subject, b"paid").result(WAIT_S)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, broker.url, subject],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "paid\n"
        os.kill(program.pid, signal.SIGKILL)
        program.wait(WAIT_S)


def test_a_program_that_was_killed_and_starts_again_says_that_it_waits_and_goes_on(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    kill_a_program(broker, client, subject)
    with client.consumer(subject, group="hotel", consumer="till") as consumer:
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert (message.payload, message.attempt) == (b"paid", 2)
        message.ack()
    [line] = waits(caplog)
    assert (line.name, line.levelname) == ("fairway.client", "WARNING")
    assert line.getMessage().startswith(f"consumer till cannot join group hotel on {subject} yet: ")
    assert "wait for the lease of consumer till to end" in line.getMessage()


def test_so_does_one_on_a_loop(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with (
            fairway.aio.connect(broker.url) as mine,
            mine.consumer(subject, group="hotel", consumer="till") as consumer,
        ):
            message = await consumer.poll(WAIT_S)
            assert message is not None
            message.ack()

    kill_a_program(broker, client, subject)
    asyncio.run(story())
    assert len(waits(caplog)) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_so_does_an_app(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    app, handled = App(broker.url), list[bytes]()

    def handle(message: fairway.Message) -> None:
        handled.append(message.payload)

    async def handle_async(message: fairway.Message) -> None:
        handled.append(message.payload)

    app.listener(subject, group="hotel", consumer="till")(handle_async if is_async else handle)
    kill_a_program(broker, client, subject)
    with running(app):
        until(lambda: handled == [b"paid"])
    assert [record.name for record in waits(caplog)] == ["fairway.app"]


def test_a_broadcast_consumer_comes_back_after_its_lease_and_misses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with MemoryBroker() as broker:
        first = broker.connect()
        first.send("orders", b"one").result()
        consumer = first.consumer("orders", group="cache", consumer="host-1", is_broadcast=True)
        message = consumer.poll(timeout=1)
        assert message is not None
        message.ack()
        consumer.flush()
        first.abandon()
        again = broker.connect()
        again.send("orders", b"two").result()
        with again.consumer("orders", group="cache", consumer="host-1", is_broadcast=True) as consumer:
            message = consumer.poll(timeout=60)
            assert message is not None
            assert message.payload == b"two"
            message.ack()
            consumer.flush()
        assert waits(caplog)
        caplog.clear()
        with again.consumer("orders", group="cache", consumer="host-1", is_broadcast=True) as consumer:
            assert consumer.poll(timeout=1) is None
        assert waits(caplog) == [], "who has left waits for nothing when it comes back"


def test_a_consumer_goes_on_after_each_restart_of_the_broker_without_waiting(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    with client.consumer(subject, group="hotel", consumer="till") as consumer:
        for stop in (broker.stop, broker.kill):
            client.send(subject, b"paid").result(WAIT_S)
            message = consumer.poll(WAIT_S)
            assert message is not None
            stop()
            broker.start()
            message.ack()
            assert consumer.flush(WAIT_S)
        assert consumer.counts.settled == 2
        assert consumer.counts.stale == 0
    assert waits(caplog) == []


def test_a_second_process_with_the_id_waits_and_takes_nothing(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.send(subject, b"paid").result(WAIT_S)
    with (
        client.consumer(subject, group="hotel", consumer="till") as consumer,
        fairway.connect(broker.url) as other,
        other.consumer(subject, group="hotel", consumer="till") as second,
    ):
        message = consumer.poll(WAIT_S)
        assert message is not None
        until(lambda: bool(waits(caplog)))
        assert second.poll(0.1) is None
        message.ack()
        assert consumer.flush(WAIT_S)
        assert (consumer.counts.settled, consumer.counts.stale) == (1, 0)
