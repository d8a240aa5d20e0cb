"""An INSERT that leaves alone what is there already, as each database spells it.

Where another transaction has just written the same key and not ended yet, the database waits for it: the row is ours if
that one rolls back, and was there before if it commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from sqlalchemy import Connection, Dialect, Insert, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from fairway.errors import Misuse

Bound: TypeAlias = Connection | Session  # whatever holds the caller's transaction
AsyncBound: TypeAlias = AsyncConnection | AsyncSession


def insert_unless_there(table: Table, dialect: Dialect) -> Insert:
    """What was there counts in no `rowcount`, and comes with no RETURNING."""
    if dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    if dialect.name in ("mysql", "mariadb"):
        return mysql.insert(table).prefix_with("IGNORE")
    raise Misuse(f"{dialect.name} is not one of the databases that Fairway knows: SQLite, PostgreSQL, MySQL, MariaDB")


def insert_one(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Whether the row was not there."""
    statement = insert_unless_there(table, connection.dialect)
    added = connection.execute(statement, row, execution_options={"preserve_rowcount": True})  # otherwise it may be -1
    return added.rowcount == 1


def connection_of(bound: Bound) -> Connection:
    """The connection on which the caller's transaction runs."""
    if isinstance(bound, Session):
        return bound.connection()
    if isinstance(bound, Connection):
        return bound
    raise Misuse(f"a {type(bound).__name__} holds no transaction: give the Connection or the Session that has begun it")
