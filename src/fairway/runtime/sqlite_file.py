"""An SQLite file, the thread that alone touches it, and a check of its write-ahead log.

`has_lost_commits` tells whether a disk has damaged synced changes in the log. SQLite ends the log at the first frame
that fails its checksum. That is right for a write that a crash has torn, and wrong for a flipped bit: all later
transactions are dropped without a word. SQLite (`synchronous=FULL`) syncs a transaction before it writes the first
frame of the next one. So a bad frame is rot if a later frame ends its transaction and yet another frame continues from
there. Each frame's checksum continues that of the frame before it. Frames that an earlier crash left behind continue
nothing, and do not count. The format is https://sqlite.org/fileformat2.html#the_write_ahead_log.

A bad frame in the last transaction looks like a torn write. So `SqliteFile.write` leaves no acknowledged transaction in
the log. The check is for logs that `write` could not empty, and for logs of earlier versions.

`SqliteFile` runs jobs: `run` on the loop puts a job into one queue, the thread does one job after the other, and the
result goes back to the loop. When `write` returns, its changes are on disk. Every error of SQLite becomes a
`StorageFault`. After any fault but `DiskFull` nobody knows what is in the file: every later write is refused with the
same fault, and `on_fault` is called.

The file has a write-ahead log, so that other programs can read the file meanwhile. But one flipped bit in that log
would undo every transaction behind it, unnoticed. So `write` moves its transaction into the main file (`fold`), where
checksums of rows can cover it, and empties the log before it returns. A crash before that leaves one transaction in the
log, which nobody has acknowledged. A rollback journal would do as well and costs about the same, but a program that
reads would hold up every write.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias, TypeVar
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
from fairway.runtime.file_system import open_private
from fairway.runtime.threads import Workers

_HEADER = struct.Struct(">IIII8sII")  # magic, version, page size, checkpoint, salts, checksum
_FRAME = struct.Struct(">II8sII")  # page number, pages after a commit or 0, salts, checksum
_SUMMED = 8  # bytes of a frame's header that its checksum covers
_MAGIC = 0x377F0682  # its last bit: the checksums read words as big-endian
_PAGE_SIZES = frozenset(1 << bits for bits in range(9, 17))
_PAGE_SIZE_AT = 16  # in the main file

_Order = Literal["<", ">"]
_Sum = tuple[int, int]


class _WalFrame(NamedTuple):
    is_commit: bool
    salts: bytes
    checksum: _Sum
    content: bytes  # under the checksum


def has_lost_commits(path: str) -> bool:
    """Whether SQLite would open the file at `path` without transactions that its log has. Changes nothing."""
    try:
        with open(path, "rb") as main, open(f"{path}-wal", "rb") as log:
            return _has_lost_commits(main, log)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageFault(f"{path}-wal cannot be read: {error}") from error


def _has_lost_commits(main: BinaryIO, log: BinaryIO) -> bool:
    header = log.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return False
    magic, _, page_bytes, _, salts, *checksum = _HEADER.unpack(header)
    if magic & ~1 == _MAGIC and page_bytes in _PAGE_SIZES:
        order: _Order = ">" if magic & 1 else "<"
        computed = _checksum(order, (0, 0), header[: _HEADER.size - 8])
        if computed == tuple(checksum):
            return _continues_after_damage(order, _frames(log, page_bytes), salts, computed)
    # SQLite ignores a log with a bad header. Its frames still tell the byte order, and the main file the page size.
    main.seek(_PAGE_SIZE_AT)
    page_bytes = int.from_bytes(main.read(2))
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
    if page_bytes not in _PAGE_SIZES:
        return False  # the main file has no pages, or is not one of SQLite
    orders: tuple[_Order, ...] = ("<", ">")
    for order in orders:
        log.seek(_HEADER.size)
        if _continues_after_damage(order, _frames(log, page_bytes), None, None):
            return True
    return False


def _frames(log: BinaryIO, page_bytes: int) -> Iterator[_WalFrame]:
    while len(data := log.read(_FRAME.size + page_bytes)) == _FRAME.size + page_bytes:
        _, pages, salts, *checksum = _FRAME.unpack_from(data)
        yield _WalFrame(pages > 0, salts, (checksum[0], checksum[1]), data[:_SUMMED] + data[_FRAME.size :])


def _continues_after_damage(
    order: _Order, frames: Iterator[_WalFrame], salts: bytes | None, checksum: _Sum | None
) -> bool:
    """Whether a transaction follows a commit that is in or behind the first bad frame. Without `salts` and a
    `checksum`, the first frame counts as bad, and its salts as those of the log."""
    is_damaged = is_after_commit = False
    for frame in frames:
        follows = (
            checksum is not None
            and frame.salts == salts
            and frame.checksum == _checksum(order, checksum, frame.content)
        )
        if follows and is_damaged and is_after_commit:
            return True
        is_damaged = is_damaged or not follows
        is_after_commit = is_damaged and frame.is_commit
        salts = salts or frame.salts
        checksum = frame.checksum
    return False


def _checksum(order: _Order, start: _Sum, data: bytes) -> _Sum:
    first, second = start
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


T = TypeVar("T")
Statement: TypeAlias = tuple[str, Sequence[Any]]

_JOIN_S = 10.0
_BUSY_S = 2.0  # for an operator who looks at the file by hand
_WRITE_VERSION_AT = 18  # in the header of an SQLite file; 1 is a rollback journal, 2 a write-ahead log
_WRITE_VERSION_MAX = b"\x02"


class SqliteFile:
    """`read` and `write` are for jobs, on the thread; all other methods are for the loop that opened the file."""

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
        """Whether the main file has everything. Otherwise another program was reading the log, or the disk was full."""
        return self._is_folded

    async def open(
        self, schema: Sequence[str], version: int, upgrade: Callable[[int], Sequence[Statement]] = lambda _: ()
    ) -> None:
        """Make the tables of a new file; refuse a file of a later version. `upgrade` returns the statements that bring
        a file of an earlier version to this one; it runs on the thread, and may read."""
        self._workers.start("fairway-sqlite", self._serve)
        try:
            await self.run(lambda: self._open(schema, version, upgrade))
        except BaseException:
            self.close()
            raise

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job after all earlier ones. It runs even if its caller has stopped waiting."""
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
        """From a job: have the loop make this call, before the job's caller gets the result."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """Finish the jobs given before, then close the file."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
            self._workers.join(_JOIN_S)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def read(self, sql: str) -> list[tuple[Any, ...]]:
        with faults(self.path):
            return self._opened().execute(sql).fetchall()

    def write(self, statements: Iterable[Statement]) -> None:
        """Apply all statements or none, durably."""
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
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
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
            # SQLite deletes its journal by path when it closes. That path may lead to another registry's journal now.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        elif self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # everything that counts is on disk
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
            connection.execute("PRAGMA journal_mode=WAL")  # other programs may read meanwhile
            connection.execute("PRAGMA synchronous=FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > version:
            raise WrongDirectory(f"{self.path} was written by a later version of Fairway: use that one, or newer")
        if found < version:
            steps = upgrade(found) if found else [(sql, ()) for sql in schema]
            self.write([*steps, (f"PRAGMA user_version={version}", ())])


def look(path: str, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The results of these queries on a file that may be in use. Nothing is written."""
    _check_files(path)
    _check_writable(path)
    is_idle = not os.path.exists(f"{path}-wal")  # a user has one; without it SQLite must make no file beside this one
    uri = f"file:{quote(os.path.abspath(path))}?mode=ro{'&immutable=1' if is_idle else ''}"
    with faults(path), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as connection:
        connection.execute("BEGIN")  # all queries see the same transaction
        return [connection.execute(query).fetchall() for query in queries]


def _check_files(path: str) -> None:
    """`StorageFault` if the file, its log or its index is a link or no regular file: SQLite would follow a link."""
    for each in (path, f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(NoSuchFile, ReadOnlyDisk):  # SQLite reports these
            os.close(open_private(each, each, os.O_RDONLY))


def _check_writable(path: str) -> None:
    """Refuse an unknown write version. SQLite reads a file of that kind, and refuses every change: without this check
    `look` would find nothing wrong where an owner cannot start."""
    try:
        with open(path, "rb") as file:
            write_version = file.read(_WRITE_VERSION_AT + 1)[_WRITE_VERSION_AT:]
    except OSError:
        return  # SQLite reports the problem
    if write_version > _WRITE_VERSION_MAX:
        raise StorageFault(f"{path} cannot be written: its header names the write version {write_version[0]}")


@contextlib.contextmanager
def faults(path: str) -> Iterator[None]:
    """Turn errors of SQLite into faults that name the file and the remedy."""
    try:
        yield
    except (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError) as error:  # a flipped bit can cause each
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
