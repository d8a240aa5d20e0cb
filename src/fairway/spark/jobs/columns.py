"""The columns of an archive, and the Spark settings for writing it: plain Parquet for any reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)
from pyspark.sql.types import DateType, StructField, StructType

from fairway.limits import KIB
from fairway.spark.frames import MESSAGES
from fairway.spark.jobs.manifest import ArchiveFile
from fairway.spark.server_groups import SubjectPart

ARCHIVE: Final = StructType([*MESSAGES.fields, StructField("date", DateType(), False)])

STAGED_BY: Final = "staged_by"  # a directory level of staged rows: each file is of one broker group
_FILE_OF: Final = (STAGED_BY, "subject", "date")  # what the rows of a file have in common
_DAY_US: Final = 24 * 3_600 * 1_000_000
WRITERS_MAX: Final = 64  # open files of one task
_WRITING: Final = {
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
    with _listing(spark):
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
def settings(spark: SparkSession) -> Iterator[None]:
    """The session's settings for writing an archive; the old settings are restored afterwards."""
    with _set(spark, _WRITING):
        yield


@contextmanager
def _listing(spark: SparkSession) -> Iterator[None]:
    """List files with a few tasks, unless the user has set how many: 4,000 files take 0.7 s instead of 15."""
    tasks = _LISTING_TASKS_PER_CORE * spark.sparkContext.defaultParallelism
    with _set(spark, {} if LISTING in spark.conf.getAll else {LISTING: str(tasks)}):
        yield


@contextmanager
def _set(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
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
