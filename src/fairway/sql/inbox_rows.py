"""The rows of an inbox: one for each message whose effect is in the database.

    subject, consumer_group, message     the key; see `fairway.client.idempotence` for what a message is called
    recorded_ms                          when, in ms since 1970 UTC; indexed, so that old rows are found without a scan

All statements are one round trip. Keys are ASCII, and compared byte by byte on every database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    and_,
    delete,
    func,
    select,
)

from fairway import limits
from fairway.client.idempotence import NAME_CHARS_MAX
from fairway.sql.inserting import insert_one, insert_unless_there
from fairway.sql.making import ascii_text

EXPIRE_ROWS: Final = 1_000  # in one transaction: some ms, in which nobody waits for long


class InboxScope(NamedTuple):
    """Whose messages: names are unique within it."""

    subject: str
    group: str


class InboxRows:
    """One table, and what is done with it in somebody's transaction."""

    def __init__(self, name: str) -> None:
        self.table = Table(
            name,
            MetaData(),
            Column("subject", ascii_text(limits.INTERNAL_CHARS_MAX), nullable=False),
            Column("consumer_group", ascii_text(limits.NAME_CHARS_MAX), nullable=False),
            Column("message", ascii_text(NAME_CHARS_MAX), nullable=False),
            Column("recorded_ms", BigInteger, nullable=False),
            PrimaryKeyConstraint("subject", "consumer_group", "message"),
            Index(f"ix_{name}_recorded_ms", "recorded_ms"),
            mysql_engine="InnoDB",
            mariadb_engine="InnoDB",
        )

    def record(self, connection: Connection, place: InboxScope, names: Sequence[str], now_ms: int) -> set[str]:
        """Those of the names that were not there. Sorted names keep two transactions from waiting for each other."""
        rows = [self._row(place, name, now_ms) for name in names]
        if len(rows) > 1 and connection.dialect.insert_returning:
            statement = insert_unless_there(self.table, connection.dialect).returning(self.table.c.message)
            return set(connection.execute(statement, rows).scalars())
        return {row["message"] for row in rows if insert_one(connection, self.table, row)}

    def remove(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> None:
        """They are not done after all."""
        if names:
            connection.execute(delete(self.table).where(self._is_of(place), self.table.c.message.in_(names)))

    def are_there(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> bool:
        """Whether what was recorded in this transaction still is."""
        held = select(func.count()).where(self._is_of(place), self.table.c.message.in_(names))
        return connection.execute(held).scalar_one() == len(names)

    def expire(self, connection: Connection, before_ms: int, most: int = EXPIRE_ROWS) -> int:
        """Delete the oldest of those that are older; about so many of them, since those of one ms go together."""
        recorded = self.table.c.recorded_ms
        old = select(recorded).where(recorded < before_ms).order_by(recorded)
        last = connection.execute(old.offset(most - 1).limit(1)).scalar_one_or_none()
        doomed = recorded < before_ms if last is None else recorded <= last
        return connection.execute(delete(self.table).where(doomed)).rowcount

    def _row(self, place: InboxScope, name: str, now_ms: int) -> dict[str, Any]:
        return {
            "subject": place.subject,
            "consumer_group": place.group,
            "message": name,
            "recorded_ms": now_ms,
        }

    def _is_of(self, place: InboxScope) -> ColumnElement[bool]:
        return and_(self.table.c.subject == place.subject, self.table.c.consumer_group == place.group)
