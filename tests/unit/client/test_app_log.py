"""What an app says in its log, against a real broker: where it connects, what it listens to, and each dead letter."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fairway
from fairway.client.app import App
from fairway.groups import GroupConfig
from fairway.runtime.host import free_port
from fairway.testing import MemoryBroker
from tests.tidy.source import ROOT
from tests.unit.client.broker import WAIT_S, Running
from tests.unit.client.test_app import running, until

IS_ASYNC = pytest.mark.parametrize("is_async", [False, True])


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


def listen(app: App, subject: str, *, is_async: bool) -> None:
    """A handler that rejects one message and fails on all others."""

    def judge(message: fairway.Message) -> None:
        if message.payload == b"reject":
            raise fairway.Reject("no such room")
        raise ValueError("the model is broken")

    async def judge_async(message: fairway.Message) -> None:
        judge(message)

    app.listener(subject, group="hotel")(judge_async if is_async else judge)


@IS_ASYNC
def test_it_says_that_it_waits_and_when_it_is_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    caplog.set_level(logging.INFO, "fairway")
    later = Running(tmp_path / "data")
    later.port = free_port()
    app = App(f"fairway://127.0.0.1:{later.port}")
    listen(app, "room.booked", is_async=is_async)
    try:
        with running(app):
            until(lambda: bool(lines(caplog, "waiting for the broker")))
            later.start()
            until(lambda: bool(lines(caplog, "connected")))
    finally:
        later.kill()
    [waiting] = lines(caplog, "waiting for the broker")
    assert f"at fairway://127.0.0.1:{later.port}: " in waiting
    assert "Connection refused" in waiting
    assert f"fairway up --data data --port {later.port}" in waiting
    assert lines(caplog, "connected to") == [f"connected to the broker at fairway://127.0.0.1:{later.port}"]
    assert any("subject room.booked, group hotel, 1 " in each for each in lines(caplog, "listener judge"))
    assert [each.split(":")[0] for each in lines(caplog, "stop")] == ["stopping", "stopped"]


@IS_ASYNC
def test_each_dead_letter_is_one_line(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    app = App(broker.url)
    listen(app, subject, is_async=is_async)
    client.configure(subject, "hotel", GroupConfig(attempts_max=1), expected_version=0)
    rejected = client.send(subject, b"reject").result()
    failed = client.send(subject, b"fail").result()
    with running(app):
        until(lambda: len(lines(caplog, "dead letter")) == 2)
    first, second = sorted(lines(caplog, "dead letter"), key=lambda line: "failed" in line)
    where = f"of {subject} in group hotel"
    assert first == (
        f"dead letter: message {rejected.id} (sequence {rejected.sequence}) {where} was rejected on attempt 1: "
        "no such room"
    )
    assert second == (
        f"dead letter: message {failed.id} (sequence {failed.sequence}) {where} failed on its last attempt, 1: "
        "ValueError: the model is broken"
    )
    until(lambda: client.describe(subject, "hotel").subjects[0].groups[0].dead == 2)  # once it is copied there
    assert not lines(caplog, "will be retried")


def test_no_dead_letter_is_reported_while_attempts_are_left(
    broker: Running, client: fairway.Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(broker.url)
    listen(app, subject, is_async=False)
    client.configure(subject, "hotel", GroupConfig(), expected_version=0)
    client.send(subject, b"fail").result()
    with running(app):
        until(lambda: client.describe(subject, "hotel").subjects[0].groups[0].retrying == 1)
    assert lines(caplog, "will be retried")
    assert not lines(caplog, "dead letter")


def test_a_broker_in_memory_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fairway")
    with MemoryBroker() as memory:
        app = App(memory.url)
        listen(app, "room.booked", is_async=False)
        memory.connect().send("room.booked", b"reject").result()
        assert memory.handle(app) == 1
    assert not caplog.records


PROGRAM = """
import logging, sys, fairway
exec(sys.argv[2])
app = fairway.App(sys.argv[1])
app.listener("room.booked", group="hotel")(print)
app.run()
"""


@contextmanager
def program(setting: str) -> Iterator[subprocess.Popen[str]]:
    """A program on a port where nobody is."""
    arguments = [sys.executable, "-c", PROGRAM, f"fairway://127.0.0.1:{free_port()}", setting]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_plain_program_shows_the_log_on_stderr() -> None:
    with program("") as started:
        assert started.stderr is not None
        first = [started.stderr.readline() for _ in range(2)]
        started.send_signal(signal.SIGTERM)
        rest = started.communicate(timeout=WAIT_S)[1]
    assert "Z fairway.app: listener print: subject room.booked, group hotel, 1 thread\n" in first[0]
    assert "waiting for the broker at fairway://127.0.0.1:" in first[1]
    assert "stopping" in rest
    assert started.returncode == 0


def test_a_program_that_sets_up_logging_decides_itself() -> None:
    with program("logging.basicConfig(format='mine %(message)s')") as started:
        assert started.stderr is not None
        first = started.stderr.readline()
        started.send_signal(signal.SIGTERM)
        rest = started.communicate(timeout=WAIT_S)[1]
    assert first.startswith("mine waiting for the broker at")
    assert rest == ""
