"""`fairway pipeline trace`: what became of messages, group by group; `run` and `command`.

For each group the job shows how many messages are done, dead or still to come, how long they took, which were the
slowest, and which are stuck. `message_lifecycle.lives` has the same facts message by message.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Final

import typer
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client.message_states import ACKED, OPEN, STATES
from fairway.errors import BadName, Misuse
from fairway.names import GroupName
from fairway.spark.jobs import job, selection, server_status
from fairway.spark.jobs.job import Point, ProgressListener, sentences, unwatched
from fairway.spark.jobs.message_lifecycle import lives
from fairway.spark.jobs.selection import Picking
from fairway.spark.jobs.server_status import ConsumptionStatus
from fairway.spark.options import DEFAULT_URL, PATIENCE_S

TOP: Final = 5
_TIMES: Final = ("wait_ms", "handling_ms", "total_ms")
_FINE: Final = 10_000  # the precision of percentiles: a hundredth of a percent


@dataclass(frozen=True)
class TraceOptions:
    """Which messages and groups to trace, and what to show."""

    picking: Picking
    groups: tuple[str, ...] = ()  # empty: all
    top: int = TOP  # messages to name, of the slowest and of the stuck
    output: str | None = None  # a directory for one row per message and group, as Parquet


@dataclass(frozen=True)
class LatencyTimes:
    """Percentiles of a duration; None: no message has it yet."""

    p50_ms: int | None
    p99_ms: int | None


@dataclass(frozen=True)
class GroupAccount:
    """What became of a subject's messages in one group."""

    subject: str
    group: str
    messages: int
    states: dict[str, int]  # those that occur, in the order of a lifecycle
    again: int  # handed out more than once
    acked_again: int  # acked more than once
    redriven: int  # came again through the group's inbox
    wait: LatencyTimes  # from storing to being handed out
    handling: LatencyTimes  # from being handed out to the ack
    total: LatencyTimes  # from creation to the ack


@dataclass(frozen=True)
class TracedMessage:
    """One message in one group."""

    id: str
    subject: str
    group: str
    sequence: int
    key: str | None
    state: str
    pulls: int
    appended_at: datetime
    due_at: datetime | None
    wait_ms: int | None
    handling_ms: int | None
    total_ms: int | None
    reason: str | None  # the last that a consumer gave


@dataclass
class TraceResult:
    accounts: list[GroupAccount] = field(default_factory=list)
    slowest: list[TracedMessage] = field(default_factory=list)  # of the acked messages: from creation to ack
    stuck: list[TracedMessage] = field(default_factory=list)  # of the messages in an open state: the oldest
    unclaimed: list[str] = field(default_factory=list)  # subjects that no group consumes


def run(spark: SparkSession, options: TraceOptions, watch: ProgressListener = unwatched) -> TraceResult:
    """Trace the selected messages."""
    try:
        groups = frozenset(str(GroupName.parse(each)) for each in options.groups) or None
    except BadName as error:
        raise Misuse(f"--group: {error}") from None
    with sentences("tracing"):
        seen = server_status.look(options.picking, groups)
        messages = sum(seen.extents[part].end - seen.extents[part].first for part in seen.parts)
        watch(Point("trace", messages))
        with job.sized(spark, messages + selection.archived(spark, options.picking)):
            return _found(spark, options, groups, seen)


def _found(
    spark: SparkSession, options: TraceOptions, groups: frozenset[str] | None, seen: ConsumptionStatus
) -> TraceResult:
    rows = lives(spark, options.picking, groups, seen).persist()
    try:
        if options.output is not None:
            rows.write.mode("errorifexists").partitionBy("subject").parquet(options.output)
        found = TraceResult()
        for row in accounts(rows).orderBy("subject", "group").collect():
            counts = {state: row[state] for state in STATES if row[state]}
            wait, handling, total = (LatencyTimes(*(row[name] or (None, None))) for name in _TIMES)
            again, acked_again, redriven = (row[name] for name in ("again", "acked_again", "redriven"))
            subject, group, messages = row[:3]
            found.accounts.append(
                GroupAccount(subject, group, messages, counts, again, acked_again, redriven, wait, handling, total)
            )
        found.slowest = _named(rows.filter(F.col("state") == ACKED), F.desc("total_ms"), options.top)
        found.stuck = _named(rows.filter(F.col("state").isin(*OPEN)), F.asc("appended_at"), options.top)
        claimed = {part.subject for part, _ in seen.cursors} | {each.subject for each in found.accounts}
        found.unclaimed = sorted(name for name in seen.subjects if name not in claimed) if groups is None else []
        return found
    finally:
        rows.unpersist()


def accounts(rows: DataFrame) -> DataFrame:
    """One row for each subject and group: `messages`, one column for each state, `again`, `acked_again`, `redriven`,
    and the 50th and 99th percentile of each time as an array."""
    return rows.groupBy("subject", "group").agg(
        F.count("*").alias("messages"),
        *(F.count_if(F.col("state") == state).alias(state) for state in STATES),
        F.count_if(F.col("pulls") > 1).alias("again"),
        F.count_if(F.col("acks") > 1).alias("acked_again"),
        F.count_if(F.col("redrives") > 0).alias("redriven"),
        *(F.percentile_approx(name, [0.5, 0.99], _FINE).alias(name) for name in _TIMES),
    )


def _named(rows: DataFrame, order: Column, top: int) -> list[TracedMessage]:
    reasons = F.filter(F.transform("attempts", lambda each: each["reason"]), lambda each: each.isNotNull())
    reason = F.try_element_at(reasons, F.lit(-1)).alias("reason")
    columns = [each.name for each in fields(TracedMessage) if each.name != "reason"]
    found = rows.orderBy(order, "subject", "group", "sequence").limit(top)
    return [TracedMessage(**job.in_utc(row)) for row in found.select(*columns, reason).collect()]


def command(  # noqa: PLR0913, PLR0917  (one for each flag)
    subjects: selection.Subjects,
    archive: selection.Archive = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", metavar="GROUP", help="Only this group; may be repeated.")
    ] = None,
    since: selection.Since = None,
    until: selection.Until = None,
    key: selection.Keys = None,
    tag: selection.Tags = None,
    where: selection.Predicate = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Name so many of the slowest and of the stuck.")] = TOP,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write one row per message and group there, as Parquet.")
    ] = None,
    url: job.Url = DEFAULT_URL,
    patience_s: job.Patience = PATIENCE_S,
    master: job.Master = None,
    spark_log: job.SparkLog = job.QUIET,
    json: job.AsJson = False,
) -> None:
    """What became of messages, group by group: done, dead, still to come; how long they took; which are stuck."""
    with job.failures("trace"):
        picked = selection.told(
            subjects, archive, url, since, until, keys=key, tags=tag, where=where, patience_s=patience_s
        )
    with job.running("trace", master, spark_log, is_quiet=json) as (spark, watch):
        found = run(spark, TraceOptions(picked, tuple(group or ()), top, output), watch)
    job.tell(found, json, _lines(found))


def _lines(found: TraceResult) -> list[str]:
    lines = [line for each in found.accounts for line in _lines_of(each)]
    lines += [f"{subject}: no group consumes it" for subject in found.unclaimed]
    for title, named in (("slowest", found.slowest), ("stuck", found.stuck)):
        lines += [f"{title}:"] if named else []
        lines += [_line(each) for each in named]
    return lines or ["no messages"]


def _lines_of(account: GroupAccount) -> list[str]:
    states = ", ".join(f"{count:,} {state}" for state, count in account.states.items())
    lines = [f"{account.subject} → {account.group}: {account.messages:,} messages: {states}"]
    notes = (
        (account.again, "handed out more than once"),
        (account.acked_again, "acked more than once"),
        (account.redriven, "redriven or replayed to the group"),
    )
    told = [f"{count:,} {what}" for count, what in notes if count]
    times = (("waited", account.wait), ("handled in", account.handling), ("acked after", account.total))
    told += [f"{what} {_ms(of.p50_ms)} (p99 {_ms(of.p99_ms)})" for what, of in times if of.p50_ms is not None]
    return [*lines, f"  {'; '.join(told)}"] if told else lines


def _line(each: TracedMessage) -> str:
    parts = [f"  {each.id} {each.subject} → {each.group}: {each.state}"]
    if each.state == ACKED:
        parts.append(f"after {_ms(each.total_ms)}, waited {_ms(each.wait_ms)}, handled in {_ms(each.handling_ms)}")
    else:
        parts.append(f"since {each.appended_at:%Y-%m-%d %H:%M:%S}Z")
    if each.due_at is not None:
        parts.append(f"again at {each.due_at:%Y-%m-%d %H:%M:%S}Z")
    if each.pulls > 1:
        parts.append(f"handed out {each.pulls} times")
    return ", ".join(parts) + (f" ({each.reason})" if each.reason else "")


def _ms(of: int | None) -> str:
    if of is None:
        return "unknown"
    return f"{of:,} ms" if of < 10_000 else f"{of / 1_000:,.0f} s"


if __name__ == "__main__":
    job.main(command, "trace")
