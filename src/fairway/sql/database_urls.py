"""Opens a database by the address that a person wrote, and reports every failure as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import Engine

from fairway.errors import FairwayError, Misuse
from fairway.redaction import without_password

_REMEDY = "write DIALECT+DRIVER://USER:PASSWORD@HOST/NAME"


@contextmanager
def engine_at(database: str, flag: str) -> Iterator[Engine]:
    """An engine for the duration of the block. `flag` names the option that held the address, for messages."""
    try:
        engine = sa.create_engine(database)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise Misuse(f"{flag} {_scheme(database)} is no address: {_reason(error)}; {_REMEDY}") from None
    except ModuleNotFoundError as error:
        raise FairwayError(f"the driver {error.name} is not installed: pip install {error.name}") from None
    if "@" in (engine.url.host or ""):
        engine.dispose()
        raise Misuse(f"{flag} {_scheme(database)} has an '@' in its password or user: write %40 for it; {_REMEDY}")
    if engine.dialect.is_async:
        raise Misuse(f"{flag} {_scheme(database)} names a driver for asyncio: name another, such as psycopg or pymysql")
    try:
        yield engine
    except sa.exc.DBAPIError as error:
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
