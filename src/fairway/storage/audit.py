"""Do the views tell the truth? Indexes against their segments, checkpoints against the log. Nothing is changed.

A view that is missing or behind is made again at the next start and only remarked upon. One that fails its checksum, or
contradicts the log that it was made from, is a flaw: the first says that the disk lets bits rot, the second could hide
messages from their readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway.errors import NoSuchFile, RemoteProtocolError
from fairway.storage import checkpoint as checkpoints
from fairway.storage import index_file, subjects
from fairway.storage.checkpoint import Checkpoint
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.index_file import ENTRY, ENTRY_BYTES
from fairway.storage.record import RecordHeader
from fairway.storage.report import CheckpointReport, FlawReport, SegmentReport
from fairway.storage.scan import Damage
from fairway.storage.tally import Entries
from fairway.world.disk import Disk

_INDEX_REMEDY = "remove it while nobody uses the directory: the next start makes it again from its segment"
_CHECKPOINT_REMEDY = "remove it while nobody uses the directory: the next start reads more of the log instead"


class _Index(NamedTuple):
    covered_end: int
    entries: dict[int, bytes]  # by subject


class IndexAudit:
    """Compares the index files with the segments that they were made from."""

    def __init__(self, disk: Disk, log_id: int, vouched_end: int, newest_base: int) -> None:
        self.flaws: list[FlawReport] = []
        self.remarks: list[str] = []
        self._disk = disk
        self._log_id = log_id
        self._vouched_end = vouched_end
        self._newest_base = newest_base

    def check(self, of: SegmentReport, entries: Entries | None, lost: list[Damage]) -> None:
        """Judge the segment's index. `entries` is what it should hold; None: only see whether it can be read."""
        name = index_file.file_name(of.base)
        due_end = of.end if of.base < self._newest_base else min(of.end, self._vouched_end)
        try:
            index = self._read(of.base, whole=entries is not None)
        except NoSuchFile:
            of.index = "missing" if due_end > of.base else "none"
        except RemoteProtocolError as error:
            of.index = "unreadable"
            self.flaws.append(FlawReport(name, str(error), _INDEX_REMEDY))
        else:
            of.index = "sound" if index.covered_end >= due_end else "stale"
            contradiction = None if entries is None else _contradiction(index, entries, of.end, lost)
            if contradiction is not None:
                of.index = "lying"
                self.flaws.append(FlawReport(name, f"it contradicts its segment: {contradiction}", _INDEX_REMEDY))
        if of.index in ("missing", "stale"):
            self.remarks.append(f"{name} is {of.index}: the next start makes it again from its segment")

    def _read(self, base: int, *, whole: bool) -> _Index:
        file = self._disk.open(index_file.file_name(base))
        try:
            covered_end, runs = index_file.read_directory(file, self._log_id, base)
            wanted = runs if whole else {}
            return _Index(covered_end, {each: index_file.read_run(file, run) for each, run in wanted.items()})
        finally:
            file.close()


def _contradiction(index: _Index, entries: Entries, end: int, lost: list[Damage]) -> str | None:
    """Where the two first differ, in words. A record that was lost since the index was made may still be in it."""
    for subject_id in sorted(index.entries.keys() | entries.keys()):
        written = index.entries.get(subject_id, b"")
        found = bytes(entries.get(subject_id, b""))
        if written == found:
            continue
        expected = [each for each in _split(found) if _position(each) < min(index.covered_end, end)]
        present = [each for each in _split(written) if _position(each) < end and not _is_lost(each, lost)]
        if present != expected:
            position = min(map(_position, set(present) ^ set(expected)), default=index.covered_end)
            return f"subject {subject_id} differs from position {position} on"
    return None


def _split(entries: bytes) -> Iterator[bytes]:
    return (entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))


def _position(entry: bytes) -> int:
    position: int = ENTRY.unpack(entry)[3]
    return position


def _is_lost(entry: bytes, lost: list[Damage]) -> bool:
    position = _position(entry)
    return any(each.start <= position < each.end for each in lost)


class _Known(NamedTuple):
    """What a checkpoint knows of subjects."""

    end: int  # of the messages that it covers
    table: dict[int, int]  # next sequence by subject
    next_id: int
    floor: int

    def used_to(self, subject_id: int) -> int:
        """Where the sequences end that are not used again. A removed subject is not in the table: its id is not given
        to another, and the floor is above its sequences."""
        return self.table.get(subject_id, self.floor if subject_id < self.next_id else 0)


class CheckpointAudit:
    """Reads every checkpoint, and holds the readable ones against the batches that they should know of."""

    def __init__(self, disk: Disk, identity: DirectoryIdentity) -> None:
        self.reports: list[CheckpointReport] = []
        self.flaws: list[FlawReport] = []
        self.newest: Checkpoint | None = None
        self._tables: dict[str, _Known] = {}  # by file
        self._numbers = checkpoints.numbers(disk)
        for number in self._numbers:
            self._read(disk, number, identity)

    def is_overtaken(self, disk: Disk) -> bool:
        """Whether other checkpoints are there by now: what this one says of the logs may be outdated."""
        return checkpoints.numbers(disk) != self._numbers

    def _read(self, disk: Disk, number: int, identity: DirectoryIdentity) -> None:
        name = checkpoints.file_name(number)
        try:
            read = checkpoints.read(disk, number, identity)
            DedupeWindow.unpack(read.streams, read.verifiers)
            table = {each: after for each, _, after in subjects.unpack(read.subjects)}
            self._tables[name] = _Known(read.messages.end, table, *subjects.unpack_head(read.subjects))
        except RemoteProtocolError as error:
            self.reports.append(CheckpointReport(name, str(error)))
            self.flaws.append(FlawReport(name, f"it is of no use: {error}", _CHECKPOINT_REMEDY))
        else:
            self.newest = read
            self.reports.append(CheckpointReport(name, None, read.epoch, read.messages.end, read.actions.end))

    def check_batch(self, header: RecordHeader) -> None:
        """A checkpoint that covers a batch must know that its sequences are used: else they would be used again."""
        for name, known in list(self._tables.items()):
            if header.end <= known.end and known.used_to(header.subject_id) < header.first_sequence + header.count:
                del self._tables[name]
                why = (
                    f"it contradicts the log: subject {header.subject_id} has sequence {header.first_sequence} already"
                )
                self.flaws.append(FlawReport(name, why, _CHECKPOINT_REMEDY))
