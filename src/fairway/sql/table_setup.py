"""Creates Fairway's tables in a user's database where they are missing. Several programs may try at once."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Connection, Engine, String, Table, inspect
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateColumn
from sqlalchemy.types import TypeEngine

from fairway.errors import Misuse


def ascii_text(chars: int) -> TypeEngine[str]:
    """ASCII, compared byte by byte: MySQL's usual collation equates `A` and `a`, and PostgreSQL sorts faster by
    bytes."""
    narrow = mysql.VARCHAR(chars, charset="ascii", collation="ascii_bin")
    plain = postgresql.VARCHAR(chars, collation="C")
    return String(chars).with_variant(narrow, "mysql", "mariadb").with_variant(plain, "postgresql")


def make(engine: Engine | AsyncEngine, table: Table) -> None:
    """Create the table with its indexes, in a transaction of its own."""
    if not isinstance(engine, Engine):
        raise Misuse(f"the table {table.name} is made by `await create_async()`: this engine is one for asyncio")
    try:
        with engine.begin() as connection:
            _make(connection, table)
    except DBAPIError:
        with engine.connect() as connection:
            if not _is_there(connection, table):  # otherwise another program was faster
                raise


async def make_async(engine: Engine | AsyncEngine, table: Table) -> None:
    """`make` for asyncio."""
    if not isinstance(engine, AsyncEngine):
        raise Misuse(f"the table {table.name} is made by `create()`: this engine is none for asyncio")
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_make, table)
    except DBAPIError:
        async with engine.connect() as connection:
            if not await connection.run_sync(_is_there, table):
                raise


def _make(connection: Connection, table: Table) -> None:
    """Create the table, or add the columns that a table of an earlier version lacks."""
    table.create(connection, checkfirst=True)
    for column in _missing(connection, table):
        name = connection.dialect.identifier_preparer.format_table(table)
        said = CreateColumn(column).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {said}")


def _missing(connection: Connection, table: Table) -> list[Column[Any]]:
    there = {column["name"] for column in inspect(connection).get_columns(table.name, schema=table.schema)}
    return [column for column in table.columns if column.name not in there]


def _is_there(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema) and not _missing(connection, table)
