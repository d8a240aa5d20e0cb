"""Reads what producers still hold: messages in outboxes and spools, which are outstanding there, and not lost.

The driver reads them batch by batch, and hands them to Spark in chunks, so it never holds more than one chunk. The job
reads them before all else. A message moves from there to the delay server or the log, so a message that moves during
the job is found further on.

The fate of a held message is found by its own id, whatever part of it business rows are matched by:

    stored, scheduled, archived     it has arrived, and is not yet removed from where it waited
    at the producer                 it waits to be sent         set aside       a broker has refused it for good
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import reduce
from itertools import islice
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway import batch
from fairway.batch import Batch
from fairway.client.spool import contents
from fairway.errors import FairwayError, RemoteProtocolError
from fairway.runtime.clock import RealClock
from fairway.spark.jobs import business_rows, findings
from fairway.spark.jobs.reconcile_options import ReconcileOptions

OUTBOX, SPOOL = "outbox", "spool"
UNSENT: Final = (business_rows.AT_PRODUCER, business_rows.SET_ASIDE)
CHUNK_ROWS: Final = 50_000  # on the driver at once: some ten MB
_STAMP: Final = pa.timestamp("us", tz="UTC")
_SCHEMA: Final = pa.schema(
    [
        pa.field("subject", pa.string()),
        pa.field("id", pa.string()),
        pa.field("key", pa.string()),
        pa.field("row", pa.string()),
        pa.field("sent_at", _STAMP),
        pa.field("holder", pa.string()),
        pa.field("aside", pa.string()),
    ]
)


class HeldMessage(NamedTuple):
    """A held message, in the order of the schema."""

    subject: str
    id: str
    key: str | None
    row: str | None  # the part of the message by which business rows are matched
    sent_us: int
    holder: str
    aside: str | None  # why a broker has refused it; None: it waits


def load(
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


# --- reading ----------------------------------------------------------------------------------------------------------


def _messages(options: ReconcileOptions, notes: list[str]) -> Iterator[HeldMessage]:
    for database in options.outboxes:
        yield from _of_outbox(database, options, notes)
    clock = RealClock()
    for directory in options.spools:
        for kept in contents.contents(directory, clock, notes):
            yield from _of_batch(SPOOL, kept.subject, kept.data, kept.aside, options, notes)


def _of_outbox(database: str, options: ReconcileOptions, notes: list[str]) -> Iterator[HeldMessage]:
    try:
        from fairway.sql.database_urls import engine_at, split
        from fairway.sql.outbox_contents import contents
    except ModuleNotFoundError:
        raise FairwayError("an outbox needs SQLAlchemy: pip install 'fairway[sql]'") from None
    with engine_at(database, "--outbox") as engine:
        for kept in contents(engine, *split(options.outbox_table)):
            yield from _of_batch(OUTBOX, kept.subject, kept.body, kept.aside, options, notes)


def _of_batch(
    holder: str, subject: str, data: bytes, aside: str | None, options: ReconcileOptions, notes: list[str]
) -> Iterator[HeldMessage]:
    if not any(fnmatchcase(subject, each) for each in options.subjects):
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
    if match == business_rows.KEY:
        return opened.keys()
    if business_rows.needs_headers(match):
        return [each.get(match.removeprefix(business_rows.HEADER)) for each in opened.header_maps()]
    return []


# --- judging ----------------------------------------------------------------------------------------------------------


def judged(held: DataFrame, stored: DataFrame, pending: DataFrame, archived: DataFrame | None) -> DataFrame:
    """The held messages, each once, with `fate` and `at`."""
    place = ["subject", "id"]
    once = held.groupBy(*place).agg(*(F.min(name).alias(name) for name in ("key", "row", "sent_at", "holder", "aside")))
    there = stored.groupBy(*place).agg(F.min("appended_at").alias("stored_at"))
    marked = once.join(there, place, "left").join(_mark(pending, "is_pending"), place, "left")
    if archived is not None:
        marked = marked.join(_mark(archived, "is_archived"), place, "left")
    else:
        marked = marked.withColumn("is_archived", F.lit(None).cast("boolean"))
    fate = (
        F.when(F.col("stored_at").isNotNull(), business_rows.STORED)
        .when(F.col("is_pending"), business_rows.SCHEDULED)
        .when(F.col("is_archived"), business_rows.ARCHIVED)
        .when(F.col("aside").isNotNull(), business_rows.SET_ASIDE)
        .otherwise(business_rows.AT_PRODUCER)
    )
    return marked.select(
        *place, "key", "row", "sent_at", "holder", "aside", F.coalesce("stored_at", "sent_at").alias("at"),
        fate.alias("fate"),
    )  # fmt: skip


def _mark(rows: DataFrame, name: str) -> DataFrame:
    return rows.select("subject", "id").distinct().withColumn(name, F.lit(True))


def unsent(judged: DataFrame, now_ms: int, stuck_after_ms: int) -> DataFrame:
    """Findings: messages that were set aside, and messages that wait for too long."""
    fate, waits_ms = F.col("fate"), F.lit(now_ms) - F.unix_millis("sent_at")
    is_stuck = (fate == business_rows.SET_ASIDE) | ((fate == business_rows.AT_PRODUCER) & (waits_ms > stuck_after_ms))
    waits = F.format_string("in the %s for %.3f s", F.col("holder"), waits_ms / 1_000)
    return findings.found(
        judged.filter(is_stuck),
        F.when(fate == business_rows.SET_ASIDE, findings.SET_ASIDE).otherwise(findings.UNSENT),
        **{name: F.col(name) for name in ("subject", "id", "key", "at")},
        since=F.col("sent_at"),
        detail=F.when(fate == business_rows.SET_ASIDE, F.format_string("in the %s: %s", "holder", "aside")).otherwise(
            waits
        ),
    )


def notes_of(judged: DataFrame) -> list[str]:
    """Sentences about how much waits where."""
    waiting = judged.filter(F.col("fate") == business_rows.AT_PRODUCER).groupBy("holder")
    return [
        f"{row['count']:,} messages wait in the {row['holder']}: they are outstanding at the producer, not lost"
        for row in waiting.count().orderBy("holder").collect()
    ]
