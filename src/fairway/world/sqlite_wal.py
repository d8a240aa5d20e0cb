"""The write-ahead log of an SQLite file: whether a disk has damaged changes that were synced.

SQLite ends the log at the first frame that fails its checksum. That is right for a write that a crash has torn, and
wrong for a flipped bit: all later transactions are dropped without a word. `has_lost_commits` tells the two apart.
SQLite (`synchronous=FULL`) syncs a transaction before it writes the first frame of the next one. So a bad frame is rot
if a later frame ends its transaction and yet another frame continues from there. Each frame's checksum continues that
of the frame before it, so frames that an earlier crash left behind do not continue anything, and do not count.

A bad frame in the last transaction looks like a torn write. For this reason `SqliteFile.write` leaves no acknowledged
transaction in the log. This check is for logs that `write` could not empty, and for those of earlier versions.

The format is https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

from fairway.errors import StorageFault

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
    # SQLite ignores a log with a bad header. Frames tell their order themselves; the main file has their size.
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
    """Whether a transaction follows a commit that is in or behind the first bad frame. Without `salts` and a `checksum`
    to begin with, the first frame counts as bad, and its salts as those of the log."""
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
