"""A delay pair as real processes: the one that leads is killed while messages wait, and clients notice nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import fairway
from fairway.runtime.process import Child
from tests.support.ports import free_port
from tests.unit.cli.running import Cli

pytestmark = pytest.mark.slow

READY_S = 60.0
SESSION_MS = "2000"
COUNT = 60


class Pair:
    """A meta server, a broker, two delay servers."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        port = free_port()
        self.url = f"meta://127.0.0.1:{port}"
        self.cli = Cli(self.url)
        self._ports = {name: free_port() for name in ("d1-a", "d1-b")}
        self._children: dict[str, Child] = {}
        self._start("meta", "--registry", f"sqlite:{root / 'registry'}", "--port", str(port))
        self._start("broker", "--data", str(root / "g1"), "--group", "g1", "--port", "0", *self._member)
        for name in self._ports:
            self.start(name)

    @property
    def _member(self) -> tuple[str, ...]:
        return ("--registry", self.url, "--session-ms", SESSION_MS)

    def _start(self, *arguments: str) -> Child:
        child = self._stack.enter_context(Child("fairway", *arguments))
        ready = child.line(timeout_s=READY_S)
        assert ready
        assert re.search(r"ready at \S*:\d+", ready)
        return child

    def start(self, name: str) -> None:
        flags = ("--data", str(self._root / name), "--group", "d1", "--port", str(self._ports[name]))
        self._children[name] = self._start("delay", "serve", *flags, *self._member)

    def group(self) -> dict[str, object]:
        document = self.cli.json("cluster")
        return next((each for each in document["groups"] if each["name"] == "d1"), {})

    def await_in_sync(self, copies: int) -> None:
        for _ in range(300):
            group = self.group()
            if group.get("is_writable") and sum(each["is_in_sync"] for each in group["copies"]) == copies:  # type: ignore[attr-defined]
                return
            time.sleep(0.1)
        raise AssertionError(f"not in sync: {self.group()}")

    def master(self) -> str:
        at = str(self.group()["master"])
        return next(name for name, port in self._ports.items() if at == f"127.0.0.1:{port}")

    def kill(self, name: str) -> None:
        os.kill(self._children[name].pid, signal.SIGKILL)

    def stop(self, name: str) -> int:
        self._children[name].terminate()
        return self._children[name].wait(timeout_s=READY_S)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(tmp_path, stack)
        made.await_in_sync(2)
        yield made


def test_the_one_that_leads_is_killed_and_everything_comes_once_and_not_early(pair: Pair) -> None:
    due: dict[bytes, datetime] = {}
    with fairway.connect(pair.url) as client:
        for number in range(COUNT):
            payload = b"%d" % number
            due[payload] = datetime.now(UTC) + timedelta(seconds=2 + number / 10)
            client.send("orders", payload, key=f"k-{number}", at=due[payload]).result(READY_S)
        assert client.delayed.cancel(subject="orders", key=f"k-{COUNT - 1}").fate == "cancelled"
        master = pair.master()
        pair.kill(master)
        for number in range(COUNT, COUNT + 10):  # nobody who sends notices
            payload = b"%d" % number
            due[payload] = datetime.now(UTC) + timedelta(seconds=1)
            client.send("orders", payload, at=due[payload]).result(READY_S)
        assert client.delayed.cancel(subject="orders", key=f"k-{COUNT - 1}").fate == "cancelled"
        came: dict[bytes, datetime] = {}
        with client.consumer("orders", group="g") as consumer:
            while len(came) < len(due) - 1:
                message = consumer.poll(timeout=READY_S)
                assert message is not None, f"missing: {sorted(due.keys() - came.keys())}"
                assert message.payload not in came, "sent twice"
                came[bytes(message.payload)] = message.appended_at
                message.ack()
            assert consumer.poll(timeout=1.0) is None
    assert b"%d" % (COUNT - 1) not in came
    early = {each: came[each] - due[each] for each in came if came[each] < due[each] - timedelta(milliseconds=1)}
    assert early == {}
    assert pair.master() != master
    pair.start(master)
    pair.await_in_sync(2)


def test_copies_are_restarted_one_by_one_and_led_by_hand(pair: Pair) -> None:
    with fairway.connect(pair.url) as client:
        client.send("orders", b"later", after=20).result(READY_S)
        before = pair.master()
        told = pair.cli.run("broker", "promote", "d1", "--registry", pair.url)
        assert "leads group d1 from now on" in told
        for _ in range(100):
            if pair.master() != before:
                break
            time.sleep(0.1)
        pair.await_in_sync(2)
        led = pair.master()
        assert led != before
        assert pair.stop(led) == 0
        assert client.delayed.count(subject="orders") == 1
        pair.start(led)
        pair.await_in_sync(2)
        with client.consumer("orders", group="g") as consumer:
            message = consumer.poll(timeout=READY_S)
            assert message is not None
            assert message.payload == b"later"
            message.ack()
            assert consumer.poll(timeout=1.0) is None
