"""What a crash or a bad disk left of a journal: read it all, decide what each piece is, lose nothing in silence.

    sound                                              it counts
    damaged, and a sound record further on says that   rotten: that piece is kept aside and reported, the rest counts
    the synced end was beyond it
    damaged otherwise                                  torn: from there on nothing was ever confirmed. It is cut off,
                                                       kept aside and reported, sound-looking records included

A record that is only in the page cache (its process died before the sync) counts; it is written again and synced,
before anything is built on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway import limits
from fairway.client.spool_record import BadSpoolRecord, CutShort, SpoolRecord, find, parse
from fairway.world.disk import Disk, File

LOG = "log"
KEPT = "kept"  # what was cut off or skipped
ASIDE = "aside"  # what the broker will never take
CHUNK_BYTES = limits.MIB


class SpoolDamage(NamedTuple):
    """A piece that cannot be read."""

    kind: str  # "torn" or "rotten"
    position: int
    size_bytes: int

    @property
    def file(self) -> str:
        return f"{KEPT}/{self.kind}-{self.position:016x}"


class RecoveredSegment(NamedTuple):
    """One segment, as it was found."""

    base: int
    records: list[SpoolRecord]


def segment_name(base: int) -> str:
    return f"{LOG}/{base:016x}"


def bases(disk: Disk) -> list[int]:
    """Where the segments begin, in order."""
    return sorted(int(name, 16) for name in disk.listing(LOG) if "." not in name)


def records(file: File, base: int, start: int, journal: int) -> Iterator[SpoolRecord | int]:
    """The sound records of a segment from `start` on, in order; where one is unsound its position, and that is all."""
    position, data, data_at = start, b"", start
    end = base + file.size
    while position < end:
        try:
            record = parse(data, position - data_at, position, journal)
        except CutShort as short:
            wanted = max(short.size_bytes, CHUNK_BYTES)
            if position == data_at and len(data) >= min(wanted, end - position):
                yield position  # it ends before the record does
                return
            data, data_at = file.read(position - base, wanted), position
        except BadSpoolRecord:
            yield position
            return
        else:
            yield record
            position = record.end


class JournalSurvey:
    """A journal, read without changing anything."""

    def __init__(self, disk: Disk, journal: int) -> None:
        self._disk = disk
        self._journal = journal
        self.damages: list[SpoolDamage] = []
        self.end = 0  # of what counts
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
        """What is at `position` is damaged: where to go on. Torn: nowhere, and `torn_at` says so."""
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

    # --- changing ----------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """After a walk: keep damaged pieces aside, cut the torn end, make sure of the rest."""
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
