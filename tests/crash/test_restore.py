"""Backups that are restored under a broker that went on: a delay server, an outbox database, a spool.

The steps are those of docs/how-to/operations.md, with real processes. What is acknowledged after the restore arrives.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import fairway
from fairway.sql import Outbox
from tests.support.outboxes import NIMBLE, Up, eventually, numbered, payloads, put, up

pytestmark = pytest.mark.slow

WAIT_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Up]:
    with up(tmp_path / "data") as running:
        yield running


def test_a_delay_server_that_is_restored_delivers_what_it_takes_from_then_on(server: Up, tmp_path: Path) -> None:
    live, backup = tmp_path / "data" / "delay", tmp_path / "backup"

    def delayed(name: str) -> list[bytes]:
        """Sent to the delay server, acknowledged, and due by the time this returns."""
        made = [f"{name} {number}".encode() for number in range(5)]
        with fairway.connect(server.url) as client:
            for each in made:
                client.send("orders", each, after=0.3).result(timeout=WAIT_S)
        return made

    expected = delayed("before the backup")
    assert sorted(payloads(server.url, "orders", 5)) == sorted(expected)
    server.kill()
    shutil.copytree(live, backup)
    server.start()
    expected += delayed("after the backup")
    assert sorted(payloads(server.url, "orders", 10)) == sorted(expected)
    server.kill()
    shutil.rmtree(live)
    shutil.copytree(backup, live)
    server.start()
    expected += delayed("after the restore")
    assert sorted(payloads(server.url, "orders", 15)) == sorted(expected)


def rows_of(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("SELECT count(*) FROM fairway_outbox").fetchone()[0])


def commit(outbox: Outbox, engine: sa.Engine, when: str) -> None:
    put(engine, outbox, "orders", *(when.encode() + b" " + number for number in numbered(5)))


def test_an_outbox_database_that_is_restored_sends_what_commits_from_then_on(server: Up, tmp_path: Path) -> None:
    path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    server.kill()
    with Outbox(engine, server.url, options=NIMBLE) as outbox:
        outbox.create()
        commit(outbox, engine, "before the backup")
    engine.dispose()
    shutil.copyfile(path, backup)
    assert rows_of(backup) == 5
    server.start()
    with Outbox(engine, server.url, options=NIMBLE) as outbox:
        commit(outbox, engine, "after the backup")
        eventually(lambda: rows_of(path) == 0, "all of it sent")
    engine.dispose()
    shutil.copyfile(backup, path)  # its rows were sent, and come back
    with Outbox(engine, server.url, options=NIMBLE) as outbox:
        commit(outbox, engine, "after the restore")
        eventually(lambda: rows_of(path) == 0, "all of it sent")
    engine.dispose()
    found = Counter(payloads(server.url, "orders", 15))
    when = ("before the backup", "after the backup", "after the restore")
    assert found == {f"{name} {number}".encode(): 1 for name in when for number in range(5)}


SPOOLER = """
import os, sys, fairway
client = fairway.connect(sys.argv[1], spool=fairway.SpoolOptions(sys.argv[2], after_ms=10))
for number in range(5):
    client.send("orders", b"spooled %d" % number).result(timeout=60)
os._exit(0)
"""


def test_a_spool_that_is_restored_is_drained_and_what_is_sent_from_then_on_arrives(server: Up, tmp_path: Path) -> None:
    spool, backup = tmp_path / "spool", tmp_path / "backup"
    server.kill()
    subprocess.run([sys.executable, "-c", SPOOLER, server.url, str(spool)], check=True, timeout=WAIT_S)
    shutil.copytree(spool, backup)
    server.start()

    def drained(name: str) -> None:
        with fairway.connect(server.url, spool=fairway.SpoolOptions(str(spool), adopt_ms=50)) as client:
            client.send("orders", name.encode()).result(timeout=WAIT_S)
            assert client.wait_drained(WAIT_S)

    drained("after the backup")
    shutil.rmtree(spool)
    shutil.copytree(backup, spool)
    drained("after the restore")
    found = Counter(payloads(server.url, "orders", 7))
    assert found == Counter([b"after the backup", b"after the restore", *(b"spooled %d" % each for each in range(5))])
