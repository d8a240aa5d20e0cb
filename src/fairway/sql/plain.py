"""The outbox for programs that speak to their database without SQLAlchemy: one more INSERT in a transaction of theirs.

    insert(cursor, "order.changed", b"...", key="o-42")                   any cursor of PEP 249
    await cursor.execute(*statement("pyformat", "order.changed", b"..."))       drivers for asyncio, and all others

The row says what is to be sent, and a relay (`fairway outbox relay`) sends it after the commit.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final, Protocol

from fairway.batch import MessageId
from fairway.client.core import Duration
from fairway.errors import Misuse
from fairway.sql.letters import Origin, letter, unstamped
from fairway.sql.rows import MARKS, insert_text
from fairway.sql.tables import NAME
from fairway.world.clock import RealClock
from fairway.world.lineage import forks
from fairway.world.rng import RealRng

_clock: Final = RealClock()


class Cursor(Protocol):
    """What PEP 249 says of a cursor, as far as it is needed."""

    def execute(self, operation: Any, parameters: Any, /) -> Any: ...


class _Origins:
    """Ids of this process."""

    def __init__(self) -> None:
        self._forks = forks()
        self._origin = Origin(RealRng())

    def next_id(self) -> MessageId:
        if self._forks != forks():
            self.__init__()  # type: ignore[misc]  # another process: other ids
        return self._origin.next_id()


_origins = _Origins()


def insert(
    cursor: Cursor,
    subject: str,
    payload: bytes,
    key: str | None = None,
    tags: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
    after: Duration | None = None,
    at: datetime | None = None,
    *,
    table: str = NAME,
    paramstyle: str | None = None,
) -> MessageId:
    """Write a message as a row, in the transaction that the cursor is in; its id is the one it keeps."""
    text, values, message_id = _written(
        paramstyle or paramstyle_of(cursor), subject, payload, key, tags, headers, after, at, table
    )
    cursor.execute(text, values)
    return message_id


def statement(
    paramstyle: str,
    subject: str,
    payload: bytes,
    key: str | None = None,
    tags: Collection[str] = (),
    headers: Mapping[str, str] | None = None,
    after: Duration | None = None,
    at: datetime | None = None,
    *,
    table: str = NAME,
) -> tuple[str, tuple[Any, ...]]:
    """The same as SQL and its values: for who executes it otherwise than `cursor.execute`."""
    return _written(paramstyle, subject, payload, key, tags, headers, after, at, table)[:2]


def paramstyle_of(cursor: object) -> str:
    """What the driver that a cursor comes from says of itself."""
    for kind in type(cursor).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if style in MARKS:
            return str(style)
    raise Misuse(
        f"the driver of {type(cursor).__module__}.{type(cursor).__qualname__} does not say how it marks values: give "
        f"paramstyle=, one of {', '.join(MARKS)}"
    )


def _written(
    paramstyle: str,
    subject: str,
    payload: bytes,
    key: str | None,
    tags: Collection[str],
    headers: Mapping[str, str] | None,
    after: Duration | None,
    at: datetime | None,
    table: str,
) -> tuple[str, tuple[Any, ...], MessageId]:
    if not all(part.isidentifier() for part in table.split(".")):
        raise Misuse(f"the table name {table!r}: letters, digits and _ are allowed, and a dot behind the schema")
    made = letter(_origins.next_id(), _clock, subject, payload, key, tags, headers, after, at)
    [row] = unstamped([made], _clock.wall_ms())
    return insert_text(table, paramstyle, 1), row.values, made.id
