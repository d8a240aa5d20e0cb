"""What an engine does with its transactions, told to those who must know.

SQLAlchemy's own events would do, but for their price: with any listener on an engine every statement costs a fifth
more, also in transactions that send nothing. So the few methods of the engine's dialect by which it makes savepoints,
commits and rolls back are wrapped instead, once for each engine. That also says exactly when a commit is done, for
which there is no event. And it lets what is written last travel with the commit, as text in one exchange with the
database, where the driver can do that: psycopg 3 can. (Its pipelines could too, for 70 µs more on our side of the wire:
a third of what a message costs a transaction.)
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from sqlalchemy import Connection, Dialect, Engine

_NAME: Final = "_fairway_hooks"
_CURSOR: Final = "fairway cursor"  # in a connection's `info`


class Listener(Protocol):
    """`info` is what SQLAlchemy keeps with a connection to the database, as long as that lives."""

    def words(self, info: dict[Any, Any]) -> str | None:
        """A statement that goes to the database right before COMMIT, whole and as text, instead of what `before_commit`
        would say; None: there is nothing to be said, or too much. May raise."""

    def before_commit(self, info: dict[Any, Any], connection: Any) -> None:
        """The database is about to be told; what is said to it now belongs to the transaction. May raise."""

    def committed(self, info: dict[Any, Any]) -> None:
        """It has answered that it is done. Must not raise."""

    def forget(self, info: dict[Any, Any]) -> None:
        """Rolled back, or failed, or nobody knows."""

    def savepoint(self, info: dict[Any, Any], name: str) -> None:
        """It is about to be made."""

    def rolled_back_to(self, info: dict[Any, Any], name: str) -> None:
        """What was done since then is undone."""


class Hooks:
    """The wrapped methods of one dialect, which belongs to one engine and those derived from it."""

    def __init__(self, dialect: Dialect) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._commit = dialect.do_commit
        self._rollback = dialect.do_rollback
        self._savepoint = dialect.do_savepoint
        self._rollback_to = dialect.do_rollback_to_savepoint
        self._prepare = dialect.do_prepare_twophase
        self._commit_twophase = dialect.do_commit_twophase
        self._rollback_twophase = dialect.do_rollback_twophase
        self._is_sqlite = dialect.name == "sqlite"
        self._takes_words = (dialect.name, dialect.driver) == ("postgresql", "psycopg") and not dialect.is_async
        for name in ("commit", "rollback", "savepoint", "rollback_to_savepoint"):
            setattr(dialect, f"do_{name}", getattr(self, name))
        for name in ("prepare_twophase", "commit_twophase", "rollback_twophase"):
            setattr(dialect, f"do_{name}", getattr(self, name))

    # --- what the dialect does now -----------------------------------------------------------------------------------

    def commit(self, dbapi_connection: Any) -> None:
        info = _info(dbapi_connection)
        if info is None:
            self._commit(dbapi_connection)
            return
        try:
            words = self._words(info, dbapi_connection) if self._takes_words_on(dbapi_connection) else []
            self._before_commit(info, dbapi_connection)
            if words:
                self._commit_with(words, info, dbapi_connection)
            else:
                self._commit(dbapi_connection)
        except BaseException:
            self._forget(info)
            raise
        for each in self.listeners:
            each.committed(info)

    def _takes_words_on(self, dbapi_connection: Any) -> bool:
        """Whether several statements may go in one text: not while its owner has it in a pipeline."""
        return self._takes_words and dbapi_connection.driver_connection.pgconn.pipeline_status == 0

    def _words(self, info: dict[Any, Any], dbapi_connection: Any) -> list[str]:
        try:
            return [words for each in self.listeners if (words := each.words(info)) is not None]
        except BaseException:
            self._rollback(dbapi_connection)
            raise

    def _commit_with(self, words: list[str], info: dict[Any, Any], dbapi_connection: Any) -> None:
        """What is to be said before the commit, and the commit, without waiting in between. If any of it fails the
        database does nothing of what comes behind it."""
        driver = dbapi_connection.driver_connection
        cursor = info.get(_CURSOR)
        if cursor is None or cursor.connection is not driver or cursor.closed:
            cursor = info[_CURSOR] = driver.cursor()  # kept: to make one takes 20 µs
        try:
            cursor.execute("; ".join((*words, "COMMIT")), prepare=False)
        except BaseException:
            if not driver.closed:
                self._rollback(dbapi_connection)
            raise

    def _before_commit(self, info: dict[Any, Any], dbapi_connection: Any) -> None:
        """Where that fails nothing of the transaction must remain: SQLAlchemy takes a transaction whose commit has
        failed for ended, and would let the next one go on in it."""
        try:
            for each in self.listeners:
                each.before_commit(info, dbapi_connection)
        except BaseException:
            self._rollback(dbapi_connection)
            raise

    def rollback(self, dbapi_connection: Any) -> None:
        info = _info(dbapi_connection)
        if info is not None:
            self._forget(info)
            if self._takes_words_on(dbapi_connection) and _is_idle(dbapi_connection):
                return  # as a pool does after every transaction: the driver takes 8 µs to find that out
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
        self._before_commit(connection.info, connection.connection)
        self._prepare(connection, xid)

    def commit_twophase(
        self, connection: Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        info = connection.info
        try:
            self._before_commit(info, connection.connection)
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
    """Those of an engine, made the first time."""
    found: Hooks | None = getattr(engine.dialect, _NAME, None)
    if found is None:
        found = Hooks(engine.dialect)
        setattr(engine.dialect, _NAME, found)
    return found


def _is_idle(dbapi_connection: Any) -> bool:
    """Whether a connection of psycopg 3 is in no transaction."""
    return bool(dbapi_connection.driver_connection.pgconn.transaction_status == 0)


def _info(dbapi_connection: Any) -> dict[Any, Any] | None:
    """None for a connection that is in no pool, such as the one by which an engine looks at its database."""
    try:
        info = dbapi_connection.info
    except (AttributeError, NotImplementedError):
        return None
    return info if type(info) is dict else None  # drivers have an `info` of their own kind


def _begin(connection: Connection) -> None:
    """Python's sqlite3 begins no transaction for a savepoint, and then its release would commit."""
    driver = connection.connection.driver_connection
    if driver is not None and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN")
