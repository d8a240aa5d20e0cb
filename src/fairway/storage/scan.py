"""Reading a segment from end to end: every intact record, and every span that is not one.

Whoever reads a log in full (recovery, the rebuild of a view, `verify`) reads it through here, so that there is one
opinion on what is intact. Whether a damaged span is torn or rotten is not decided here: see `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fairway import limits
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.storage import record, segment
from fairway.storage.record import BadRecord, Record, RecordHeader
from fairway.world.disk import File

CHUNK_BYTES = 4 * limits.MIB

MISSING = "missing"  # the file, or its end, is not there
STALE = "stale"  # such a header is sound, but not that of the record that was lost


@dataclass(frozen=True, slots=True)
class Damage:
    """A span of a log that holds no intact record; `header` where the record's own header survived."""

    start: int
    end: int
    why: str
    header: RecordHeader | None = None


def check_segment_header(file: File, base: int, log_id: int) -> Damage | None:
    """What is wrong with the segment's header, if anything; a segment of another log or place is damaged as a whole."""
    try:
        own_log, own_base = segment.parse_header(file.read(0, segment.HEADER_BYTES))
    except segment.UnknownVersion as error:
        raise WrongDirectory(f"{file.name}: {error}") from error
    except RemoteProtocolError as error:
        return Damage(base, base + min(segment.HEADER_BYTES, file.size), str(error))
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
        """Make sure that `size` bytes from the position on are in memory, or all that there are."""
        if self._position - self._data_at + size > len(self._data):
            want = min(max(size, CHUNK_BYTES), self._limit - self._position)
            self._data = self._file.read(self._position - self._base, want)
            self._data_at = self._position

    def _next_record(self) -> int:
        """Where the next record after a damaged one begins; the end of the segment if nowhere."""
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
