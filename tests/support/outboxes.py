"""What tests of the outbox share: a broker with a delay server, and a look at what has arrived."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import sqlalchemy as sa

import fairway
from fairway.runtime.process import Child
from fairway.runtime.rng import SeededRng
from fairway.sql import Outbox, RelayOptions
from fairway.sql.outbox_table import outbox_table

READY_S = 60.0
WAIT_S = 30.0
NIMBLE = RelayOptions(grace_s=0.2, poll_s=0.05, retry_s=0.1, delete_linger_s=0.01)
TABLE = outbox_table(sa.MetaData())
_groups = count(1)


class FailingRng(SeededRng):
    """A relay that asks it for anything ends by surprise."""

    def uniform(self) -> float:
        raise RuntimeError("a surprise")


class Up:
    """`fairway up` on one data directory and one port, through as many lives as a test wants."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._port = 0
        self._child: Child | None = None
        self.url = ""

    def start(self) -> None:
        self._child = Child("fairway", "up", "--data", str(self._data), "--port", str(self._port))
        ready = re.search(r"fairway://[\d.]+:(\d+)", self._child.line(timeout_s=READY_S) or "")
        assert ready
        self._port, self.url = int(ready[1]), ready[0]

    def kill(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None

    def forget(self) -> None:
        """A new broker at the same address, which remembers nothing."""
        self.kill()
        shutil.rmtree(self._data)
        self.start()


@contextmanager
def up(data: Path) -> Iterator[Up]:
    running = Up(data)
    try:
        running.start()
        yield running
    finally:
        running.kill()


def arrived(url: str, subject: str, count: int, *, beyond_s: float = 0.2) -> list[fairway.Message]:
    """The first messages of a subject, and what comes within a moment after so many."""
    found: list[fairway.Message] = []
    with fairway.connect(url) as client, client.consumer(subject, group=f"look-{next(_groups)}") as consumer:
        deadline = time.monotonic() + WAIT_S
        while len(found) < count and time.monotonic() < deadline:
            found += _acked(consumer.take(1_000, timeout=0.2))
        found += _acked(consumer.take(1_000, timeout=beyond_s))
    return found


def _acked(messages: Sequence[fairway.Message]) -> Sequence[fairway.Message]:
    for message in messages:
        message.ack()
    return messages


def payloads(url: str, subject: str, count: int, *, beyond_s: float = 0.2) -> list[bytes]:
    return [message.payload for message in arrived(url, subject, count, beyond_s=beyond_s)]


def put(engine: sa.Engine, outbox: Outbox, subject: str, *messages: bytes, key: str | None = None) -> None:
    """Each in a transaction of its own."""
    for payload in messages:
        with engine.begin() as connection:
            outbox.send(connection, subject, payload, key=key)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def rows(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(TABLE)).scalar_one()


def eventually(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def in_a_child(does: Callable[[], bool]) -> bool:
    """Fork; whether the child did it, and ended."""
    child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if does() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
