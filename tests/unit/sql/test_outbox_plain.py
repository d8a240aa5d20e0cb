"""The outbox for programs without SQLAlchemy: one INSERT in a transaction of theirs, and a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from fairway.errors import BadName, Misuse
from fairway.sql import Outbox, Relay, insert, statement
from fairway.sql.outbox_writer import paramstyle_of
from tests.support.outboxes import NIMBLE, Up, arrived, payloads


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(database_url)
    Outbox(made).create()
    yield made
    made.dispose()


def bare(engine: sa.Engine) -> Any:
    """A connection of the driver itself."""
    places, names = engine.dialect.create_connect_args(engine.url)
    return engine.dialect.loaded_dbapi.connect(*places, **names)


def test_a_row_of_a_plain_transaction_is_sent_by_a_relay(engine: sa.Engine, up: Up, subject: str) -> None:
    with closing(bare(engine)) as connection:
        cursor = connection.cursor()
        told = insert(cursor, subject, b"\x00paid", key="o-1", tags=["a"], headers={"trace": "7"})
        connection.commit()
        insert(cursor, subject, b"rolled back")
        connection.rollback()
        insert(cursor, subject, b"later", after=0.1)
        connection.commit()
    with Relay(engine, up.url, options=NIMBLE):
        first, second = arrived(up.url, subject, 2)
    assert (first.payload, first.key, tuple(first.tags), dict(first.headers), first.id) == (
        b"\x00paid", "o-1", ("a",), {"trace": "7"}, told
    )  # fmt: skip
    assert second.payload == b"later"


def test_a_driver_for_asyncio(postgres_url: str, up: Up, subject: str) -> None:
    engine = sa.create_engine(postgres_url)
    Outbox(engine).create()

    async def main() -> None:
        places, names = engine.dialect.create_connect_args(engine.url)
        connection = await psycopg.AsyncConnection.connect(*places, **names)
        async with connection:
            await connection.execute(*statement("pyformat", subject, b"x", key="k"))

    asyncio.run(main())
    with Relay(engine, up.url, options=NIMBLE):
        assert payloads(up.url, subject, 1) == [b"x"]
    engine.dispose()


def test_how_drivers_mark_values() -> None:
    for style, marks in (
        ("qmark", "?, ?"),
        ("format", "%s, %s"),
        ("pyformat", "%s, %s"),
        ("numeric", ":1, :2"),
        ("numeric_dollar", "$1, $2"),
    ):
        text, values = statement(style, "s", b"x", table="mine.box")
        assert text.startswith("INSERT INTO mine.box (id, wake_ms, ")
        assert f"VALUES ({marks}" in text
        assert len(values) == 8
    with pytest.raises(Misuse, match="none of qmark"):
        statement("named", "s", b"x")
    with pytest.raises(Misuse, match="paramstyle="):
        paramstyle_of(object())
    with pytest.raises(Misuse, match="the table name"):
        statement("qmark", "s", b"x", table="a; drop")
    with pytest.raises(BadName):
        statement("qmark", "no spaces", b"x")
