"""Subjects to Parquet, exactly once: `fairway pipeline archive`, `run`, or this file under `spark-submit`.

The archive itself says how far it is: a commit (`manifest`) holds the ranges of sequences and the files with their
rows, and appears whole or not at all. A run reads where each subject ends in the archive, has Spark read and write
what the log has beyond, and commits. Whatever is killed at whatever moment, the next run finds either the commit, and
goes on behind it, or no commit, and does the same range again. There is no checkpoint beside it that could disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from fairway.errors import FairwayError, Misuse
from fairway.limits import MIB
from fairway.spark import reading
from fairway.spark.brokers import SubjectExtent
from fairway.spark.jobs import columns, compacting, ledger, manifest, program
from fairway.spark.jobs.failing import sentences
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.ledger import ArchiveRunRecord
from fairway.spark.jobs.manifest import ArchivedRange, ArchiveState
from fairway.spark.jobs.watching import NS, ProgressCounter, ProgressListener, unwatched
from fairway.spark.looking import Planner
from fairway.spark.options import DEFAULT_URL, EARLIEST, PATIENCE_S, ReadOptions, Where, explicit, read_options
from fairway.spark.places import BROKER_GROUP, SubjectPart
from fairway.world import host
from fairway.world.clock import RealClock

BATCH_MIB: Final = 256  # of the log: two tasks of 128, and what is repeated after a crash is seconds of work
INTERVAL_S: Final = 10.0  # between commits while messages trickle: each makes a file per subject
_FILE_MESSAGES: Final = 1_000  # of a file that takes longer to create than to fill
_POLL_MS: Final = 500  # how soon a run that is asked to end does


@dataclass(frozen=True)
class ArchiveOptions:
    """What an archive run is told."""

    path: str
    subjects: tuple[str, ...]  # names, and patterns such as orders.*
    url: str = DEFAULT_URL
    once: bool = False  # up to what is stored now; else on and on
    starting: str = "earliest"  # where subjects begin that are new to the archive
    group: str | None = None  # under which the broker knows how far the archive is
    batch_mib: int = BATCH_MIB
    interval_s: float = INTERVAL_S
    compact: bool = True
    accept_loss: bool = False
    patience_s: int = PATIENCE_S


@dataclass
class Archived:
    """What a run has done."""

    path: str
    rows: int = 0
    batches: int = 0
    files: int = 0  # in the archive now
    compacted: int = 0  # files that are gone into larger ones
    missing: int = 0  # sequences of this run that the log has no message for
    elapsed_s: float = 0.0
    # By subject, in a cluster by SUBJECT@BROKER-GROUP: what is archived ends before.
    ends: dict[str, int] = field(default_factory=dict)


def read(spark: SparkSession, path: str) -> DataFrame:
    """The rows of an archive, and nothing else that may lie there: the columns of the source, and `date`."""
    files = Files(spark, path)
    return columns.frame(spark, files.root, ledger.load(files).files.values())


def contents(spark: SparkSession, path: str) -> manifest.ArchiveState:
    """Which ranges of which subjects are in which files."""
    return ledger.load(Files(spark, path))


def run(
    spark: SparkSession,
    options: ArchiveOptions,
    watch: ProgressListener = unwatched,
    is_to_end: Callable[[], bool] = lambda: False,
) -> Archived:
    """Archive until all is done (`once`) or `is_to_end`; a run that ends has committed all that it has read."""
    ledger.check_place(options.path)
    with sentences(f"archiving to {options.path}"), columns.settings(spark):
        reading_options = _read_options(options)
        looker = Planner(reading_options)
        try:
            return _ArchiveRun(spark, options, reading_options, looker, watch).run(is_to_end)
        finally:
            looker.close()


def _read_options(options: ArchiveOptions) -> ReadOptions:
    told = {"url": options.url, "subject": ",".join(options.subjects), "starting": options.starting}
    if options.group is not None:
        told["group"] = options.group
    return read_options({**told, "patienceSeconds": str(options.patience_s)})


def resumed(state: ArchiveState, part: SubjectPart, extent: SubjectExtent, log_id: str, options: ArchiveOptions) -> int:
    """Where a subject goes on; what is not there any more is an error, unless the user accepts it."""
    name, own = part.subject, archived_as(state, part, log_id)
    known, end = state.log_id(*own), state.end(*own)
    if known is not None and known != log_id:
        raise reading.DataLoss(
            f"{options.path} holds {name} of another log ({known}) than the broker at {options.url} has ({log_id}): "
            "the broker has new data. Archive it to a new path"
        )
    begin = extent.first if end is None else end
    if begin > extent.end:
        raise reading.DataLoss(
            f"the log of {name} ends at {extent.end}, and {options.path} has it up to {begin - 1}: the broker has lost "
            "its newest messages (a power cut with durability memory, or an older copy of its data). The archive keeps "
            "them; archive what comes now to a new path"
        )
    if begin >= extent.first:
        return begin
    if options.accept_loss:
        return extent.first
    raise reading.DataLoss(
        f"messages {begin} to {extent.first - 1} of {name} are not in {options.path}, and the broker has them no "
        "longer: retention has taken them. Go on without them with --accept-loss (the archive keeps a gap there); "
        "--group NAME makes retention wait for the archive"
    )


def archived_as(state: ArchiveState, part: SubjectPart, log_id: str) -> SubjectPart:
    """What the archive calls it. A log keeps the name under which it was first archived: so an archive of a broker that
    was named by its address goes on when that is in a cluster, and the other way round."""
    return part._replace(broker_group=state.name_of(part.subject, log_id) or part.broker_group)


def check_kind(state: ArchiveState, subject: str, logs: Mapping[str, str], options: ArchiveOptions) -> None:
    """Of the logs that hold a subject now, by their broker groups, the archive must know one if it was made from the
    other kind of URL: nobody could say otherwise what they have in common with what is there."""
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
    """Whether files cost more than rows. A small batch comes from the source as one task, which would write hundreds
    of files one after the other; a shuffle of few rows lets every core write its share."""
    messages = sum(end - begin for begin, end in batch.values())
    return len(batch) > columns.WRITERS_MAX and messages < len(batch) * _FILE_MESSAGES


def _shown(part: SubjectPart) -> str:
    return part.subject if part.broker_group == BROKER_GROUP else f"{part.subject}@{part.broker_group}"


class _ArchiveRun:
    """One run."""

    def __init__(
        self,
        spark: SparkSession,
        options: ArchiveOptions,
        reading_options: ReadOptions,
        looker: Planner,
        watch: ProgressListener,
    ) -> None:
        self._spark = spark
        self._options = options
        self._places = reading_options.starting
        self._looker = looker
        self._clock = RealClock()
        self._pace = ProgressCounter(watch, "archive")
        self._noted: dict[SubjectPart, int] = {}
        files = Files(spark, options.path)
        ledger_ = ArchiveRunRecord(files) if files.exists(manifest.MARK) else None  # repaired, whatever the broker says
        extents = self._looker.extents()  # an unknown subject is found out before anything is made
        self._ledger = ledger_ or ArchiveRunRecord(files)
        self._target = {part: extent.end for part, extent in extents.items()} if options.once else None
        self.done = Archived(self._ledger.files.root)

    def run(self, is_to_end: Callable[[], bool]) -> Archived:
        is_behind, last_ns = True, 0
        while not is_to_end():
            extents = self._looker.extents()
            planned = self._planned(extents)
            wait_s = 0.0 if is_behind else self._options.interval_s - (self._clock.monotonic_ns() - last_ns) / NS
            if planned and (wait_s <= 0 or self._target is not None):
                batch = self._cut(planned)
                self._archive(batch)
                last_ns = self._clock.monotonic_ns()
                is_behind = batch != planned
                self._tell(planned, batch)
            elif self._target is not None:
                break
            elif planned:
                host.sleep(min(wait_s, _POLL_MS / 1_000))
            else:
                self._looker.wait({part: extent.end for part, extent in extents.items()}, _POLL_MS)
        state = self._ledger.state
        self.done.files, self.done.elapsed_s = len(state.files), self._pace.elapsed_s
        parts = [SubjectPart(name, group) for name in sorted(state.ranges) for group in state.groups_of(name)]
        self.done.ends = {_shown(part): end for part in parts if (end := state.end(*part)) is not None}
        return self.done

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _planned(self, extents: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, SubjectExtent]:
        """For each subject that has more than the archive: from where to where."""
        self._check_kinds(extents)
        self._settle_beginnings(extents)
        planned = {}
        for part, extent in extents.items():
            done = self._ledger.state.end(*self._own(part)) or 0
            if done > extent.end:  # by the copy that was asked now
                extent = extent._replace(end=max(extent.end, self._looker.awaited(part, done)))  # noqa: PLW2901
            begin = resumed(self._ledger.state, part, extent, self._log_id(part), self._options)
            end = extent.end if self._target is None else min(extent.end, self._target.get(part, 0))
            self._note(part, begin)
            if end > begin:
                planned[part] = SubjectExtent(begin, end)
        return planned

    def _own(self, part: SubjectPart) -> SubjectPart:
        """As the archive calls it."""
        return archived_as(self._ledger.state, part, self._log_id(part))

    def _check_kinds(self, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        logs: dict[str, dict[str, str]] = {}
        for part in extents:
            logs.setdefault(part.subject, {})[part.broker_group] = self._log_id(part)
        for subject, of in logs.items():
            check_kind(self._ledger.state, subject, of, self._options)

    def _settle_beginnings(self, extents: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Where a subject begins that is new to the archive. Other places than the earliest are committed at once: were
        one resolved anew after a batch that failed, what came in between would be passed over."""
        self._places.check("starting", extents)
        places = {part: self._place(part) for part in extents if self._ledger.state.end(*self._own(part)) is None}
        new = {part: place for part, place in places.items() if place != EARLIEST}
        if not new:
            return
        begins = self._looker.resolve(new)
        self._ledger.commit([], [self._range(part, begin, begin, 0) for part, begin in begins.items()])

    def _place(self, part: SubjectPart) -> Where:
        """In a broker group that a subject has gained since, it begins with its first message."""
        is_known = bool(self._ledger.state.ranges.get(part.subject))
        return EARLIEST if is_known else self._places.place(part)

    def _range(self, part: SubjectPart, begin: int, end: int, rows: int) -> ArchivedRange:
        return ArchivedRange(part.subject, self._log_id(part), begin, end, rows, self._own(part).broker_group)

    def _log_id(self, part: SubjectPart) -> str:
        return f"{self._looker.logs[part.broker_group].id:016x}"

    def _cut(self, planned: Mapping[SubjectPart, SubjectExtent]) -> dict[SubjectPart, SubjectExtent]:
        """As much of it as one batch holds, shared among the subjects."""
        share = max(self._options.batch_mib * MIB // len(planned), 1)
        return {
            part: SubjectExtent(begin, self._looker.reach(part, begin, end, share))
            for part, (begin, end) in planned.items()
        }

    # --- doing it ----------------------------------------------------------------------------------------------------

    def _archive(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        """Read, write, make sure that it was the same log to the end, commit."""
        try:
            self._write(batch)
            self._confirm(batch)
        except (PySparkException, FairwayError):
            self._ledger.abandon()
            raise
        staged = self._ledger.staged()
        rows_of = Counter[SubjectPart]()
        for _, file in staged:
            rows_of[SubjectPart(file.subject, file.broker_group)] += file.rows
        ranges = [self._range(part, begin, end, rows_of[self._own(part)]) for part, (begin, end) in batch.items()]
        self._ledger.commit(staged, ranges)
        rows = sum(each.rows for each in ranges)
        self.done.rows += rows
        self.done.missing += manifest.missing(ranges)
        self.done.batches += 1
        for part, (_, end) in batch.items():
            self._note(part, end)
        if self._options.compact:
            self.done.compacted += compacting.run(self._spark, self._ledger)

    def _write(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        reader = self._spark.read.format("fairway").options(
            url=self._options.url,
            subject=",".join(dict.fromkeys(part.subject for part in batch)),
            starting=explicit({part: begin for part, (begin, _) in batch.items()}),
            ending=explicit({part: end for part, (_, end) in batch.items()}),
            patienceSeconds=str(self._options.patience_s),
        )
        rows = reader.load().withColumn("date", columns.utc_date("appended_at"))
        names = {part: own.broker_group for part in batch if (own := self._own(part)) != part}
        rows = columns.to_stage(columns.renamed(rows, names))
        cores = self._spark.sparkContext.defaultParallelism
        if has_small_files(batch):
            rows = columns.by_file(rows, cores)
        else:
            rows = rows.coalesce(max(cores, self._options.batch_mib * MIB // compacting.TARGET_BYTES))
        columns.stage(rows, self._ledger.room)

    def _confirm(self, batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        """That the logs that Spark has read are those that were looked at, and still have it all."""
        logs = {part: self._log_id(part) for part in batch}
        extents = self._looker.extents()
        for part, (_, end) in batch.items():
            if self._log_id(part) != logs[part]:
                raise reading.other_log(part.subject, self._looker.where)
            if part in extents and extents[part].end < end and self._looker.awaited(part, end) < end:
                raise reading.cut_short(part.subject, extents[part].end, end)

    def _note(self, part: SubjectPart, done: int) -> None:
        """Let the broker know, so that `fairway lag` shows it and retention waits for it."""
        group = self._options.group
        if group is None or self._noted.get(part) == done:
            return
        if part not in self._noted:
            self._looker.hold(part, group, EARLIEST)
        self._looker.progress(part, group, done)
        self._noted[part] = done

    def _tell(self, planned: Mapping[SubjectPart, SubjectExtent], batch: Mapping[SubjectPart, SubjectExtent]) -> None:
        rows = sum(end - begin for begin, end in batch.values())
        self._pace.add(rows, sum(end - begin for begin, end in planned.values()) - rows)


# --- the program ------------------------------------------------------------------------------------------------------


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
    url: program.Url = DEFAULT_URL,
    patience_s: program.Patience = PATIENCE_S,
    master: program.Master = None,
    spark_log: program.SparkLog = program.QUIET,
    json: program.AsJson = False,
) -> None:
    """Subjects to Parquet, exactly once, by subject and date. Without --once it goes on until Ctrl-C or SIGTERM."""
    options = ArchiveOptions(
        path, tuple(subjects), url, once, starting, group, batch_mib, interval_s, compact, accept_loss, patience_s
    )
    with program.running("archive", master, spark_log, is_quiet=json) as (spark, watch), host.asked_to_end() as ending:
        done = run(spark, options, watch, lambda: ending.is_asked)
    program.tell(done, json, [_sentence(done)])


def _sentence(done: Archived) -> str:
    rate = f", {done.rows / done.elapsed_s:,.0f} rows/s" if done.rows and done.elapsed_s > 0 else ""
    gaps = f"; {done.missing:,} sequences have no message in the log" if done.missing else ""
    return f"{done.rows:,} rows archived (commits: {done.batches:,}{rate}); {done.path} has {done.files:,} files{gaps}"


if __name__ == "__main__":
    program.main(command, "archive")
