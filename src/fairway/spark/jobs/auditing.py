"""An archive against the log it was made from: every row of a committed range, once, and the same.

Where both have a range, rows are compared one by one, in all that a message is made of: `content` has its parts, of
which the large ones are digests. What retention has taken from the log since is held against the commits, which say how
many rows there were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.spark.brokers import SubjectExtent
from fairway.spark.jobs import columns, findings, ledger
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.holes import Whole, holes
from fairway.spark.jobs.manifest import ArchivedRange, ArchiveState
from fairway.spark.places import SubjectPart
from fairway.spark.reading import DataLoss

# A committed range, as far as it is looked at. The log has what lies from `kept` on.
_SPANS: Final = "subject string, broker_group string, first long, kept long, end long"
_PART: Final = ("subject", "broker_group")
_COMPARED: Final = ("id", "key", "tags", "headers", "payload", "created_at", "appended_at")
CONTENT: Final = "content"  # what rows are compared by
PAYLOADS: Final = ("tags", "headers", "payload")  # columns that only the comparison needs


@dataclass(frozen=True)
class Archive:
    """An archive that is looked at."""

    root: str
    rows: DataFrame  # of the subjects that are meant, as the archive has them
    ranges: tuple[ArchivedRange, ...]
    files_gone: tuple[str, ...]  # that the commits name, and that are not there


def open_archive(
    spark: SparkSession,
    path: str,
    log_ids: Mapping[str, str],
    extents: Mapping[SubjectPart, SubjectExtent],
    since: datetime | None = None,
) -> Archive:
    """Its rows and ranges of some subjects, which must be of these logs; of older files there is nothing."""
    files = Files(spark, path)
    state = ledger.load(files).named(log_ids)
    oldest = "" if since is None else since.astimezone(UTC).strftime("%Y-%m-%d")
    meant = [each for each in state.files.values() if SubjectPart(each.subject, each.broker_group) in extents]
    named = [each for each in meant if each.date >= oldest]
    there = files.all_data() if named else set()
    gone = tuple(sorted(each.path for each in named if each.path not in there))
    rows = columns.frame(spark, files.root, [each for each in named if each.path in there])
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


def _part(span: ArchivedRange) -> SubjectPart:
    return SubjectPart(span.subject, span.broker_group)


def with_content(rows: DataFrame) -> DataFrame:
    """The same with `content`."""
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
    """Findings: what only one of both has, what the archive has twice, and where they differ. `log` has the messages of
    the extents, with `content`; the archive is looked at before them, too, where it is looked at as a whole."""
    spans = []
    for each in archive.ranges:
        begin, end = extents[_part(each)]
        kept = max(each.first, begin)
        spans.append((*_part(each), each.first if is_whole else kept, kept, min(each.end, end)))
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
    # Of two rows in the archive, the one that the log does not have.
    other = F.when(F.col("least") == F.col("logged"), F.col("most")).otherwise(F.col("least"))
    one = one.withColumn("archived", other).withColumn("differing", _differing())
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
        detail=F.concat(_both_sides(), findings.within()),
        id=true["id"],
        key=F.when(F.col("in_log") > 0, F.col("logged.key")).otherwise(F.col("archived.key")),
        since=true["appended_at"],
        at=true["appended_at"],
        **{name: F.col(name) for name in ("subject", "sequence")},
    )


def _differing() -> Column:
    """The parts in which the archive's row is not that of the log."""
    parts = (F.when(~F.col(f"logged.{name}").eqNullSafe(F.col(f"archived.{name}")), F.lit(name)) for name in _COMPARED)
    has_both = (F.col("in_log") > 0) & (F.col("in_archive") > 0)
    return F.when(has_both, F.array_compact(F.array(*parts))).otherwise(F.array())


def _both_sides() -> Column:
    """How many rows each side has; and where they differ, in what, and who is who."""
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
    """Place and time of what the archive alone has, of what was found: it is no hole."""
    place = [*_PART, "sequence"]
    only = findings_.filter(F.col("reason") == findings.NOT_IN_LOG).select("subject", "sequence").distinct()
    rows = archive.rows.select(*place, "appended_at").join(only, ["subject", "sequence"], "left_semi")
    return rows.join(log.select(*place), place, "left_anti").dropDuplicates(place)


def gone(
    spark: SparkSession, archive: Archive, log: DataFrame, extents: Mapping[SubjectPart, SubjectExtent]
) -> DataFrame | None:
    """Findings: rows that the commits speak of, which neither the archive nor the log has any more; None: none."""
    old = [each for each in archive.ranges if each.first < extents[_part(each)].first]
    if not old:
        return None
    begins = [(*_part(each), each.first, extents[_part(each)].first, each.end) for each in old]
    ranges = F.broadcast(spark.createDataFrame(begins, _SPANS))
    before = _within(archive.rows, ranges).filter(F.col("sequence") < F.col("kept"))
    before = before.dropDuplicates([*_PART, "sequence"])
    wholes = [
        Whole(each.subject, each.first, min(each.end, extents[_part(each)].first), each.broker_group) for each in old
    ]
    gaps = holes(spark, before, wholes)
    if gaps is None:
        return None
    # The log may have had holes there, too: only where rows are fewer than were committed, something is gone.
    there = Counter[SubjectPart]()
    for rows in (before, _within(log, ranges)):
        there.update({SubjectPart(*row[:2]): row["count"] for row in rows.groupBy(*_PART).count().collect()})
    committed = Counter[SubjectPart]()
    for each in old:
        committed[_part(each)] += each.rows
    short = [part for part, rows in committed.items() if there[part] < rows]
    is_short = [(F.col("subject") == part.subject) & (F.col("broker_group") == part.broker_group) for part in short]
    return findings.found(
        gaps.filter(reduce(Column.__or__, is_short, F.lit(False))),
        findings.GONE,
        subject=F.col("subject"),
        sequence=F.col("first"),
        messages=F.col("end") - F.col("first"),
        since=F.col("at"),
        detail=F.concat(
            F.format_string("the archive has no rows %d to %d", F.col("first"), F.col("end") - 1), findings.within()
        ),
        at=F.col("at"),
    )


def _within(rows: DataFrame, ranges: DataFrame) -> DataFrame:
    """The rows of ranges, with what they are compared by if it is there."""
    some = rows.select(*_PART, "sequence", "appended_at", *({CONTENT} & set(rows.columns))).join(ranges, list(_PART))
    is_within = (F.col("sequence") >= F.col("first")) & (F.col("sequence") < F.col("end"))
    return some.filter(is_within).drop("first", "end")
