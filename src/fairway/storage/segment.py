"""A segment: one file of a log, named by the position of its first byte.

Positions count every byte of the log, segment headers too. So `position - base` is the offset in the file, and a
replica's files equal the master's, byte for byte. A segment opens with a 64-byte header; the records follow.

`SegmentScan` reads a segment from end to end: every intact record, and every span that holds none. Recovery, the
rebuild of a view and `fairway verify` all read through it, so that they agree on what is intact. Whether a damaged span
is torn or rotten is decided in `recovery`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fairway import limits
from fairway.batch import checksum
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import Disk, File
from fairway.storage import record
from fairway.storage.record import BadRecord, Record, RecordHeader

MAGIC = b"FWYSEG\r\n"  # a copy made in text mode changes the line ending, and so shows
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQQQ20x")  # magic, version, header length, must, may, log id, base, epoch
_CRC = struct.Struct("<I")
HEADER_BYTES = _COVERED.size + _CRC.size
SUFFIX = ".log"


@dataclass(slots=True)
class Segment:
    """One file of a log. `end` is the position after its last record; in the newest segment it moves."""

    base: int
    end: int
    newest_ms: int = 0  # append time of its last record
    set_back_ms: int = 0  # append time of its first record, where the segment before it ends with a later one; else 0


class UnknownVersion(RemoteProtocolError):
    """The segment was written by a newer version."""


def file_name(directory: str, base: int) -> str:
    return f"{directory}/{base:020d}{SUFFIX}"


def base_of(name: str) -> int | None:
    """The base in a file name; None where the file is not a segment."""
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix != SUFFIX or len(stem) != 20 or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def bases(disk: Disk, directory: str) -> list[int]:
    """The bases of the segments in a directory, in order."""
    return [base for name in disk.listing(directory) if (base := base_of(name)) is not None]


def pack_header(log_id: int, base: int, epoch: int) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, log_id, base, epoch)
    return covered + _CRC.pack(checksum(covered))


def parse_header(data: bytes) -> tuple[int, int]:
    """(log id, base) of a segment header; `RemoteProtocolError` where the bytes are none."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("the segment header is cut short")
    covered = data[: _COVERED.size]
    magic, version, header_bytes, must_flags, _, log_id, base, _ = _COVERED.unpack(covered)
    if magic != MAGIC:
        raise RemoteProtocolError("the segment header has no magic")
    if _CRC.unpack_from(data, _COVERED.size)[0] != checksum(covered):
        raise RemoteProtocolError("the segment header fails its checksum")
    if version != VERSION or must_flags or header_bytes != HEADER_BYTES:
        raise UnknownVersion(
            f"segment format version {version} is newer than this program, which reads {VERSION}: "
            "use the version that wrote it"
        )
    return log_id, base


CHUNK_BYTES = 4 * limits.MIB

MISSING = "missing"  # the file, or its end, is not there
STALE = "stale"  # the header is sound, but belongs to another record than the lost one


@dataclass(frozen=True, slots=True)
class Damage:
    """A span of a log that holds no intact record; `header` if the record's own header survived."""

    start: int
    end: int
    why: str
    header: RecordHeader | None = None


def check_segment_header(file: File, base: int, log_id: int) -> Damage | None:
    """The damage of a segment's header, if any. A segment of another log or place is damaged as a whole."""
    try:
        own_log, own_base = parse_header(file.read(0, HEADER_BYTES))
    except UnknownVersion as error:
        raise WrongDirectory(f"{file.name}: {error}") from error
    except RemoteProtocolError as error:
        return Damage(base, base + min(HEADER_BYTES, file.size), str(error))
    if (own_log, own_base) != (log_id, base):
        return Damage(base, base + file.size, "misplaced")
    return None


class SegmentScan:
    """Walks over the records of one segment from `start` to `limit`; yields `Record` and `Damage`, in order, no
    gaps."""

    def __init__(
        self, file: File, base: int, start: int, log_id: int, *, epoch: int = 0, limit: int | None = None
    ) -> None:
        self._file = file
        self._base = base
        self._log_id = log_id
        self._epoch = epoch  # a record of an older epoch than the one before it is stale
        self._position = start
        self._limit = base + file.size if limit is None else min(limit, base + file.size)
        self._data = b""
        self._data_at = start

    def __iter__(self) -> Iterator[Record | Damage]:
        while self._position < self._limit:
            try:
                found = self._record()
            except BadRecord as bad:
                end = bad.header.end if bad.header is not None else self._next_record()
                damage = Damage(self._position, min(end, self._limit), bad.why, bad.header)
                self._position = damage.end
                yield damage
            else:
                self._position = found.header.end
                yield found

    def _record(self) -> Record:
        self._have(record.HEADER_BYTES)
        offset = self._position - self._data_at
        header = record.parse_header(self._data, offset, self._position, self._log_id)
        if header.end > self._limit:
            raise BadRecord("cut short", header)
        if header.epoch < self._epoch:
            raise BadRecord(STALE, header)
        self._have(record.HEADER_BYTES + header.body_bytes)
        body_at = header.body_at - self._data_at
        body = self._data[body_at : body_at + header.body_bytes]
        record.check_body(header, body)
        self._epoch = header.epoch
        return Record(header, body)

    def _have(self, size: int) -> None:
        """Load `size` bytes from the current position on, or all that there are."""
        if self._position - self._data_at + size > len(self._data):
            want = min(max(size, CHUNK_BYTES), self._limit - self._position)
            self._data = self._file.read(self._position - self._base, want)
            self._data_at = self._position

    def _next_record(self) -> int:
        """The position of the next record after a damaged one; the end of the segment if there is none."""
        position = self._position + record.ALIGNMENT
        while position < self._limit:
            data = self._file.read(position - self._base, min(CHUNK_BYTES, self._limit - position))
            found = record.find_header(data, 0, position, self._log_id)
            if found is not None:
                return position + found
            if position + len(data) >= self._limit:
                break
            position += len(data) - record.HEADER_BYTES  # a header may straddle the two chunks
        return self._limit
