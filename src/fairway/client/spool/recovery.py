"""Recovers a journal after a crash or a disk fault: reads all of it, classifies each piece, and drops nothing silently.

The module also holds the format of the files of batches that a journal has set aside (`Aside`): one file for each batch
that the broker will never take, or whose fate nobody knows.

Recovery reads the segments in order and classifies what it finds:

    sound        the record counts
    rotten       damaged, and a later sound record says that the synced end was beyond. The damaged piece is copied to
                 `kept` and reported, and the rest of the journal counts
    torn         damaged otherwise. Nothing from there on was ever confirmed. Everything from there on is cut off,
                 copied to `kept` and reported, even records that look sound

A record that is only in the page cache, because its process died before the sync, counts. `JournalSurvey.mend` writes
the last segment again and syncs it before the journal builds on that record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from fairway import limits
from fairway.client.spool.journal_record import BadSpoolRecord, CutShort, SpoolRecord, find, parse
from fairway.errors import RemoteProtocolError
from fairway.runtime.disk import Disk, File

_SIZE_BYTES = 4  # of the length in front of the note


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
    return [len(said).to_bytes(_SIZE_BYTES, "little"), said, data]


def read_aside(disk: Disk, name: str, journal: str) -> tuple[Aside, bytes]:
    """The note and the batch's data; blocks."""
    file = disk.open(f"{ASIDE}/{name}")
    try:
        content = file.read(0, file.size)
    finally:
        file.close()
    size = int.from_bytes(content[:_SIZE_BYTES], "little")
    said, data = content[_SIZE_BYTES : _SIZE_BYTES + size], content[_SIZE_BYTES + size :]
    try:
        return msgspec.msgpack.decode(said, type=Aside), data
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"{ASIDE}/{name} of journal {journal} is damaged: {error}") from error


LOG = "log"
KEPT = "kept"  # directory of damaged pieces that were cut off or skipped
ASIDE = "aside"  # directory of batches that were set aside
CHUNK_BYTES = limits.MIB


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
            file = self._disk.open(segment_name(base))
            try:
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
            finally:
                file.close()

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
        file = self._disk.open(segment_name(base))
        try:
            data = file.read(0, file.size)
            record = find(data, 0, base, self._journal)
            while record is not None:
                if record.synced_end > position:
                    return True
                record = find(data, record.end - base, base, self._journal)
            return False
        finally:
            file.close()

    def _size(self, base: int) -> int:
        file = self._disk.open(segment_name(base))
        try:
            return file.size
        finally:
            file.close()

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
            file = self._disk.open(segment_name(holding))
            self._disk.truncate(file, torn.position - holding)
            file.close()
        if self.bases:
            file = self._disk.open(segment_name(self.bases[-1]))
            self._disk.sync(file, 0)
            file.close()
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
            file = self._disk.open(segment_name(base))
            start = max(damage.position - base, 0)
            parts.append(file.read(start, min(left, file.size - start)))
            left -= len(parts[-1])
            file.close()
        self._disk.publish(damage.file, parts)
