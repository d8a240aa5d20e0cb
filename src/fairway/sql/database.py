"""Everything about a user's database that is the same for outbox, inbox and election.

Engines. Fairway derives its engines from the engine that the program gives: `own` on the same pool, `apart` on a
separate pool. `engine_at` opens a database by the address that a person wrote, and reports every failure as one
sentence.

Tables. `make` creates them where they are missing. Several programs may try at once.

An INSERT that skips existing rows is spelled differently on each database. If another open transaction has just
inserted the same key, the database waits for the end of that transaction. After its rollback the new row is inserted;
after its commit the row counts as existing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection, Dialect, Engine, Insert, Pool, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateColumn, SchemaItem

from fairway.errors import FairwayError, Misuse
from fairway.redaction import without_password

_ADDRESS: Final = "write DIALECT+DRIVER://USER:PASSWORD@HOST/NAME"


def own_isolation(dialect: Dialect) -> str | None:
    """The isolation level of Fairway's own transactions: where readers lock gaps, relays would block writers."""
    return "READ COMMITTED" if dialect.name in ("mysql", "mariadb") else None


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


def unknown(dialect: Dialect) -> Misuse:
    return Misuse(f"{dialect.name} is not one of the databases that Fairway knows: SQLite, PostgreSQL, MySQL, MariaDB")


def insert_unless_there(table: Table, dialect: Dialect) -> Insert:
    """An INSERT that skips existing rows. Skipped rows are not in `rowcount`, nor in RETURNING."""
    if dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    if dialect.name in ("mysql", "mariadb"):
        return mysql.insert(table).prefix_with("IGNORE")
    raise unknown(dialect)


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


# --- engines by address -----------------------------------------------------------------------------------------------


@contextmanager
def engine_at(database: str, flag: str) -> Iterator[Engine]:
    """An engine for the duration of the block. `flag` names the option that held the address, for messages."""
    try:
        engine = sa.create_engine(database)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise Misuse(f"{flag} {_scheme(database)} is no address: {_reason(error)}; {_ADDRESS}") from None
    except ModuleNotFoundError as error:
        raise FairwayError(f"the driver {error.name} is not installed: pip install {error.name}") from None
    if "@" in (engine.url.host or ""):
        engine.dispose()
        raise Misuse(f"{flag} {_scheme(database)} has an '@' in its password or user: write %40 for it; {_ADDRESS}")
    if engine.dialect.is_async:
        raise Misuse(f"{flag} {_scheme(database)} names a driver for asyncio: name another, such as psycopg or pymysql")
    try:
        yield engine
    except DBAPIError as error:
        raise FairwayError(f"the database {shown(engine.url)} says: {' '.join(str(error.orig).split())}") from error
    finally:
        engine.dispose()


def shown(url: sa.URL) -> str:
    """The address of a database without its password."""
    return without_password(url.render_as_string())


def _scheme(database: str) -> str:
    """The only part of an unparsable address that is safe to quote: the password may be anywhere in the rest."""
    scheme, found, _ = database.partition("://")
    return repr(f"{scheme}://..." if found else "..." if {":", "@"} & set(scheme) else scheme)


def _reason(error: Exception) -> str:
    """The reason for people. SQLAlchemy's own sentence is used only if it quotes no more than dialect and driver."""
    if isinstance(error, sa.exc.NoSuchModuleError):
        return str(error)
    return "it cannot be parsed; its port is no number, or its password has a character that must be percent-encoded"


def split(table: str) -> tuple[str, str | None]:
    """The name and the schema of `[SCHEMA.]NAME`."""
    schema, dot, name = table.rpartition(".")
    return name, schema if dot else None


# --- tables -----------------------------------------------------------------------------------------------------------


def ascii_text(chars: int, *, is_fixed: bool = False) -> sa.types.TypeEngine[str]:
    """ASCII, compared byte by byte: MySQL's usual collation equates `A` and `a`, and PostgreSQL sorts faster by bytes.
    In MySQL's indexes ASCII is four times smaller than UTF-8."""
    kind = sa.CHAR(chars) if is_fixed else sa.String(chars)
    narrow = (mysql.CHAR if is_fixed else mysql.VARCHAR)(chars, charset="ascii", collation="ascii_bin")
    plain = postgresql.VARCHAR(chars, collation="C")  # CHAR would be padded, and gains nothing there
    return kind.with_variant(narrow, "mysql", "mariadb").with_variant(plain, "postgresql")


def new_table(name: str, *items: SchemaItem, metadata: sa.MetaData | None = None, schema: str | None = None) -> Table:
    """A table in the caller's metadata, or by itself. Of MySQL's storage engines only InnoDB knows transactions."""
    return Table(
        name,
        sa.MetaData() if metadata is None else metadata,
        *items,
        schema=schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


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


def _missing(connection: Connection, table: Table) -> list[sa.Column[Any]]:
    there = {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=table.schema)}
    return [column for column in table.columns if column.name not in there]


def _is_there(connection: Connection, table: Table) -> bool:
    return sa.inspect(connection).has_table(table.name, schema=table.schema) and not _missing(connection, table)
