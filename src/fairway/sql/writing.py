"""From a message that is given in a transaction to a row that commits with it, and from the commit to its sending.

    send             the message is kept with the connection; nothing is said to the database yet
    rolled_back_to   what was given since that savepoint is forgotten
    forget           all of it is
    before_commit    all of it becomes rows, in one statement, which travels with the COMMIT where it can. If that
                     fails, the transaction is rolled back, and the caller sees why
    committed        the rows are sent from here

Sessions and connections, with threads and on a loop, all pass through `hooks`. What is not seen is SQL that ends a
transaction by itself (`text("COMMIT")`, `text("ROLLBACK TO ...")`): use SQLAlchemy's own ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session

from fairway.batch import MessageId
from fairway.client.core import Duration
from fairway.errors import Misuse
from fairway.sql.hooks import hooks_of
from fairway.sql.inserting import Bound
from fairway.sql.letters import Origin, OutboxMessage, OutboxRow, Picker, letter, placed, sealed, unstamped
from fairway.sql.opening import shown
from fairway.sql.riding import PiggybackStatement
from fairway.sql.rows import REMEDY, OutboxRows, bytes_max
from fairway.sql.streams import OutboxStream, Streams
from fairway.world.clock import Clock
from fairway.world.lineage import forks
from fairway.world.rng import Rng

Parcels = list[tuple[OutboxRow, OutboxStream | None]]  # None: a relay chooses one


class _Transaction:
    """What was given on one connection since its transaction began."""

    __slots__ = ("letters", "marks", "parcels")

    def __init__(self) -> None:
        self.letters: list[OutboxMessage] = []
        self.marks: dict[str, int] = {}  # by savepoint, how many letters there were before
        self.parcels: Parcels = []  # that the letters have become, and whose commit is under way


class OutboxWriter:
    """Writes rows in the transactions of one engine. `on_committed` is given each transaction's rows after its commit,
    in the thread that has committed, and must not raise. What belongs to a connection's transaction is kept in its
    `info`, under the writer itself."""

    def __init__(
        self,
        engine: Engine,
        table: Table,
        clock: Clock,
        rng: Rng,
        *,
        grace_ms: int,
        on_committed: Callable[[Parcels], None] | None,
        picker: Callable[[], Picker] | None = None,
    ) -> None:
        """`picker`: in a cluster, who knows where messages go."""
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
        """Ids and streams of this process; a forked child has others."""
        self._forks = forks()
        self._streams = Streams(self._clock, self._rng, has_secrets=lambda: self.rows.keeps_secrets)
        self._origin = Origin(self._rng)

    def close(self) -> None:
        """Hear nothing more."""
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
        made = letter(
            self._origin.next_id(), self._clock, subject, payload, key, tags, headers, after, at, self._bytes_max
        )
        if not connection.in_transaction():
            connection.begin()
        transaction = connection.info.get(self)
        if transaction is None:
            transaction = connection.info[self] = _Transaction()
        transaction.letters.append(made)
        return made.id

    def connection_of(self, bound: Bound) -> Connection:
        """The connection on which the caller's transaction runs, if it is one to this engine's database."""
        if isinstance(bound, Session):
            try:
                connection = bound.connection()
            except UnboundExecutionError:  # it has several engines, and takes the one that is named
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
        if _is_autocommit(connection):
            raise Misuse(
                "the connection is in AUTOCOMMIT: there is no transaction that a message could be a part of; use "
                "another isolation level"
            )
        return connection

    def _check(self, connection: Connection) -> None:
        """Once, in the first transaction: is there a table, and what does it take?

        Not where SQLite has begun one: from a read on it would refuse, at once, what is written after somebody else has
        written. There the INSERT tells.
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
        transaction: _Transaction | None = info.get(self)
        if transaction is not None:
            transaction.marks[name] = len(transaction.letters)

    def rolled_back_to(self, info: dict[Any, Any], name: str) -> None:
        transaction: _Transaction | None = info.get(self)
        if transaction is not None:
            del transaction.letters[transaction.marks.get(name, 0) :]  # not known: made before the first letter

    def forget(self, info: dict[Any, Any]) -> None:
        """Rows that were written are gone, or nobody knows: then their streams are not to be gone on with."""
        transaction: _Transaction | None = info.pop(self, None)
        if transaction is not None:
            for _, stream in transaction.parcels:
                if stream is not None:
                    stream.is_left = True

    def before_commit(self, info: dict[Any, Any], connection: Any, *, may_ride: bool) -> PiggybackStatement | None:
        transaction: _Transaction | None = info.get(self)
        if transaction is None or not transaction.letters:
            return None
        rows = self._seal(transaction)
        rider = self.rows.rider(rows) if may_ride else None
        if rider is None:
            self._insert(connection, rows)
        return rider

    def _insert(self, connection: Any, rows: list[OutboxRow]) -> None:
        try:
            self.rows.insert(connection, rows)
        except Exception as error:
            if self._is_checked or not re.search("no such table|no column", str(error)):
                raise
            raise Misuse(f"{error}: {REMEDY}") from error
        self._is_checked = True

    def _seal(self, transaction: _Transaction) -> list[OutboxRow]:
        """The letters become rows, which are to be written."""
        letters, transaction.letters = transaction.letters, []
        transaction.parcels = self._sealed(letters, self._clock.wall_ms())
        return [row for row, _ in transaction.parcels]

    def _sealed(self, letters: list[OutboxMessage], now_ms: int) -> Parcels:
        if self._on_committed is None:  # nobody here sends them: whoever does knows where to
            return [(row, None) for row in unstamped(letters, now_ms)]
        if self._picker is None:
            return [*sealed(letters, self._streams, now_ms, now_ms + self._grace_ms)]
        return placed(letters, self._streams, now_ms, now_ms + self._grace_ms, self._picker())

    def committed(self, info: dict[Any, Any]) -> None:
        transaction: _Transaction | None = info.pop(self, None)
        if transaction is None:
            return
        parcels = transaction.parcels
        if self._on_committed is not None:
            self._on_committed(parcels)  # first: who takes the stream next must come behind us
        if len(parcels) == 1:  # nearly every transaction
            [(row, stream)] = parcels
            if stream is not None:
                self._streams.give_back(stream, row.messages)
            return
        given_back: dict[OutboxStream, int] = {}
        for row, stream in parcels:
            if stream is not None:
                given_back[stream] = given_back.get(stream, 0) + row.messages
        for stream, messages in given_back.items():
            self._streams.give_back(stream, messages)

    def _on_checkin(self, _: object, record: Any) -> None:
        """A connection that goes back without commit or rollback: its pool was told to leave it as it is."""
        if record is not None and self in record.info:
            self.forget(record.info)


def _is_autocommit(connection: Connection) -> bool:
    chosen = connection.get_execution_options().get("isolation_level")
    if chosen is None:
        chosen = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return chosen == "AUTOCOMMIT"
