"""The commits of an archive: what an archive consists of. A commit is a small JSON file, written whole or not at all.

    _fairway/archive.json                          which format this is _fairway/commits/000000000041.json
    what one commit added and removed _fairway/commits/000000000064.full.json        every 64th holds the whole state,
    so that no reader reads more than 64

A commit ties ranges of sequences to files. A committed range is never archived again. A file that no commit names is
not part of the archive, whatever its name. The module is pure; `archive_log` reads and writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from fairway.errors import FairwayError, Misuse
from fairway.spark.server_groups import BROKER_GROUP, SubjectPart

VERSION: Final = 1
HOME: Final = "_fairway"
MARK: Final = f"{HOME}/archive.json"
COMMITS: Final = f"{HOME}/commits"
STAGING: Final = f"{HOME}/staging"
FULL_EVERY: Final = 64  # commits: a reader reads at most as many small files
_DIGITS: Final = 12


class NotAnArchive(Misuse):
    """The path is something else, or an archive of a version that this release does not know."""


class ArchiveDamaged(FairwayError):
    """The commits of an archive contradict one another, or one is missing."""


@dataclass(frozen=True)
class ArchiveFile:
    """One Parquet file: rows of one subject, broker group and date, `first` ≤ sequence < `end`."""

    path: str  # relative to the archive
    subject: str
    date: str
    first: int
    end: int
    rows: int
    size_bytes: int
    broker_group: str = BROKER_GROUP
    stored_as: str = ""  # the broker group in the file's rows, if that is another; never written down

    @property
    def part(self) -> SubjectPart:
        return SubjectPart(self.subject, self.broker_group)


@dataclass(frozen=True)
class ArchivedRange:
    """Archived sequences of one subject in one broker group. `rows` is less than `end - first` if the log itself has
    holes."""

    subject: str
    log_id: str
    first: int
    end: int
    rows: int
    broker_group: str = BROKER_GROUP

    @property
    def part(self) -> SubjectPart:
        return SubjectPart(self.subject, self.broker_group)


@dataclass(frozen=True)
class Commit:
    number: int
    at_ms: int
    ranges: tuple[ArchivedRange, ...] = ()
    added: tuple[ArchiveFile, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass
class ArchiveState:
    """The state of an archive after some commits."""

    number: int = 0
    # By subject. The ranges of one broker group are in order, and adjacent ones are joined.
    ranges: dict[str, list[ArchivedRange]] = field(default_factory=dict)
    files: dict[str, ArchiveFile] = field(default_factory=dict)  # by path

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files.values())

    def ranges_of(self, subject: str, broker_group: str = BROKER_GROUP) -> list[ArchivedRange]:
        return [each for each in self.ranges.get(subject, ()) if each.broker_group == broker_group]

    def end(self, subject: str, broker_group: str = BROKER_GROUP) -> int | None:
        """Where the next range of a subject begins; None: the subject is not in the archive."""
        ranges = self.ranges_of(subject, broker_group)
        return ranges[-1].end if ranges else None

    def log_id(self, subject: str, broker_group: str = BROKER_GROUP) -> str | None:
        ranges = self.ranges_of(subject, broker_group)
        return ranges[-1].log_id if ranges else None

    def groups_of(self, subject: str) -> list[str]:
        """The broker groups that the subject was archived from."""
        return sorted({each.broker_group for each in self.ranges.get(subject, ())})

    def name_of(self, subject: str, log_id: str) -> str | None:
        """The archive's name for the broker group with this log; None: the archive has nothing of it. A broker that was
        named by its address may be in a cluster by now, and the other way round."""
        return next((each.broker_group for each in self.ranges.get(subject, ()) if each.log_id == log_id), None)

    def named(self, log_ids: Mapping[str, str]) -> ArchiveState:
        """The state under the present names of broker groups, given their logs. If a name now belongs to another log,
        the old log is called by its id."""
        now = {log_id: name for name, log_id in log_ids.items()}
        spans = [each for of in self.ranges.values() for each in of]
        names = {
            each.part: now[each.log_id]
            for each in spans
            if now.get(each.log_id, each.broker_group) != each.broker_group
        }
        taken = {(subject, name) for (subject, _), name in names.items()}
        for each in spans:
            if each.log_id not in now and each.part in taken:
                names[each.part] = each.log_id
        ranges = {
            subject: [replace(each, broker_group=names.get(each.part, each.broker_group)) for each in of]
            for subject, of in self.ranges.items()
        }
        files = {
            path: replace(each, broker_group=names[each.part], stored_as=each.broker_group)
            if each.part in names
            else each
            for path, each in self.files.items()
        }
        return ArchiveState(self.number, ranges, files)

    def apply(self, commit: Commit) -> None:
        """Apply the next commit; a contradiction is damage."""
        if commit.number != self.number + 1:
            raise ArchiveDamaged(f"commit {self.number + 1} of the archive is missing: there is {commit.number}")
        for path in commit.removed:
            if self.files.pop(path, None) is None:
                raise ArchiveDamaged(f"commit {commit.number} removes {path}, which is not in the archive")
        for each in commit.added:
            if each.path in self.files:
                raise ArchiveDamaged(f"commit {commit.number} adds {each.path}, which is in the archive already")
            self.files[each.path] = each
        for span in commit.ranges:
            self._extend(span, commit.number)
        self.number = commit.number

    def _extend(self, span: ArchivedRange, number: int) -> None:
        ranges = self.ranges.setdefault(span.subject, [])
        mine = [at for at, each in enumerate(ranges) if each.broker_group == span.broker_group]
        last = ranges[mine[-1]] if mine else None
        if last is not None and span.first < last.end:
            raise ArchiveDamaged(
                f"commit {number} archives {span.subject} from {span.first} on, which ends at {last.end}"
            )
        if last is not None and last.end == span.first and last.log_id == span.log_id:
            ranges[mine[-1]] = replace(span, first=last.first, rows=last.rows + span.rows)
        else:
            ranges.append(span)


# --- as files ---------------------------------------------------------------------------------------------------------


def is_full(number: int) -> bool:
    return number % FULL_EVERY == 0


def name_of(number: int) -> str:
    return f"{COMMITS}/{number:0{_DIGITS}}{'.full' if is_full(number) else ''}.json"


def number_of(name: str) -> int | None:
    """The number of a commit's file, given without its directory; None: the file is something else."""
    digits = name.removesuffix(".json").removesuffix(".full")
    is_ours = len(digits) == _DIGITS and digits.isascii() and digits.isdigit()
    return int(digits) if is_ours and name == name_of(int(digits)).rpartition("/")[2] else None


def wanted(names: Iterable[str]) -> list[int]:
    """The commits to read, in order: from the last full one on."""
    numbers = sorted(number for name in names if (number := number_of(name)) is not None)
    begin = max((number for number in numbers if is_full(number)), default=0)
    return [number for number in numbers if number >= begin]


def encode_mark() -> bytes:
    # The value of `schema` is a part of format version 1, whatever the page is called today.
    return _dump({"fairway_archive": VERSION, "schema": "docs/pipeline.md"})


def check_mark(data: bytes, path: str) -> None:
    version = _load(data, path).get("fairway_archive")
    if version != VERSION:
        raise NotAnArchive(
            f"{path} is an archive of version {version}, and this release of fairway reads version {VERSION}: "
            "upgrade fairway, or archive to a new path"
        )


def encode(commit: Commit, after: ArchiveState) -> bytes:
    """The bytes of a commit. Every 64th commit also holds the whole state `after` it."""
    ranges, added = ([_said(each) for each in of] for of in (commit.ranges, commit.added))
    said: dict[str, Any] = {"fairway_archive": VERSION, **asdict(commit), "ranges": ranges, "added": added}
    if is_full(commit.number):
        said["full"] = {
            "ranges": [_said(each) for of in after.ranges.values() for each in of],
            "files": [_said(each) for each in after.files.values()],
        }
    return _dump(said)


def _said(of: ArchiveFile | ArchivedRange) -> dict[str, Any]:
    """A range or file as JSON. The name of a single broker is left out, so that older releases can read it."""
    said = {name: value for name, value in asdict(of).items() if name != "stored_as"}
    return {name: value for name, value in said.items() if (name, value) != ("broker_group", BROKER_GROUP)}


def decode(data: bytes, path: str, into: ArchiveState) -> None:
    """Apply the commit in `data`. A full commit replaces everything before it."""
    said = _load(data, path)
    check_mark(data, path)
    try:
        if "full" in said:
            into.number = said["number"]
            into.files = {each["path"]: ArchiveFile(**each) for each in said["full"]["files"]}
            into.ranges = {}
            for each in said["full"]["ranges"]:
                into.ranges.setdefault(each["subject"], []).append(ArchivedRange(**each))
        else:
            ranges = tuple(ArchivedRange(**each) for each in said["ranges"])
            added = tuple(ArchiveFile(**each) for each in said["added"])
            into.apply(Commit(said["number"], said["at_ms"], ranges, added, tuple(said["removed"])))
    except (KeyError, TypeError) as error:
        raise ArchiveDamaged(f"{path} is no commit of an archive: {error}") from error


def _dump(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, indent=1).encode() + b"\n"


def _load(data: bytes, path: str) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except ValueError as error:
        raise ArchiveDamaged(f"{path} is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ArchiveDamaged(f"{path} holds something else than was written there")
    return said


def missing(ranges: Sequence[ArchivedRange]) -> int:
    """The number of archived sequences without a row, because the log had none."""
    return sum(each.end - each.first - each.rows for each in ranges)
