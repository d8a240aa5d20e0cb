"""An SQLite file, and the thread that alone touches it.

A job travels: `run` on the loop → one queue → the thread, which does one job after the other → back to the loop. What a
job writes is on disk when `write` returns. No error of SQLite leaves: every one is a `StorageFault`. After any but
`DiskFull` nobody knows what is in the file, every later write is refused with the same fault, and `on_fault` is called.

The file has a write-ahead log, so that other programs can read the file meanwhile. But SQLite ends that log at the
first frame that fails its checksum: one flipped bit would undo every transaction behind it, unnoticed. So `write` moves
its transaction into the main file (`fold`), where checksums of rows can cover it, and empties the log before it
returns. A crash before that leaves one transaction in the log, which nobody has acknowledged. A rollback journal
would do as well and costs about the same, but a program that reads would hold up every write.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from fairway.errors import (
    DirectoryLocked,
    DirectoryMoved,
    DiskFull,
    Misuse,
    NoSuchFile,
    ReadOnlyDisk,
    StorageFault,
    WrongDirectory,
)
from fairway.world.real_file import open_private
from fairway.world.workers import Workers

T = TypeVar("T")
Statement: TypeAlias = tuple[str, Sequence[Any]]

_JOIN_S = 10.0
_BUSY_S = 2.0  # for somebody who looks at the file by hand
_WRITE_VERSION_AT = 18  # in the header of an SQLite file; 1 is a rollback journal, 2 a write-ahead log
_WRITE_VERSION_MAX = b"\x02"


class SqliteFile:
    """`read` and `write` are for jobs, on the thread; everything else is for the loop that opened it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._connection: sqlite3.Connection | None = None
        self._fault: StorageFault | None = None
        self._workers = Workers()
        self._is_closed = False
        self._is_folded = True
        self.on_fault: Callable[[StorageFault], None] = lambda _fault: None  # called once, on the loop

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_folded(self) -> bool:
        """Whether the main file has everything. Otherwise another program was reading it, or the disk was full."""
        return self._is_folded

    async def open(
        self, schema: Sequence[str], version: int, upgrade: Callable[[int], Sequence[Statement]] = lambda _: ()
    ) -> None:
        """The tables are made if the file is new; a file of a later version is refused. `upgrade` has what makes one of
        this version of a file of an earlier one; it runs on the thread, and may read."""
        self._workers.start("fairway-sqlite", self._serve)
        try:
            await self.run(lambda: self._open(schema, version, upgrade))
        except BaseException:
            self.close()
            raise

    async def run(self, job: Callable[[], T]) -> T:
        """Have a job done after all that were given before. It is done also if nobody waits for it any more."""
        if self._is_closed:
            raise Misuse(f"{self.path} is closed")
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

    def poison(self, fault: StorageFault) -> None:
        """Refuse every later write. On any thread."""
        if self._fault is None:
            self._fault = fault
            self.post(self.on_fault, fault)

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
        with faults(self.path):
            return self._opened().execute(sql).fetchall()

    def write(self, statements: Iterable[Statement]) -> None:
        """All of them or none, and durably."""
        if self._fault is not None:
            raise self._fault
        connection = self._opened()
        try:
            with faults(self.path):
                connection.execute("BEGIN IMMEDIATE")
                for sql, values in statements:
                    connection.execute(sql, values)
                connection.execute("COMMIT")
        except StorageFault as fault:
            with contextlib.suppress(sqlite3.Error):  # it may have rolled back by itself
                connection.execute("ROLLBACK")
            if not isinstance(fault, DiskFull):
                self.poison(fault)
            raise
        self.fold()

    def fold(self) -> None:
        """Move the log into the main file and empty it. While another program reads, or the disk is full, the log
        stays: the transaction is durable there, and the owner calls again."""
        connection = self._opened()
        try:
            with faults(self.path):
                connection.execute("PRAGMA busy_timeout=0")  # writers do not wait for readers
                try:
                    [(is_busy, *_)] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    connection.execute(f"PRAGMA busy_timeout={int(_BUSY_S * 1000)}")
        except DiskFull:
            is_busy = 1
        except StorageFault as fault:
            self.poison(fault)
            raise
        self._is_folded = not is_busy

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()
        if isinstance(self._fault, DirectoryMoved):
            # SQLite deletes its journal by path when it closes: that may be the journal of another registry by now.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        elif self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # all that counts is on disk
                self._connection.close()

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageFault(f"{self.path} is not open")
        return self._connection

    def _open(self, schema: Sequence[str], version: int, upgrade: Callable[[int], Sequence[Statement]]) -> None:
        _check_files(self.path)
        os.close(open_private(self.path, self.path, os.O_RDWR | os.O_CREAT))  # SQLite makes its log with the same mode
        with faults(self.path):
            connection = self._connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")  # others may look meanwhile
            connection.execute("PRAGMA synchronous=FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > version:
            raise WrongDirectory(f"{self.path} was written by a later version of Fairway: use that one, or newer")
        if found < version:
            steps = upgrade(found) if found else [(sql, ()) for sql in schema]
            self.write([*steps, (f"PRAGMA user_version={version}", ())])


def look(path: str, *queries: str) -> list[list[tuple[Any, ...]]]:
    """What these queries find in a file that somebody may be using. Nothing is written."""
    _check_files(path)
    _check_writable(path)
    is_idle = not os.path.exists(f"{path}-wal")  # whoever uses it has one; without it nothing is made beside the file
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro{'&immutable=1' if is_idle else ''}"
    with faults(path), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as connection:
        connection.execute("BEGIN")  # all queries see the same transaction
        return [connection.execute(query).fetchall() for query in queries]


def _check_files(path: str) -> None:
    """`StorageFault` where the file, its log or its index is a link or no regular file: SQLite would follow it."""
    for each in (path, f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(NoSuchFile, ReadOnlyDisk):  # SQLite says what is wrong with it
            os.close(open_private(each, each, os.O_RDONLY))


def _check_writable(path: str) -> None:
    """SQLite reads a file whose write version it does not know, and refuses every change to it: so a look would find
    nothing wrong where an owner cannot start."""
    try:
        with open(path, "rb") as file:
            write_version = file.read(_WRITE_VERSION_AT + 1)[_WRITE_VERSION_AT:]
    except OSError:
        return  # SQLite says what is wrong with it
    if write_version > _WRITE_VERSION_MAX:
        raise StorageFault(f"{path} cannot be written: its header names the write version {write_version[0]}")


@contextlib.contextmanager
def faults(path: str) -> Iterator[None]:
    """Errors of SQLite become faults that name the file and the remedy."""
    try:
        yield
    except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:  # made up by a flipped bit
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise DiskFull(f"no room for {path}: free some, then try again") from error
        if code == sqlite3.SQLITE_BUSY:
            raise DirectoryLocked(f"{path} is being written by another program: stop that one") from error
        if code == sqlite3.SQLITE_NOTADB:
            raise WrongDirectory(f"{path} is not an SQLite file: move it away, or name another") from error
        raise StorageFault(f"{path} cannot be used: {error}") from error


def _answer(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
