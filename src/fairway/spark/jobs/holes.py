"""Sequences that should be there and are not. Counted in stretches first: where nothing is missing, which is nearly
everywhere, nothing is sorted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

STRETCH: Final = 1 << 20  # sequences; one with a hole is sorted by one task


_STRETCHES: Final = "subject string, stretch long, low long, high long"


class _Stretch(NamedTuple):
    subject: str
    number: int
    low: int
    high: int


class Whole(NamedTuple):
    """Where every sequence of a subject should be there, from `begin` up to `end`."""

    subject: str
    begin: int
    end: int


def holes(spark: SparkSession, rows: DataFrame, wholes: Iterable[Whole]) -> DataFrame | None:
    """`subject`, `first`, `end` and `at` of each hole: when the message before it was stored, or else the one behind;
    None: there are none. Of rows, `subject`, `sequence` and `appended_at` are looked at. A hole over two stretches is
    two."""
    stretches = [_Stretch(each.subject, number, *bounds) for each in wholes for number, *bounds in _cut(each)]
    placed = rows.select("subject", F.expr(f"sequence div {STRETCH}").alias("stretch"), "sequence", "appended_at")
    within = placed.join(F.broadcast(spark.createDataFrame(stretches, _STRETCHES)), ["subject", "stretch"])
    within = within.filter((F.col("sequence") >= F.col("low")) & (F.col("sequence") < F.col("high")))
    counts = {
        (subject, number): count for subject, number, count in within.groupBy("subject", "stretch").count().collect()
    }
    short = [each for each in stretches if counts.get((each.subject, each.number), 0) < each.high - each.low]
    return _between(spark, within, short) if short else None


def _between(spark: SparkSession, within: DataFrame, short: list[_Stretch]) -> DataFrame:
    stretches = spark.createDataFrame(short, _STRETCHES)
    kept = within.join(F.broadcast(stretches.select("subject", "stretch")), ["subject", "stretch"], "left_semi")
    ends = stretches.withColumn("sequence", F.col("high")).withColumn("appended_at", F.lit(None).cast("timestamp"))
    marks = kept.unionByName(ends)
    in_order = Window.partitionBy("subject", "stretch").orderBy("sequence")
    first = F.coalesce(F.lag("sequence").over(in_order), F.col("low") - 1) + 1
    at = F.coalesce(F.lag("appended_at").over(in_order), F.col("appended_at"))
    found = marks.select("subject", first.alias("first"), F.col("sequence").alias("end"), at.alias("at"))
    return found.filter(F.col("end") > F.col("first"))


def _cut(whole: Whole) -> Iterator[tuple[int, int, int]]:
    """The numbers of the stretches that it lies in, and from where to where in each."""
    for number in range(whole.begin // STRETCH, -(-whole.end // STRETCH)):
        low, high = max(whole.begin, number * STRETCH), min(whole.end, (number + 1) * STRETCH)
        if low < high:
            yield number, low, high
