"""Sequences that should be there and are not. Counted in stretches first: where nothing is missing, which is nearly
everywhere, nothing is sorted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.spark.places import BROKER_GROUP

STRETCH: Final = 1 << 20  # sequences; one with a hole is sorted by one task


_STRETCHES: Final = "subject string, broker_group string, stretch long, low long, high long"
_KEYS: Final = ("subject", "broker_group", "stretch")


class _Stretch(NamedTuple):
    subject: str
    broker_group: str
    number: int
    low: int
    high: int


class Whole(NamedTuple):
    """Where every sequence of a subject should be there, from `begin` up to `end`."""

    subject: str
    begin: int
    end: int
    broker_group: str = BROKER_GROUP


def holes(spark: SparkSession, rows: DataFrame, wholes: Iterable[Whole]) -> DataFrame | None:
    """`subject`, `broker_group`, `first`, `end` and `at` of each hole: when the message before it was stored, or else
    the one behind; None: there are none. Of rows, these, `sequence` and `appended_at` are looked at. A hole over two
    stretches is two."""
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
    """The numbers of the stretches that it lies in, and from where to where in each."""
    for number in range(whole.begin // STRETCH, -(-whole.end // STRETCH)):
        low, high = max(whole.begin, number * STRETCH), min(whole.end, (number + 1) * STRETCH)
        if low < high:
            yield number, low, high
