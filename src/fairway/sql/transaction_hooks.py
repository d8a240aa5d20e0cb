"""Tells listeners when an engine commits or rolls back, and sends their last statements together with the COMMIT.

`Hooks` wraps the seven methods of an engine's dialect that make savepoints, commit and roll back, once for each engine.
SQLAlchemy's own events would do, but for their price: with any listener on an engine every statement costs a fifth
more, also in transactions that send nothing. The wrapped methods also show exactly when a commit is done, for which
SQLAlchemy has no event.

`CommitPiggyback` sends a transaction's last statements and its COMMIT to PostgreSQL in one exchange, and their answers
come back in one. A program waits for no answer between its last write and the commit, so that write need not cost a
round trip of its own. Nor need the database parse and plan a repeated statement each time: psycopg prepares repeated
statements by itself. Piggyback statements take part in that: the driver's own cache counts, prepares and forgets them,
as if the driver had executed them. The cache must know them, because after every rollback the driver tells the database
to forget all prepared statements. The cache is a private part of psycopg, so the constructor tries it out first. If the
cache works in another way, piggyback statements are never prepared. Nor are they if a program forbids that
(`prepare_threshold=None`, as some poolers between program and database require).

The exchange calls libpq's pipeline mode directly: the driver's own way into a pipeline takes as long as the piggyback
saves (bench/outbox). If a statement fails, the database skips everything behind it, so the transaction is not
committed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Connection, Dialect, Engine

if TYPE_CHECKING:
    from fairway.sql.outbox_writer import OutboxWriter

_NAME: Final = "_fairway_hooks"


class Hooks:
    """The wrapped methods of one dialect, which belongs to one engine and the engines derived from it."""

    def __init__(self, dialect: Dialect) -> None:
        self.listeners: tuple[OutboxWriter, ...] = ()
        self._commit = dialect.do_commit
        self._rollback = dialect.do_rollback
        self._savepoint = dialect.do_savepoint
        self._rollback_to = dialect.do_rollback_to_savepoint
        self._prepare = dialect.do_prepare_twophase
        self._commit_twophase = dialect.do_commit_twophase
        self._rollback_twophase = dialect.do_rollback_twophase
        self._is_sqlite = dialect.name == "sqlite"
        self._piggyback = CommitPiggyback.on(dialect)
        for name in ("commit", "rollback", "savepoint", "rollback_to_savepoint"):
            setattr(dialect, f"do_{name}", getattr(self, name))
        for name in ("prepare_twophase", "commit_twophase", "rollback_twophase"):
            setattr(dialect, f"do_{name}", getattr(self, name))

    # --- the new methods of the dialect ------------------------------------------------------------------------------

    def commit(self, dbapi_connection: Any) -> None:
        info = _info(dbapi_connection)
        if info is None:
            self._commit(dbapi_connection)
            return
        try:
            self._commit_all(info, dbapi_connection)
        except BaseException:
            self._forget(info)
            raise
        for each in self.listeners:
            each.committed(info)

    def _commit_all(self, info: dict[Any, Any], dbapi_connection: Any) -> None:
        piggyback = self._piggyback
        if piggyback is None or not piggyback.has_room(driver := dbapi_connection.driver_connection):
            self._before_commit(info, dbapi_connection, may_piggyback=False)
            self._commit(dbapi_connection)
            return
        piggybacked = self._before_commit(info, dbapi_connection, may_piggyback=True)
        if not piggybacked:
            self._commit(dbapi_connection)
            return
        try:
            piggyback.commit(driver, piggybacked)
        except BaseException:
            if not driver.closed:
                self._rollback(dbapi_connection)
            raise

    def _before_commit(
        self, info: dict[Any, Any], dbapi_connection: Any, *, may_piggyback: bool
    ) -> list[PiggybackStatement]:
        """Ask the listeners. If one fails, roll everything back: SQLAlchemy takes a transaction whose commit has failed
        for ended, and would let the next transaction continue in it."""
        piggybacked = []
        try:
            for each in self.listeners:
                piggyback_statement = each.before_commit(info, dbapi_connection, may_piggyback=may_piggyback)
                if piggyback_statement is not None:
                    piggybacked.append(piggyback_statement)
        except BaseException:
            self._rollback(dbapi_connection)
            raise
        return piggybacked

    def rollback(self, dbapi_connection: Any) -> None:
        info = _info(dbapi_connection)
        if info is not None:
            self._forget(info)
            if self._piggyback is not None and self._piggyback.is_idle(dbapi_connection.driver_connection):
                return  # as after every transaction, when the pool rolls back: the driver takes 8 µs to find that out
        self._rollback(dbapi_connection)

    def savepoint(self, connection: Connection, name: str) -> None:
        if self._is_sqlite:
            _begin(connection)
        for each in self.listeners:
            each.savepoint(connection.info, name)
        self._savepoint(connection, name)

    def rollback_to_savepoint(self, connection: Connection, name: str) -> None:
        for each in self.listeners:
            each.rolled_back_to(connection.info, name)
        self._rollback_to(connection, name)

    def prepare_twophase(self, connection: Connection, xid: Any) -> None:
        self._before_commit(connection.info, connection.connection, may_piggyback=False)
        self._prepare(connection, xid)

    def commit_twophase(
        self, connection: Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        info = connection.info
        try:
            self._before_commit(info, connection.connection, may_piggyback=False)
            self._commit_twophase(connection, xid, is_prepared, recover)
        except BaseException:
            self._forget(info)
            raise
        for each in self.listeners:
            each.committed(info)

    def rollback_twophase(
        self, connection: Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        self._forget(connection.info)
        self._rollback_twophase(connection, xid, is_prepared, recover)

    def _forget(self, info: dict[Any, Any]) -> None:
        for each in self.listeners:
            each.forget(info)


def hooks_of(engine: Engine) -> Hooks:
    """The hooks of an engine, made on the first call."""
    found: Hooks | None = getattr(engine.dialect, _NAME, None)
    if found is None:
        found = Hooks(engine.dialect)
        setattr(engine.dialect, _NAME, found)
    return found


def _info(dbapi_connection: Any) -> dict[Any, Any] | None:
    """None for a connection outside any pool, such as the one by which an engine inspects its database."""
    try:
        info = dbapi_connection.info
    except (AttributeError, NotImplementedError):
        return None
    return info if type(info) is dict else None  # drivers have an `info` of their own kind


def _begin(connection: Connection) -> None:
    """Begin explicitly: Python's sqlite3 begins no transaction for a savepoint, whose release would then commit."""
    driver = connection.connection.driver_connection
    if driver is not None and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")


_OFF: Final = 0  # PipelineStatus.OFF
_IDLE: Final = 0  # TransactionStatus.IDLE
_IN_TRANSACTION: Final = 2  # TransactionStatus.INTRANS
_WELL: Final = (1, 10)  # ExecStatus.COMMAND_OK, and PIPELINE_SYNC, which is the last answer


class PipelinedStatement(NamedTuple):
    """A statement that is sent often. psycopg's cache of prepared statements knows it by `query` and `types`."""

    query: bytes  # with $1, $2, ...
    types: tuple[int, ...]  # PostgreSQL's numbers of them
    formats: tuple[int, ...]  # of the values: 0 text, 1 binary


class PiggybackStatement(NamedTuple):
    statement: PipelinedStatement
    values: Sequence[bytes | None]


_COMMIT: Final = PiggybackStatement(PipelinedStatement(b"COMMIT", (), ()), ())


class _PreparedStatement(NamedTuple):
    """An entry of psycopg's cache, to be confirmed when its answer has arrived."""

    key: Any
    prepare: Any
    name: bytes
    answer: int  # the index of that answer


class CommitPiggyback:
    """Commits with piggyback statements, on connections of psycopg 3 for threads."""

    def __init__(self) -> None:
        from psycopg import errors, generators

        self._errors: Any = errors
        self._generators: Any = generators
        self._should: Any = None  # the cache's answer when a statement is to be prepared
        self._cache_type: type | None = self._try_cache()  # psycopg's class of caches; None: not the one known here

    @classmethod
    def on(cls, dialect: Dialect) -> CommitPiggyback | None:
        """None: connections of this dialect take no piggyback statements."""
        if (dialect.name, dialect.driver, dialect.is_async) != ("postgresql", "psycopg", False):
            return None
        from psycopg import Pipeline

        return cls() if Pipeline.is_supported() else None

    def _try_cache(self) -> type | None:
        """Try out all the operations used here, on a fresh cache; None: one of them works differently."""
        statement = PipelinedStatement(b"SELECT $1", (20,), (1,))
        try:
            from psycopg._preparing import Prepare, PrepareManager

            cache: Any = PrepareManager()
            prepare, name = cache.get(statement, True)
            if prepare is not Prepare.SHOULD or type(name) is not bytes:
                return None
            cache.validate(cache.maybe_add_to_cache(statement, prepare, name), prepare, name, [])
            self._should = prepare
            return PrepareManager
        except (ImportError, AttributeError, TypeError, ValueError):
            return None

    def has_room(self, driver: Any) -> bool:
        """Whether the driver is in a transaction that can be committed, and in no pipeline of its owner."""
        pgconn = driver.pgconn
        return bool(pgconn.transaction_status == _IN_TRANSACTION and pgconn.pipeline_status == _OFF)

    def is_idle(self, driver: Any) -> bool:
        """Whether the driver is in no transaction."""
        pgconn = driver.pgconn
        return bool(pgconn.transaction_status == _IDLE and pgconn.pipeline_status == _OFF)

    def commit(self, driver: Any, piggybacked: Sequence[PiggybackStatement]) -> None:
        """Raises what the driver would raise for the failed statement. Afterwards the connection is fit for a rollback,
        or closed, because it is unknown how far the database has come."""
        cache: Any = getattr(driver, "_prepared", None)
        if self._cache_type is None or type(cache) is not self._cache_type:
            cache = None
        pgconn = driver.pgconn
        entries: list[_PreparedStatement] = []
        with driver.lock:
            try:
                pgconn.enter_pipeline_mode()
                count = 0
                for piggyback_statement in (*piggybacked, _COMMIT):
                    count = self._send(pgconn, piggyback_statement, count, cache, entries)
                pgconn.pipeline_sync()
                answers = driver.wait(self._exchange(pgconn, count + 1))
            finally:
                self._leave(driver)
            for key, prepare, name, answer in entries:
                if answer < len(answers):  # else the connection has ended
                    cache.validate(key, prepare, name, answers[answer])
        for each in answers:
            if each[0].status not in _WELL:
                raise self._errors.error_from_result(each[0], encoding=driver.info.encoding)

    def _send(
        self,
        pgconn: Any,
        piggyback_statement: PiggybackStatement,
        count: int,
        cache: Any,
        entries: list[_PreparedStatement],
    ) -> int:
        """Queue a statement; returns how many answers are to come by now."""
        statement, values = piggyback_statement
        prepare, name = (None, b"") if cache is None else cache.get(statement)
        if name and prepare is self._should:
            pgconn.send_prepare(name, statement.query, statement.types)
            count += 1
        if name:
            pgconn.send_query_prepared(name, values, statement.formats)
        else:
            pgconn.send_query_params(statement.query, values, statement.types, statement.formats)
        if cache is not None and (key := cache.maybe_add_to_cache(statement, prepare, name)) is not None:
            entries.append(_PreparedStatement(key, prepare, name, count))
        return count + 1

    def _exchange(self, pgconn: Any, count: int) -> Generator[Any, Any, list[Any]]:
        """A generator for the driver's `wait`, which knows best how to wait for its socket."""
        yield from self._generators.send(pgconn)
        answers: list[Any] = []
        for _ in range(count):
            try:
                answers += [(yield from self._generators.fetch_many(pgconn))]
            except self._errors.DatabaseError:
                if all(each[0].status in _WELL for each in answers):
                    raise
                break  # the database has said why it ends the connection, and no more answers come
        return answers

    def _leave(self, driver: Any) -> None:
        """End the pipeline. After an interrupted wait some answers are missing: then only closing the connection is
        left."""
        try:
            driver.pgconn.exit_pipeline_mode()
        except self._errors.OperationalError:
            driver.close()
