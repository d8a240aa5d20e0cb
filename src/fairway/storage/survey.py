"""The survey: examines a data directory without a change, for `fairway inspect` and `fairway verify`.

A survey takes no lock and writes no file. So it works on a read-only mount, on a damaged directory, and beside the
process that owns the directory. It decides with recovery's own code (`LogWalk`) what is intact, torn or rotten, so the
two cannot disagree. The result is a `survey_report.DirectorySurvey`.

`IndexAudit` compares index files with their segments, `CheckpointAudit` compares checkpoints with the log. A view that
is missing or behind is only remarked upon, because the next start rebuilds it. Two faults are flaws. A view that fails
its checksum shows that the disk lets bits rot. A view that contradicts its log could hide messages from their readers.

Both commands read every byte of both logs and compare every checksum. `verify` also opens every batch, and compares the
index entries with the log.

Beside a running owner the tail moves during the look: an unfinished record at the end is being written, not torn. The
order of reading (checkpoints, then sizes, then bytes) makes the result true for one instant. Where retention deletes a
file meanwhile, the survey starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fairway import limits
from fairway.errors import NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import TEMPORARY, Disk
from fairway.storage import action_log, directory, index_file, message_log, replica_directory, segment, subjects
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint, RotMark
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.index_file import ENTRY, ENTRY_BYTES
from fairway.storage.open_store import marks_of
from fairway.storage.record import Record, RecordHeader
from fairway.storage.recovery import ASIDE, Judgement, LogWalk
from fairway.storage.segment import Damage
from fairway.storage.survey_report import (
    INVALID,
    ROTTEN,
    SHAPE,
    TORN,
    ActionTally,
    AsideReport,
    CheckpointReport,
    DamageReport,
    DirectorySurvey,
    Entries,
    FlawReport,
    MessageTally,
    SegmentReport,
    SubjectReport,
)

_INDEX_REMEDY = "remove it while nobody uses the directory: the next start makes it again from its segment"
_CHECKPOINT_REMEDY = "remove it while nobody uses the directory: the next start reads more of the log instead"


class _Index(NamedTuple):
    covered_end: int
    entries: dict[int, bytes]  # by subject


class IndexAudit:
    """Compares the index files with their segments."""

    def __init__(self, disk: Disk, log_id: int, vouched_end: int, newest_base: int) -> None:
        self.flaws: list[FlawReport] = []
        self.remarks: list[str] = []
        self._disk = disk
        self._log_id = log_id
        self._vouched_end = vouched_end
        self._newest_base = newest_base

    def check(self, of: SegmentReport, entries: Entries | None, lost: list[Damage]) -> None:
        """Judge the segment's index. `entries`: what it should hold; None: only check that it can be read."""
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
        with closing(self._disk.open(index_file.file_name(base))) as file:
            covered_end, runs = index_file.read_directory(file, self._log_id, base)
            wanted = runs if whole else {}
            return _Index(covered_end, {each: index_file.read_run(file, run) for each, run in wanted.items()})


def _contradiction(index: _Index, entries: Entries, end: int, lost: list[Damage]) -> str | None:
    """The first difference, in words. The index may still have a record that was lost after it was made."""
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
    """The subjects in a checkpoint."""

    end: int  # of the messages that it covers
    table: dict[int, int]  # next sequence by subject
    next_id: int
    floor: int

    def used_to(self, subject_id: int) -> int:
        """The end of the sequences that are not used again. A removed subject is not in the table: its id is never
        reused, and the floor is above its sequences."""
        return self.table.get(subject_id, self.floor if subject_id < self.next_id else 0)


class CheckpointAudit:
    """Reads every checkpoint, and compares the readable ones with the batches that they should know."""

    def __init__(self, disk: Disk, identity: DirectoryIdentity) -> None:
        self.reports: list[CheckpointReport] = []
        self.flaws: list[FlawReport] = []
        self.newest: Checkpoint | None = None
        self._tables: dict[str, _Known] = {}  # by file
        self._numbers = checkpoints.numbers(disk)
        for number in self._numbers:
            self._read(disk, number, identity)

    def is_overtaken(self, disk: Disk) -> bool:
        """Whether there are other checkpoints by now: then these may be outdated."""
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
        """A checkpoint that covers a batch must know that its sequences are used; otherwise they would be reused."""
        for name, known in list(self._tables.items()):
            if header.end <= known.end and known.used_to(header.subject_id) < header.first_sequence + header.count:
                del self._tables[name]
                why = (
                    f"it contradicts the log: subject {header.subject_id} has sequence {header.first_sequence} already"
                )
                self.flaws.append(FlawReport(name, why, _CHECKPOINT_REMEDY))


Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all
Owner: TypeAlias = Callable[[], int | None]  # the process that uses the directory now

_LOOKS_MAX = 5  # retention deletes a segment every few minutes at worst; a look takes less
_STEP_BYTES = 4 * limits.MIB  # between two calls of `progress`


def survey(
    disk: Disk,
    *,
    verify: bool = False,
    records_max: int = 0,
    owner: Owner = lambda: None,
    progress: Progress = lambda _done, _total: None,
) -> DirectorySurvey:
    """Survey the whole directory. `WrongDirectory` for a foreign directory, or another version."""
    for _ in range(_LOOKS_MAX - 1):
        try:
            return _DirectoryLook(disk, verify, records_max, owner, progress).run()
        except NoSuchFile:  # a running owner deleted it meanwhile
            continue
    return _DirectoryLook(disk, verify, records_max, owner, progress).run()


class _Meter:
    """Counts the bytes read so far, and reports progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._told = 0
        self.done = 0
        self.total = 0

    def add(self, size: int) -> None:
        self.done += size
        if self.done - self._told >= _STEP_BYTES:
            self._told = self.done
            self._progress(min(self.done, self.total), self.total)

    def finish(self) -> None:
        self._progress(self.total, self.total)


@dataclass(kw_only=True)
class _MeteredWalk(LogWalk):
    """A walk that reports its progress to a meter."""

    meter: _Meter

    def walk(self, start: int, epoch: int) -> Iterator[Record | Damage]:
        for found in super().walk(start, epoch):
            if isinstance(found, Record):
                self.meter.add(found.header.end - found.header.position)
            elif found.why != "missing":
                self.meter.add(found.end - found.start)
            yield found

    def behind(self, judgement: Judgement, epoch: int) -> Iterator[Record | Damage]:
        if judgement.damages:
            self.meter.total += sum(
                max(base + size - max(base, judgement.damages[0].start), 0) for base, size in self.sizes.items()
            )
        return super().behind(judgement, epoch)


class _DirectoryLook:
    """One survey of a directory, from beginning to end."""

    def __init__(self, disk: Disk, verify: bool, records_max: int, owner: Owner, progress: Progress) -> None:
        self._disk = disk
        self._verify = verify
        self._records_max = records_max
        self._owner_now = owner
        self._owner = owner()
        self._identity = _identify(disk)
        self._meter = _Meter(progress)
        self._damages: list[DamageReport] = []
        self._remarks: list[str] = []
        self._checkpoints = CheckpointAudit(disk, self._identity)
        self._known_rot: list[RotMark] = self._checkpoints.newest.rotten if self._checkpoints.newest else []

    def run(self) -> DirectorySurvey:
        identity = self._identity
        messages_walk = self._walk_of(message_log.DIRECTORY, identity.messages_id)
        actions_walk = self._walk_of(action_log.DIRECTORY, identity.actions_id)
        if self._checkpoints.is_overtaken(self._disk):
            raise NoSuchFile("a newer checkpoint was written while we looked")
        indexes = IndexAudit(
            self._disk, identity.messages_id, messages_walk.vouched_end, max(messages_walk.sizes, default=0)
        )
        messages = MessageTally(
            messages_walk,
            self._records_max,
            is_deep=self._verify,
            check_batch=self._checkpoints.check_batch,
            check_index=indexes.check,
        )
        actions = ActionTally(actions_walk, self._records_max)
        messages_judged, actions_judged = messages.run(), actions.run()
        self._meter.finish()
        self._owner = self._owner or self._owner_now()
        names = self._names(messages)
        self._note_damages(messages_walk, messages_judged, messages.invalid, names)
        self._note_damages(actions_walk, actions_judged, actions.invalid, names)
        records = [*messages.newest, *actions.newest]
        for each in records:
            each.subject = names.get(int(each.subject), each.subject) if each.subject else None
        flaws = _identity_flaws(identity) + self._checkpoints.flaws + indexes.flaws
        return DirectorySurvey(
            shape=SHAPE,
            format_version=directory.VERSION,
            directory_id=f"{identity.directory_id:016x}" if identity.directory_id else None,
            owner=self._owner,
            is_verified=self._verify,
            is_sound=not self._damages and not flaws,
            bytes_read=self._meter.total,
            messages=messages.report(messages_judged),
            actions=actions.report(actions_judged),
            subjects=_subjects(messages),
            groups=sorted(actions.groups.values(), key=lambda each: each.id),
            checkpoints=self._checkpoints.reports,
            damages=self._damages,
            flaws=flaws,
            aside=self._aside(),
            remarks=self._remarks + indexes.remarks + self._leftovers(messages_walk) + self._changes(),
            records=records,
        )

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _walk_of(self, log: str, log_id: int) -> LogWalk:
        mark = marks_of(self._disk, self._checkpoints.newest)[log]
        walk = _MeteredWalk(
            self._disk,
            log,
            log_id,
            first_base=mark.first_base,
            vouched_end=mark.end,
            believed_end=replica_directory.read_catch_up(self._disk).get(log),
            meter=self._meter,
        )
        walk.measure()
        self._meter.total += sum(walk.sizes.values())
        return walk

    def _names(self, messages: MessageTally) -> dict[int, str]:
        """Names by subject id. The checkpoint may know a name whose record has rotted, and skipped sequences."""
        if self._checkpoints.newest is not None:
            messages.table.restate(self._checkpoints.newest.subjects, position=0)
        return {each.id: str(each.name) for each in messages.table}

    def _note_damages(self, walk: LogWalk, judged: Judgement, invalid: list[Damage], names: dict[int, str]) -> None:
        for verdict, damages in ((ROTTEN, judged.rotten), (INVALID, invalid)):
            self._damages += [self._damage(walk, verdict, each, names) for each in damages]
        if judged.cut_at is None:
            return
        end = max((base + size for base, size in walk.sizes.items()), default=judged.cut_at)
        torn = Damage(judged.cut_at, max(end, judged.cut_at), judged.why)
        if self._owner is None:
            self._damages.append(self._damage(walk, TORN, torn, names))
        else:
            self._remarks.append(f"the {walk.directory} log ends in a record that is being written: it is in use")

    def _damage(self, walk: LogWalk, verdict: str, damage: Damage, names: dict[int, str]) -> DamageReport:
        base = max((each for each in walk.sizes if each <= damage.start), default=walk.first_base)
        is_known = any(
            mark.log == walk.directory and mark.touches(damage.start, damage.end) for mark in self._known_rot
        )
        found = DamageReport(
            walk.directory,
            segment.file_name(walk.directory, base),
            damage.start,
            damage.end,
            verdict,
            damage.why,
            is_known,
        )
        if damage.header is not None and damage.header.subject_id:
            found.subject = names.get(damage.header.subject_id, str(damage.header.subject_id))
            found.first_sequence = damage.header.first_sequence
            found.messages = damage.header.count
        return found

    def _aside(self) -> list[AsideReport]:
        found = []
        for name in self._disk.listing(ASIDE):
            with closing(self._disk.open(f"{ASIDE}/{name}")) as file:
                found.append(AsideReport(f"{ASIDE}/{name}", file.size))
        return found

    def _leftovers(self, messages: LogWalk) -> list[str]:
        """Harmless files that a killed process left behind."""
        first = index_file.file_name(messages.first_base)  # names sort as numbers do
        indexes = (f"{index_file.DIRECTORY}/{name}" for name in self._disk.listing(index_file.DIRECTORY))
        orphans = [name for name in indexes if name < first and not name.endswith(TEMPORARY)]
        expired = [
            segment.file_name(log, base)
            for log, mark in marks_of(self._disk, self._checkpoints.newest).items()
            for base in segment.bases(self._disk, log)
            if base < mark.first_base
        ]
        return [f"{name} is left over from retention and is not read" for name in expired + orphans]

    def _changes(self) -> list[str]:
        """Changes of a copy that are under way."""
        names = self._disk.listing("")
        said = {
            directory.CATCHING_UP: "this copy is catching up with its master: what is damaged at its end is torn",
            directory.WIPING: "this copy is being begun anew: the next start finishes that",
            directory.INSTALLING: "this copy is being begun anew with its master's files: the next start finishes that",
        }
        return [sentence for name, sentence in said.items() if name in names]


def _identify(disk: Disk) -> DirectoryIdentity:
    identity = directory.identify(disk)
    if identity is None:
        raise WrongDirectory("the directory is empty: name one that Fairway has written to")
    return identity


def _identity_flaws(identity: DirectoryIdentity) -> list[FlawReport]:
    if identity.directory_id:
        return []
    remedy = "restore it from a copy, or let the next start make it again, under a new directory id"
    return [FlawReport(directory.IDENTITY, "it is missing or fails its checksum", remedy)]


def _subjects(messages: MessageTally) -> list[SubjectReport]:
    found = []
    for state in sorted(messages.table, key=lambda each: each.id):
        of = messages.subjects.get(state.id) or SubjectReport(state.id, "")
        of.name, of.next_sequence = str(state.name), state.next_sequence
        found.append(of)
    return found
