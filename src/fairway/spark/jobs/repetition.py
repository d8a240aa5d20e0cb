"""`fairway pipeline repetition`: how often keys repeat, compared with the length of the consumption queue.

Two messages of one key may be fewer places apart than the queue is long. Then they are in the queue at the same time,
and several consumers may work on the same request at once. A key's smallest distance determines its repetition:

    none     the key occurs once
    sparse   the key repeats, but never within one length of the queue: each handler has the key to itself
    high     the key repeats within one length: work is done twice at the same time

For a key with high repetition, coalescing keeps one message in process and one waiting, and declines the rest until the
first is done. The job counts stretches as long as the queue. In the first of several consecutive stretches two messages
are worked on, in each following stretch one; the rest is saved. Window functions over (subject, key) compute this,
without Python per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.errors import Misuse
from fairway.limits import LOT_MESSAGES_MAX
from fairway.spark.jobs import job, selection
from fairway.spark.jobs.job import Point, ProgressListener, sentences, unwatched
from fairway.spark.jobs.selection import Picking
from fairway.spark.options import DEFAULT_URL, PATIENCE_S

NONE, SPARSE, HIGH = "none", "sparse", "high"
MANY: Final = 0.1  # the share of a subject's messages saved from which coalescing is worth the effort
TOP: Final = 10
_RECOMMENDED: Final = {
    NONE: "leave it: no key repeats",
    SPARSE: "leave it: repeats are too far apart for coalescing to save work",
    HIGH: "coalesce by key",
}


@dataclass(frozen=True)
class RepetitionOptions:
    picking: Picking
    queue_length: int = LOT_MESSAGES_MAX  # messages that all consumers together hold at once
    many: float = MANY
    top: int = TOP  # keys to name
    output: str | None = None  # a directory for one row per subject and key, as Parquet


@dataclass(frozen=True)
class RepeatedKey:
    """One key of a subject, of those with the largest savings."""

    subject: str
    key: str
    repetition: str
    messages: int
    least_distance: int | None
    saved: int


@dataclass(frozen=True)
class SubjectRepetition:
    """The repetition of one subject."""

    subject: str
    repetition: str
    messages: int
    unkeyed: int  # messages without a key, which cannot be coalesced
    keys: int
    keys_sparse: int
    keys_high: int
    least_distance: int | None
    saved: int  # messages that coalescing would have declined
    saved_share: float
    recommendation: str


@dataclass
class RepetitionResult:
    queue_length: int
    subjects: list[SubjectRepetition] = field(default_factory=list)
    keys: list[RepeatedKey] = field(default_factory=list)  # those with the largest savings


def by_key(messages: DataFrame, queue_length: int) -> DataFrame:
    """One row per subject and key: messages, least_distance, repetition, saved."""
    keyed = messages.filter(F.col("key").isNotNull()).select("subject", "broker_group", "sequence", "key")
    places = Window.partitionBy("subject", "broker_group", "key").orderBy("sequence")
    stretches = keyed.withColumn(
        "distance", F.col("sequence") - F.lag("sequence").over(places)
    ).withColumn("stretch", F.expr(f"sequence div {queue_length}"))  # fmt: skip
    per_stretch = stretches.groupBy("subject", "broker_group", "key", "stretch").agg(
        F.count("*").alias("messages"), F.min("distance").alias("least_distance")
    )
    in_order = Window.partitionBy("subject", "broker_group", "key").orderBy("stretch")
    is_next = F.coalesce(F.col("stretch") - F.lag("stretch").over(in_order) == 1, F.lit(False))
    worked_on = F.when(is_next, 1).otherwise(F.least(F.col("messages"), F.lit(2)))
    summed = (
        per_stretch.withColumn("saved", F.col("messages") - worked_on)
        .groupBy("subject", "key")
        .agg(
            F.sum("messages").alias("messages"),
            F.min("least_distance").alias("least_distance"),
            F.sum("saved").alias("saved"),
        )
    )
    repetition = (
        F.when(F.col("least_distance").isNull(), NONE)
        .when(F.col("least_distance") < queue_length, HIGH)
        .otherwise(SPARSE)
    )
    return summed.withColumn("repetition", repetition).select(
        "subject", "key", "repetition", "messages", "least_distance", "saved"
    )


def by_subject(messages: DataFrame, keys: DataFrame, many: float = MANY) -> DataFrame:
    """One row per subject."""
    counts = messages.groupBy("subject").agg(
        F.count("*").alias("messages"), F.count_if(F.col("key").isNull()).alias("unkeyed")
    )
    of_keys = keys.groupBy("subject").agg(
        F.count("*").alias("keys"),
        F.count_if(F.col("repetition") == SPARSE).alias("keys_sparse"),
        F.count_if(F.col("repetition") == HIGH).alias("keys_high"),
        F.min("least_distance").alias("least_distance"),
        F.sum("saved").alias("saved"),
    )
    joined = counts.join(of_keys, "subject", "left").fillna(0, ["keys", "keys_sparse", "keys_high", "saved"])
    share = F.col("saved") / F.col("messages")
    repetition = (
        F.when(F.col("keys_high") + F.col("keys_sparse") == 0, NONE).when(share >= many, HIGH).otherwise(SPARSE)
    )
    return joined.withColumn("saved_share", share).withColumn("repetition", repetition)


def run(spark: SparkSession, options: RepetitionOptions, watch: ProgressListener = unwatched) -> RepetitionResult:
    """Analyse the selected messages."""
    if options.queue_length < 1:
        raise Misuse(f"a queue of {options.queue_length} messages: it is 1 at least")
    with sentences("looking for repetition"):
        messages = selection.messages(spark, options.picking).select("subject", "broker_group", "sequence", "key")
        messages = messages.persist()
        try:
            count = messages.count()  # also fills the cache, so that the log is read once
            watch(Point("repetition", count))
            with job.sized(spark, count):
                return _found(messages, options)
        finally:
            messages.unpersist()


def _found(messages: DataFrame, options: RepetitionOptions) -> RepetitionResult:
    keys = by_key(messages, options.queue_length).persist()
    try:
        if options.output is not None:
            keys.write.mode("errorifexists").partitionBy("subject").parquet(options.output)
        found = RepetitionResult(options.queue_length)
        for row in by_subject(messages, keys, options.many).orderBy("subject").collect():
            named = row.asDict()
            found.subjects.append(SubjectRepetition(**named, recommendation=_RECOMMENDED[named["repetition"]]))
        top = keys.filter(F.col("repetition") != NONE)
        top = top.orderBy(F.desc("saved"), F.desc("messages"), "subject", "key").limit(options.top)
        found.keys.extend(RepeatedKey(**row.asDict()) for row in top.collect())
        return found
    finally:
        keys.unpersist()


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: selection.Subjects,
    archive: selection.Archive = None,
    queue_length: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Messages in the hands of all consumers at once: in flight in `fairway groups`."
        ),
    ] = LOT_MESSAGES_MAX,
    many: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Work saved from which on a subject repeats highly.")
    ] = MANY,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Name so many keys.")] = TOP,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write one row per subject and key there, as Parquet.")
    ] = None,
    since: selection.Since = None,
    until: selection.Until = None,
    where: selection.Predicate = None,
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """How often keys repeat against the length of the queue: none, sparse, high; what coalescing would save."""
    with job.failures("repetition"):
        picked = selection.told(subjects, archive, url, since, until, where=where, patience_s=patience_s)
    with job.running("repetition", master, spark_log, is_quiet=json) as (spark, watch):
        found = run(spark, RepetitionOptions(picked, queue_length, many, top, output), watch)
    job.tell(found, json, _lines(found))


def _lines(found: RepetitionResult) -> list[str]:
    lines = [f"against a queue of {found.queue_length:,} messages:"]
    lines.extend(
        f"{each.subject}: {each.repetition} repetition, {each.messages:,} messages, {each.keys:,} keys "
        f"({each.keys_high:,} high, {each.keys_sparse:,} sparse), coalescing saves {each.saved:,} "
        f"({each.saved_share:.0%}): {each.recommendation}"
        for each in found.subjects
    )
    lines.extend(
        f"  {each.subject} {each.key}: {each.repetition}, {each.messages:,} messages, "
        f"{each.least_distance} apart at least, saves {each.saved:,}"
        for each in found.keys
    )
    return lines


if __name__ == "__main__":
    job.main(command, "repetition")
