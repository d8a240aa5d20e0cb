"""Tables of ours in a user's database, made where they are missing; several programs may try at once."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, String, Table, inspect
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.types import TypeEngine

from fairway.errors import Misuse


def ascii_text(chars: int) -> TypeEngine[str]:
    """ASCII, compared byte by byte: to MySQL's usual collation `A` is `a`, and PostgreSQL sorts faster by bytes."""
    narrow = mysql.VARCHAR(chars, charset="ascii", collation="ascii_bin")
    plain = postgresql.VARCHAR(chars, collation="C")
    return String(chars).with_variant(narrow, "mysql", "mariadb").with_variant(plain, "postgresql")


def make(engine: Engine | AsyncEngine, table: Table) -> None:
    """With its indexes; in a transaction of its own."""
    if not isinstance(engine, Engine):
        raise Misuse(f"the table {table.name} is made by `await create_async()`: this engine is one for asyncio")
    try:
        with engine.begin() as connection:
            table.create(connection, checkfirst=True)
    except DBAPIError:
        with engine.connect() as connection:
            if not _is_there(connection, table):  # otherwise another was faster
                raise


async def make_async(engine: Engine | AsyncEngine, table: Table) -> None:
    """`make` on a loop."""
    if not isinstance(engine, AsyncEngine):
        raise Misuse(f"the table {table.name} is made by `create()`: this engine is none for asyncio")
    try:
        async with engine.begin() as connection:
            await connection.run_sync(table.create, checkfirst=True)
    except DBAPIError:
        async with engine.connect() as connection:
            if not await connection.run_sync(_is_there, table):
                raise


def _is_there(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)
