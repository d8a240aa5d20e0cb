"""The record of a spool's journal: 56 bytes of header and a body, both multiples of 8 with a CRC-32C each.

As in the broker's logs a record names the journal it belongs to and its own position, so that one in the wrong place is
never taken for a right one, and *the synced end known when it was written*: what lies below it was once safely on disk,
so damage there is rot, and damage above may simply never have arrived.

    ENTRY   one batch (or whatever the owner keeps), with its number in the journal
    MARKS   entries that are done with; how far entries may have been sent; streams that were begun anew
    HEAD    the first of each segment: what of the marks before it still matters

Version 2 is that of a journal of a client of a cluster: an entry names the group of brokers that it was meant for, and
marks say which entries are about to be sent where, and under which number. Versions 3 and 4 are the same two with a key
in every HEAD and MARKS, from which the secrets of all streams of the journal are derived.

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
CLUSTER_VERSION = 2
KEYED_VERSION = 3
KEYED_CLUSTER_VERSION = 4
_VERSIONS = frozenset({VERSION, CLUSTER_VERSION, KEYED_VERSION, KEYED_CLUSTER_VERSION})
ALIGNMENT = 8

# magic, version, kind, header length | journal | position | synced end | time ms | body length, body CRC | header CRC
_COVERED = struct.Struct("<4sBBHQQQqII")
_WHOLE = struct.Struct("<4sBBHQQQqIII4x")
HEADER_BYTES = _WHOLE.size
# number, messages, length of the subject, was sent, length of the group, length of the data, how many numbers before it
# stood the entry that it takes the place of (0: of none)
_ENTRY = struct.Struct("<QIHBBII")
_MARK = struct.Struct("<Q")
BODY_BYTES_MAX = limits.BATCH_RAW_BYTES_MAX + limits.MIB


class SpoolRecordKind(enum.IntEnum):
    ENTRY = 1
    MARKS = 2
    HEAD = 3


class SpoolRecord(NamedTuple):
    """A verified record; its body may be longer than what is in it, by padding."""

    kind: int
    position: int
    synced_end: int
    time_ms: int
    body: bytes
    version: int = VERSION

    @property
    def end(self) -> int:
        return self.position + HEADER_BYTES + len(self.body)


class SpoolEntry(NamedTuple):
    """Something that is kept."""

    number: int
    subject: str
    messages: int
    was_sent: bool
    data: bytes
    group: str = ""  # of brokers that it was meant for; where it was sent, if it was
    instead: int | None = None  # of the entry with this number, which is done with from here on


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


class PlacementRecord(msgspec.Struct, frozen=True, array_like=True):
    """An entry is about to be sent to a group of brokers, under this number: from here on it may be stored there."""

    number: int
    group: str
    stream: int
    first: int


class ClusterMarks(Marks, frozen=True, array_like=True):
    """The same in a cluster."""

    placed: list[PlacementRecord] = []


class KeyedMarks(ClusterMarks, frozen=True, array_like=True):
    """The same with the key of the journal, in a cluster or not."""

    key: bytes = b""


class BadSpoolRecord(Exception):
    """The bytes at a position are not the record that belongs there."""


class CutShort(BadSpoolRecord):
    """So many bytes are needed."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("cut short")
        self.size_bytes = size_bytes


def pack(
    kind: SpoolRecordKind,
    journal: int,
    position: int,
    synced_end: int,
    time_ms: int,
    body: bytes,
    version: int = VERSION,
) -> bytes:
    """A whole record."""
    body += bytes(-len(body) % ALIGNMENT)
    covered = _COVERED.pack(
        MAGIC, version, kind, HEADER_BYTES, journal, position, synced_end, time_ms, len(body), checksum(body)
    )
    return covered + checksum(covered).to_bytes(4, "little") + bytes(4) + body


def parse(data: bytes, offset: int, position: int, journal: int) -> SpoolRecord:
    """The record at `offset` of `data`, which must be the one that belongs at `position`."""
    if len(data) - offset < HEADER_BYTES:
        raise CutShort(HEADER_BYTES)
    magic, version, kind, header_bytes, own_journal, own_position, synced_end, time_ms, size, body_crc, crc = (
        _WHOLE.unpack_from(data, offset)
    )
    if magic != MAGIC or crc != checksum(data[offset : offset + _COVERED.size]):
        raise BadSpoolRecord("unreadable header")
    if (own_journal, own_position) != (journal, position) or size % ALIGNMENT or size > BODY_BYTES_MAX:
        raise BadSpoolRecord("misplaced")
    is_known = version in _VERSIONS and header_bytes == HEADER_BYTES
    if not is_known or kind not in (SpoolRecordKind.ENTRY, SpoolRecordKind.MARKS, SpoolRecordKind.HEAD):
        raise WrongDirectory(f"a spool's record at {position} is of a newer format: drain it with what wrote it")
    body = data[offset + HEADER_BYTES : offset + HEADER_BYTES + size]
    if len(body) < size:
        raise CutShort(HEADER_BYTES + size)
    if checksum(body) != body_crc:
        raise BadSpoolRecord("damaged body")
    return SpoolRecord(kind, position, synced_end, time_ms, body, version)


def find(data: bytes, offset: int, position: int, journal: int) -> SpoolRecord | None:
    """The next whole record from `offset` on; `position` is that of data[0]."""
    at = data.find(MAGIC, offset)
    while at >= 0:
        if (position + at) % ALIGNMENT == 0:
            try:
                return parse(data, at, position + at, journal)
            except BadSpoolRecord:
                pass
        at = data.find(MAGIC, at + 1)
    return None


def entry_body(entry: SpoolEntry) -> bytes:
    subject, group = entry.subject.encode(), entry.group.encode()
    back = 0 if entry.instead is None else entry.number - entry.instead
    head = _ENTRY.pack(entry.number, entry.messages, len(subject), entry.was_sent, len(group), len(entry.data), back)
    return b"".join((head, subject, group, bytes(-(len(subject) + len(group)) % ALIGNMENT), entry.data))


def entry_of(body: bytes) -> SpoolEntry:
    number, messages, subject_bytes, was_sent, group_bytes, data_bytes, back = _ENTRY.unpack_from(body)
    subject_end = _ENTRY.size + subject_bytes
    group_end = subject_end + group_bytes
    data_at = group_end + -(subject_bytes + group_bytes) % ALIGNMENT
    subject, group = body[_ENTRY.size : subject_end].decode(), body[subject_end:group_end].decode()
    data, instead = body[data_at : data_at + data_bytes], number - back if back else None
    return SpoolEntry(number, subject, messages, bool(was_sent), data, group, instead)


def marks_body(marks: Marks) -> bytes:
    said = msgspec.msgpack.encode(marks)
    return _MARK.pack(len(said)) + said


def marks_of(body: bytes) -> KeyedMarks:
    (size,) = _MARK.unpack_from(body)
    return msgspec.msgpack.decode(body[_MARK.size : _MARK.size + size], type=KeyedMarks)
