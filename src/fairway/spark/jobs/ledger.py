"""An archive on its disk: open it, take part in it, commit.

Files of a commit that is being made carry its number and the name of the run that makes it. They are moved to their
places first, then the commit is written, under a name that only one run can take. So

    killed before the commit   nobody counts the files; the next run makes a commit of that number with files of its own
    two runs at once           one of them takes the number; the other is told so, and removes what it brought

and a file whose number is committed, and which is not named by the archive, is nobody's: it is removed. (One whose
number is yet to come may belong to a run that is under way.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from fairway.errors import FairwayError
from fairway.spark.jobs import manifest
from fairway.spark.jobs.columns import STAGED_BY
from fairway.spark.jobs.files import Files, Taken
from fairway.spark.jobs.manifest import ArchiveDamaged, Commit, File, NotAnArchive, Range, State
from fairway.spark.places import Part
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng

_OURS: Final = re.compile(r"fairway-(?P<number>\d{12})-[0-9a-f]{8}-\d{5}\.parquet", re.ASCII)
_STAGED: Final = re.compile(r"(?P<number>\d{12})-[0-9a-f]{8}", re.ASCII)
_LOADS_MAX: Final = 5  # a reader that is overtaken by 64 commits between two of its steps begins anew


Staged = list[tuple[str, File]]


class Overtaken(FairwayError):
    """Another run has committed to the archive meanwhile."""


def load(files: Files) -> State:
    """What is committed. `NotAnArchive` says what the path is instead."""
    if not files.exists():
        raise NotAnArchive(f"there is nothing at {files.root}: `fairway pipeline archive` makes an archive")
    if not files.exists(manifest.MARK):
        raise NotAnArchive(f"{files.root} is not an archive of fairway: it has no {manifest.MARK}")
    manifest.check_mark(files.read(manifest.MARK), files.full(manifest.MARK))
    for attempt in range(_LOADS_MAX):
        state = State()
        numbers = manifest.wanted(files.names(manifest.COMMITS))
        try:
            for number in numbers:
                name = manifest.name_of(number)
                manifest.decode(files.read(name), files.full(name), state)
        except FairwayError:
            if attempt + 1 == _LOADS_MAX or all(files.exists(manifest.name_of(number)) for number in numbers):
                raise
        else:
            return state
    raise ArchiveDamaged(f"the commits of {files.root} change faster than they can be read")


class Ledger:
    """One run's part in an archive."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._run = f"{RealRng().bits(32):08x}"
        self._clock = RealClock()
        self.state = State()
        if not self.files.exists(manifest.MARK):
            self._create()
        self.state = load(self.files)
        self._doubtful: list[tuple[int, str]] = []  # perhaps of a run that is under way: number, path
        self._sweep()

    def _create(self) -> None:
        files = self.files
        if files.exists() and not files.is_directory():
            raise NotAnArchive(f"{files.root} is a file: an archive is a directory; name another path")
        if set(files.names("")) - {manifest.HOME}:
            raise NotAnArchive(
                f"{files.root} is not empty, and not an archive of fairway (it has no {manifest.MARK}): "
                "archive to a new path"
            )
        try:
            files.write(manifest.MARK, manifest.encode_mark(), temporary=f"{manifest.STAGING}/archive-{self._run}.json")
        except Taken:
            return  # somebody else has made it just now

    # --- committing --------------------------------------------------------------------------------------------------

    @property
    def staging(self) -> str:
        """Where the next commit is prepared; nobody reads there."""
        return f"{manifest.STAGING}/{self.state.number + 1:012}-{self._run}"

    @property
    def room(self) -> str:
        """Where Spark is to write what the next commit adds, as Spark takes it."""
        return self.files.full(f"{self.staging}/rows")

    def abandon(self) -> None:
        """Nothing comes of what was staged."""
        self.files.remove(self.staging)

    def staged(self) -> Staged:
        """What was written for the next commit: where it lies, and what it is to be."""
        staging = f"{self.staging}/rows"
        found = sorted(each for each in self.files.walk(staging) if each.path.endswith(".parquet"))
        made = []
        for place, (path, size_bytes) in enumerate(found):
            folder = path.removeprefix(f"{staging}/").rpartition("/")[0]
            values = dict(part.split("=", 1) for part in folder.split("/"))
            footer = self.files.footer(path, "sequence")
            if footer.rows:
                name = f"fairway-{self.state.number + 1:012}-{self._run}-{place:05}.parquet"
                target = f"subject={values['subject']}/date={values['date']}/{name}"
                span = (footer.least, footer.most + 1, footer.rows, size_bytes, unquote(values[STAGED_BY]))
                made.append((path, File(target, unquote(values["subject"]), values["date"], *span)))
        return made

    def commit(self, staged: Staged, ranges: Sequence[Range], removed: Sequence[File] = ()) -> None:
        """The staged files become a part of the archive, and those that are removed no longer are."""
        staging, gone = self.staging, [each.path for each in removed]
        added = [file for _, file in staged]
        _check(added, ranges, removed)
        commit = Commit(self.state.number + 1, self._clock.wall_ms(), tuple(ranges), tuple(added), tuple(gone))
        self.state.apply(commit)
        for source, file in staged:
            self.files.move(source, file.path)
        data = manifest.encode(commit, self.state)
        try:
            self.files.write(manifest.name_of(commit.number), data, temporary=f"{staging}/commit.json")
        except Taken as error:
            self.files.remove_all([*(file.path for file in added), staging])
            raise Overtaken(
                f"another run writes to {self.files.root}: it has made commit {commit.number} meanwhile. Nothing of "
                "this run's commit was kept. Let one archive job at a time write to a path"
            ) from error
        overtaken = [path for number, path in self._doubtful if number <= commit.number]
        self._doubtful = [each for each in self._doubtful if each[0] > commit.number]
        self.files.remove_all([*gone, *overtaken, staging])
        if manifest.is_full(commit.number):
            self._forget(commit.number - manifest.FULL_EVERY)

    # --- cleaning ----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Remove what runs that were killed have left behind; and remember what may turn out to be that."""
        numbered = []
        for each in self.files.walk():
            found = _OURS.fullmatch(each.path.rpartition("/")[2])
            if found is not None and not each.path.startswith(f"{manifest.HOME}/"):
                numbered.append((int(found["number"]), each.path))
        for name in self.files.names(manifest.STAGING):
            staged = _STAGED.fullmatch(name)
            numbered.append((int(staged["number"]) if staged is not None else 0, f"{manifest.STAGING}/{name}"))
        strange = [each for each in numbered if each[1] not in self.state.files]
        self.files.remove_all(path for number, path in strange if number <= self.state.number)
        self._doubtful = [each for each in strange if each[0] > self.state.number]

    def _forget(self, before: int) -> None:
        for name in self.files.names(manifest.COMMITS):
            number = manifest.number_of(name)
            if number is not None and number < before:
                self.files.remove(f"{manifest.COMMITS}/{name}")


def _check(added: Sequence[File], ranges: Sequence[Range], removed: Sequence[File]) -> None:
    """Files must tell the same story as the ranges, or as the files that they replace."""
    spans = {_part(each): (each.first, each.end) for each in ranges} if ranges else _spans(removed)
    last: dict[Part, int] = {}
    for each in sorted(added, key=lambda each: each.first):
        first, end = spans.get(_part(each), (0, 0))
        if not max(first, last.get(_part(each), 0)) <= each.first < each.end <= end:
            raise ArchiveDamaged(
                f"Spark has written {each.subject} {each.first} to {each.end - 1}, where {first} to {end - 1} was "
                "read, or has written some of it twice: nothing was committed"
            )
        last[_part(each)] = each.end
    before, after = sum(each.rows for each in ranges or removed), sum(each.rows for each in added)
    if before != after:
        raise ArchiveDamaged(f"{before} rows were read, and {after} were written: nothing was committed")


def _part(of: File | Range) -> Part:
    return Part(of.subject, of.broker_group)


def _spans(files: Sequence[File]) -> dict[Part, tuple[int, int]]:
    """From where to where the files of one compaction reach."""
    return {_part(each): (min(f.first for f in files), max(f.end for f in files)) for each in files[:1]}
