"""Engines for transactions of ours, made from the one that a program gives us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Engine, Pool
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.ext.asyncio import AsyncEngine

from fairway.sql.rows import own_isolation


def own(engine: Engine) -> Engine:
    """On the same pool: for what is done now and then."""
    level = own_isolation(engine.dialect)
    return engine if level is None else engine.execution_options(isolation_level=level)


def own_async(engine: AsyncEngine) -> AsyncEngine:
    level = own_isolation(engine.dialect)
    return engine if level is None else engine.execution_options(isolation_level=level)


class _Apart(OptionEngine):
    """Like the engine that it is made from, whose listeners hear of it, too; but for the pool."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, {})
        self._pool = engine.pool.recreate()

    if not TYPE_CHECKING:  # as SQLAlchemy does where it puts a property in the place of an attribute

        @property
        def pool(self) -> Pool:
            return self._pool

        @pool.setter
        def pool(self, pool: Pool) -> None:
            self._pool = pool


def apart(engine: Engine) -> Engine:
    """On a pool of its own, which connects when it is first used: for what goes on beside a program all the time.

    A pool hands its connections out in turn. So whoever borrows one now and then makes a program with one connection go
    on with two; the database has a process for each, whose caches are cold half of the time: 3 % more for a transaction
    of five statements (bench/outbox). And a pool that is used up by its program holds up nobody else. SQLite has no
    processes, and a database in memory no second connection.

    The program's own engine must have been connected before it is used: what SQLAlchemy asks a database on the first
    connection it asks once for all pools that were made from one another, and only users of the same pool wait for it.
    """
    return own(engine if engine.dialect.name == "sqlite" else _Apart(engine))


def apart_async(engine: AsyncEngine) -> AsyncEngine:
    return AsyncEngine(apart(engine.sync_engine))
