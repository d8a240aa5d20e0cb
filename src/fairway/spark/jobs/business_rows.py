"""Compares the business rows, which say what producers have sent, with what is stored.

Rows come from any place that Spark reads: the rows of an outbox or a spool, or the business table itself. A row has an
`id`, and may have `subject` and `sent_at`. `match` names the part of a message that holds the id of its row: the
message's own id, its key, or a header. `judged` gives each row a fate:

    stored      a message has it            scheduled   the delay server has it
    archived    the archive has it, and retention has taken it from the log
    at the producer  an outbox or a spool has it (`held`)          set aside   the same, and a broker has refused it
    under way   sent a moment ago           too old     the log does not reach back so far, so the fate is unknown
    missing     none of these
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.errors import Misuse
from fairway.spark.jobs import findings

STORED, SCHEDULED, ARCHIVED, UNDER_WAY, TOO_OLD, MISSING = (
    "stored", "scheduled", "archived", "under way", "too old", "missing",
)  # fmt: skip
AT_PRODUCER, SET_ASIDE = "at the producer", "set aside"
ID, KEY, HEADER = "id", "key", "header:"
_FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".orc": "orc"}
TABLE: Final = "table"


def load(spark: SparkSession, path: str, how: str | None = None) -> DataFrame:
    """The rows of a file, a directory or a table, in the given format or the one that the name implies."""
    bare = path.rstrip("/").removesuffix(".gz")
    how = how or next((name for ending, name in _FORMATS.items() if bare.endswith(ending)), "parquet")
    try:
        if how == TABLE:
            return spark.table(path)
        reader = spark.read.format(how)
        return (reader.option("header", "true") if how == "csv" else reader).load(path)
    except AnalysisException as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise Misuse(
            f"--sent {path} cannot be read as {how}: {first}. --sent-format says another one: parquet, csv, json, table"
        ) from error


def prepared(rows: DataFrame, subjects: Iterable[str]) -> DataFrame:
    """The rows with `row`, `sent_at`, and `subject` if they have one: each once, and only of the wanted subjects."""
    names = {name.lower(): name for name in rows.columns}
    if ID not in names:
        raise Misuse(f"the rows of --sent have no column id: there are {', '.join(rows.columns)}. Name one of them so")
    columns = [F.col(names[ID]).cast("string").alias("row")]
    if "sent_at" in names:
        columns.append(F.col(names["sent_at"]).try_cast("timestamp").alias("sent_at"))
    else:
        columns.append(F.lit(None).cast("timestamp").alias("sent_at"))
    if "subject" in names:
        columns.append(F.col(names["subject"]).cast("string").alias("subject"))
    found = rows.select(*columns).filter(F.col("row").isNotNull())
    if "subject" in names:
        meant = "|".join(fnmatch.translate(each) for each in subjects)
        found = found.filter(F.col("subject").rlike(f"^(?:{meant})$"))
    keys = _keys(found)
    return found.groupBy(*keys).agg(F.min("sent_at").alias("sent_at"))


def within(rows: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """The rows that were sent in that time. The rows need a column `sent_at`."""
    if since is not None:
        rows = rows.filter(F.col("sent_at") >= F.lit(since))
    return rows if until is None else rows.filter(F.col("sent_at") < F.lit(until))


def needs_headers(match: str) -> bool:
    return match.startswith(HEADER)


def check_match(match: str) -> None:
    if match not in {ID, KEY} and not (needs_headers(match) and match != HEADER):
        raise Misuse(f"--match {match!r}: rows are found by id, by key, or by header:NAME")


def row_of(match: str) -> Column:
    """The part of a message that holds the id of its row."""
    return F.col("headers").getItem(match.removeprefix(HEADER)) if needs_headers(match) else F.col(match)


def judged(
    rows: DataFrame,
    stored: DataFrame,
    pending: DataFrame,
    archived: DataFrame | None,
    begins: Mapping[str, datetime],
    under_way_after_ms: int,
    held: DataFrame | None = None,
) -> DataFrame:
    """The rows with their `fate`, `subject`, and `at`. `begins`: since when there are messages of subjects whose older
    ones retention has taken. A row sent after `under_way_after_ms` may still arrive. `held`: what producers still have.
    """
    keys = _keys(rows)
    there = stored.groupBy(*keys).agg(F.min("appended_at").alias("stored_at"), F.min("subject").alias("of"))
    marked = rows.join(there, keys, "left").join(_mark(pending, keys, "is_pending"), keys, "left")
    if archived is not None:
        marked = marked.join(_mark(archived, keys, "is_archived"), keys, "left")
    else:
        marked = marked.withColumn("is_archived", F.lit(None).cast("boolean"))
    if held is not None:
        asides = held.groupBy(*keys).agg(F.bool_or(F.col("aside").isNotNull()).alias("is_aside"))
        marked = marked.join(asides, keys, "left")
    else:
        marked = marked.withColumn("is_aside", F.lit(None).cast("boolean"))
    fate = (
        F.when(F.col("stored_at").isNotNull(), STORED)
        .when(F.col("is_pending"), SCHEDULED)
        .when(F.col("is_archived"), ARCHIVED)
        .when(F.col("is_aside"), SET_ASIDE)
        .when(F.col("is_aside").isNotNull(), AT_PRODUCER)
        .when(F.unix_millis("sent_at") > under_way_after_ms, UNDER_WAY)
        .when(F.col("sent_at") < _begin(keys, begins), TOO_OLD)
        .otherwise(MISSING)
    )
    subject = F.col("subject") if "subject" in keys else F.col("of")
    at = F.coalesce("stored_at", "sent_at")
    return marked.select("row", subject.alias("subject"), "sent_at", at.alias("at"), fate.alias("fate"))


def unspoken(rows: DataFrame, held: DataFrame) -> DataFrame:
    """The held messages without a row."""
    return held.join(rows, _keys(rows), "left_anti")


def never_stored(rows: DataFrame) -> DataFrame:
    return findings.found(
        rows.filter(F.col("fate") == MISSING),
        findings.NEVER_STORED,
        subject=F.col("subject"),
        id=F.col("row"),
        since=F.col("sent_at"),
        detail=F.lit("a business row without a message"),
        at=F.col("at"),
    )


def strangers(rows: DataFrame, stored: DataFrame) -> DataFrame:
    """Findings: messages without a row."""
    return findings.found(
        stored.join(rows, _keys(rows), "left_anti"),
        findings.NO_ROW,
        subject=F.col("subject"),
        id=F.col("id"),
        key=F.col("key"),
        sequence=F.col("sequence"),
        since=F.col("appended_at"),
        at=F.col("appended_at"),
    )


def rows_twice(rows: DataFrame, stored: DataFrame) -> DataFrame:
    """Findings: messages of a row that already has a message with another id."""
    place = F.struct("appended_at", "broker_group", "sequence")
    firsts = stored.groupBy("subject", "row").agg(
        F.min(place).alias("first"), F.min_by("id", place).alias("first_id"), F.count("*").alias("copies")
    )
    copies = stored.join(firsts.filter("copies > 1"), ["subject", "row"]).join(rows, _keys(rows), "left_semi")
    return findings.found(
        copies.filter((place > F.col("first")) & (F.col("id") != F.col("first_id"))),
        findings.ROW_TWICE,
        subject=F.col("subject"),
        id=F.col("id"),
        key=F.col("key"),
        sequence=F.col("sequence"),
        since=F.col("appended_at"),
        detail=F.format_string("row %s, first stored as %d", F.col("row"), F.col("first.sequence")),
        at=F.col("appended_at"),
    )


def _keys(rows: DataFrame) -> list[str]:
    return ["subject", "row"] if "subject" in rows.columns else ["row"]


def _mark(rows: DataFrame, keys: list[str], name: str) -> DataFrame:
    return rows.select(*keys).distinct().withColumn(name, F.lit(True))


def _begin(keys: list[str], begins: Mapping[str, datetime]) -> Column:
    """Since when the log of a row's subject is complete; null: since its beginning."""
    if not begins:
        return F.lit(None).cast("timestamp")
    if "subject" not in keys:
        return F.lit(max(begins.values()))
    pairs = [F.lit(each) for pair in begins.items() for each in pair]
    return F.create_map(*pairs)[F.col("subject")]
