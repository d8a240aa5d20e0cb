"""Outbox tables of earlier versions are drained for ever, as they are, and this version writes what it always wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fairway.sql import Outbox
from tests.golden.outbox import FILE, SECRET_FILE, SENT, dump, load
from tests.support.outboxes import NIMBLE, Up, arrived, eventually, put, rows, up


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def columns(path: Path) -> set[str]:
    with sqlite3.connect(path) as database:
        return {str(name) for _, name, *_ in database.execute("PRAGMA table_info(fairway_outbox)")}


def test_this_version_writes_the_same_rows(tmp_path: Path) -> None:
    assert dump(tmp_path / "shop.db") == SECRET_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [FILE, SECRET_FILE], ids=["without secrets", "with secrets"])
@pytest.mark.parametrize("is_created", [False, True], ids=["as it is", "with create()"])
def test_it_is_drained_once_and_goes_on(file: Path, is_created: bool, tmp_path: Path, server: Up) -> None:
    path = tmp_path / "shop.db"
    load(file, path)
    engine = sa.create_engine(f"sqlite:///{path}")
    ids = {message_id for (message_id,) in sqlite3.connect(path).execute("SELECT id FROM fairway_outbox")}
    subject = f"orders-{file.stem}-{is_created}"
    with sqlite3.connect(path) as database:
        database.execute("UPDATE fairway_outbox SET subject = ?", (subject,))
        for shift, table in enumerate((FILE, SECRET_FILE)):  # the broker is one for all of these tests
            database.execute(
                "UPDATE fairway_outbox SET stream = stream - ? WHERE ? = ?",
                (2 * shift + is_created, str(table), str(file)),
            )
    before = columns(path)
    with Outbox(engine, server.url, options=NIMBLE) as outbox:
        if is_created:
            outbox.create()
            assert "secret" in columns(path)
        else:
            assert columns(path) == before
        eventually(lambda: rows(engine) == 1, "all but what is set aside is sent")
        put(engine, outbox, subject, b"new")
        eventually(lambda: rows(engine) == 1, "what is new, too")
        assert outbox.state().set_aside == 1
    found = arrived(server.url, subject, len(SENT) + 1)
    assert sorted(each.payload for each in found) == sorted([*SENT, b"new"])
    assert len({str(each.id) for each in found} & ids) >= 4, "each under the id that it was written with"
    engine.dispose()
