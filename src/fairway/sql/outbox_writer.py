"""Writes messages to the outbox: `insert` and `statement` without SQLAlchemy, `OutboxWriter` within its transactions.

`insert` and `statement` are for programs that use their database without SQLAlchemy: one more INSERT in a transaction.

    insert(cursor, "order.changed", b"...", key="o-42")                   any cursor of PEP 249
    await cursor.execute(*statement("pyformat", "order.changed", b"..."))       drivers for asyncio, and all others

The row names the message and its subject. A relay (`fairway outbox relay`) sends it after the commit.

`OutboxWriter` follows a transaction from the first message to the commit:

    send             the message is kept with the connection; the database learns nothing yet
    rolled_back_to   messages given since that savepoint are dropped
    forget           all messages are dropped
    before_commit    all messages become rows, in one INSERT (or one per 500 rows or 4 MiB), which travels with the
                     COMMIT if possible. If the INSERT fails, the transaction is rolled back, and the caller sees why
    committed        the rows are given to be sent

Sessions and connections, of threads and of asyncio, all pass through `transaction_hooks`. The hooks do not see SQL that
ends a transaction by itself (`text("COMMIT")`, `text("ROLLBACK TO ...")`): use SQLAlchemy's own methods.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session

from fairway.batch import MessageId
from fairway.client.core import Duration
from fairway.errors import Misuse
from fairway.runtime.clock import Clock, RealClock
from fairway.runtime.host import forks
from fairway.runtime.rng import RealRng, Rng
from fairway.sql.database import Bound, shown
from fairway.sql.outbox_encoding import (
    Origin,
    OutboxMessage,
    OutboxRow,
    OutboxStream,
    Picker,
    Streams,
    new_message,
    placed,
    sealed,
    unstamped,
)
from fairway.sql.outbox_rows import MARKS, REMEDY, OutboxRows, bytes_max, insert_text
from fairway.sql.outbox_table import NAME
from fairway.sql.transaction_hooks import PiggybackStatement, hooks_of

_clock: Final = RealClock()


class Cursor(Protocol):
    """The part of a PEP 249 cursor that `insert` needs."""

    def execute(self, operation: Any, parameters: Any, /) -> Any: ...


class _Origins:
    """Message ids of this process."""

    def __init__(self) -> None:
        self._forks = forks()
        self._origin = Origin(RealRng())

    def next_id(self) -> MessageId:
        if self._forks != forks():
            self.__init__()  # type: ignore[misc]  # a forked child needs other ids
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
    """Write a message as a row, in the cursor's transaction; returns the message's final id."""
    made = new_message(_origins.next_id(), _clock, subject, payload, key, tags, headers, after, at)
    cursor.execute(*_statement(paramstyle or paramstyle_of(cursor), made, table))
    return made.id


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
    """The INSERT as SQL and values, for programs that do not execute it with `cursor.execute`."""
    made = new_message(_origins.next_id(), _clock, subject, payload, key, tags, headers, after, at)
    return _statement(paramstyle, made, table)


def _statement(paramstyle: str, made: OutboxMessage, table: str) -> tuple[str, tuple[Any, ...]]:
    if not all(part.isidentifier() for part in table.split(".")):
        raise Misuse(f"the table name {table!r}: letters, digits and _ are allowed, and a dot behind the schema")
    [row] = unstamped([made], _clock.wall_ms())
    return insert_text(table, paramstyle, 1), row.values


def paramstyle_of(cursor: object) -> str:
    """The paramstyle that the cursor's driver declares."""
    for kind in type(cursor).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if style in MARKS:
            return str(style)
    raise Misuse(
        f"the driver of {type(cursor).__module__}.{type(cursor).__qualname__} does not say how it marks values: give "
        f"paramstyle=, one of {', '.join(MARKS)}"
    )


OutboxBatches = list[tuple[OutboxRow, OutboxStream | None]]  # None: a relay chooses one


@dataclass(slots=True)
class _Transaction:
    """The messages given on one connection since its transaction began."""

    messages: list[OutboxMessage] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # by savepoint, the number of messages before it
    outbox_batches: OutboxBatches = field(default_factory=list)  # made of the messages, whose commit is under way


class OutboxWriter:
    """Writes rows in the transactions of one engine. After each commit `on_committed` gets the transaction's rows, in
    the thread that committed; `on_committed` must not raise. The state of a connection's transaction is in the
    connection's `info`, under the writer itself."""

    def __init__(
        self,
        engine: Engine,
        table: Table,
        clock: Clock,
        rng: Rng,
        *,
        grace_ms: int,
        on_committed: Callable[[OutboxBatches], None] | None,
        picker: Callable[[], Picker] | None = None,
    ) -> None:
        """`picker`: in a cluster, chooses broker groups for messages."""
        self.rows = OutboxRows(table, engine.dialect, is_cluster=picker is not None)
        self._picker = picker
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._grace_ms = grace_ms
        self._on_committed = on_committed
        self._bytes_max: int | None = None
        self._is_checked = False
        self._start()
        self._hooks = hooks_of(engine)
        self._hooks.listeners = (*self._hooks.listeners, self)
        event.listen(engine, "checkin", self._on_checkin)

    def _start(self) -> None:
        """Make ids and streams for this process; a forked child makes others."""
        self._forks = forks()
        self._streams = Streams(self._clock, self._rng, has_secrets=lambda: self.rows.keeps_secrets)
        self._origin = Origin(self._rng)

    def close(self) -> None:
        """Stop listening to the engine."""
        self._hooks.listeners = tuple(each for each in self._hooks.listeners if each is not self)
        event.remove(self._engine, "checkin", self._on_checkin)

    # --- giving ------------------------------------------------------------------------------------------------------

    def send(
        self,
        bound: Bound,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> MessageId:
        connection = self.connection_of(bound)
        if not self._is_checked:
            self._check(connection)
        if self._forks != forks():
            self._start()
        made = new_message(
            self._origin.next_id(), self._clock, subject, payload, key, tags, headers, after, at, self._bytes_max
        )
        if not connection.in_transaction():
            connection.begin()
        transaction = connection.info.get(self)
        if transaction is None:
            transaction = connection.info[self] = _Transaction()
        transaction.messages.append(made)
        return made.id

    def connection_of(self, bound: Bound) -> Connection:
        """The connection of the caller's transaction, if that is a transaction in this engine's database."""
        if isinstance(bound, Session):
            try:
                connection = bound.connection()
            except UnboundExecutionError:  # a session with several engines, which takes the named one
                connection = bound.connection(bind_arguments={"bind": self._engine})
        elif isinstance(bound, Connection):
            connection = bound
        else:
            raise Misuse(
                f"a {type(bound).__name__} holds no transaction: give the Connection or the Session that has begun it"
                f"{', and to AioOutbox one for asyncio' if 'Async' in type(bound).__name__ else ''}"
            )
        if connection.engine is not self._engine and connection.engine.pool is not self._engine.pool:
            raise Misuse(
                f"the transaction is one in {shown(connection.engine.url)}, and the outbox is in "
                f"{shown(self._engine.url)}: make the Outbox with the same engine, or give the session's "
                'connection to it, session.connection(bind_arguments={"bind": engine})'
            )
        level = connection.get_execution_options().get("isolation_level")
        if (level or getattr(connection.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT":
            raise Misuse(
                "the connection is in AUTOCOMMIT: there is no transaction that a message could be a part of; use "
                "another isolation level"
            )
        return connection

    def _check(self, connection: Connection) -> None:
        """Check the table and its limits, once, in the first transaction.

        Skip the check if SQLite has already begun the transaction: after a read, SQLite would refuse a write at once
        if another connection has written meanwhile. There the INSERT shows whether the table exists.
        """
        if connection.dialect.name == "sqlite" and getattr(
            connection.connection.driver_connection, "in_transaction", True
        ):
            return
        self.rows.check_table(connection)
        self._bytes_max = bytes_max(connection)
        self._is_checked = True

    # --- what happens to the transaction -----------------------------------------------------------------------------

    def savepoint(self, info: dict[Any, Any], name: str) -> None:
        """A savepoint is about to be made."""
        transaction: _Transaction | None = info.get(self)
        if transaction is not None:
            transaction.marks[name] = len(transaction.messages)

    def rolled_back_to(self, info: dict[Any, Any], name: str) -> None:
        """Everything since the savepoint is undone."""
        transaction: _Transaction | None = info.get(self)
        if transaction is not None:
            del transaction.messages[transaction.marks.get(name, 0) :]  # unknown: made before the first message

    def forget(self, info: dict[Any, Any]) -> None:
        """Drop the messages. Written rows are gone, or their fate is unknown, so their streams must not continue."""
        transaction: _Transaction | None = info.pop(self, None)
        if transaction is not None:
            for _, stream in transaction.outbox_batches:
                if stream is not None:
                    stream.is_left = True

    def before_commit(self, info: dict[Any, Any], connection: Any, *, may_piggyback: bool) -> PiggybackStatement | None:
        """The COMMIT is about to be sent. What is executed now belongs to the transaction, and so does the statement
        that is returned, which travels with the COMMIT. May raise."""
        transaction: _Transaction | None = info.get(self)
        if transaction is None or not transaction.messages:
            return None
        messages, transaction.messages = transaction.messages, []
        transaction.outbox_batches = self._sealed(messages, self._clock.wall_ms())
        rows = [row for row, _ in transaction.outbox_batches]
        piggyback_statement = self.rows.piggyback_statement(rows) if may_piggyback else None
        if piggyback_statement is None:
            self._insert(connection, rows)
        return piggyback_statement

    def _insert(self, connection: Any, rows: list[OutboxRow]) -> None:
        try:
            self.rows.insert(connection, rows)
        except Exception as error:
            if self._is_checked or not re.search("no such table|no column", str(error)):
                raise
            raise Misuse(f"{error}: {REMEDY}") from error
        self._is_checked = True

    def _sealed(self, messages: list[OutboxMessage], now_ms: int) -> OutboxBatches:
        if self._on_committed is None:  # this process does not send; the one that does knows where to
            return [(row, None) for row in unstamped(messages, now_ms)]
        if self._picker is None:
            return [*sealed(messages, self._streams, now_ms, now_ms + self._grace_ms)]
        return placed(messages, self._streams, now_ms, now_ms + self._grace_ms, self._picker())

    def committed(self, info: dict[Any, Any]) -> None:
        """The database has answered that the commit is done."""
        transaction: _Transaction | None = info.pop(self, None)
        if transaction is None:
            return
        outbox_batches = transaction.outbox_batches
        if self._on_committed is not None:
            self._on_committed(outbox_batches)  # first: the stream's next user must come behind these rows
        if len(outbox_batches) == 1:  # nearly every transaction
            [(row, stream)] = outbox_batches
            if stream is not None:
                self._streams.give_back(stream, row.messages)
            return
        given_back: dict[OutboxStream, int] = {}
        for row, stream in outbox_batches:
            if stream is not None:
                given_back[stream] = given_back.get(stream, 0) + row.messages
        for stream, messages in given_back.items():
            self._streams.give_back(stream, messages)

    def _on_checkin(self, _: object, record: Any) -> None:
        """A connection went back to a pool that does not reset connections, without commit or rollback."""
        if record is not None and self in record.info:
            self.forget(record.info)
