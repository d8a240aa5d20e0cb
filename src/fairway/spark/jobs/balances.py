"""Balances: how many messages came in and what became of them, per subject, group and window of time (of storing).

`COUNTS` of `reconcile` says what each column counts.

For each group `stored = acked + dead + outstanding + skipped + lost`; and `sent = stored - duplicates + missing +
unsent`, plus what is scheduled, if rows were given. The second equation holds if no row is under way, too old or
archived, no message lacks a row, and the archive agrees with the log. Latencies are those of messages that were acked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client import message_states
from fairway.spark.jobs.findings import DUPLICATE, MISSING

SUBJECT_COUNTS: Final = ("sent", "stored", "scheduled", "unsent", "missing", "duplicates")
GROUP_COUNTS: Final = ("delivered", "acked", "retried", "dead", "outstanding", "skipped", "lost", "late", "stuck")
HELD: Final = "held"  # handed out and not settled, without redriven messages: the broker counts the same
_SHARES: Final = (0.5, 0.95, 0.99)
_FINE: Final = 10_000  # a percentile is right to a ten-thousandth of the rank


def window_of(time: str, window_ms: int) -> Column:
    """The start of the window that a time lies in. Windows begin at multiples of their length since 1970 UTC."""
    return F.timestamp_millis(F.expr(f"unix_millis({time}) div {window_ms} * {window_ms}"))


def amounts(rows: DataFrame, window: Column, **counts: Column | int) -> DataFrame:
    """The amounts that rows add to the counts of their subject and window; `summed` adds them up."""
    named = [F.lit(counts.get(name, 0)).cast("long").alias(name) for name in SUBJECT_COUNTS]
    return rows.select("subject", window.alias("window"), *named)


def problems(findings: DataFrame, window_ms: int) -> DataFrame:
    """The missing and duplicate messages among findings about whole subjects."""
    whole, kind = findings.filter(F.col("group").isNull()), F.col("kind")
    return amounts(
        whole,
        window_of("at", window_ms),
        missing=F.when(kind == MISSING, F.col("messages")).otherwise(0),
        duplicates=F.when(kind == DUPLICATE, F.col("messages")).otherwise(0),
    )


def summed(counts: Sequence[DataFrame], accounts: DataFrame) -> DataFrame:
    """One row for each group of a subject, or for a subject without groups: in total, and for each window. `is_whole`
    tells a total from an unknown window."""
    rows = reduce(DataFrame.unionByName, counts)
    subjects = _sums(rows, ["subject"], [F.sum(name).alias(name) for name in SUBJECT_COUNTS])
    groups = _sums(accounts, ["subject", "group"], _measures())
    other = groups.withColumnsRenamed({name: f"_{name}" for name in _KEYS})
    same = reduce(Column.__and__, (F.col(name).eqNullSafe(F.col(f"_{name}")) for name in _KEYS))
    both = subjects.join(other, same, "full")
    keys = [F.coalesce(name, f"_{name}").alias(name) for name in _KEYS]
    latencies = [
        F.get(of, F.lit(place)).alias(f"{of}_p{round(share * 100)}_ms")
        for of in ("ack", "total")
        for place, share in enumerate(_SHARES)
    ]
    counted = [F.coalesce(name, F.lit(0)).alias(name) for name in (*SUBJECT_COUNTS, *GROUP_COUNTS, HELD)]
    return both.select(*keys, "group", *counted, *latencies)


_KEYS: Final = ("subject", "window", "is_whole")


def _sums(rows: DataFrame, keys: Sequence[str], measures: Sequence[Column]) -> DataFrame:
    """The sums in total and for each window, in one aggregation."""
    sets = rows.groupingSets([keys, [*keys, "window"]], *keys, "window")
    return sets.agg((F.grouping("window") == 1).alias("is_whole"), *measures)


def _measures() -> list[Column]:
    state = F.col("state")
    ack_ms = F.unix_millis("acked_at") - F.unix_millis("appended_at")
    return [
        F.count_if(F.col("pulls") > 0).alias("delivered"),
        F.count_if(state.isin(message_states.ACKED, message_states.HANDED_OUT)).alias("acked"),
        F.count_if(F.exists("attempts", lambda each: each["outcome"] == "retried")).alias("retried"),
        F.count_if(state == message_states.DEAD).alias("dead"),
        F.count_if(state.isin(*message_states.OPEN)).alias("outstanding"),
        F.count_if(state.isin(message_states.SKIPPED, message_states.UNKNOWN)).alias("skipped"),
        F.count_if(state == message_states.LOST).alias("lost"),
        F.count("late").alias("late"),
        F.count("stuck").alias("stuck"),
        F.count_if(state.isin(*message_states.HELD) & (F.col("redrives") == 0)).alias(HELD),
        _percentiles(ack_ms).alias("ack"),
        _percentiles(F.col("total_ms")).alias("total"),
    ]


def _percentiles(value: Column) -> Column:
    return F.percentile_approx(value, list(_SHARES), _FINE)
