"""An SQLite file, and the thread that alone touches it.

A job travels: `run` on the loop → one queue → the thread, which does one job after the other → back to the loop. What a
job writes is on disk when `write` returns. No error of SQLite leaves: every one is a `StorageFault`. After any but
`DiskFull` nobody knows what is in the file, and every later write is refused with the same fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from fairway.errors import DirectoryLocked, DiskFull, Misuse, StorageFault, WrongDirectory
from fairway.world.workers import Workers

T = TypeVar("T")
Statement: TypeAlias = tuple[str, Sequence[Any]]

_JOIN_S = 10.0
_BUSY_S = 2.0  # for somebody who looks at the file by hand


class SqliteFile:
    """`read` and `write` are for jobs, on the thread; everything else is for the loop that opened it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._connection: sqlite3.Connection | None = None
        self._fault: StorageFault | None = None
        self._workers = Workers()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def open(self, schema: Sequence[str], version: int) -> None:
        """The tables are made if the file is new; a file of a later version is refused."""
        self._workers.start("fairway-sqlite", self._serve)
        try:
            await self.run(lambda: self._open(schema, version))
        except BaseException:
            self.close()
            raise

    async def run(self, job: Callable[[], T]) -> T:
        """Have a job done after all that were given before. It is done also if nobody waits for it any more."""
        if self._is_closed:
            raise Misuse(f"{self._path} is closed")
        answer: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            try:
                result = job()
            except BaseException as error:
                self.post(_fail, answer, error)
            else:
                self.post(_answer, answer, result)

        self._jobs.put(work)
        return await answer

    def post(self, call: Callable[..., object], *args: object) -> None:
        """From a job: have the loop call this, before whoever gave the job hears of its end."""
        with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
            self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """Finish what was given, then let go of the file."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
            self._workers.join(_JOIN_S)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def read(self, sql: str) -> list[tuple[Any, ...]]:
        with self._faults():
            return self._opened().execute(sql).fetchall()

    def write(self, statements: Iterable[Statement]) -> None:
        """All of them or none, and durably."""
        if self._fault is not None:
            raise self._fault
        connection = self._opened()
        try:
            with self._faults():
                connection.execute("BEGIN IMMEDIATE")
                for sql, values in statements:
                    connection.execute(sql, values)
                connection.execute("COMMIT")
        except StorageFault as fault:
            with contextlib.suppress(sqlite3.Error):  # it may have rolled back by itself
                connection.execute("ROLLBACK")
            if not isinstance(fault, DiskFull):
                self._fault = fault
            raise

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # all that counts is on disk
                self._connection.close()

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageFault(f"{self._path} is not open")
        return self._connection

    def _open(self, schema: Sequence[str], version: int) -> None:
        with self._faults():
            connection = self._connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")  # one sync per commit, and others may look meanwhile
            connection.execute("PRAGMA synchronous=FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > version:
            raise WrongDirectory(f"{self._path} was written by a later version of Fairway: use that one, or newer")
        if found < version:
            self.write([(sql, ()) for sql in [*schema, f"PRAGMA user_version={version}"]])

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise DiskFull(f"no room for {self._path}: free some, then try again") from error
            if code == sqlite3.SQLITE_BUSY:
                raise DirectoryLocked(f"{self._path} is being written by another program: stop that one") from error
            if code == sqlite3.SQLITE_NOTADB:
                raise WrongDirectory(f"{self._path} is not an SQLite file: move it away, or name another") from error
            raise StorageFault(f"{self._path} cannot be used: {error}") from error


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
