"""Handlers against a real broker: what their end means, how the program ends, and what a slow one keeps from others."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import fairway
from fairway.client.app import App
from fairway.client.handler_results import Reject, Retry
from fairway.errors import Misuse, Refused
from fairway.protocol.messages import Whence
from tests.support.one_session import share_one_secret
from tests.unit.client.broker import WAIT_S, Running


@contextmanager
def running(app: App) -> Iterator[threading.Thread]:
    """The app in a thread of its own, ended at the end."""
    runner = threading.Thread(target=app.run, daemon=True)
    runner.start()
    try:
        yield runner
    finally:
        app.stop()
        runner.join(WAIT_S)
        assert not runner.is_alive()


def until(is_so: Callable[[], bool]) -> None:
    waiter = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if is_so():
            return
        waiter.wait(0.02)
    raise AssertionError("it did not come about")


def test_what_the_end_of_a_handler_means(broker: Running, client: fairway.Client, subject: str) -> None:
    app, attempts = App(broker.url), list[tuple[bytes, int]]()

    @app.listener(subject, group="hotel", concurrency=3)
    def on_change(message: fairway.Message) -> None:
        attempts.append((message.payload, message.attempt))
        if message.payload == b"later" and message.attempt == 1:
            raise Retry("not yet", after=0.05)
        if message.payload == b"never":
            raise Reject("no such order")
        if message.payload == b"by hand":
            message.retry(after=0) if message.attempt == 1 else message.ack()

    client.send_many(subject, [b"fine", b"later", b"never", b"by hand"]).result()
    with running(app):
        until(lambda: len(attempts) == 6)
    assert sorted(attempts) == [
        (b"by hand", 1), (b"by hand", 2), (b"fine", 1), (b"later", 1), (b"later", 2), (b"never", 1)
    ]  # fmt: skip
    state = client.describe(subject, "hotel").subjects[0].groups[0]
    assert (state.lag, state.dead, state.in_flight) == (0, 1, 0)


def test_a_handler_that_fails_is_tried_again_with_the_groups_backoff(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = App(broker.url), threading.Event()

    @app.listener(subject, group="hotel")
    def on_change(message: fairway.Message) -> None:
        seen.set()
        raise ValueError("no such hotel")

    client.send(subject, b"x").result()
    with running(app):
        assert seen.wait(WAIT_S)
        until(lambda: client.describe(subject, "hotel").subjects[0].groups[0].retrying == 1)
    assert "will be retried" in caplog.text


def test_coroutines_and_batches(broker: Running, client: fairway.Client, subject: str) -> None:
    app, single, many, at_once = App(broker.url), list[bytes](), list[bytes](), list[int]()
    busy = 0

    @app.listener(subject, group="single", concurrency=10)
    async def one(message: fairway.Message) -> None:
        nonlocal busy
        busy += 1
        at_once.append(busy)
        await asyncio.sleep(0.001)
        busy -= 1
        single.append(message.payload)

    @app.listener(subject, group="many", batch=True, batch_max=50)
    async def some(messages: list[fairway.Message]) -> None:
        assert len(messages) <= 50
        many.extend(message.payload for message in messages)

    payloads = [b"%d" % each for each in range(500)]
    client.send_many(subject, payloads).result()
    with running(app):
        until(lambda: len(single) == len(many) == 500)
    assert set(single) == set(many) == set(payloads)
    assert max(at_once) == 10


def test_it_goes_on_when_the_broker_returns(broker: Running, client: fairway.Client, subject: str) -> None:
    app, seen = App(broker.url), list[bytes]()

    @app.listener(subject, group="hotel")
    def on_change(message: fairway.Message) -> None:
        seen.append(message.payload)

    client.send(subject, b"before").result()
    with running(app):
        until(lambda: seen == [b"before"])
        broker.kill()
        broker.start()
        client.send(subject, b"after").result(WAIT_S)
        until(lambda: b"after" in seen)


def test_what_waits_behind_a_slow_handler_goes_to_others(broker: Running, client: fairway.Client, subject: str) -> None:
    app, begun, end = App(broker.url), threading.Event(), threading.Event()

    @app.listener(subject, group="hotel")
    def on_change(message: fairway.Message) -> None:
        begun.set()
        assert end.wait(WAIT_S)

    client.send_many(subject, [b"%d" % each for each in range(10)]).result()
    with running(app):
        assert begun.wait(WAIT_S)
        with client.consumer(subject, group="hotel") as other:
            others: list[fairway.Message] = []
            for _ in range(int(WAIT_S)):
                others += other.take(timeout=1)
                if len(others) == 9:
                    break
        end.set()
    assert len(others) == 9


@pytest.mark.parametrize("is_async", [False, True])
def test_a_listener_that_cannot_go_on_ends_the_app(
    broker: Running, client: fairway.Client, subject: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_one_secret(monkeypatch)
    app, failures = App(broker.url), list[BaseException]()

    def on_change(message: fairway.Message) -> None: ...

    async def on_change_async(message: fairway.Message) -> None: ...

    app.listener(subject, group="hotel", consumer="desk-1")(on_change_async if is_async else on_change)

    def run() -> None:
        try:
            app.run()
        except Refused as refused:
            failures.append(refused)

    client.send(subject, b"x").result()
    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    until(lambda: [each.lag for each in client.describe(subject).subjects[0].groups] == [0])
    with client.consumer(subject, group="hotel", consumer="desk-1"):
        runner.join(WAIT_S)
    assert [type(each) for each in failures] == [Refused]


def test_a_listener_takes_the_settings_of_a_consumer(broker: Running) -> None:
    app = App(broker.url)
    app.listener("s", group="g", start="latest", consumer="desk-1", prefetch_messages=10)(print)
    [listener] = app.listeners
    assert (listener.options.start, listener.options.consumer) == (Whence.LATEST, "desk-1")
    with pytest.raises(Misuse, match="'earliest' or 'latest'"):
        app.listener("s", group="g", start="yesterday")  # type: ignore[arg-type]


def test_misuse_is_told_at_once(broker: Running) -> None:
    with pytest.raises(Misuse, match="no listeners"):
        App(broker.url).run()
    with pytest.raises(Misuse, match="at least 1"):
        App(broker.url).listener("s", group="g", concurrency=0)
    with pytest.raises(Misuse, match="after is -1"):
        Retry(after=-1)


PROGRAM = r"""
import os, sys, time, fairway
app = fairway.App(sys.argv[1])

@app.listener(sys.argv[2], group="hotel", concurrency=2)
def on_change(message):
    os.write(1, b"begun\n")  # whole, whatever other threads write
    time.sleep(1)
    os.write(1, b"done\n")

app.run()
"""


def test_sigterm_finishes_what_is_in_hand(broker: Running, client: fairway.Client, subject: str) -> None:
    client.send_many(subject, [b"%d" % each for each in range(20)]).result()
    arguments = [sys.executable, "-c", PROGRAM, broker.url, subject]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            first = [program.stdout.readline() for _ in range(2)]
            program.send_signal(signal.SIGTERM)
            told = program.communicate(timeout=WAIT_S)[0].split()
        finally:
            program.kill()
    assert first == ["begun\n"] * 2
    assert program.returncode == 0
    assert told.count("done") == 2 + told.count("begun")
    state = client.describe(subject, "hotel").subjects[0].groups[0]
    assert (state.in_flight, state.lag + state.returned) == (0, 20 - told.count("done"))
