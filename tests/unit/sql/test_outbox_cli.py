"""`fairway outbox`: what operators see of the table, and what they can do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from fairway.__main__ import app
from fairway.sql import Outbox
from tests.support.outboxes import TABLE, Up, payloads, rows
from tests.unit.client.broker import run_program


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'lite.db'}"


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(database)
    yield made
    made.dispose()


def called(arguments: tuple[str, ...], status: int) -> Result:
    result = CliRunner().invoke(app, ["outbox", *arguments])
    assert result.exit_code == status, result.output
    return result


def call(*arguments: str, status: int = 0) -> str:
    return called(arguments, status).output


def told(*arguments: str, status: int = 0) -> Any:
    return json.loads(called((*arguments, "--json"), status).stdout)


def fill(engine: sa.Engine, subject: str) -> list[str]:
    """Two rows; the first is damaged."""
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.send(connection, subject, b"one", key="k", tags=["t"])
    with engine.begin() as connection:
        outbox.send(connection, subject, b"two")
    with engine.begin() as connection:
        ids = sorted(connection.execute(sa.select(TABLE.c.id)).scalars())
        connection.execute(sa.update(TABLE).where(TABLE.c.id == ids[0]).values(messages=7))
    return ids


def test_an_operators_day(database: str, engine: sa.Engine, up: Up, subject: str) -> None:
    assert "the table fairway_outbox exists" in call("create", "--database", database)
    assert "0 messages pending" in call("status", "--database", database)
    ids = fill(engine, subject)
    assert told("status", "--database", database)["subjects"] == {subject: 8}
    sent = told("relay", "--once", "--database", database, "--url", up.url)
    assert (sent["sent"], sent["set_aside"]) == (1, 7)
    assert payloads(up.url, subject, 1) == [b"two"]
    assert "fairway outbox list" in call("status", "--database", database)
    [listed] = told("list", "--database", database)
    assert (listed["id"], listed["subject"]) == (ids[0], subject)
    assert "says 7" in listed["error"]
    assert ids[0] in call("list", "--database", database)
    assert told("show", "--database", database, ids[0])["contents"][0]["payload"] == "one"
    assert "one" in call("show", "--database", database, ids[0].lower())
    with engine.begin() as connection:
        connection.execute(sa.update(TABLE).values(messages=1))
    assert "1 row: waits" in call("retry", "--all", "--database", database)
    assert "1 message sent" in call("relay", "--once", "--database", database, "--url", up.url)
    assert payloads(up.url, subject, 2) == [b"two", b"one"]
    assert "nothing was set aside" in call("list", "--database", database)


def test_what_is_discarded_is_gone(database: str, engine: sa.Engine, up: Up, subject: str) -> None:
    call("create", "--database", database)
    ids = fill(engine, subject)
    call("relay", "--once", "--database", database, "--url", up.url)
    assert told("discard", "--database", database, ids[0], ids[1], status=1) == {"ids": [ids[0]], "unknown": [ids[1]]}
    assert rows(engine) == 0
    assert f"no row {ids[0]} is set aside" in call("retry", "--database", database, ids[0], status=1)
    assert f"no row {ids[0]} is set aside" in call("show", "--database", database, ids[0], status=1)


def test_mistakes(database: str) -> None:
    assert "outbox.create()" in call("status", "--database", database, status=2)
    assert "no address" in call("status", "--database", "nonsense", status=2)
    assert "not installed" in call("status", "--database", "postgresql+psycopg2://x", status=1)
    call("create", "--database", database)
    assert "give the IDs of rows, or --all" in call("retry", "--database", database, status=2)
    assert "the table name" in call("create", "--database", database, "--table", "a-b", status=2)
    assert "the table mine exists" in call("create", "--database", database, "--table", "mine")


@pytest.mark.parametrize(
    "source", ["import fairway.sql", "from fairway.__main__ import app; app(['outbox', 'relay', '--database', 'x'])"]
)
def test_without_sqlalchemy_it_says_what_to_install(source: str) -> None:
    run = run_program(f"import sys; sys.modules['sqlalchemy'] = None; {source}")
    assert run.returncode == 1
    assert "pip install 'fairway[sql]'" in run.stderr
