"""The inbox: a message's effect and the record that it has happened, in one transaction of the user's own database.

    BEGIN
    INSERT INTO fairway_inbox ... ON CONFLICT DO NOTHING       no row added: it was done before, ack and be done
    ... what the handler does ...
    COMMIT
    ack

Between record and effect there is no instant at which a crash could part them: both are there after the commit, and
neither is without it. A crash between commit and ack makes the message come again, and the row says so. While another
consumer has the same message in its transaction, the INSERT waits for the end of that one, as the database does it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine, ExceptionContext, Table, Transaction, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, AsyncTransaction
from sqlalchemy.orm import Session

from fairway.client.core import Duration, seconds_of
from fairway.client.idempotence import By, Guarded, Handler, Naming, Sheaf, name_of, parameters_of
from fairway.errors import Misuse
from fairway.protocol.delivery import Message
from fairway.sql.inbox_rows import InboxRows, InboxScope
from fairway.sql.inserting import AsyncBound, Bound, connection_of
from fairway.sql.making import make, make_async
from fairway.world.clock import Clock, RealClock
from fairway.world.rng import RealRng
from fairway.world.timekeeper import AGE_HOLD_MS, Timekeeper

KEEP: Final = timedelta(days=30)
_EXPIRE_EVERY: Final = 500  # messages recorded; each time up to 1,000 old rows go, so the table does not grow for ever
_SCOPES: Final = ("session", "connection")
_TRIAL: Final = InboxScope("trial", "trial")
_FAILED: Final = "fairway.inbox.failed"  # in a connection's `info`: a statement has failed since the transaction began

_log = logging.getLogger("fairway.inbox")


@dataclass
class InboxCounts:
    """Of this process. Threads may count past each other now and then: figures for people."""

    recorded: int = 0
    done_before: int = 0
    expired: int = 0


class SqlInbox:
    """Remembers what was done, in a table of the user's database. One serves all listeners of an engine.

    A handler takes a second parameter, in whose transaction its effect belongs: `session` (a Session, or an
    AsyncSession of an AsyncEngine) or `connection`. What it says about its messages is told after the commit.
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
        """`by` is 'key' or a function of the message, where not its id is what makes it the same. Rows are kept for
        `keep`, None: for ever. `replays=False` swallows replays of what was done. `session` makes sessions, such as a
        sessionmaker of the user's."""
        if not isinstance(engine, Engine | AsyncEngine):
            raise Misuse(f"SqlInbox takes an Engine or an AsyncEngine of SQLAlchemy, not {type(engine).__name__}")
        self._engine = engine
        self._naming = Naming(by, replays=replays)
        self._keep_ms = None if keep is None else round(seconds_of(keep) * 1_000)
        self._rows = InboxRows(table)
        self._session: Callable[..., Any] = session or (Session if isinstance(engine, Engine) else AsyncSession)
        self._clock = clock or RealClock()
        self._aging = Timekeeper(self._clock, hold_ms=AGE_HOLD_MS, holds_back=True)  # a jump makes nothing old
        self._rng = RealRng()
        self._is_made = False
        self._since_expiry = 0
        _watch(engine if isinstance(engine, Engine) else engine.sync_engine)
        self.counts = InboxCounts()

    @property
    def table(self) -> Table:
        """For migrations: `inbox.table.to_metadata(Base.metadata)`."""
        return self._rows.table

    def create(self) -> None:
        """Make the table where it is missing, and see that a rollback is one. A listener does both by itself."""
        make(self._engine, self.table)
        with self._sync_engine.connect() as connection:
            self._try_out(connection)
        self._is_made = True

    async def create_async(self) -> None:
        """`create` on a loop."""
        await make_async(self._engine, self.table)
        async with self._async_engine.connect() as connection:
            await connection.run_sync(self._try_out)
        self._is_made = True

    def _try_out(self, connection: Connection) -> None:
        """An engine in AUTOCOMMIT, or a table without transactions, would part record and effect without a word."""
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
        """Record the message in this transaction; False: it was done before, so ack it and do nothing.

        True: do it in the same transaction, commit, then ack. The table must be there: call `create` at the start.
        """
        fresh = self._record(
            connection_of(connection), InboxScope(message.subject, message.group), [self._name(message)]
        )
        return bool(fresh)

    async def once_async(self, connection: AsyncBound, message: Message) -> bool:
        """`once` in a transaction on a loop."""
        return await connection.run_sync(lambda bound: self.once(bound, message))

    def _name(self, message: Message) -> str:
        return self._naming.of(message)

    def _record(self, connection: Connection, place: InboxScope, names: Sequence[str]) -> set[str]:
        now_ms = max(self._aging.now_ms(), self._clock.wall_ms())  # a clock that is behind makes no row old either
        fresh = self._rows.record(connection, place, names, now_ms)
        self.counts.recorded += len(fresh)
        self.counts.done_before += len(names) - len(fresh)
        return fresh

    # --- for listeners -----------------------------------------------------------------------------------------------

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        """See that the handler fits, and stand before it."""
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
        sheaf = Sheaf(messages, self._naming)
        place = InboxScope(messages[0].subject, messages[0].group)
        if not self._is_made:
            self.create()
        with self._transaction() as (connection, transaction):
            if held := sheaf.sift(self._begin(connection, place, sheaf)):
                with self._scope(scope, connection) as bound:
                    handler(held if is_batch else held[0], bound)
                _see_that_it_lasts(handler, transaction)
                self._conclude(connection, handler, place, sheaf)
        sheaf.settle()
        if self._is_time_to_expire(len(messages)):
            with _tolerating_a_busy_database():
                self._expire_some()

    async def _handle_async(self, handler: Handler, scope: str, is_batch: bool, messages: Sequence[Message]) -> None:
        sheaf = Sheaf(messages, self._naming)
        place = InboxScope(messages[0].subject, messages[0].group)
        if not self._is_made:
            await self.create_async()
        async with self._transaction_async() as (connection, transaction):
            if held := sheaf.sift(await connection.run_sync(self._begin, place, sheaf)):
                async with self._scope_async(scope, connection) as bound:
                    await handler(held if is_batch else held[0], bound)
                _see_that_it_lasts(handler, transaction)
                await connection.run_sync(self._conclude, handler, place, sheaf)
        sheaf.settle()
        if self._is_time_to_expire(len(messages)):
            with _tolerating_a_busy_database():
                await self._expire_some_async()

    def _begin(self, connection: Connection, place: InboxScope, sheaf: Sheaf) -> set[str]:
        connection.info.pop(_FAILED, None)
        return self._record(connection, place, sheaf.names)

    def _conclude(self, connection: Connection, handler: Handler, place: InboxScope, sheaf: Sheaf) -> None:
        """Before the commit. After some errors a database has rolled everything back, whatever the handler thinks."""
        if connection.info.pop(_FAILED, False) and not self._rows.are_there(connection, place, sheaf.held_names):
            raise Misuse(
                f"{name_of(handler)} went on after an error that rolled back its transaction: do not catch that error, "
                "or catch it around a savepoint, `begin_nested()`"
            )
        self._rows.remove(connection, place, sheaf.handed_back)

    async def close_async(self) -> None:
        """Connections of a loop must be closed on it; the engine makes others where it is used again."""
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()

    # --- transactions ------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Connection, Transaction]]:
        with self._sync_engine.connect() as connection, connection.begin() as transaction:
            yield connection, transaction

    @asynccontextmanager
    async def _transaction_async(self) -> AsyncIterator[tuple[AsyncConnection, AsyncTransaction]]:
        async with self._async_engine.connect() as connection, connection.begin() as transaction:
            yield connection, transaction

    @contextmanager
    def _scope(self, scope: str, connection: Connection) -> Iterator[Connection | Session]:
        """What the handler works with. A `commit` of the session's own flushes: the transaction is ours to commit."""
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
        """Delete all rows that are older than `keep`, a thousand in a transaction; how many. Listeners do it bit by
        bit, by themselves."""
        total = 0
        while self._keep_ms is not None and (count := self._expire_some()):
            total += count
        return total

    async def expire_async(self) -> int:
        """`expire` on a loop."""
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
    """Old rows can wait: the message in hand is done."""
    try:
        yield
    except DBAPIError as error:
        _log.warning("old rows of the inbox stay a while longer: %s", error.orig)
