"""`fairway pipeline archive`: writes subjects to Parquet files, exactly once; `run`, `command`, and compaction.

The archive itself records how far it is. A commit (`manifest`) holds ranges of sequences and the files with their rows,
and appears whole or not at all. A run reads from the archive where each subject ends, has Spark read and write the rest
of the log, and commits. If a run is killed at any moment, the next run finds either the commit, and continues behind
it, or no commit, and repeats the same range. There is no separate checkpoint that could disagree.

`plan` and `compact` turn small files into large ones. Files of one subject, broker group and date are in order of their
sequences. Eight neighbours of about the same size become one file of the next size up, so a row is rewritten a few
times in all, not once per micro-batch. When a later date has begun, the remaining small files of an earlier date are
joined. `plan` decides; `compact` writes and commits as many subjects and dates at once as make a batch. With hundreds
of subjects, a job for each would take minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Final

import typer
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from fairway.errors import FairwayError, Misuse
from fairway.limits import KIB, MIB
from fairway.runtime import host
from fairway.runtime.clock import RealClock
from fairway.spark import reader
from fairway.spark.jobs import archive_log, job, manifest
from fairway.spark.jobs.archive_log import ArchiveRunRecord, by_file, frame, stage, to_stage
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.job import NS, ProgressCounter, ProgressListener, sentences, unwatched
from fairway.spark.jobs.manifest import ArchivedRange, ArchiveFile, ArchiveState
from fairway.spark.options import (
    DEFAULT_URL,
    EARLIEST,
    PATIENCE_S,
    ReadOptions,
    Where,
    options_of,
    options_of_ranges,
    read_options,
)
from fairway.spark.plan import Planner, SubjectExtent
from fairway.spark.server_groups import BROKER_GROUP, SubjectPart

FAN_IN: Final = 8
TARGET_BYTES: Final = 128 * MIB  # Spark reads as much in one task
SMALLEST_BYTES: Final = 64 * KIB
BATCH_BYTES: Final = 256 * MIB  # compacted by one job, and repeated after a crash


def plan(files: Iterable[ArchiveFile]) -> list[list[ArchiveFile]]:
    """The groups of files to join, each in order."""
    ordered = sorted(files, key=lambda each: (*each.part, each.date, each.first))
    latest = {each.part: each.date for each in ordered}
    groups: list[list[ArchiveFile]] = []
    for (part, date), of_day in groupby(ordered, key=lambda each: (each.part, each.date)):
        if date < latest[part]:  # the date is over: all small neighbours
            runs = groupby(of_day, key=lambda each: each.size_bytes < TARGET_BYTES // 2)
            groups += [group for is_small, run in runs if is_small for group in _fitting(run) if len(group) > 1]
        else:  # neighbours of one tier
            tiers = groupby(of_day, key=lambda each: _tier(each.size_bytes))
            groups += [group for _, run in tiers for group in _fitting(run) if len(group) >= FAN_IN]
    return groups


def _fitting(files: Iterable[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    """Cut a run of files where the joined file would become too large."""
    group: list[ArchiveFile] = []
    size_bytes = 0
    for each in files:
        if group and size_bytes + each.size_bytes > TARGET_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(each)
        size_bytes += each.size_bytes
    if group:
        yield group


def _tier(size_bytes: int) -> int:
    tier, limit = 0, SMALLEST_BYTES
    while size_bytes >= limit and limit < TARGET_BYTES:
        tier, limit = tier + 1, limit * FAN_IN
    return tier


def batches(groups: Iterable[list[ArchiveFile]]) -> list[list[list[ArchiveFile]]]:
    """The groups that each job compacts. Two groups of one job never share broker group, subject and date, so each
    group becomes one file. A job has at most `BATCH_BYTES`, or a single group."""
    waiting = list(groups)
    made = []
    while waiting:
        taken: set[tuple[SubjectPart, str]] = set()
        batch: list[list[ArchiveFile]] = []
        size_bytes, left = 0, list[list[ArchiveFile]]()
        for group in waiting:
            place, size = (group[0].part, group[0].date), sum(each.size_bytes for each in group)
            if place in taken or (batch and size_bytes + size > BATCH_BYTES):
                left.append(group)
                continue
            taken.add(place)
            batch.append(group)
            size_bytes += size
        made.append(batch)
        waiting = left
    return made


def compact(spark: SparkSession, commits: ArchiveRunRecord) -> int:
    """Compact what is due; returns by how many files the archive shrank."""
    fewer = 0
    for batch in batches(plan(commits.state.files.values())):
        removed = [file for group in batch for file in group]
        rows = to_stage(frame(spark, commits.files.root, removed))
        stage(by_file(rows, min(len(batch), spark.sparkContext.defaultParallelism)), commits.room)
        staged = commits.staged()
        commits.commit(staged, (), removed)
        fewer += len(removed) - len(staged)
    return fewer


BATCH_MIB: Final = 256  # of the log: two tasks of 128, and seconds of work to repeat after a crash
INTERVAL_S: Final = 10.0  # between commits while messages trickle: each commit makes a file per subject
_FILE_MESSAGES: Final = 1_000  # a smaller file takes longer to create than to fill
_POLL_MS: Final = 500  # the time within which a run reacts to a request to end


@dataclass(frozen=True)
class ArchiveOptions:
    path: str
    subjects: tuple[str, ...]  # names, and patterns such as orders.*
    url: str = DEFAULT_URL
    once: bool = False  # up to what is stored now; otherwise run until asked to end
    starting: str = "earliest"  # where subjects begin that are new to the archive
    group: str | None = None  # under this name the broker keeps the archive's progress
    batch_mib: int = BATCH_MIB
    interval_s: float = INTERVAL_S
    compact: bool = True
    accept_loss: bool = False
    patience_s: int = PATIENCE_S


@dataclass
class Archived:
    """The result of a run."""

    path: str
    rows: int = 0
    batches: int = 0
    files: int = 0  # in the archive now
    compacted: int = 0  # files that compaction has removed
    missing: int = 0  # sequences of this run without a message in the log
    elapsed_s: float = 0.0
    # By subject, or SUBJECT@BROKER-GROUP in a cluster: the end of what is archived.
    ends: dict[str, int] = field(default_factory=dict)


def read(spark: SparkSession, path: str) -> DataFrame:
    """The rows of an archive, without other files of its directory: the columns of the source, and `date`."""
    files = Files(spark, path)
    return archive_log.frame(spark, files.root, archive_log.load(files).files.values())


def contents(spark: SparkSession, path: str) -> manifest.ArchiveState:
    """Which ranges of which subjects are in which files."""
    return archive_log.load(Files(spark, path))


def run(
    spark: SparkSession,
    options: ArchiveOptions,
    watch: ProgressListener = unwatched,
    is_to_end: Callable[[], bool] = lambda: False,
) -> Archived:
    """Archive until all is done (`once`) or `is_to_end`. By its end, a run has committed all that it has read."""
    archive_log.check_place(options.path)
    with sentences(f"archiving to {options.path}"), archive_log.settings(spark):
        told = {**options_of(options.url, options.patience_s, options.subjects), "starting": options.starting}
        reading_options = read_options(told if options.group is None else {**told, "group": options.group})
        planner = Planner(reading_options)
        try:
            return _ArchiveRun(spark, options, reading_options, planner, watch).run(is_to_end)
        finally:
            planner.close()


def resumed(state: ArchiveState, part: SubjectPart, extent: SubjectExtent, log_id: str, options: ArchiveOptions) -> int:
    """Where a subject continues. Messages that the broker no longer has are an error, unless the user accepts it."""
    name, own = part.subject, archived_as(state, part, log_id)
    known, end = state.log_id(*own), state.end(*own)
    if known is not None and known != log_id:
        raise reader.DataLoss(
            f"{options.path} holds {name} of another log ({known}) than the broker at {options.url} has ({log_id}): "
            "the broker has new data. Archive it to a new path"
        )
    begin = extent.first if end is None else end
    if begin > extent.end:
        raise reader.DataLoss(
            f"the log of {name} ends at {extent.end}, and {options.path} has it up to {begin - 1}: the broker has lost "
            "its newest messages (a power cut with durability memory, or an older copy of its data). The archive keeps "
            "them; archive what comes now to a new path"
        )
    if begin >= extent.first:
        return begin
    if options.accept_loss:
        return extent.first
    raise reader.DataLoss(
        f"messages {begin} to {extent.first - 1} of {name} are not in {options.path}, and the broker has them no "
        "longer: retention has taken them. Go on without them with --accept-loss (the archive keeps a gap there); "
        "--group NAME makes retention wait for the archive"
    )


def archived_as(state: ArchiveState, part: SubjectPart, log_id: str) -> SubjectPart:
    """The part's name in the archive. A log keeps the name under which it was first archived. So an archive of a broker
    that was named by its address continues when the broker joins a cluster, and the other way round."""
    return part._replace(broker_group=state.name_of(part.subject, log_id) or part.broker_group)


def check_kind(state: ArchiveState, subject: str, logs: Mapping[str, str], options: ArchiveOptions) -> None:
    """Refuse a change between the address of a broker and a cluster, unless the archive knows one of the present logs
    of the subject. Otherwise nothing shows how the logs relate to what is archived."""
    there = state.groups_of(subject)
    was_alone, is_alone = BROKER_GROUP in there, BROKER_GROUP in logs
    if not there or was_alone is is_alone or any(state.name_of(subject, log_id) for log_id in logs.values()):
        return
    if was_alone:
        raise Misuse(
            f"{options.path} holds {subject} of a broker that was named by its address, and no broker group of "
            f"{options.url} that holds it has its log ({state.log_id(subject)}): go on with that address, or archive "
            "to a new path"
        )
    raise Misuse(
        f"{options.path} holds {subject} of broker group {', '.join(there)} of a cluster, and the broker at "
        f"{options.url} has another log ({logs[BROKER_GROUP]}): go on with meta://HOST:PORT, or archive to a new path"
    )


def has_small_files(batch: Mapping[SubjectPart, SubjectExtent]) -> bool:
    """Whether files cost more than rows. The source reads a small batch as one task, which would write hundreds of
    files one after the other. After a shuffle of the few rows every core writes its share."""
    messages = sum(end - begin for begin, end in batch.values())
    return len(batch) > archive_log.WRITERS_MAX and messages < len(batch) * _FILE_MESSAGES


class _ArchiveRun:
    def __init__(
        self,
        spark: SparkSession,
        options: ArchiveOptions,
        reading_options: ReadOptions,
        planner: Planner,
        watch: ProgressListener,
    ) -> None:
        self._spark = spark
        self._options = options
        self._places = reading_options.starting
        self._planner = planner
        self._clock = RealClock()
        self._pace = ProgressCounter(watch, "archive")
        self._noted: dict[SubjectPart, int] = {}
        files = Files(spark, options.path)
        commits = ArchiveRunRecord(files) if files.exists(manifest.MARK) else None  # repairs even without a broker
        extents = self._planner.extents()  # refuses an unknown subject before anything is made
        self._commits = commits or ArchiveRunRecord(files)
        self._target = {part: extent.end for part, extent in extents.items()} if options.once else None
        self.done = Archived(self._commits.files.root)

    def run(self, is_to_end: Callable[[], bool]) -> Archived:
        is_behind, last_ns = True, 0
        while not is_to_end():
            extents = self._planner.extents()
            planned = self._planned(extents)
            wait_s = 0.0 if is_behind else self._options.interval_s - (self._clock.monotonic_ns() - last_ns) / NS
            if planned and (wait_s <= 0 or self._target is not None):
                batch = self._cut(planned)
                self._archive(batch)
                last_ns = self._clock.monotonic_ns()
                is_behind = batch != planned
                rows, planned_rows = (sum(end - begin for begin, end in of.values()) for of in (batch, planned))
                self._pace.add(rows, planned_rows - rows)
            elif self._target is not None:
                break
            elif planned:
                host.sleep(min(wait_s, _POLL_MS / 1_000))
            else:
                self._planner.wait({part: extent.end for part, extent in extents.items()}, _POLL_MS)
        state = self._commits.state
        self.done.files, self.done.elapsed_s = len(state.files), self._pace.elapsed_s
        parts = [SubjectPart(name, group) for name in sorted(state.ranges) for group in state.groups_of(name)]
        for part in parts:
            name = part.subject if part.broker_group == BROKER_GROUP else f"{part.subject}@{part.broker_group}"
            if (end := state.end(*part)) is not None:
                self.done.ends[name] = end
        return self.done

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _planned(self, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, SubjectExtent]:
        """The range to archive of each subject that has more than the archive."""
        self._check_kinds(extents)
        self._settle_beginnings(extents)
        planned = {}
        for part, extent in extents.items():
            done = self._commits.state.end(*self._own(part)) or 0
            end = extent.end
            if done > end:  # on the copy that was asked now
                end = max(end, self._planner.broker(part.broker_group).awaited(part.subject, done))
            begin = resumed(
                self._commits.state, part, SubjectExtent(extent.first, end), self._log_id(part), self._options
            )
            end = end if self._target is None else min(end, self._target.get(part, 0))
            self._note(part, begin)
            if end > begin:
                planned[part] = SubjectExtent(begin, end)
        return planned

    def _own(self, part: SubjectPart) -> SubjectPart:
        """The part's name in the archive."""
        return archived_as(self._commits.state, part, self._log_id(part))

    def _check_kinds(self, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        logs: dict[str, dict[str, str]] = {}
        for part in extents:
            logs.setdefault(part.subject, {})[part.broker_group] = self._log_id(part)
        for subject, of in logs.items():
            check_kind(self._commits.state, subject, of, self._options)

    def _settle_beginnings(self, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Where new subjects begin. Places other than the earliest are committed at once: if they were resolved again
        after a failed batch, the messages in between would be skipped."""
        self._places.check("starting", extents)
        places = {part: self._place(part) for part in extents if self._commits.state.end(*self._own(part)) is None}
        new = {part: place for part, place in places.items() if place != EARLIEST}
        if not new:
            return
        begins = self._planner.resolve(new)
        self._commits.commit([], [self._range(part, begin, begin, 0) for part, begin in begins.items()])

    def _place(self, part: SubjectPart) -> Where:
        """Where a new part begins: at its first message, if the archive has the subject from another broker group."""
        is_known = bool(self._commits.state.ranges.get(part.subject))
        return EARLIEST if is_known else self._places.place(part)

    def _range(self, part: SubjectPart, begin: int, end: int, rows: int) -> ArchivedRange:
        return ArchivedRange(part.subject, self._log_id(part), begin, end, rows, self._own(part).broker_group)

    def _log_id(self, part: SubjectPart) -> str:
        return f"{self._planner.logs[part.broker_group].id:016x}"

    def _cut(self, planned: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, SubjectExtent]:
        """As much of the plan as one batch holds, shared among the subjects."""
        share = max(self._options.batch_mib * MIB // len(planned), 1)
        return {
            part: SubjectExtent(begin, self._planner.broker(part.broker_group).reach(part.subject, begin, end, share))
            for part, (begin, end) in planned.items()
        }

    # --- doing it ----------------------------------------------------------------------------------------------------

    def _archive(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Read, write, check that the logs are still the same, commit."""
        try:
            self._write(batch)
            self._confirm(batch)
        except (PySparkException, FairwayError):
            self._commits.abandon()
            raise
        staged = self._commits.staged()
        rows_of = Counter[SubjectPart]()
        for _, file in staged:
            rows_of[file.part] += file.rows
        ranges = [self._range(part, begin, end, rows_of[self._own(part)]) for part, (begin, end) in batch.items()]
        self._commits.commit(staged, ranges)
        rows = sum(each.rows for each in ranges)
        self.done.rows += rows
        self.done.missing += manifest.missing(ranges)
        self.done.batches += 1
        for part, (_, end) in batch.items():
            self._note(part, end)
        if self._options.compact:
            self.done.compacted += compact(self._spark, self._commits)

    def _write(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        told = options_of_ranges(self._options.url, self._options.patience_s, batch)
        reader = self._spark.read.format("fairway").options(**told)
        rows = reader.load().withColumn("date", archive_log.utc_date("appended_at"))
        names = {part: own.broker_group for part in batch if (own := self._own(part)) != part}
        rows = to_stage(archive_log.renamed(rows, names))
        cores = self._spark.sparkContext.defaultParallelism
        if has_small_files(batch):
            rows = by_file(rows, cores)
        else:
            rows = rows.coalesce(max(cores, self._options.batch_mib * MIB // TARGET_BYTES))
        stage(rows, self._commits.room)

    def _confirm(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Check that Spark has read the logs that were planned, and that they still have everything."""
        logs = {part: self._log_id(part) for part in batch}
        extents = self._planner.extents()
        for part, (_, end) in batch.items():
            if self._log_id(part) != logs[part]:
                raise reader.other_log(part.subject, self._planner.where)
            if (
                part in extents
                and extents[part].end < end
                and self._planner.broker(part.broker_group).awaited(part.subject, end) < end
            ):
                raise reader.cut_short(part.subject, extents[part].end, end)

    def _note(self, part: SubjectPart, done: int) -> None:
        """Report progress to the broker, so that `fairway lag` shows it and retention waits for it."""
        group = self._options.group
        if group is None or self._noted.get(part) == done:
            return
        if part not in self._noted:
            self._planner.broker(part.broker_group).hold(part.subject, group, EARLIEST)
        self._planner.broker(part.broker_group).progress(part.subject, group, done)
        self._noted[part] = done


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: Annotated[
        list[str], typer.Argument(metavar="SUBJECT...", help="Subjects, or patterns such as 'orders.*'.")
    ],
    path: Annotated[str, typer.Option("--path", metavar="DIR", help="The archive; made where it is missing.")],
    once: Annotated[bool, typer.Option("--once", help="Up to what is stored now, then end.")] = False,
    starting: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where subjects begin that are new to it: earliest, latest, a time, a sequence."
        ),
    ] = "earliest",
    group: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="Show progress under this name in `fairway lag`; retention waits for it."),
    ] = None,
    batch_mib: Annotated[int, typer.Option(min=1, metavar="N", help="Of the log, in one commit.")] = BATCH_MIB,
    interval_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Between commits, while there is little to do.")
    ] = INTERVAL_S,
    compact: Annotated[bool, typer.Option(help="Put small files together.")] = True,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Go on where retention has taken messages, and leave a gap."),
    ] = False,
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """Subjects to Parquet, exactly once, by subject and date. Without --once it goes on until Ctrl-C or SIGTERM."""
    options = ArchiveOptions(
        path, tuple(subjects), url, once, starting, group, batch_mib, interval_s, compact, accept_loss, patience_s
    )
    with job.running("archive", master, spark_log, is_quiet=json) as (spark, watch), host.asked_to_end() as ending:
        done = run(spark, options, watch, lambda: ending.is_asked)
    job.tell(done, json, [_sentence(done)])


def _sentence(done: Archived) -> str:
    rate = f", {done.rows / done.elapsed_s:,.0f} rows/s" if done.rows and done.elapsed_s > 0 else ""
    gaps = f"; {done.missing:,} sequences have no message in the log" if done.missing else ""
    return f"{done.rows:,} rows archived (commits: {done.batches:,}{rate}); {done.path} has {done.files:,} files{gaps}"


if __name__ == "__main__":
    job.main(command, "archive")
