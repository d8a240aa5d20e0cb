"""The files of a spool's journal: the bytes of its records, and recovery, which reads them after a crash.

A record has a header of 56 bytes and a body, both multiples of 8 bytes and each with a CRC-32C. As in the broker's
logs, a record names its journal and its own position, so that recovery never accepts a record in the wrong place. A
record also names the synced end that was known when it was written. Bytes below that end were safely on disk, so damage
there is rot. Bytes above may never have reached the disk.

    ENTRY   one batch (or whatever the owner keeps), with its number in the journal
    MARKS   which entries are done, how far entries may have been sent, which streams go on under a new producer id
    HEAD    the first record of each segment: the marks that still matter

    version   journal of
    1         a client with one broker
    2         a cluster client: entries name their broker group, and marks record where each entry is about to be sent
    3, 4      the same two, with a key in every HEAD and MARKS. The secrets of all streams derive from the key

A batch that the broker will never take, or whose fate nobody knows, goes to a file of its own (`Aside`).

Recovery (`JournalSurvey`) reads the segments in order, drops nothing silently, and classifies what it finds:

    sound        the record counts
    rotten       damaged, and a later sound record says that the synced end was beyond. The damaged piece is copied to
                 `kept` and reported, and the rest of the journal counts
    torn         damaged otherwise. Nothing from there on was ever confirmed. Everything from there on is cut off,
                 copied to `kept` and reported, even records that look sound

A record that is only in the page cache, because its process died before the sync, counts. `JournalSurvey.mend` writes
the last segment again and syncs it before the journal builds on that record.

The module needs nothing beyond the core install.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fairway import limits
from fairway.batch.checksum import checksum
from fairway.errors import RemoteProtocolError, StorageFault, WrongDirectory
from fairway.protocol.spool_port import Handed
from fairway.runtime.disk import Completion, Disk, File, contents

MAGIC = b"FWS1"
VERSION = 1
VERSIONS = {1: (False, False), 2: (False, True), 3: (True, False), 4: (True, True)}  # keyed, of a cluster client
ALIGNMENT = 8

# magic, version, kind, header length | journal | position | synced end | time ms | body length, body CRC | header CRC
_COVERED = struct.Struct("<4sBBHQQQqII")
_WHOLE = struct.Struct("<4sBBHQQQqIII4x")
HEADER_BYTES = _WHOLE.size
# number, messages, length of the subject, was sent, length of the group, length of the data, distance back to the
# number of the entry that this one replaces (0: replaces none)
_ENTRY = struct.Struct("<QIHBBII")
_MARK = struct.Struct("<Q")
BODY_BYTES_MAX = limits.BATCH_RAW_BYTES_MAX + limits.MIB


class SpoolRecordKind(enum.IntEnum):
    ENTRY = 1
    MARKS = 2
    HEAD = 3


class SpoolRecord(NamedTuple):
    """A verified record. Its body includes the padding."""

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
    """One batch in a journal."""

    number: int
    subject: str
    messages: int
    was_sent: bool
    data: bytes
    group: str = ""  # the broker group that the batch is meant for, or was sent to
    instead: int | None = None  # the number of the entry that this one replaces; that entry is done


class Restream(msgspec.Struct, frozen=True, array_like=True):
    """From sequence `first` on, the batches of one stream go on in another, whose sequences begin at 0."""

    old_id: int
    first: int
    new_id: int


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """What has happened to entries."""

    done: list[int] = []
    sent: int = 0  # entries with smaller numbers may have been sent
    restreams: list[Restream] = []


class PlacementRecord(msgspec.Struct, frozen=True, array_like=True):
    """An entry is about to be sent to a broker group under this number. From here on it may be stored there."""

    number: int
    group: str
    stream: int
    first: int


class ClusterMarks(Marks, frozen=True, array_like=True):
    """The marks of a cluster client's journal."""

    placed: list[PlacementRecord] = []


class KeyedMarks(ClusterMarks, frozen=True, array_like=True):
    """Marks with the key of the journal, of a cluster client or not."""

    key: bytes = b""


class BadSpoolRecord(Exception):
    """The bytes at a position are not a valid record of that position."""


class CutShort(BadSpoolRecord):
    """The record needs more bytes than there are: `size_bytes` in all."""

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
    """The bytes of a whole record."""
    body += bytes(-len(body) % ALIGNMENT)
    covered = _COVERED.pack(
        MAGIC, version, kind, HEADER_BYTES, journal, position, synced_end, time_ms, len(body), checksum(body)
    )
    return covered + checksum(covered).to_bytes(4, "little") + bytes(4) + body


def parse(data: bytes, offset: int, position: int, journal: int) -> SpoolRecord:
    """The record at `offset` of `data`. Raises if it is not the record of that journal and position."""
    if len(data) - offset < HEADER_BYTES:
        raise CutShort(HEADER_BYTES)
    magic, version, kind, header_bytes, own_journal, own_position, synced_end, time_ms, size, body_crc, crc = (
        _WHOLE.unpack_from(data, offset)
    )
    if magic != MAGIC or crc != checksum(data[offset : offset + _COVERED.size]):
        raise BadSpoolRecord("unreadable header")
    if (own_journal, own_position) != (journal, position) or size % ALIGNMENT or size > BODY_BYTES_MAX:
        raise BadSpoolRecord("misplaced")
    is_known = version in VERSIONS and header_bytes == HEADER_BYTES
    if not is_known or kind not in (SpoolRecordKind.ENTRY, SpoolRecordKind.MARKS, SpoolRecordKind.HEAD):
        raise WrongDirectory(f"a spool's record at {position} is of a newer format: drain it with what wrote it")
    body = data[offset + HEADER_BYTES : offset + HEADER_BYTES + size]
    if len(body) < size:
        raise CutShort(HEADER_BYTES + size)
    if checksum(body) != body_crc:
        raise BadSpoolRecord("damaged body")
    return SpoolRecord(kind, position, synced_end, time_ms, body, version)


def find(data: bytes, offset: int, position: int, journal: int) -> SpoolRecord | None:
    """The next whole record from `offset` on; `position` is the position of `data[0]`."""
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


class JournalWrite(NamedTuple):
    """One write that waits for a commit."""

    entry: Handed | None  # None: marks alone
    done: Completion
    numbered: Callable[[int], None] | None = None  # called with the entry's number, just before `done`
    placed: Sequence[PlacementRecord] = ()
    instead: int | None = None  # the number of the entry to replace
    is_needed: bool = False  # `done` reports a full disk; otherwise marks just wait for the next commit


@dataclass(slots=True, eq=False)
class JournalSegment:
    """One file of a journal."""

    base: int
    end: int
    file: File
    pending: int = 0  # entries that are not done


class PendingEntry(NamedTuple):
    """An entry that is not done."""

    messages: int
    segment: JournalSegment
    subject: str
    is_due: bool  # whether its messages are due later
    was_sent: bool  # before the journal wrote it
    group: str  # the broker group that it is meant for, or was sent to; empty: not chosen yet, or there is no cluster


def nobody(_: StorageFault | None) -> None:
    """A completion that nobody waits for."""


def tell_all(jobs: Sequence[JournalWrite], fault: StorageFault | None) -> None:
    for job in jobs:
        job.done(fault)


# --- files that were set aside ----------------------------------------------------------------------------------------

LOG = "log"
KEPT = "kept"  # directory of damaged pieces that were cut off or skipped
ASIDE = "aside"  # directory of batches that were set aside
CHUNK_BYTES = limits.MIB
_NOTE_SIZE_BYTES = 4  # of the length in front of the note


class Aside(msgspec.Struct, frozen=True, omit_defaults=True):
    """The note about an entry that was set aside, and why. The entry's data follows in the file."""

    number: int
    subject: str
    messages: int
    reason: str
    is_unknown: bool  # the batch may be stored; nobody can tell any more
    producer_id: int
    time_ms: int
    is_cluster: bool = False  # as the journal, whose segments may be gone when a reader asks


def aside_name(number: int) -> str:
    return f"{ASIDE}/{number:016x}"


def aside_parts(aside: Aside, data: bytes) -> list[bytes]:
    """The bytes of the file."""
    said = msgspec.msgpack.encode(aside)
    return [len(said).to_bytes(_NOTE_SIZE_BYTES, "little"), said, data]


def read_aside(disk: Disk, name: str, journal: str) -> tuple[Aside, bytes]:
    """The note and the batch's data; blocks."""
    content = contents(disk, f"{ASIDE}/{name}")
    size = int.from_bytes(content[:_NOTE_SIZE_BYTES], "little")
    said, data = content[_NOTE_SIZE_BYTES : _NOTE_SIZE_BYTES + size], content[_NOTE_SIZE_BYTES + size :]
    try:
        return msgspec.msgpack.decode(said, type=Aside), data
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"{ASIDE}/{name} of journal {journal} is damaged: {error}") from error


# --- recovery ---------------------------------------------------------------------------------------------------------


class SpoolDamage(NamedTuple):
    """A piece of a journal that cannot be read."""

    kind: str  # "torn" or "rotten"
    position: int
    size_bytes: int

    @property
    def file(self) -> str:
        return f"{KEPT}/{self.kind}-{self.position:016x}"


def segment_name(base: int) -> str:
    return f"{LOG}/{base:016x}"


def bases(disk: Disk) -> list[int]:
    """The positions where the segments begin, in order."""
    return sorted(int(name, 16) for name in disk.listing(LOG) if "." not in name)


def records(file: File, base: int, start: int, journal: int) -> Iterator[SpoolRecord | int]:
    """Yield the sound records of a segment from `start` on. At damage, yield its position and stop."""
    position, data, data_at = start, b"", start
    end = base + file.size
    while position < end:
        try:
            record = parse(data, position - data_at, position, journal)
        except CutShort as short:
            wanted = max(short.size_bytes, CHUNK_BYTES)
            if position == data_at and len(data) >= min(wanted, end - position):
                yield position  # the segment ends before the record
                return
            data, data_at = file.read(position - base, wanted), position
        except BadSpoolRecord:
            yield position
            return
        else:
            yield record
            position = record.end


class JournalSurvey:
    """Reads a journal. Only `mend` changes files."""

    def __init__(self, disk: Disk, journal: int) -> None:
        self._disk = disk
        self._journal = journal
        self.damages: list[SpoolDamage] = []
        self.end = 0  # of the records that count
        self.bases = bases(disk)
        self.torn_at: int | None = None

    def walk(self) -> Iterator[tuple[int, SpoolRecord]]:
        """Every record that counts, with its segment's base."""
        for index, base in enumerate(self.bases):
            with self._opened(base) as file:
                end = base + file.size
                position = base
                while position < end:
                    for found in records(file, base, position, self._journal):
                        if isinstance(found, int):
                            position = self._skip(file, base, found, self.bases[index + 1 :])
                            break
                        yield base, found
                        position = found.end
                    if self.torn_at is not None:
                        self.end = self.torn_at
                        return
                self.end = end

    def _opened(self, base: int) -> closing[File]:
        return closing(self._disk.open(segment_name(base)))

    def _skip(self, file: File, base: int, position: int, later: list[int]) -> int:
        """Classify the damage at `position`, and return where to go on. For a torn end, set `torn_at` too."""
        end = base + file.size
        rest = file.read(position - base, end - position)
        next_one = find(rest, 1, position, self._journal)
        at = next_one
        while at is not None and at.synced_end <= position:
            at = find(rest, at.end - position, position, self._journal)
        is_rotten = at is not None or any(self._vouches(each, position) for each in later)
        if not is_rotten:
            self.torn_at = position
            size = sum(self._size(each) for each in later) + end - position
            self.damages.append(SpoolDamage("torn", position, size))
            return end
        go_on = end if next_one is None else next_one.position
        self.damages.append(SpoolDamage("rotten", position, go_on - position))
        return go_on

    def _vouches(self, base: int, position: int) -> bool:
        """Whether a sound record in a later segment says that `position` was synced."""
        data = contents(self._disk, segment_name(base))
        record = find(data, 0, base, self._journal)
        while record is not None and record.synced_end <= position:
            record = find(data, record.end - base, base, self._journal)
        return record is not None

    def _size(self, base: int) -> int:
        with self._opened(base) as file:
            return file.size

    # --- repair ------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """After a walk: copy the damaged pieces to `kept`, cut the torn end, sync the rest."""
        for damage in self.damages:
            if damage.kind == "rotten":
                self._keep(damage, [self._holding(damage.position)])
        torn = next((each for each in self.damages if each.kind == "torn"), None)
        if torn is not None:
            holding = self._holding(torn.position)
            later = [base for base in self.bases if base > holding]
            self._keep(torn, [holding, *later])
            for base in reversed(later):
                self._disk.remove(segment_name(base))
            self.bases = [base for base in self.bases if base <= holding]
            with self._opened(holding) as file:
                self._disk.truncate(file, torn.position - holding)
        if self.bases:
            with self._opened(self.bases[-1]) as file:
                self._disk.sync(file, 0)
        for directory in (LOG, KEPT, ASIDE):
            for name in self._disk.listing(directory):
                if name.endswith(".tmp"):
                    self._disk.remove(f"{directory}/{name}")

    def _holding(self, position: int) -> int:
        return max(base for base in self.bases if base <= position)

    def _keep(self, damage: SpoolDamage, of: list[int]) -> None:
        parts: list[bytes] = []
        left = damage.size_bytes
        for base in of:
            with self._opened(base) as file:
                start = max(damage.position - base, 0)
                parts.append(file.read(start, min(left, file.size - start)))
            left -= len(parts[-1])
        self._disk.publish(damage.file, parts)
