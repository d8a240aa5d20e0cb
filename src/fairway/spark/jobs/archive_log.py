"""An archive on its disk: its rows, its commits, and the repair of what killed runs left.

The rows are plain Parquet for any reader. `frame` reads them, `stage` writes them; `settings` has what Spark needs for
writing. A run makes a commit in five steps. The files of a commit carry its number and the name of the run.

    1  stage     Spark writes the files below `_fairway/staging/NUMBER-RUN`, where no plain reader looks
    2  move      the files go to their places, where plain readers see them
    3  commit    the commit is written under its number, a name that only one run can take
    4  remove    files that the commit replaces are removed
    5  tidy      the staging folder is removed

A run repairs at its start what killed runs have left:

    killed in 1          plain readers see nothing; the folder is removed after its number is taken
    killed in 2, or      plain readers see files that no commit names. The new run takes their number with an empty
    between 2 and 3      commit, so that no run can commit them any more, and removes them
    killed in 3 to 5     plain readers see files that are replaced; the new run removes them

If another run takes the number of a live run, the live run learns that when it commits, and removes what it has moved.
So at the longest, plain readers see foreign files from step 2 of one run to the start of the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote, urlsplit

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)
from pyspark.sql.types import DateType, StructField, StructType

from fairway.errors import FairwayError, Misuse, StorageFault
from fairway.limits import KIB
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs import manifest
from fairway.spark.jobs.files import EXCLUSIVE, Files, Listed, NameTaken
from fairway.spark.jobs.manifest import ArchiveDamaged, ArchivedRange, ArchiveFile, ArchiveState, Commit, NotAnArchive
from fairway.spark.server_groups import SubjectPart

ARCHIVE: Final = StructType([*MESSAGES.fields, StructField("date", DateType(), False)])

STAGED_BY: Final = "staged_by"  # a directory level of staged rows: each file is of one broker group
_FILE_OF: Final = (STAGED_BY, "subject", "date")  # what the rows of a file have in common
_DAY_US: Final = 24 * 3_600 * 1_000_000
WRITERS_MAX: Final = 64  # open files of one task
WRITING: Final = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # not INT96, which is deprecated outside Spark
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # Write several subjects and dates at once without sorting: rows stay in the order of the log.
    "spark.sql.maxConcurrentOutputFileWriters": str(WRITERS_MAX),
    # Compaction reads small files: up to 512 of them in a task instead of 32, shared among all cores.
    "spark.sql.files.openCostInBytes": str(256 * KIB),
}
# Spark lists more than 32 paths with a job that has a task for each path, up to 10,000.
LISTING: Final = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_LISTING_TASKS_PER_CORE: Final = 2


def utc_date(column: str) -> Column:
    """The date of a time in UTC, whatever the session's time zone."""
    return F.expr(f"date_from_unix_date(cast(unix_micros({column}) div {_DAY_US} as int))")


def frame(spark: SparkSession, root: str, files: Iterable[ArchiveFile]) -> DataFrame:
    """The rows of some files of an archive, with the columns in the order of the live source, and `date`."""
    meant = list(files)
    if not meant:
        return spark.createDataFrame([], ARCHIVE)
    paths = [f"{root}/{each.path}" for each in meant]
    # List files with a few tasks, unless the user has set how many: 4,000 files take 0.7 s instead of 15.
    tasks = _LISTING_TASKS_PER_CORE * spark.sparkContext.defaultParallelism
    with settings(spark, {} if LISTING in spark.conf.getAll else {LISTING: str(tasks)}):
        rows = spark.read.schema(ARCHIVE).option("basePath", root).parquet(*paths).select(*ARCHIVE.fieldNames())
    return renamed(
        rows, {SubjectPart(each.subject, each.stored_as): each.broker_group for each in meant if each.stored_as}
    )


def renamed(rows: DataFrame, names: Mapping[SubjectPart, str]) -> DataFrame:
    """The rows with other names of broker groups for the given subjects. There is one condition for each pair of names:
    there may be thousands of subjects, and Spark could not plan a condition for each."""
    subjects: dict[tuple[str, str], list[str]] = {}
    for part, other in names.items():
        subjects.setdefault((part.broker_group, other), []).append(part.subject)
    name = own = F.col("broker_group")
    for (before, after), of in subjects.items():
        name = F.when((own == before) & F.col("subject").isin(of), F.lit(after)).otherwise(name)
    return rows.withColumn("broker_group", name) if names else rows


def stage(rows: DataFrame, path: str) -> None:
    """Write the rows there, each file of one broker group, subject and date."""
    rows.write.partitionBy(*_FILE_OF).parquet(path)


def to_stage(rows: DataFrame) -> DataFrame:
    return rows.withColumn(STAGED_BY, F.col("broker_group"))


def by_file(rows: DataFrame, tasks: int) -> DataFrame:
    """The rows with each file's rows in one task, in the order of the log. A single task needs no shuffle."""
    rows = rows.coalesce(1) if tasks == 1 else rows.repartition(tasks, *_FILE_OF)
    return rows.sortWithinPartitions(*_FILE_OF, "sequence")


@contextmanager
def settings(spark: SparkSession, wanted: Mapping[str, str] = WRITING) -> Iterator[None]:
    """The session's settings, by default those for writing an archive; the old settings are restored afterwards."""
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


_OURS: Final = re.compile(r"fairway-(?P<number>\d{12})-[0-9a-f]{8}-\d{5}\.parquet", re.ASCII)
_STAGED: Final = re.compile(r"(?P<number>\d{12})-[0-9a-f]{8}", re.ASCII)
_LOADS_MAX: Final = 5  # a reader that is overtaken by 64 commits between two of its steps begins again
_REPAIRS_MAX: Final = 5  # a repair begins again each time another run commits between two of its steps


Staged = list[tuple[str, ArchiveFile]]


class Overtaken(FairwayError):
    """Another run has committed to the archive meanwhile."""


def load(files: Files) -> ArchiveState:
    """The committed state. `NotAnArchive` says what the path is instead."""
    if not files.exists():
        raise NotAnArchive(f"there is nothing at {files.root}: `fairway pipeline archive` makes an archive")
    if not files.exists(manifest.MARK):
        raise NotAnArchive(f"{files.root} is not an archive of fairway: it has no {manifest.MARK}")
    manifest.check_mark(files.read(manifest.MARK), files.full(manifest.MARK))
    for attempt in range(_LOADS_MAX):
        state = ArchiveState()
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


class ArchiveRunRecord:
    """One run's view of an archive, through which it commits."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._run = f"{RealRng().bits(32):08x}"
        self._clock = RealClock()
        self.state = ArchiveState()
        check_place(files.full_root)
        if not self.files.exists(manifest.MARK):
            self._create()
        self.state = load(self.files)
        self._abandoned: list[tuple[int, str]] = []  # staging folders of runs that were killed, or are under way
        self._repair()

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
        except NameTaken:
            return  # another run has just made the archive

    # --- committing --------------------------------------------------------------------------------------------------

    @property
    def staging(self) -> str:
        """The folder where the next commit is prepared; no reader looks there."""
        return f"{manifest.STAGING}/{self.state.number + 1:012}-{self._run}"

    @property
    def room(self) -> str:
        """The path, in Spark's form, where Spark is to write the rows of the next commit."""
        return self.files.full(f"{self.staging}/rows")

    def abandon(self) -> None:
        """Remove what was staged."""
        self.files.remove(self.staging)

    def staged(self) -> Staged:
        """The files written for the next commit: their present paths, and their future entries."""
        staging = f"{self.staging}/rows"
        found = sorted(each for each in self.files.walk(staging) if each.path.endswith(".parquet"))
        made = []
        for place, (path, size_bytes) in enumerate(found):
            folder = path.removeprefix(f"{staging}/").rpartition("/")[0]
            values = dict(part.split("=", 1) for part in folder.split("/"))
            footer = self.files.footer(Listed(path, size_bytes), "sequence")
            if footer.rows:
                name = f"fairway-{self.state.number + 1:012}-{self._run}-{place:05}.parquet"
                target = f"subject={values['subject']}/date={values['date']}/{name}"
                span = (footer.least, footer.most + 1, footer.rows, size_bytes, unquote(values[STAGED_BY]))
                made.append((path, ArchiveFile(target, unquote(values["subject"]), values["date"], *span)))
        return made

    def commit(self, staged: Staged, ranges: Sequence[ArchivedRange], removed: Sequence[ArchiveFile] = ()) -> None:
        """Make the staged files part of the archive, and take the removed files out of it."""
        staging, gone = self.staging, [each.path for each in removed]
        added = [file for _, file in staged]
        _check(added, ranges, removed)
        commit = Commit(self.state.number + 1, self._clock.wall_ms(), tuple(ranges), tuple(added), tuple(gone))
        self.state.apply(commit)
        try:
            for source, file in staged:
                self.files.move(source, file.path)
        except StorageFault:
            self.files.remove_all([*(file.path for file in added), staging])
            raise
        data = manifest.encode(commit, self.state)
        try:
            self.files.write(manifest.name_of(commit.number), data, temporary=f"{staging}/commit.json")
        except NameTaken as error:
            self.files.remove_all([*(file.path for file in added), staging])
            raise Overtaken(
                f"another run writes to {self.files.root}: it has made commit {commit.number} meanwhile. Nothing of "
                "this run's commit was kept. Let one archive job at a time write to a path"
            ) from error
        self.files.remove_all([*gone, *self._overtaken(), staging])
        for name in self.files.names(manifest.COMMITS) if manifest.is_full(commit.number) else ():
            number = manifest.number_of(name)
            if number is not None and number < commit.number - manifest.FULL_EVERY:
                self.files.remove(f"{manifest.COMMITS}/{name}")

    def _overtaken(self) -> list[str]:
        """Staging folders of commits that no run can make any more."""
        overtaken = [path for number, path in self._abandoned if number <= self.state.number]
        self._abandoned = [each for each in self._abandoned if each[0] > self.state.number]
        return overtaken

    # --- repair -------------------------------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Remove what killed runs have left, as the table above says."""
        for _ in range(_REPAIRS_MAX):
            named = [(_OURS.fullmatch(path.rpartition("/")[2]), path) for path in self.files.all_data()]
            strange = [(int(ours["number"]), path) for ours, path in named if ours and path not in self.state.files]
            if all(number <= self.state.number for number, _ in strange):
                self._abandoned = self._staging_folders()
                self.files.remove_all([*(path for _, path in strange), *self._overtaken()])
                return
            try:
                self.commit([], [])
            except Overtaken:
                self.state = load(self.files)  # the run that owns the files has committed them, or another run has
        raise Overtaken(
            f"another run writes to {self.files.root}, and has made {_REPAIRS_MAX} commits while this one began. Let "
            "one archive job at a time write to a path"
        )

    def _staging_folders(self) -> list[tuple[int, str]]:
        """The staging folders, with the numbers of their commits; 0 without a number, as for a new archive's mark."""
        found = []
        for name in self.files.names(manifest.STAGING):
            staged = _STAGED.fullmatch(name)
            found.append((int(staged["number"]) if staged is not None else 0, f"{manifest.STAGING}/{name}"))
        return found


def check_place(path: str) -> None:
    """Check that an archive can be written there: taking a number needs a rename that fails if the name is taken. A
    path without a scheme is on the default file system, which `ArchiveRunRecord` knows."""
    scheme = urlsplit(path).scheme
    if scheme and scheme not in EXCLUSIVE:
        raise Misuse(
            f"cannot archive to {path}: on {scheme}:// a rename does not fail if the name is taken, so that two runs "
            "could make the same commit and lose rows. Archive to a local disk or to hdfs://, and copy the archive "
            "from there when no run writes to it"
        )


def _check(added: Sequence[ArchiveFile], ranges: Sequence[ArchivedRange], removed: Sequence[ArchiveFile]) -> None:
    """Check that the files agree with the ranges, or with the files that they replace."""
    spans: dict[SubjectPart, tuple[int, int]] = {}  # of each subject, in each broker group
    for of in ranges or removed:
        first, end = spans.get(of.part, (of.first, of.end))
        spans[of.part] = min(first, of.first), max(end, of.end)
    last: dict[SubjectPart, int] = {}
    for each in sorted(added, key=lambda each: each.first):
        first, end = spans.get(each.part, (0, 0))
        if not max(first, last.get(each.part, 0)) <= each.first < each.end <= end:
            raise ArchiveDamaged(
                f"Spark has written {each.subject} {each.first} to {each.end - 1}, where {first} to {end - 1} was "
                "read, or has written some of it twice: nothing was committed"
            )
        last[each.part] = each.end
    before, after = sum(each.rows for each in ranges or removed), sum(each.rows for each in added)
    if before != after:
        raise ArchiveDamaged(f"{before} rows were read, and {after} were written: nothing was committed")
