"""A statement that rides with COMMIT: both go to PostgreSQL in one exchange, and the answers come back in one.

Nobody waits for the answer to what is written last in a transaction before it commits. So it need not cost a round trip
of its own. And where it comes again and again the database need not read and plan it each time: psycopg prepares such
statements by itself. Riders join in that: they are counted, prepared and forgotten by the driver's own books, as if it
had executed them, because it also tells the database to forget them all, after every rollback. Those books are promised
to nobody, so they are tried out first; where they are kept in another way, riders are never prepared. Nor are they if a
program has forbidden it (`prepare_threshold=None`, as some poolers between program and database want it).

The exchange is libpq's pipeline mode, in its own words: the driver's own way into a pipeline takes as long as all that
is saved by it (bench/outbox). If a rider fails, the database does nothing of what comes behind it, so that the
transaction is not committed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Dialect

_OFF: Final = 0  # PipelineStatus.OFF
_IDLE: Final = 0  # TransactionStatus.IDLE
_IN_TRANSACTION: Final = 2  # TransactionStatus.INTRANS
_WELL: Final = (1, 10)  # ExecStatus.COMMAND_OK; PIPELINE_SYNC, which is the last answer


class PipelinedStatement(NamedTuple):
    """One that rides often. `query` and `types` are what the driver's books know it by."""

    query: bytes  # with $1, $2, ...
    types: tuple[int, ...]  # PostgreSQL's numbers of them
    formats: tuple[int, ...]  # of the values: 0 text, 1 binary


class PiggybackStatement(NamedTuple):
    statement: PipelinedStatement
    values: Sequence[bytes | None]


_COMMIT: Final = PiggybackStatement(PipelinedStatement(b"COMMIT", (), ()), ())


class _PreparedStatement(NamedTuple):
    """In the driver's books, to be confirmed when the answer to what it was made for is there."""

    key: Any
    prepare: Any
    name: bytes
    answer: int  # the number of that one


class CommitPiggyback:
    """Commits with riders, on connections of psycopg 3 for threads."""

    def __init__(self) -> None:
        from psycopg import errors, generators

        self._errors: Any = errors
        self._generators: Any = generators
        self._should: Any = None  # what books answer when a statement is to be prepared
        self._books: type | None = self._try_books()  # None: those that we know are not kept

    @classmethod
    def on(cls, dialect: Dialect) -> CommitPiggyback | None:
        """None: its connections take no riders."""
        if (dialect.name, dialect.driver, dialect.is_async) != ("postgresql", "psycopg", False):
            return None
        from psycopg import Pipeline

        return cls() if Pipeline.is_supported() else None

    def _try_books(self) -> type | None:
        """By all that is done with them, in books of nobody's."""
        statement = PipelinedStatement(b"SELECT $1", (20,), (1,))
        try:
            from psycopg._preparing import Prepare, PrepareManager

            books: Any = PrepareManager()
            prepare, name = books.get(statement, True)
            if prepare is not Prepare.SHOULD or type(name) is not bytes:
                return None
            books.validate(books.maybe_add_to_cache(statement, prepare, name), prepare, name, [])
            self._should = prepare
            return PrepareManager
        except (ImportError, AttributeError, TypeError, ValueError):
            return None

    def has_room(self, driver: Any) -> bool:
        """Whether it is in a transaction that can be committed, and not in a pipeline of its owner's."""
        pgconn = driver.pgconn
        return bool(pgconn.transaction_status == _IN_TRANSACTION and pgconn.pipeline_status == _OFF)

    def is_idle(self, driver: Any) -> bool:
        """Whether it is in no transaction."""
        pgconn = driver.pgconn
        return bool(pgconn.transaction_status == _IDLE and pgconn.pipeline_status == _OFF)

    def commit(self, driver: Any, riders: Sequence[PiggybackStatement]) -> None:
        """Raises what the driver would raise for the statement that failed; then the connection is fit for a rollback,
        or it is closed, because nobody knows how far the database has come."""
        books: Any = getattr(driver, "_prepared", None)
        if self._books is None or type(books) is not self._books:
            books = None
        pgconn = driver.pgconn
        entries: list[_PreparedStatement] = []
        with driver.lock:
            try:
                pgconn.enter_pipeline_mode()
                count = 0
                for rider in (*riders, _COMMIT):
                    count = self._send(pgconn, rider, count, books, entries)
                pgconn.pipeline_sync()
                answers = driver.wait(self._exchange(pgconn, count + 1))
            finally:
                self._leave(driver)
            for key, prepare, name, answer in entries:
                if answer < len(answers):  # else the connection has ended
                    books.validate(key, prepare, name, answers[answer])
        for each in answers:
            if each[0].status not in _WELL:
                raise self._errors.error_from_result(each[0], encoding=driver.info.encoding)

    def _send(
        self, pgconn: Any, rider: PiggybackStatement, count: int, books: Any, entries: list[_PreparedStatement]
    ) -> int:
        """How many answers there will be, with those that were to come before."""
        statement, values = rider
        prepare, name = (None, b"") if books is None else books.get(statement)
        if name and prepare is self._should:
            pgconn.send_prepare(name, statement.query, statement.types)
            count += 1
        if name:
            pgconn.send_query_prepared(name, values, statement.formats)
        else:
            pgconn.send_query_params(statement.query, values, statement.types, statement.formats)
        if books is not None and (key := books.maybe_add_to_cache(statement, prepare, name)) is not None:
            entries.append(_PreparedStatement(key, prepare, name, count))
        return count + 1

    def _exchange(self, pgconn: Any, count: int) -> Generator[Any, Any, list[Any]]:
        """For the driver's `wait`: how to wait for the socket it knows best."""
        yield from self._generators.send(pgconn)
        answers: list[Any] = []
        for _ in range(count):
            try:
                answers += [(yield from self._generators.fetch_many(pgconn))]
            except self._errors.DatabaseError:
                if all(each[0].status in _WELL for each in answers):
                    raise
                break  # the database has said why it ends the connection, and nothing more will come
        return answers

    def _leave(self, driver: Any) -> None:
        """Where not every answer was fetched, because the wait was interrupted, there is no way back."""
        try:
            driver.pgconn.exit_pipeline_mode()
        except self._errors.OperationalError:
            driver.close()
