"""Compares an archive with the log it was made from, and finds holes in sequences.

Every row of a committed range must be in the archive once, and equal the log's. `compared` compares rows one by one
where both have a range. The column `content` has all parts of a message, the large ones as digests. `gone` checks what
retention has since taken from the log against the commits, which record how many rows there were.

`holes` finds missing sequences. It counts rows in stretches first: where nothing is missing, which is nearly
everywhere, nothing is sorted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.spark.jobs import archive_log, findings
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.manifest import ArchivedRange, ArchiveState
from fairway.spark.plan import SubjectExtent
from fairway.spark.reader import DataLoss
from fairway.spark.server_groups import BROKER_GROUP, SubjectPart

STRETCH: Final = 1 << 20  # sequences; one task sorts a stretch with a hole


_STRETCHES: Final = "subject string, broker_group string, stretch long, low long, high long"
_KEYS: Final = ("subject", "broker_group", "stretch")


class _Stretch(NamedTuple):
    subject: str
    broker_group: str
    number: int
    low: int
    high: int


class Whole(NamedTuple):
    """A range in which every sequence of a subject should exist, from `begin` up to `end`."""

    subject: str
    begin: int
    end: int
    broker_group: str = BROKER_GROUP


def holes(spark: SparkSession, rows: DataFrame, wholes: Iterable[Whole]) -> DataFrame | None:
    """`subject`, `broker_group`, `first`, `end` and `at` of each hole; None: there are none. `at` is when the message
    before the hole was stored, or else the message behind it. Of `rows` only these columns, `sequence` and
    `appended_at` are used. A hole over two stretches counts as two."""
    stretches = [
        _Stretch(each.subject, each.broker_group, number, *bounds) for each in wholes for number, *bounds in _cut(each)
    ]
    stretch = F.expr(f"sequence div {STRETCH}").alias("stretch")
    placed = rows.select("subject", "broker_group", stretch, "sequence", "appended_at")
    within = placed.join(F.broadcast(spark.createDataFrame(stretches, _STRETCHES)), list(_KEYS))
    within = within.filter((F.col("sequence") >= F.col("low")) & (F.col("sequence") < F.col("high")))
    counts = {tuple(key): count for *key, count in within.groupBy(*_KEYS).count().collect()}
    short = [each for each in stretches if counts.get(each[:3], 0) < each.high - each.low]
    return _between(spark, within, short) if short else None


def _between(spark: SparkSession, within: DataFrame, short: list[_Stretch]) -> DataFrame:
    stretches = spark.createDataFrame(short, _STRETCHES)
    kept = within.join(F.broadcast(stretches.select(*_KEYS)), list(_KEYS), "left_semi")
    ends = stretches.withColumn("sequence", F.col("high")).withColumn("appended_at", F.lit(None).cast("timestamp"))
    marks = kept.unionByName(ends)
    in_order = Window.partitionBy(*_KEYS).orderBy("sequence")
    first = F.coalesce(F.lag("sequence").over(in_order), F.col("low") - 1) + 1
    at = F.coalesce(F.lag("appended_at").over(in_order), F.col("appended_at"))
    found = marks.select(
        "subject", "broker_group", first.alias("first"), F.col("sequence").alias("end"), at.alias("at")
    )
    return found.filter(F.col("end") > F.col("first"))


def _cut(whole: Whole) -> Iterator[tuple[int, int, int]]:
    """The stretches that the range lies in: the number of each, and the part of the range within it."""
    for number in range(whole.begin // STRETCH, -(-whole.end // STRETCH)):
        low, high = max(whole.begin, number * STRETCH), min(whole.end, (number + 1) * STRETCH)
        if low < high:
            yield number, low, high


# A committed range, as far as it is compared. The log has the sequences from `kept` on.
_SPANS: Final = "subject string, broker_group string, first long, kept long, end long"
_PART: Final = ("subject", "broker_group")
_COMPARED: Final = ("id", "key", "tags", "headers", "payload", "created_at", "appended_at")
CONTENT: Final = "content"  # the column that rows are compared by
PAYLOADS: Final = ("tags", "headers", "payload")  # columns that only the comparison needs


@dataclass(frozen=True)
class Archive:
    """The part of an archive that is compared."""

    root: str
    rows: DataFrame  # of the wanted subjects, as the archive has them
    ranges: tuple[ArchivedRange, ...]
    files_gone: tuple[str, ...]  # named by commits, and missing on the disk


def open_archive(
    spark: SparkSession,
    path: str,
    log_ids: Mapping[str, str],
    extents: Mapping[SubjectPart, SubjectExtent],
    since: datetime | None = None,
) -> Archive:
    """The rows and ranges of some subjects, which must be of these logs; files older than `since` are left out."""
    files = Files(spark, path)
    state = archive_log.load(files).named(log_ids)
    oldest = "" if since is None else since.astimezone(UTC).strftime("%Y-%m-%d")
    meant = [each for each in state.files.values() if each.part in extents]
    named = [each for each in meant if each.date >= oldest]
    there = files.all_data() if named else set()
    gone = tuple(sorted(each.path for each in named if each.path not in there))
    rows = archive_log.frame(spark, files.root, [each for each in named if each.path in there])
    return Archive(files.root, rows, tuple(_ranges(state, files.root, log_ids, extents)), gone)


def _ranges(
    state: ArchiveState, root: str, log_ids: Mapping[str, str], parts: Iterable[SubjectPart]
) -> Iterable[ArchivedRange]:
    for part in parts:
        log_id = log_ids[part.broker_group]
        strange = [each for each in state.ranges.get(part.subject, ()) if each.broker_group not in log_ids]
        for each in (*strange, *state.ranges_of(*part)):
            if each.log_id != log_id:
                raise DataLoss(
                    f"{root} holds {part.subject} of another log ({each.log_id}) than the broker has ({log_id}), and "
                    "they cannot be compared: name the archive that was made from this broker, or leave --archive out"
                )
        yield from state.ranges_of(*part)


def with_content(rows: DataFrame) -> DataFrame:
    """The rows with the column `content`."""
    entries = F.array_sort(F.map_entries("headers"))  # a map has no order
    parts = {
        "tags": F.sha2(F.to_json("tags"), 256),
        "headers": F.sha2(F.to_json(entries), 256),
        "payload": F.sha2("payload", 256),
    }
    return rows.withColumn(CONTENT, F.struct(*(parts.get(name, F.col(name)).alias(name) for name in _COMPARED)))


def compared(
    spark: SparkSession,
    archive: Archive,
    log: DataFrame,
    extents: Mapping[SubjectPart, SubjectExtent],
    *,
    is_whole: bool,
) -> DataFrame:
    """Findings: rows that only one side has, rows that the archive has twice, and rows that differ. `log` has the
    messages of the extents, with `content`. With `is_whole` the archive is also checked before the extents."""
    spans = []
    for each in archive.ranges:
        begin, end = extents[each.part]
        kept = max(each.first, begin)
        spans.append((*each.part, each.first if is_whole else kept, kept, min(each.end, end)))
    ranges = F.broadcast(spark.createDataFrame(spans, _SPANS))
    sides = [
        _within(rows, ranges).withColumn("in_log", F.lit(is_log)).withColumn("in_archive", F.lit(1 - is_log))
        for rows, is_log in ((log, 1), (with_content(archive.rows), 0))
    ]
    both = sides[0].unionByName(sides[1])
    archived = F.when(F.col("in_archive") == 1, F.col(CONTENT))
    one = both.groupBy(*_PART, "sequence", "kept").agg(
        F.sum("in_log").alias("in_log"),
        F.sum("in_archive").alias("in_archive"),
        F.max(F.when(F.col("in_log") == 1, F.col(CONTENT))).alias("logged"),
        F.min(archived).alias("least"),
        F.max(archived).alias("most"),
    )
    # Of two rows in the archive, take the one that the log does not have.
    other = F.when(F.col("least") == F.col("logged"), F.col("most")).otherwise(F.col("least"))
    one = one.withColumn("archived", other)
    parts = (F.when(~F.col(f"logged.{name}").eqNullSafe(F.col(f"archived.{name}")), F.lit(name)) for name in _COMPARED)
    has_both = (F.col("in_log") > 0) & (F.col("in_archive") > 0)
    differing = F.when(has_both, F.array_compact(F.array(*parts))).otherwise(F.array())
    one = one.withColumn("differing", differing)
    reason = (
        F.when(F.col("in_archive") == 0, findings.NOT_ARCHIVED)
        .when((F.col("in_log") == 0) & (F.col("sequence") >= F.col("kept")), findings.NOT_IN_LOG)
        .when(F.col("in_archive") > 1, findings.ARCHIVED_TWICE)
        .when((F.col("in_log") > 0) & (F.size("differing") > 0), findings.ARCHIVED_OTHERWISE)
    )
    one = one.withColumn("reason", reason).filter(F.col("reason").isNotNull())
    true = {name: F.coalesce(F.col(f"logged.{name}"), F.col(f"archived.{name}")) for name in ("id", "appended_at")}
    return findings.found(
        one,
        F.col("reason"),
        "subject",
        "sequence",
        detail=F.concat(_both_sides(), findings.within()),
        id=true["id"],
        key=F.when(F.col("in_log") > 0, F.col("logged.key")).otherwise(F.col("archived.key")),
        since=true["appended_at"],
    )


def _both_sides() -> Column:
    """The detail of a finding: the number of rows on each side, and how they differ."""
    counts = F.format_string("rows in the log: %d, in the archive: %d", F.col("in_log"), F.col("in_archive"))

    def said(side: str) -> Column:
        key = F.coalesce(F.concat(F.lit(", key "), F.col(f"{side}.key")), F.lit(", no key"))
        return F.concat(F.lit("id "), F.col(f"{side}.id"), key)

    parts = F.concat_ws(", ", "differing")
    differs = F.concat(
        F.lit("; the archive has other "), parts, F.lit(": "), said("archived"), F.lit("; the log has "), said("logged")
    )
    return F.concat(counts, F.when(F.size("differing") > 0, differs).otherwise(""))


def only_archived(archive: Archive, log: DataFrame, findings_: DataFrame) -> DataFrame:
    """Places and times of rows that only the archive has, according to the findings: they are no holes."""
    place = [*_PART, "sequence"]
    only = findings_.filter(F.col("reason") == findings.NOT_IN_LOG).select("subject", "sequence").distinct()
    rows = archive.rows.select(*place, "appended_at").join(only, ["subject", "sequence"], "left_semi")
    return rows.join(log.select(*place), place, "left_anti").dropDuplicates(place)


def gone(
    spark: SparkSession, archive: Archive, log: DataFrame, extents: Mapping[SubjectPart, SubjectExtent]
) -> DataFrame | None:
    """Findings: committed rows that neither the archive nor the log has any more; None: there are none."""
    old = [each for each in archive.ranges if each.first < extents[each.part].first]
    if not old:
        return None
    begins = [(*each.part, each.first, extents[each.part].first, each.end) for each in old]
    ranges = F.broadcast(spark.createDataFrame(begins, _SPANS))
    before = _within(archive.rows, ranges).filter(F.col("sequence") < F.col("kept"))
    before = before.dropDuplicates([*_PART, "sequence"])
    wholes = [
        Whole(each.subject, each.first, min(each.end, extents[each.part].first), each.broker_group) for each in old
    ]
    gaps = holes(spark, before, wholes)
    if gaps is None:
        return None
    # The log may have had holes there, too. Only a part with fewer rows than were committed has lost some.
    there = Counter[SubjectPart]()
    for rows in (before, _within(log, ranges)):
        there.update({SubjectPart(*row[:2]): row["count"] for row in rows.groupBy(*_PART).count().collect()})
    committed = Counter[SubjectPart]()
    for each in old:
        committed[each.part] += each.rows
    short = [part for part, rows in committed.items() if there[part] < rows]
    is_short = [(F.col("subject") == part.subject) & (F.col("broker_group") == part.broker_group) for part in short]
    return findings.found(
        gaps.filter(reduce(Column.__or__, is_short, F.lit(False))),
        findings.GONE,
        "subject",
        sequence=F.col("first"),
        messages=F.col("end") - F.col("first"),
        since=F.col("at"),
        detail=F.concat(
            F.format_string("the archive has no rows %d to %d", F.col("first"), F.col("end") - 1), findings.within()
        ),
    )


def _within(rows: DataFrame, ranges: DataFrame) -> DataFrame:
    """The rows that lie in the ranges, with `content` if it exists."""
    some = rows.select(*_PART, "sequence", "appended_at", *({CONTENT} & set(rows.columns))).join(ranges, list(_PART))
    is_within = (F.col("sequence") >= F.col("first")) & (F.col("sequence") < F.col("end"))
    return some.filter(is_within).drop("first", "end")
