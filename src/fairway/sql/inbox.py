"""The inbox: a handler's effect and the record of its message, in one transaction of the user's own database.

    BEGIN
    INSERT INTO fairway_inbox ... ON CONFLICT DO NOTHING       no row added: the message was handled before, just ack
    ... what the handler does ...
    COMMIT
    ack

A crash cannot part the record from the effect: after the commit both are there, without the commit neither is. After a
crash between commit and ack the broker delivers the message again, and the row shows that it was handled. If another
consumer has the same message in an open transaction, the INSERT waits for the end of that transaction.

The table has one row for each message whose effect is in the database:

    subject, consumer_group, message     the key; `fairway.client.idempotence` says how a message is named
    recorded_ms                          when, in ms since 1970 UTC; indexed, so that old rows are found without a scan

Keys are ASCII, and compared byte by byte on every database. Several names are one INSERT where the database has
RETURNING, and one INSERT each where not.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    ExceptionContext,
    Index,
    PrimaryKeyConstraint,
    Table,
    Transaction,
    and_,
    delete,
    event,
    func,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, AsyncTransaction
from sqlalchemy.orm import Session

from fairway import limits
from fairway.client.core import Duration, seconds_of
from fairway.client.idempotence import (
    NAME_CHARS_MAX,
    By,
    Guarded,
    Handler,
    NamedMessages,
    Naming,
    name_of,
    parameters_of,
)
from fairway.errors import Misuse
from fairway.protocol.delivery import Message
from fairway.runtime.clock import AGE_HOLD_MS, Clock, RealClock, Timekeeper
from fairway.runtime.rng import RealRng
from fairway.sql.database import (
    AsyncBound,
    Bound,
    ascii_text,
    connection_of,
    insert_one,
    insert_unless_there,
    make,
    make_async,
    new_table,
)

EXPIRE_ROWS: Final = 1_000  # per transaction: a few ms, so that nobody waits long for its locks


class InboxScope(NamedTuple):
    """The subject and the group of messages. Names of messages are unique within a scope."""

    subject: str
    group: str


class InboxRows:
    """One inbox table, and the statements on it. Each runs in the caller's transaction."""

    def __init__(self, name: str) -> None:
        self.table = new_table(
            name,
            Column("subject", ascii_text(limits.INTERNAL_CHARS_MAX), nullable=False),
            Column("consumer_group", ascii_text(limits.NAME_CHARS_MAX), nullable=False),
            Column("message", ascii_text(NAME_CHARS_MAX), nullable=False),
            Column("recorded_ms", BigInteger, nullable=False),
            PrimaryKeyConstraint("subject", "consumer_group", "message"),
            Index(f"ix_{name}_recorded_ms", "recorded_ms"),
        )

    def record(self, connection: Connection, place: InboxScope, names: Sequence[str], now_ms: int) -> set[str]:
        """Insert the names; returns those that were new. Callers sort the names, or two transactions may deadlock."""
        common: dict[str, Any] = {"subject": place.subject, "consumer_group": place.group, "recorded_ms": now_ms}
        rows = [{**common, "message": name} for name in names]
        if len(rows) > 1 and connection.dialect.insert_returning:
            statement = insert_unless_there(self.table, connection.dialect).returning(self.table.c.message)
            return set(connection.execute(statement, rows).scalars())
        return {row["message"] for row in rows if insert_one(connection, self.table, row)}

    def remove(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> None:
        """Delete the records of messages that are not handled after all."""
        if names:
            connection.execute(delete(self.table).where(self._is_of(place), self.table.c.message.in_(names)))

    def are_there(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> bool:
        """Whether the names that this transaction recorded are still in the table."""
        held = select(func.count()).where(self._is_of(place), self.table.c.message.in_(names))
        return connection.execute(held).scalar_one() == len(names)

    def expire(self, connection: Connection, before_ms: int, most: int = EXPIRE_ROWS) -> int:
        """Delete about `most` of the rows recorded before `before_ms`, oldest first. Rows of one ms go together."""
        recorded = self.table.c.recorded_ms
        old = select(recorded).where(recorded < before_ms).order_by(recorded)
        last = connection.execute(old.offset(most - 1).limit(1)).scalar_one_or_none()
        doomed = recorded < before_ms if last is None else recorded <= last
        return connection.execute(delete(self.table).where(doomed)).rowcount

    def _is_of(self, place: InboxScope) -> ColumnElement[bool]:
        return and_(self.table.c.subject == place.subject, self.table.c.consumer_group == place.group)


KEEP: Final = timedelta(days=30)
_EXPIRE_EVERY: Final = 500  # handled messages; each time up to 1,000 old rows go, so the table does not grow for ever
_SCOPES: Final = ("session", "connection")
_TRIAL: Final = InboxScope("trial", "trial")
_FAILED: Final = "fairway.inbox.failed"  # a mark in a connection's `info`: a statement of the transaction has failed

_log = logging.getLogger("fairway.inbox")


@dataclass
class InboxCounts:
    """Counts of this process, for people: threads may occasionally lose an increment."""

    recorded: int = 0
    done_before: int = 0
    expired: int = 0


class SqlInbox:
    """Remembers handled messages in a table of the user's database. One inbox serves all listeners of an engine.

    A handler takes a second parameter, which carries the transaction of its effect: `session` (a Session, or an
    AsyncSession of an AsyncEngine) or `connection`. Acks and retries of its messages are sent after the commit.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        *,
        by: By = None,
        keep: Duration | None = KEEP,
        replays: bool = True,
        table: str = "fairway_inbox",
        session: Callable[..., Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`by` names messages by 'key' or by a function of the message, instead of by their id. `keep` is how long rows
        stay; None: for ever. With `replays=False` a replayed message that was handled before is not handled again.
        `session` makes sessions, for example a sessionmaker of the user's."""
        if not isinstance(engine, Engine | AsyncEngine):
            raise Misuse(f"SqlInbox takes an Engine or an AsyncEngine of SQLAlchemy, not {type(engine).__name__}")
        self._engine = engine
        self._naming = Naming(by, replays=replays)
        self._keep_ms = None if keep is None else round(seconds_of(keep) * 1_000)
        self._rows = InboxRows(table)
        self._session: Callable[..., Any] = session or (Session if isinstance(engine, Engine) else AsyncSession)
        self._clock = clock or RealClock()
        self._aging = Timekeeper(self._clock, hold_ms=AGE_HOLD_MS, holds_back=True)  # a jump of the clock ages no row
        self._rng = RealRng()
        self._is_made = False
        self._since_expiry = 0
        _watch(engine if isinstance(engine, Engine) else engine.sync_engine)
        self.counts = InboxCounts()

    @property
    def table(self) -> Table:
        """The table, for migrations: `inbox.table.to_metadata(Base.metadata)`."""
        return self._rows.table

    def create(self) -> None:
        """Make the table if it is missing, and check that rollbacks work. A listener does both by itself."""
        make(self._engine, self.table)
        with self._sync_engine.connect() as connection:
            self._try_out(connection)
        self._is_made = True

    async def create_async(self) -> None:
        """`create` for asyncio."""
        await make_async(self._engine, self.table)
        async with self._async_engine.connect() as connection:
            await connection.run_sync(self._try_out)
        self._is_made = True

    def _try_out(self, connection: Connection) -> None:
        """Check that a rollback takes a record back. An engine in AUTOCOMMIT, or a table without transactions, would
        silently part record and effect."""
        name = [f"trial:{self._rng.bits(64):016x}"]
        self._rows.record(connection, _TRIAL, name, self._clock.wall_ms())
        connection.rollback()
        if self._rows.are_there(connection, _TRIAL, name):
            self._rows.remove(connection, _TRIAL, name)
            connection.commit()
            raise Misuse(
                f"a rollback takes nothing back from {self.table.name}: the engine is in AUTOCOMMIT, or the table's "
                "storage knows no transactions. Give the inbox an engine without that isolation_level"
            )

    # --- for programs that have their own transaction ----------------------------------------------------------------

    def once(self, connection: Bound, message: Message) -> bool:
        """Record the message in this transaction; False: it was handled before, so ack it and do nothing.

        True: handle it in the same transaction, commit, then ack. The table must exist: call `create` at the start.
        """
        bound = connection_of(connection)
        return bool(self._record(bound, InboxScope(message.subject, message.group), [self._naming.of(message)]))

    async def once_async(self, connection: AsyncBound, message: Message) -> bool:
        """`once` for asyncio."""
        return await connection.run_sync(lambda bound: self.once(bound, message))

    def _record(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> set[str]:
        now_ms = max(self._aging.now_ms(), self._clock.wall_ms())  # a clock that is behind ages no row either
        fresh = self._rows.record(connection, place, names, now_ms)
        self.counts.recorded += len(fresh)
        self.counts.done_before += len(names) - len(fresh)
        return fresh

    # --- for listeners -----------------------------------------------------------------------------------------------

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        """Check the handler's parameters, and wrap it so that each call runs in a transaction of the inbox."""
        taken = parameters_of(handler)
        if len(taken) != 2 or taken[1] not in _SCOPES:
            raise Misuse(
                f"{name_of(handler)} takes ({', '.join(taken)}): with an SqlInbox a handler takes two, the message and "
                "`session` or `connection`, in whose transaction its effect belongs"
            )
        if is_async is not isinstance(self._engine, AsyncEngine):
            kind, wanted = ("async def", "create_async_engine") if is_async else ("def", "create_engine")
            raise Misuse(f"{name_of(handler)} is `{kind}`: its inbox takes an engine made by `{wanted}`")
        scope = taken[1]
        return partial(self._handle_async if is_async else self._handle, handler, scope, is_batch)

    def _handle(self, handler: Handler, scope: str, is_batch: bool, messages: Sequence[Message]) -> None:
        named = NamedMessages(messages, self._naming)
        place = InboxScope(messages[0].subject, messages[0].group)
        if not self._is_made:
            self.create()
        with self._sync_engine.connect() as connection, connection.begin() as transaction:
            if held := named.sift(self._begin(connection, place, named)):
                with self._scope(scope, connection) as bound:
                    handler(held if is_batch else held[0], bound)
                _see_that_it_lasts(handler, transaction)
                self._conclude(connection, handler, place, named)
        named.settle()
        if self._is_time_to_expire(len(messages)):
            with _tolerating_a_busy_database():
                self._expire_some()

    async def _handle_async(self, handler: Handler, scope: str, is_batch: bool, messages: Sequence[Message]) -> None:
        named = NamedMessages(messages, self._naming)
        place = InboxScope(messages[0].subject, messages[0].group)
        if not self._is_made:
            await self.create_async()
        async with self._async_engine.connect() as connection, connection.begin() as transaction:
            if held := named.sift(await connection.run_sync(self._begin, place, named)):
                async with self._scope_async(scope, connection) as bound:
                    await handler(held if is_batch else held[0], bound)
                _see_that_it_lasts(handler, transaction)
                await connection.run_sync(self._conclude, handler, place, named)
        named.settle()
        if self._is_time_to_expire(len(messages)):
            with _tolerating_a_busy_database():
                await self._expire_some_async()

    def _begin(self, connection: Connection, place: InboxScope, named: NamedMessages) -> set[str]:
        connection.info.pop(_FAILED, None)
        return self._record(connection, place, named.names)

    def _conclude(self, connection: Connection, handler: Handler, place: InboxScope, named: NamedMessages) -> None:
        """Run before the commit. After some errors the database has rolled everything back, and a handler that caught
        the error does not notice."""
        if connection.info.pop(_FAILED, False) and not self._rows.are_there(connection, place, named.held_names):
            raise Misuse(
                f"{name_of(handler)} went on after an error that rolled back its transaction: do not catch that error, "
                "or catch it around a savepoint, `begin_nested()`"
            )
        self._rows.remove(connection, place, named.handed_back)

    async def close_async(self) -> None:
        """Close the connections of a loop, which must happen on that loop. The engine opens others when used again."""
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()

    # --- transactions ------------------------------------------------------------------------------------------------

    @contextmanager
    def _scope(self, scope: str, connection: Connection) -> Iterator[Connection | Session]:
        """The handler's second argument. A `commit` of the session only flushes: the inbox commits the transaction."""
        if scope == "connection":
            yield connection
            return
        with self._session(bind=connection, join_transaction_mode="rollback_only") as session:
            yield session
            session.commit()

    @asynccontextmanager
    async def _scope_async(
        self, scope: str, connection: AsyncConnection
    ) -> AsyncIterator[AsyncConnection | AsyncSession]:
        if scope == "connection":
            yield connection
            return
        async with self._session(bind=connection, join_transaction_mode="rollback_only") as session:
            yield session
            await session.commit()

    @property
    def _sync_engine(self) -> Engine:
        if isinstance(self._engine, Engine):
            return self._engine
        raise Misuse("this inbox has an engine for asyncio: its methods are those that end in `_async`")

    @property
    def _async_engine(self) -> AsyncEngine:
        if isinstance(self._engine, AsyncEngine):
            return self._engine
        raise Misuse("this inbox has an engine for threads: its methods are those that do not end in `_async`")

    # --- old rows ----------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Delete all rows older than `keep`, a thousand per transaction; returns how many. Listeners do the same
        gradually, by themselves."""
        total = 0
        while self._keep_ms is not None and (count := self._expire_some()):
            total += count
        return total

    async def expire_async(self) -> int:
        """`expire` for asyncio."""
        total = 0
        while self._keep_ms is not None and (count := await self._expire_some_async()):
            total += count
        return total

    def _is_time_to_expire(self, handled: int) -> bool:
        self._since_expiry += handled
        if self._keep_ms is None or self._since_expiry < _EXPIRE_EVERY:
            return False
        self._since_expiry = 0
        return True

    def _expire_some(self) -> int:
        with self._sync_engine.begin() as connection:
            return self._expire_in(connection)

    async def _expire_some_async(self) -> int:
        async with self._async_engine.begin() as connection:
            return await connection.run_sync(self._expire_in)

    def _expire_in(self, connection: Connection) -> int:
        now_ms = min(self._aging.now_ms(), self._clock.wall_ms())
        count = self._rows.expire(connection, now_ms - (self._keep_ms or 0))
        self.counts.expired += count
        return count


def _watch(engine: Engine) -> None:
    if not event.contains(engine, "handle_error", _note_failure):
        event.listen(engine, "handle_error", _note_failure)


def _note_failure(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and not context.is_disconnect and not connection.invalidated:
        connection.info[_FAILED] = True


def _see_that_it_lasts(handler: Handler, transaction: Transaction | AsyncTransaction) -> None:
    if not transaction.is_active:
        raise Misuse(
            f"{name_of(handler)} has ended the transaction that holds the record of its message: raise to roll back, "
            "return to commit"
        )


@contextmanager
def _tolerating_a_busy_database() -> Iterator[None]:
    """Ignore database errors: old rows can wait, and the message at hand is already handled."""
    try:
        yield
    except DBAPIError as error:
        _log.warning("old rows of the inbox stay a while longer: %s", error.orig)
