"""Engines and connections for Fairway's own transactions, and INSERTs that skip rows which exist.

Fairway derives its engines from the engine that the program gives: `own` on the same pool, `apart` on a separate pool.

An INSERT that skips existing rows is spelled differently on each database. If another open transaction has just
inserted the same key, the database waits for the end of that transaction. After its rollback the new row is inserted;
after its commit the row counts as existing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Connection, Dialect, Engine, Insert, Pool, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from fairway.errors import Misuse
from fairway.sql.outbox_rows import own_isolation


def own(engine: Engine) -> Engine:
    """For occasional work: Fairway's isolation level on the program's own pool."""
    level = own_isolation(engine.dialect)
    return engine if level is None else engine.execution_options(isolation_level=level)


def own_async(engine: AsyncEngine) -> AsyncEngine:
    level = own_isolation(engine.dialect)
    return engine if level is None else engine.execution_options(isolation_level=level)


class _Apart(OptionEngine):
    """An engine with a pool of its own. Events reach the listeners of the original engine too."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, {})
        self._pool = engine.pool.recreate()

    if not TYPE_CHECKING:  # SQLAlchemy does the same where a property replaces an attribute

        @property
        def pool(self) -> Pool:
            return self._pool

        @pool.setter
        def pool(self, pool: Pool) -> None:
            self._pool = pool


def apart(engine: Engine) -> Engine:
    """For work that goes on beside the program all the time: a separate pool, which connects when it is first used.

    A pool hands out its connections in turn. If Fairway borrowed from the program's pool now and then, a program with
    one connection would go on with two. The database has a process for each, whose caches are cold half of the time:
    a transaction of five statements takes 3 % longer (bench/outbox). A separate pool also keeps working while the
    program has used up its own. SQLite keeps the program's pool: it has no processes, and a database in memory has no
    second connection.

    Connect the program's own engine before this one. SQLAlchemy asks a database about itself on the first connection,
    once for all pools derived from one another, and only users of the same pool wait for the answer.
    """
    return own(engine if engine.dialect.name == "sqlite" else _Apart(engine))


def apart_async(engine: AsyncEngine) -> AsyncEngine:
    return AsyncEngine(apart(engine.sync_engine))


Bound: TypeAlias = Connection | Session  # holds the caller's transaction
AsyncBound: TypeAlias = AsyncConnection | AsyncSession


def insert_unless_there(table: Table, dialect: Dialect) -> Insert:
    """An INSERT that skips existing rows. Skipped rows are not in `rowcount`, nor in RETURNING."""
    if dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    if dialect.name in ("mysql", "mariadb"):
        return mysql.insert(table).prefix_with("IGNORE")
    raise Misuse(f"{dialect.name} is not one of the databases that Fairway knows: SQLite, PostgreSQL, MySQL, MariaDB")


def insert_one(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert the row unless it exists; True: it was inserted."""
    statement = insert_unless_there(table, connection.dialect)
    added = connection.execute(statement, row, execution_options={"preserve_rowcount": True})  # rowcount may be -1 else
    return added.rowcount == 1


def connection_of(bound: Bound) -> Connection:
    """The connection on which the caller's transaction runs."""
    if isinstance(bound, Session):
        return bound.connection()
    if isinstance(bound, Connection):
        return bound
    raise Misuse(f"a {type(bound).__name__} holds no transaction: give the Connection or the Session that has begun it")
