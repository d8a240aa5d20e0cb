"""What an engine does with its transactions, told to those who must know.

SQLAlchemy's own events would do, but for their price: with any listener on an engine every statement costs a fifth
more, also in transactions that send nothing. So the few methods of the engine's dialect by which it makes savepoints,
commits and rolls back are wrapped instead, once for each engine. That also says exactly when a commit is done, for
which there is no event. And it lets what is written last travel with the commit, in one exchange with the database,
where the driver can do that (`riding`).
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from sqlalchemy import Connection, Dialect, Engine

from fairway.sql.riding import CommitPiggyback, PiggybackStatement

_NAME: Final = "_fairway_hooks"


class TransactionListener(Protocol):
    """`info` is what SQLAlchemy keeps with a connection to the database, as long as that lives."""

    def before_commit(self, info: dict[Any, Any], connection: Any, *, may_ride: bool) -> PiggybackStatement | None:
        """The database is about to be told; what is said to it now belongs to the transaction, and so does what may go
        along with the commit. May raise."""

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
        self.listeners: tuple[TransactionListener, ...] = ()
        self._commit = dialect.do_commit
        self._rollback = dialect.do_rollback
        self._savepoint = dialect.do_savepoint
        self._rollback_to = dialect.do_rollback_to_savepoint
        self._prepare = dialect.do_prepare_twophase
        self._commit_twophase = dialect.do_commit_twophase
        self._rollback_twophase = dialect.do_rollback_twophase
        self._is_sqlite = dialect.name == "sqlite"
        self._riding = CommitPiggyback.on(dialect)
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
            self._commit_all(info, dbapi_connection)
        except BaseException:
            self._forget(info)
            raise
        for each in self.listeners:
            each.committed(info)

    def _commit_all(self, info: dict[Any, Any], dbapi_connection: Any) -> None:
        riding = self._riding
        if riding is None or not riding.has_room(driver := dbapi_connection.driver_connection):
            self._before_commit(info, dbapi_connection, may_ride=False)
            self._commit(dbapi_connection)
            return
        riders = self._before_commit(info, dbapi_connection, may_ride=True)
        if not riders:
            self._commit(dbapi_connection)
            return
        try:
            riding.commit(driver, riders)
        except BaseException:
            if not driver.closed:
                self._rollback(dbapi_connection)
            raise

    def _before_commit(
        self, info: dict[Any, Any], dbapi_connection: Any, *, may_ride: bool
    ) -> list[PiggybackStatement]:
        """Where that fails nothing of the transaction must remain: SQLAlchemy takes a transaction whose commit has
        failed for ended, and would let the next one go on in it."""
        riders = []
        try:
            for each in self.listeners:
                rider = each.before_commit(info, dbapi_connection, may_ride=may_ride)
                if rider is not None:
                    riders.append(rider)
        except BaseException:
            self._rollback(dbapi_connection)
            raise
        return riders

    def rollback(self, dbapi_connection: Any) -> None:
        info = _info(dbapi_connection)
        if info is not None:
            self._forget(info)
            if self._riding is not None and self._riding.is_idle(dbapi_connection.driver_connection):
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
        self._before_commit(connection.info, connection.connection, may_ride=False)
        self._prepare(connection, xid)

    def commit_twophase(
        self, connection: Connection, xid: Any, is_prepared: bool = True, recover: bool = False
    ) -> None:
        info = connection.info
        try:
            self._before_commit(info, connection.connection, may_ride=False)
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
