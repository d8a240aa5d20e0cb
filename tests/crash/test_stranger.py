"""A stranger who reads producer ids, as every consumer can, and goes on with the streams of others: nothing vanishes.

With real processes: a delay server, an outbox, a client. The stranger scans a subject, and sends batches at the next
places of every stream that it finds there.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import fairway
from fairway import batch
from fairway.client import url as urls
from fairway.errors import Code, Refused
from fairway.protocol.admin_messages import Scan, Scanned
from fairway.protocol.messages import Whence
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.sql import Outbox
from tests.golden.outbox import FILE, load
from tests.support.client import Client
from tests.support.outboxes import NIMBLE, Up, eventually, numbered, payloads, put, rows, up

WAIT_S = 60.0
PLACES = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def attack(url: str, subject: str) -> list[Code | None]:
    """What the broker said to each batch of the stranger; None: it was stored."""
    return asyncio.run(_attack(url, subject))


async def _attack(url: str, subject: str) -> list[Code | None]:
    [(host, port)] = urls.parse_any(url).brokers
    stranger = await Client.connect(RealNet(), RealClock(), host, port)
    try:
        _, found = await stranger.ask(Scan(subject, Whence.EARLIEST, 0, None, 1 << 20), Scanned)
        ends: dict[int, int] = {}
        for data in found:
            header = batch.peek(bytes(data))
            ends[header.producer_id] = header.first_sequence + header.count
        assert ends
        said: list[Code | None] = []
        for producer_id, end in ends.items():
            for place in range(end, end + PLACES):
                bad = batch.encode([b"a stranger's"], producer_id=producer_id, first_sequence=place, created_ms=0)
                try:
                    await stranger.produce(subject, bad)
                    said.append(None)
                except Refused as refused:
                    said.append(refused.code)
        return said
    finally:
        stranger.abort()
        await asyncio.sleep(0)  # for the loop to close what was cut


def test_delayed_messages_arrive_although_a_stranger_wants_their_places(server: Up) -> None:
    with fairway.connect(server.url) as client:
        for number in range(2):
            client.send("delayed", b"%d" % number, after=0.2).result(timeout=WAIT_S)
            assert len(payloads(server.url, "delayed", number + 1)) == number + 1
            assert set(attack(server.url, "delayed")) == {Code.FOREIGN_STREAM}
        client.send("delayed", b"2", after=0.2).result(timeout=WAIT_S)
    assert sorted(payloads(server.url, "delayed", 3)) == numbered(3)


def test_a_producer_goes_on_although_a_stranger_wants_its_places(server: Up) -> None:
    with fairway.connect(server.url) as client:
        for number in range(3):
            client.send("direct", b"%d" % number).result(timeout=WAIT_S)
            assert set(attack(server.url, "direct")) == {Code.FOREIGN_STREAM}
    assert payloads(server.url, "direct", 3) == numbered(3)


@pytest.mark.parametrize("is_old", [False, True], ids=["a table with secrets", "a table of an earlier version"])
def test_rows_of_an_outbox_arrive_although_a_stranger_wants_their_places(
    server: Up, is_old: bool, tmp_path: Path
) -> None:
    """In a table without room for secrets the stranger gets the places, and the rows go elsewhere."""
    path, subject = tmp_path / "shop.db", f"rows-{is_old}"
    engine = sa.create_engine(f"sqlite:///{path}")
    if is_old:
        load(FILE, path)
        with sqlite3.connect(path) as database:
            database.execute("DELETE FROM fairway_outbox")
    with Outbox(engine, server.url, options=NIMBLE) as outbox:
        if not is_old:
            outbox.create()
        for number in range(4):
            put(engine, outbox, subject, b"%d" % number)
            eventually(lambda: rows(engine) == 0, "it is sent")
            said = attack(server.url, subject)
            assert set(said) <= ({None, Code.SEQUENCE_CONFLICT} if is_old else {Code.FOREIGN_STREAM})
            assert is_old is (None in said)
    engine.dispose()
    found = payloads(server.url, subject, 4)
    assert sorted(each for each in found if each != b"a stranger's") == numbered(4)
