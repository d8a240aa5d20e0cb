"""A database by its address, as people write it; what goes wrong there is a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import Engine

from fairway.errors import FairwayError, Misuse


@contextmanager
def engine_at(database: str, flag: str) -> Iterator[Engine]:
    """An engine for a while; `flag` is how the address was given."""
    try:
        engine = sa.create_engine(database)
    except sa.exc.ArgumentError as error:
        raise Misuse(f"{flag} {database!r} is no address: {error}; write DIALECT+DRIVER://USER@HOST/NAME") from None
    except ModuleNotFoundError as error:
        raise FairwayError(f"the driver {error.name} is not installed: pip install {error.name}") from None
    try:
        yield engine
    except sa.exc.DBAPIError as error:
        raise FairwayError(f"the database {engine.url.render_as_string()} says: {error.orig}") from error
    finally:
        engine.dispose()


def split(table: str) -> tuple[str, str | None]:
    """Name and schema of `[SCHEMA.]NAME`."""
    schema, dot, name = table.rpartition(".")
    return name, schema if dot else None
