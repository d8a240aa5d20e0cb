"""Findings: one row for each thing that is wrong with a message, with its kind, since when, and a remedy.

    missing     should be there, and is not            duplicate   is there more often than once
    late        delivered or acked too long after      stuck       handed out and not settled; a group that acks nothing
    stranger    stored, and no business row says so    differing   the log, and the archive or the broker, disagree

The reason of a finding determines its kind and its remedy (`REASONS`). `at` is the time whose window it belongs to.
"""

from __future__ import annotations

from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client.message_states import ACKED, IN_HAND, RETRYING, RETURNED, WAITING
from fairway.spark.server_groups import BROKER_GROUP

MISSING, DUPLICATE, LATE, STUCK = "missing", "duplicate", "late", "stuck"
STRANGER, DIFFERING = "stranger", "differing"
KINDS: Final = (MISSING, DUPLICATE, LATE, STUCK, STRANGER, DIFFERING)

NEVER_STORED: Final = "never stored"
HOLE: Final = "hole in the log"
NOT_ARCHIVED: Final = "not in the archive"
GONE: Final = "gone from the archive"
NOT_IN_LOG: Final = "only in the archive"
LOST: Final = "lost to retention"
STORED_TWICE: Final = "stored twice"
ROW_TWICE: Final = "row stored twice"
ARCHIVED_TWICE: Final = "archived twice"
ACKED_TWICE: Final = "acked twice"
DELIVERED_LATE: Final = "delivered late"
NOT_DELIVERED: Final = "not delivered yet"
ACKED_LATE: Final = "acked late"
HELD: Final = "in hand"
NOT_TAKEN: Final = "due again, and not taken"
NO_ACKS: Final = "no acks"
UNSENT: Final = "waits at the producer"
SET_ASIDE: Final = "set aside at the producer"
NO_ROW: Final = "no business row"
ARCHIVED_OTHERWISE: Final = "archived otherwise"
COUNTED_OTHERWISE: Final = "counted otherwise"


class Reason(NamedTuple):
    """The kind and the remedy of findings with a reason."""

    kind: str
    remedy: str


REASONS: Final[dict[str, Reason]] = {
    NEVER_STORED: Reason(MISSING, "send the row again, with the same id"),
    HOLE: Reason(
        MISSING,
        "`fairway verify` on the data directory says whether a file is damaged; a power cut with durability memory "
        "leaves holes, too. Take the message from an archive (`fairway pipeline replay --archive`) or send it again",
    ),
    NOT_ARCHIVED: Reason(MISSING, "the log still has it: archive the subject once more, to a new path"),
    GONE: Reason(MISSING, "the log no longer has it either: take the archive's file from a backup"),
    NOT_IN_LOG: Reason(MISSING, "the archive has it: `fairway pipeline replay --archive` sends it again"),
    LOST: Reason(
        MISSING,
        "the group was too far behind: give it more consumers or the broker more disk (keep_owed_gib); or the disk has "
        "lost it (`fairway verify`). An archive may have what was lost",
    ),
    STORED_TWICE: Reason(DUPLICATE, "handlers must take it as done (message.id is the same); find who sent it twice"),
    ROW_TWICE: Reason(DUPLICATE, "handlers must take it as done; let the producer send a row with an id of its own"),
    ARCHIVED_TWICE: Reason(DUPLICATE, "something else than the archive job has written there: archive to a new path"),
    ACKED_TWICE: Reason(
        DUPLICATE, "a seek has handed it out again, or it was acked after a crash: handlers must bear it"
    ),
    DELIVERED_LATE: Reason(LATE, "the group was behind: more consumers, or a larger weight; `fairway lag` watches it"),
    NOT_DELIVERED: Reason(LATE, "nobody takes it: is the group paused, are its consumers up? `fairway groups` tells"),
    ACKED_LATE: Reason(LATE, "handling took long, or it was retried: `fairway trace ID` shows where the time went"),
    HELD: Reason(STUCK, "look at that consumer; when it ends, or after max_handling_ms, others get the message"),
    NOT_TAKEN: Reason(STUCK, "nobody takes it again: are consumers of the group up? `fairway groups` tells"),
    NO_ACKS: Reason(STUCK, "start consumers, `fairway resume` a paused group, or remove a group that nobody needs"),
    UNSENT: Reason(
        STUCK,
        "it is not lost, and nobody sends it: run a relay (`fairway outbox relay`), or `fairway spool drain` where its "
        "process is dead",
    ),
    SET_ASIDE: Reason(
        STUCK,
        "mend what the broker refused; then `fairway outbox retry`, or `fairway spool retry` for what a spool has set "
        "aside",
    ),
    NO_ROW: Reason(STRANGER, "find who sent it; rows that were purged from the business table look the same"),
    ARCHIVED_OTHERWISE: Reason(
        DIFFERING, "the log is right: somebody has changed the archive. Archive to a new path, and find out who did"
    ),
    COUNTED_OTHERWISE: Reason(DIFFERING, "look again; if it stays, keep the data directory and report it"),
}

COLUMNS: Final[dict[str, str]] = {
    "subject": "string",
    "group": "string",
    "id": "string",
    "key": "string",
    "sequence": "bigint",
    "messages": "bigint",
    "since": "timestamp",
    "consumer": "string",
    "detail": "string",
    "at": "timestamp",
}


MESSAGE: Final = ("subject", "id", "key", "sequence")  # the columns that name a message


def found(rows: DataFrame, reason: str | Column, *same: str, **values: Column) -> DataFrame:
    """Findings made of rows. The columns `same` have the values that the rows have under these names. Of columns that
    are not given, `messages` is 1, `at` is the time of `since`, and the others are null."""
    of = {"messages": F.lit(1), **{name: F.col(name) for name in same}, **values}
    of.setdefault("at", of["since"])
    said = F.lit(reason) if isinstance(reason, str) else reason
    columns = [of.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in COLUMNS.items()]
    return rows.select(said.alias("reason"), *columns)


def together(parts: list[DataFrame]) -> DataFrame:
    """The union of all findings, with kind and remedy."""
    rows = reduce(DataFrame.unionByName, parts)
    kinds = _told({name: reason.kind for name, reason in REASONS.items()})
    remedies = _told({name: reason.remedy for name, reason in REASONS.items()})
    return rows.select(kinds.alias("kind"), "reason", *COLUMNS, remedies.alias("remedy"))


def within() -> Column:
    """A phrase that names the broker group of a sequence, in a cluster."""
    group = F.col("broker_group")
    return F.when(group == BROKER_GROUP, "").otherwise(F.concat(F.lit(" in broker group "), group))


def _told(by_reason: dict[str, str]) -> Column:
    pairs = [F.lit(each) for pair in by_reason.items() for each in pair]
    return F.element_at(F.create_map(*pairs), F.col("reason"))


# --- from the log -----------------------------------------------------------------------------------------------------


def repeated(messages: DataFrame) -> DataFrame:
    """Messages whose id the subject had before; `first` is the sequence that had it first."""
    place = F.struct("appended_at", "broker_group", "sequence")
    ids = messages.groupBy("subject", "id").agg(F.count("*").alias("copies"), F.min(place).alias("place"))
    twice = ids.filter("copies > 1").select("subject", "id", "place")
    copies = messages.join(twice, ["subject", "id"]).filter(place > F.col("place"))
    return copies.withColumn("first", F.col("place.sequence")).drop("place")


def stored_twice(copies: DataFrame) -> DataFrame:
    return found(
        copies,
        STORED_TWICE,
        *MESSAGE,
        since=F.col("appended_at"),
        detail=F.format_string("first stored as %d", "first"),
    )


def holes(gaps: DataFrame) -> DataFrame:
    return found(
        gaps,
        HOLE,
        "subject",
        sequence=F.col("first"),
        messages=F.col("end") - F.col("first"),
        since=F.col("at"),
        detail=F.concat(
            F.format_string("no message has the sequences %d to %d", F.col("first"), F.col("end") - 1), within()
        ),
    )


def lost(events: DataFrame) -> DataFrame:
    """Findings: what retention or damage took before a group had it, from the events that report it."""
    return found(
        events,
        LOST,
        "subject",
        "group",
        sequence=F.col("first_sequence"),
        messages=F.col("count"),
        since=F.col("at"),
        detail=F.format_string("%d messages from %d on", F.col("count"), F.col("first_sequence")),
    )


# --- from the lifecycles of messages in groups ------------------------------------------------------------------------


def marked(accounts: DataFrame, now_ms: int, late_after_ms: int, stuck_after_ms: int) -> DataFrame:
    """The lifecycles with `late` and `stuck`, the reasons why a message is late or stuck in its group (null: it is
    not), `took_ms` and `stuck_since`."""
    # Late: delivered or acked too late; or not delivered, although already late.
    owed_ms = F.unix_millis("owed_since")
    waited_ms = F.coalesce(F.unix_millis("first_pulled_at"), F.lit(now_ms)) - owed_ms
    settled_ms = F.unix_millis("acked_at") - owed_ms
    state = F.col("state")
    is_new = (state == WAITING) & (F.col("pulls") == 0)
    is_over = waited_ms > late_after_ms
    late = (
        F.when(is_new & is_over, NOT_DELIVERED)
        .when(F.col("first_pulled_at").isNotNull() & is_over, DELIVERED_LATE)
        .when((state == ACKED) & (settled_ms > late_after_ms), ACKED_LATE)
    )
    took_ms = F.when(late == ACKED_LATE, settled_ms).otherwise(waited_ms)
    # Stuck: with a consumer for too long; or due again, and not pulled.
    last = F.try_element_at("attempts", F.lit(-1))
    since = F.when(state == IN_HAND, last["pulled_at"]).when(
        state.isin(RETURNED, RETRYING), F.coalesce(F.col("due_at"), last["ended_at"])
    )
    is_over = F.lit(now_ms) - F.unix_millis(since) > stuck_after_ms
    stuck = F.when(is_over, F.when(state == IN_HAND, HELD).otherwise(NOT_TAKEN))
    named = {"late": late, "took_ms": took_ms, "last": last, "stuck": stuck, "stuck_since": since}
    return accounts.withColumns(named)


def of_messages(accounts: DataFrame, now_ms: int) -> DataFrame:
    """Findings: messages that are late, stuck, or acked more often than the group was given them. `accounts` must be
    marked."""
    twice = F.when(F.col("acks") > F.col("redrives") + 1, ACKED_TWICE)
    reasons = F.array_compact(F.array("late", "stuck", twice))
    rows = accounts.filter(F.size(reasons) > 0).withColumn("reason", F.explode(reasons))
    reason = F.col("reason")
    stuck_s = (F.lit(now_ms) - F.unix_millis("stuck_since")) / 1_000
    return found(
        rows,
        reason,
        "group",
        *MESSAGE,
        since=F.when(reason == F.col("stuck"), F.col("stuck_since"))
        .when(reason == ACKED_TWICE, F.col("acked_at"))
        .otherwise(F.col("owed_since")),
        consumer=F.when(reason == HELD, F.col("last.consumer")),
        detail=F.when(reason == F.col("stuck"), F.format_string("for %.3f s, attempts: %d", stuck_s, "pulls"))
        .when(reason == ACKED_TWICE, F.format_string("acked %d times", "acks"))
        .otherwise(F.format_string("after %.3f s, attempts: %d", F.col("took_ms") / 1_000, "pulls")),
        at=F.col("appended_at"),
    )


def stalled(accounts: DataFrame, groups: DataFrame, now_ms: int, stuck_after_ms: int) -> DataFrame:
    """Findings: groups with waiting messages that have acked nothing for too long. `groups` has their `last_ack_at`."""
    is_due = F.coalesce(F.unix_millis("due_at"), F.lit(0)) <= now_ms
    waiting = accounts.filter(F.col("state").isin(WAITING, RETURNED, RETRYING) & is_due)
    oldest = waiting.groupBy("subject", "group").agg(
        F.count("*").alias("messages"),
        F.min("owed_since").alias("oldest_at"),
        F.min_by("id", "sequence").alias("id"),
        F.min("sequence").alias("sequence"),
    )
    acked = groups.groupBy("subject", "group").agg(F.max("last_ack_at").alias("last_ack_at"))
    rows = oldest.join(F.broadcast(acked), ["subject", "group"], "left")
    rows = rows.withColumn("since", F.greatest("oldest_at", "last_ack_at"))  # ignores null
    return found(
        rows.filter(F.lit(now_ms) - F.unix_millis("since") > stuck_after_ms),
        NO_ACKS,
        *("subject", "group", "id", "sequence", "messages", "since"),
        detail=F.format_string("%d messages wait, this one is the oldest", "messages"),
        at=F.col("oldest_at"),
    )
