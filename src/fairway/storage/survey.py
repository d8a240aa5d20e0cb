"""Looks at a data directory and changes nothing: for people (`fairway inspect`) and for judges (`fairway verify`).

No lock is held and no file is written, so it works on a read-only mount, on a damaged directory and beside the process
that owns it. What is intact, torn or rotten is decided by the code that recovery uses (`LogWalk`), so that the two
cannot disagree; what it all amounts to is a `report.Survey`.

Both read every byte of both logs and compare every checksum. To *verify* means to open every batch as well, and to
compare the views with what the logs say.

Beside a living owner the tail moves while we look: an unfinished record at the end is being written, not torn. The
order of looking (checkpoints, then sizes, then bytes) makes sure that what is seen was true at one instant; where
retention deletes a file under our eyes, we look again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fairway import limits
from fairway.errors import NoSuchFile, WrongDirectory
from fairway.storage import action_log, catching_up, directory, index_file, message_log, segment, wiping
from fairway.storage.audit import CheckpointAudit, IndexAudit
from fairway.storage.checkpoint import RotMark
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.opening import marks_of
from fairway.storage.record import Record
from fairway.storage.recovery import ASIDE, Judgement, LogWalk
from fairway.storage.report import (
    INVALID,
    ROTTEN,
    SHAPE,
    TORN,
    AsideReport,
    DamageReport,
    DirectorySurvey,
    FlawReport,
    SubjectReport,
)
from fairway.storage.scan import Damage
from fairway.storage.tally import ActionTally, MessageTally
from fairway.world.disk import TEMPORARY, Disk

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all
Owner: TypeAlias = Callable[[], int | None]  # who uses the directory now

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
    """Look at the whole directory. `WrongDirectory` where it is not ours or of another version."""
    for _ in range(_LOOKS_MAX - 1):
        try:
            return _DirectoryLook(disk, verify, records_max, owner, progress).run()
        except NoSuchFile:  # a living owner let it go meanwhile
            continue
    return _DirectoryLook(disk, verify, records_max, owner, progress).run()


class _Meter:
    """How far the look has come."""

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


class _MeteredWalk(LogWalk):
    """A walk that tells a meter how far it has come."""

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
    """One look at a directory, from beginning to end."""

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
            believed_end=catching_up.read(self._disk).get(log),
        )
        walk.meter = self._meter
        walk.measure()
        self._meter.total += sum(walk.sizes.values())
        return walk

    def _names(self, messages: MessageTally) -> dict[int, str]:
        """The checkpoint may know a name whose record has rotted, and of sequences that were given up."""
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
            mark.log == walk.directory and mark.start < damage.end and damage.start < max(mark.end, mark.start + 1)
            for mark in self._known_rot
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
            file = self._disk.open(f"{ASIDE}/{name}")
            found.append(AsideReport(f"{ASIDE}/{name}", file.size))
            file.close()
        return found

    def _leftovers(self, messages: LogWalk) -> list[str]:
        """Files that a killed process left behind and that do no harm."""
        first = index_file.file_name(messages.first_base)  # names sort as numbers do
        indexes = (f"{index_file.DIRECTORY}/{name}" for name in self._disk.listing(index_file.DIRECTORY))
        orphans = [name for name in indexes if name < first and not name.endswith(TEMPORARY)]
        expired = [
            segment.file_name(log, base)
            for log, mark in marks_of(self._disk, self._checkpoints.newest).items()
            for name in self._disk.listing(log)
            if (base := segment.base_of(name)) is not None and base < mark.first_base
        ]
        return [f"{name} is left over from retention and is not read" for name in expired + orphans]

    def _changes(self) -> list[str]:
        """What is being made of a copy."""
        names = self._disk.listing("")
        said = {
            catching_up.FILE: "this copy is catching up with its master: what is damaged at its end is torn",
            wiping.FILE: "this copy is being begun anew: the next start finishes that",
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
