"""The record of a spool's journal: 56 bytes of header and a body, both multiples of 8 with a CRC-32C each.

As in the broker's logs a record names the journal it belongs to and its own position, so that one in the wrong place is
never taken for a right one, and *the synced end known when it was written*: what lies below it was once safely on disk,
so damage there is rot, and damage above may simply never have arrived.

    ENTRY   one batch (or whatever the owner keeps), with its number in the journal
    MARKS   entries that are done with; how far entries may have been sent; streams that were begun anew
    HEAD    the first of each segment: what of the marks before it still matters

Nothing here needs more than the core install.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

from fairway import limits
from fairway.batch.checksum import checksum
from fairway.errors import WrongDirectory

MAGIC = b"FWS1"
VERSION = 1
ALIGNMENT = 8

# magic, version, kind, header length | journal | position | synced end | time ms | body length, body CRC | header CRC
_COVERED = struct.Struct("<4sBBHQQQqII")
_WHOLE = struct.Struct("<4sBBHQQQqIII4x")
HEADER_BYTES = _WHOLE.size
_ENTRY = struct.Struct("<QIHBxI4x")  # number, messages, length of the subject, was sent, length of the data
_MARK = struct.Struct("<Q")
BODY_BYTES_MAX = limits.BATCH_RAW_BYTES_MAX + limits.MIB


class Kind(enum.IntEnum):
    ENTRY = 1
    MARKS = 2
    HEAD = 3


class Record(NamedTuple):
    """A verified record; its body may be longer than what is in it, by padding."""

    kind: int
    position: int
    synced_end: int
    time_ms: int
    body: bytes

    @property
    def end(self) -> int:
        return self.position + HEADER_BYTES + len(self.body)


class Entry(NamedTuple):
    """Something that is kept."""

    number: int
    subject: str
    messages: int
    was_sent: bool
    data: bytes


class Restream(msgspec.Struct, frozen=True, array_like=True):
    """From a sequence on, what was to be in one stream is in another, whose sequences begin at 0."""

    old_id: int
    first: int
    new_id: int


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """What has become of entries."""

    done: list[int] = []
    sent: int = 0  # entries with smaller numbers may have been sent
    restreams: list[Restream] = []


class BadRecord(Exception):
    """The bytes at a position are not the record that belongs there."""


class CutShort(BadRecord):
    """So many bytes are needed."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("cut short")
        self.size_bytes = size_bytes


def pack(kind: Kind, journal: int, position: int, synced_end: int, time_ms: int, body: bytes) -> bytes:
    """A whole record."""
    body += bytes(-len(body) % ALIGNMENT)
    covered = _COVERED.pack(
        MAGIC, VERSION, kind, HEADER_BYTES, journal, position, synced_end, time_ms, len(body), checksum(body)
    )
    return covered + checksum(covered).to_bytes(4, "little") + bytes(4) + body


def parse(data: bytes, offset: int, position: int, journal: int) -> Record:
    """The record at `offset` of `data`, which must be the one that belongs at `position`."""
    if len(data) - offset < HEADER_BYTES:
        raise CutShort(HEADER_BYTES)
    magic, version, kind, header_bytes, own_journal, own_position, synced_end, time_ms, size, body_crc, crc = (
        _WHOLE.unpack_from(data, offset)
    )
    if magic != MAGIC or crc != checksum(data[offset : offset + _COVERED.size]):
        raise BadRecord("unreadable header")
    if (own_journal, own_position) != (journal, position) or size % ALIGNMENT or size > BODY_BYTES_MAX:
        raise BadRecord("misplaced")
    if version != VERSION or header_bytes != HEADER_BYTES or kind not in (Kind.ENTRY, Kind.MARKS, Kind.HEAD):
        raise WrongDirectory(f"a spool's record at {position} is of a newer format: drain it with what wrote it")
    body = data[offset + HEADER_BYTES : offset + HEADER_BYTES + size]
    if len(body) < size:
        raise CutShort(HEADER_BYTES + size)
    if checksum(body) != body_crc:
        raise BadRecord("damaged body")
    return Record(kind, position, synced_end, time_ms, body)


def find(data: bytes, offset: int, position: int, journal: int) -> Record | None:
    """The next whole record from `offset` on; `position` is that of data[0]."""
    at = data.find(MAGIC, offset)
    while at >= 0:
        if (position + at) % ALIGNMENT == 0:
            try:
                return parse(data, at, position + at, journal)
            except BadRecord:
                pass
        at = data.find(MAGIC, at + 1)
    return None


def entry_body(entry: Entry) -> bytes:
    subject = entry.subject.encode()
    head = _ENTRY.pack(entry.number, entry.messages, len(subject), entry.was_sent, len(entry.data))
    return b"".join((head, subject, bytes(-len(subject) % ALIGNMENT), entry.data))


def entry_of(body: bytes) -> Entry:
    number, messages, subject_bytes, was_sent, data_bytes = _ENTRY.unpack_from(body)
    subject_end = _ENTRY.size + subject_bytes
    data_at = subject_end + -subject_bytes % ALIGNMENT
    subject = body[_ENTRY.size : subject_end].decode()
    return Entry(number, subject, messages, bool(was_sent), body[data_at : data_at + data_bytes])


def entry_size(subject: str, data_bytes: int) -> int:
    """Bytes of such a record in the journal."""
    subject_bytes = len(subject.encode())
    whole = _ENTRY.size + subject_bytes + -subject_bytes % ALIGNMENT + data_bytes
    return HEADER_BYTES + whole + -whole % ALIGNMENT


def marks_body(marks: Marks) -> bytes:
    said = msgspec.msgpack.encode(marks)
    return _MARK.pack(len(said)) + said


def marks_of(body: bytes) -> Marks:
    (size,) = _MARK.unpack_from(body)
    return msgspec.msgpack.decode(body[_MARK.size : _MARK.size + size], type=Marks)
