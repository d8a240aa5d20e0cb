"""What producers have sent, by their own records: business rows, and messages that outboxes and spools still hold.

Business rows come from any place that Spark reads: the rows of an outbox or a spool, or the business table itself. A
row has an `id`, and may have `subject` and `sent_at`. The option `match` names the part of a message that holds the id
of its row: the message's own id, its key, or a header.

Held messages are outstanding at the producer, and not lost. The driver reads them batch by batch, and hands them to
Spark in chunks, so it never holds more than one chunk. The job reads them before all else. A message moves from there
to the delay server or the log, so a message that moves during the job is found further on. A held message is found by
its own id, whatever part of it business rows are matched by.

`judged_rows` and `judged_held` give each a fate:

    stored      a message has it            scheduled   the delay server has it
    archived    the archive has it, and retention has taken it from the log
    at the producer  an outbox or a spool has it, and it waits to be sent
    set aside        the same, and a broker has refused it for good
    under way   sent a moment ago           too old     the log does not reach back so far, so the fate is unknown
    missing     none of these
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import reduce
from itertools import islice
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway import batch
from fairway.batch import Batch
from fairway.client.spool import spool_directory
from fairway.errors import FairwayError, Misuse, RemoteProtocolError
from fairway.runtime.clock import RealClock
from fairway.spark.jobs import findings
from fairway.spark.jobs.reconcile_options import HEADER, ID, KEY, ReconcileOptions, needs_headers

STORED, SCHEDULED, ARCHIVED, UNDER_WAY, TOO_OLD, MISSING = (
    "stored", "scheduled", "archived", "under way", "too old", "missing",
)  # fmt: skip
AT_PRODUCER, SET_ASIDE = "at the producer", "set aside"
_FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".orc": "orc"}
TABLE: Final = "table"


def load_rows(spark: SparkSession, path: str, how: str | None = None) -> DataFrame:
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
    keys = row_keys(found)
    return found.groupBy(*keys).agg(F.min("sent_at").alias("sent_at"))


def within(rows: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """The rows that were sent in that time. The rows need a column `sent_at`."""
    if since is not None:
        rows = rows.filter(F.col("sent_at") >= F.lit(since))
    return rows if until is None else rows.filter(F.col("sent_at") < F.lit(until))


def row_of(match: str) -> Column:
    """The part of a message that holds the id of its row."""
    return F.col("headers").getItem(match.removeprefix(HEADER)) if needs_headers(match) else F.col(match)


def judged_rows(
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
    keys = row_keys(rows)
    marked = _marked(rows, keys, stored, pending, archived)
    if held is not None:
        asides = held.groupBy(*keys).agg(F.bool_or(F.col("aside").isNotNull()).alias("is_aside"))
        marked = marked.join(asides, keys, "left")
    else:
        marked = marked.withColumn("is_aside", F.lit(None).cast("boolean"))
    fate = (
        _arrived()
        .when(F.col("is_aside"), SET_ASIDE)
        .when(F.col("is_aside").isNotNull(), AT_PRODUCER)
        .when(F.unix_millis("sent_at") > under_way_after_ms, UNDER_WAY)
        .when(F.col("sent_at") < _begin(keys, begins), TOO_OLD)
        .otherwise(MISSING)
    )
    subject = F.col("subject") if "subject" in keys else F.col("of")
    at = F.coalesce("stored_at", "sent_at")
    return marked.select("row", subject.alias("subject"), "sent_at", at.alias("at"), fate.alias("fate"))


def never_stored(rows: DataFrame) -> DataFrame:
    return findings.found(
        rows.filter(F.col("fate") == MISSING),
        findings.NEVER_STORED,
        "subject",
        "at",
        id=F.col("row"),
        since=F.col("sent_at"),
        detail=F.lit("a business row without a message"),
    )


def strangers(rows: DataFrame, stored: DataFrame) -> DataFrame:
    """Findings: messages without a row."""
    return findings.found(
        stored.join(rows, row_keys(rows), "left_anti"), findings.NO_ROW, *findings.MESSAGE, since=F.col("appended_at")
    )


def rows_twice(rows: DataFrame, stored: DataFrame) -> DataFrame:
    """Findings: messages of a row that already has a message with another id."""
    place = F.struct("appended_at", "broker_group", "sequence")
    firsts = stored.groupBy("subject", "row").agg(
        F.min(place).alias("first"), F.min_by("id", place).alias("first_id"), F.count("*").alias("copies")
    )
    copies = stored.join(firsts.filter("copies > 1"), ["subject", "row"]).join(rows, row_keys(rows), "left_semi")
    return findings.found(
        copies.filter((place > F.col("first")) & (F.col("id") != F.col("first_id"))),
        findings.ROW_TWICE,
        *findings.MESSAGE,
        since=F.col("appended_at"),
        detail=F.format_string("row %s, first stored as %d", F.col("row"), F.col("first.sequence")),
    )


def row_keys(rows: DataFrame) -> list[str]:
    return ["subject", "row"] if "subject" in rows.columns else ["row"]


def _marked(
    rows: DataFrame, keys: list[str], stored: DataFrame, pending: DataFrame, archived: DataFrame | None
) -> DataFrame:
    """The rows with `stored_at`, `of` (the subject that has it), `is_pending` and `is_archived`; null: not there."""
    there = stored.groupBy(*keys).agg(F.min("appended_at").alias("stored_at"), F.min("subject").alias("of"))
    marked = rows.join(there, keys, "left").join(_mark(pending, keys, "is_pending"), keys, "left")
    if archived is None:
        return marked.withColumn("is_archived", F.lit(None).cast("boolean"))
    return marked.join(_mark(archived, keys, "is_archived"), keys, "left")


def _arrived() -> Column:
    """The fates of what has arrived, for the caller to continue."""
    return (
        F.when(F.col("stored_at").isNotNull(), STORED)
        .when(F.col("is_pending"), SCHEDULED)
        .when(F.col("is_archived"), ARCHIVED)
    )


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


# --- what outboxes and spools hold -----------------------------------------------------------------------------------

OUTBOX, SPOOL = "outbox", "spool"
UNSENT: Final = (AT_PRODUCER, SET_ASIDE)
CHUNK_ROWS: Final = 50_000  # on the driver at once: some ten MB
_STAMP: Final = pa.timestamp("us", tz="UTC")


class HeldMessage(NamedTuple):
    """A held message."""

    subject: str
    id: str
    key: str | None
    row: str | None  # the part of the message by which business rows are matched
    sent_at: int  # in microseconds, as Spark has times
    holder: str
    aside: str | None  # why a broker has refused it; None: it waits


_SCHEMA: Final = pa.schema([(name, _STAMP if name == "sent_at" else pa.string()) for name in HeldMessage._fields])


def load_held(
    spark: SparkSession, options: ReconcileOptions, notes: list[str], *, chunk_rows: int = CHUNK_ROWS
) -> DataFrame | None:
    """All held messages, read once; None: neither an outbox nor a spool was given."""
    if not options.outboxes and not options.spools:
        return None
    messages, frames = _messages(options, notes), []
    while chunk := list(islice(messages, chunk_rows)):
        # A checkpoint moves the rows away from the driver, which would keep them as long as the frame lives.
        frames.append(spark.createDataFrame(_table(chunk)).localCheckpoint())
    return reduce(DataFrame.unionByName, frames) if frames else spark.createDataFrame(_table([]))


def _table(messages: list[HeldMessage]) -> pa.Table:
    columns = list(zip(*messages, strict=True)) or [() for _ in _SCHEMA]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, _SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _messages(options: ReconcileOptions, notes: list[str]) -> Iterator[HeldMessage]:
    for database in options.outboxes:
        yield from _of_outbox(database, options, notes)
    clock = RealClock()
    for directory in options.spools:
        for kept in spool_directory.contents(directory, clock, notes):
            yield from _of_batch(SPOOL, kept.subject, kept.data, kept.aside, options, notes)


def _of_outbox(database: str, options: ReconcileOptions, notes: list[str]) -> Iterator[HeldMessage]:
    try:
        from fairway.sql.database import engine_at, split
        from fairway.sql.outbox_rows import contents
    except ModuleNotFoundError:
        raise FairwayError("an outbox needs SQLAlchemy: pip install 'fairway[sql]'") from None
    with engine_at(database, "--outbox") as engine:
        for kept in contents(engine, *split(options.outbox_table)):
            yield from _of_batch(OUTBOX, kept.subject, kept.body, kept.aside, options, notes)


def _of_batch(
    holder: str, subject: str, data: bytes, aside: str | None, options: ReconcileOptions, notes: list[str]
) -> Iterator[HeldMessage]:
    if not any(fnmatch.fnmatchcase(subject, each) for each in options.subjects):
        return
    try:
        opened = batch.decode(data)
    except RemoteProtocolError as error:
        notes.append(f"a batch for {subject} in the {holder} cannot be read, and its messages are not counted: {error}")
        return
    rows = _rows(opened, options.match)
    ids, keys, times_ms = [str(each) for each in opened.ids()], opened.keys(), opened.created_times_ms()
    for born, key, row, at_ms in zip(ids, keys, rows or ids, times_ms, strict=True):
        yield HeldMessage(subject, born, key, row, at_ms * 1_000, holder, aside)


def _rows(opened: Batch, match: str) -> list[str | None]:
    """The part of each message that a business row names; empty: its id."""
    if match == KEY:
        return opened.keys()
    if needs_headers(match):
        return [each.get(match.removeprefix(HEADER)) for each in opened.header_maps()]
    return []


def judged_held(held: DataFrame, stored: DataFrame, pending: DataFrame, archived: DataFrame | None) -> DataFrame:
    """The held messages, each once, with `fate` and `at`."""
    place = ["subject", "id"]
    once = held.groupBy(*place).agg(*(F.min(name).alias(name) for name in ("key", "row", "sent_at", "holder", "aside")))
    marked = _marked(once, place, stored, pending, archived)
    fate = _arrived().when(F.col("aside").isNotNull(), SET_ASIDE).otherwise(AT_PRODUCER)
    return marked.select(
        *place, "key", "row", "sent_at", "holder", "aside", F.coalesce("stored_at", "sent_at").alias("at"),
        fate.alias("fate"),
    )  # fmt: skip


def unsent(judged: DataFrame, now_ms: int, stuck_after_ms: int) -> DataFrame:
    """Findings: messages that were set aside, and messages that wait for too long."""
    fate, waits_ms = F.col("fate"), F.lit(now_ms) - F.unix_millis("sent_at")
    is_stuck = (fate == SET_ASIDE) | ((fate == AT_PRODUCER) & (waits_ms > stuck_after_ms))
    waits = F.format_string("in the %s for %.3f s", F.col("holder"), waits_ms / 1_000)
    return findings.found(
        judged.filter(is_stuck),
        F.when(fate == SET_ASIDE, findings.SET_ASIDE).otherwise(findings.UNSENT),
        *("subject", "id", "key", "at"),
        since=F.col("sent_at"),
        detail=F.when(fate == SET_ASIDE, F.format_string("in the %s: %s", "holder", "aside")).otherwise(waits),
    )


def notes_of(judged: DataFrame) -> list[str]:
    """Sentences about how much waits where."""
    waiting = judged.filter(F.col("fate") == AT_PRODUCER).groupBy("holder")
    return [
        f"{row['count']:,} messages wait in the {row['holder']}: they are outstanding at the producer, not lost"
        for row in waiting.count().orderBy("holder").collect()
    ]
