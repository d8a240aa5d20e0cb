"""What producers still hold: messages in outboxes and spools, outstanding where they were sent from, and not lost.

They are read on the driver, batch by batch, and handed to Spark a chunk at a time: however much waits, the driver has
one chunk of it. They are read first of all, for a message goes from there to the delay server or the log, so whatever
moves on meanwhile is found further on.

What became of a message is told by its own id, whatever part of it business rows are found by:

    stored, scheduled, archived     it has arrived, and is not yet removed from where it waited
    at the producer                 it waits to be sent         set aside       a broker has refused it, for good
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
from fairway.client import spool_contents
from fairway.errors import FairwayError, RemoteProtocolError
from fairway.spark.jobs import findings, sent
from fairway.spark.jobs.balance import ReconcileOptions
from fairway.world.clock import RealClock

OUTBOX, SPOOL = "outbox", "spool"
UNSENT: Final = (sent.AT_PRODUCER, sent.SET_ASIDE)
CHUNK_ROWS: Final = 50_000  # at once on the driver: some ten MB
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
    """One that is held, in the order of the schema."""

    subject: str
    id: str
    key: str | None
    row: str | None  # the part of it by which business rows are found
    sent_us: int
    holder: str
    aside: str | None  # why a broker has refused it; None: it waits


def load(
    spark: SparkSession, options: ReconcileOptions, notes: list[str], *, chunk_rows: int = CHUNK_ROWS
) -> DataFrame | None:
    """All of it, once read; None: neither an outbox nor a spool was given."""
    if not options.outboxes and not options.spools:
        return None
    messages, frames = _messages(options, notes), []
    while chunk := list(islice(messages, chunk_rows)):
        # A checkpoint takes the rows from the driver, which would keep them as long as the frame lives.
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
        for kept in spool_contents.contents(directory, clock, notes):
            yield from _of_batch(SPOOL, kept.subject, kept.data, kept.aside, options, notes)


def _of_outbox(database: str, options: ReconcileOptions, notes: list[str]) -> Iterator[HeldMessage]:
    try:
        from fairway.sql.contents import contents
        from fairway.sql.opening import engine_at, split
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
    if match == sent.KEY:
        return opened.keys()
    if sent.needs_headers(match):
        return [each.get(match.removeprefix(sent.HEADER)) for each in opened.header_maps()]
    return []


# --- judging ----------------------------------------------------------------------------------------------------------


def judged(held: DataFrame, stored: DataFrame, pending: DataFrame, archived: DataFrame | None) -> DataFrame:
    """What is held, each message once, with its `fate`, and `at`."""
    place = ["subject", "id"]
    once = held.groupBy(*place).agg(*(F.min(name).alias(name) for name in ("key", "row", "sent_at", "holder", "aside")))
    there = stored.groupBy(*place).agg(F.min("appended_at").alias("stored_at"))
    marked = once.join(there, place, "left").join(_mark(pending, "is_pending"), place, "left")
    if archived is not None:
        marked = marked.join(_mark(archived, "is_archived"), place, "left")
    else:
        marked = marked.withColumn("is_archived", F.lit(None).cast("boolean"))
    fate = (
        F.when(F.col("stored_at").isNotNull(), sent.STORED)
        .when(F.col("is_pending"), sent.SCHEDULED)
        .when(F.col("is_archived"), sent.ARCHIVED)
        .when(F.col("aside").isNotNull(), sent.SET_ASIDE)
        .otherwise(sent.AT_PRODUCER)
    )
    return marked.select(
        *place, "key", "row", "sent_at", "holder", "aside", F.coalesce("stored_at", "sent_at").alias("at"),
        fate.alias("fate"),
    )  # fmt: skip


def _mark(rows: DataFrame, name: str) -> DataFrame:
    return rows.select("subject", "id").distinct().withColumn(name, F.lit(True))


def unsent(judged: DataFrame, now_ms: int, stuck_after_ms: int) -> DataFrame:
    """What was set aside, and what waits for too long."""
    fate, waits_ms = F.col("fate"), F.lit(now_ms) - F.unix_millis("sent_at")
    is_stuck = (fate == sent.SET_ASIDE) | ((fate == sent.AT_PRODUCER) & (waits_ms > stuck_after_ms))
    waits = F.format_string("in the %s for %.3f s", F.col("holder"), waits_ms / 1_000)
    return findings.found(
        judged.filter(is_stuck),
        F.when(fate == sent.SET_ASIDE, findings.SET_ASIDE).otherwise(findings.UNSENT),
        **{name: F.col(name) for name in ("subject", "id", "key", "at")},
        since=F.col("sent_at"),
        detail=F.when(fate == sent.SET_ASIDE, F.format_string("in the %s: %s", "holder", "aside")).otherwise(waits),
    )


def notes_of(judged: DataFrame) -> list[str]:
    """How much waits where."""
    waiting = judged.filter(F.col("fate") == sent.AT_PRODUCER).groupBy("holder")
    return [
        f"{row['count']:,} messages wait in the {row['holder']}: they are outstanding at the producer, not lost"
        for row in waiting.count().orderBy("holder").collect()
    ]
