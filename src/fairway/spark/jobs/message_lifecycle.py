"""The lifecycle of messages: one row for each message and group, made of messages and their events.

`trace` shows the rows, and `reconcile` balances them against the business rows. The columns:

    subject, broker_group, sequence, id, key, created_at, appended_at     the message, as the source has it
    group             each group that the subject has now, and a removed group that had to do with the message
    state             one word, see `fairway.client.message_states`
    attempts          array of (attempt, consumer, pulled_at, ended_at, outcome, reason), in order. The outcome is
                      what ended it: acked, retried, rejected, released (handed back, or the consumer left), expired
                      (held too long, or its lease ended), doubted (a power cut), forgotten (the cursor was moved, or
                      the group removed), handed out (an at-most-once group), in hand (not yet). `pulled_at` is null
                      if a crash lost the record of the pull, and the broker accepted the ack
    pulls             how often it was handed out
    redrives          how often it came again through the group's inbox (redriven, replayed); those attempts are
                      among the attempts, and count from 1 again
    first_pulled_at, acked_at, dead_at     the first time, the first time, the last time; null: never
    due_at            retrying: when again
    acks              how often it was acked: more than once is work done twice (the cursor was moved back)
    wait_ms           from storing to the first time it was handed out
    handling_ms       from being handed out to its first ack, of that attempt alone
    total_ms          from its creation, by the producer's clock, to its first ack

A message that was redriven, or replayed to one group, is one row, that of the original. A header of the copy in the
group's inbox names the original's place. A message that was sent to one group and has no original is a row of the inbox
(`inbox:GROUP:SUBJECT`). Dead letters are messages of a subject of their own (`dead:GROUP:SUBJECT`), with lifecycles of
their own if a group consumes them. A broadcast consumer is a group, `GROUP.CONSUMER`.

Spark alone explodes the ranges of events and orders them. The job asks the broker for its cursors first, then reads the
events, then the messages that the broker had when asked. So every message has the events up to that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  (so it is called everywhere)

from fairway.client import message_states as states
from fairway.errors import Misuse
from fairway.groups.config import Mode
from fairway.spark.events.frames import EVENTS
from fairway.spark.jobs import archive_log
from fairway.spark.jobs import selection as pickings
from fairway.spark.jobs.files import Files
from fairway.spark.jobs.selection import Picking
from fairway.spark.jobs.server_status import ConsumptionStatus, look
from fairway.spark.plan import SubjectExtent
from fairway.spark.server_groups import SubjectPart

_PLACE: Final = ("subject", "broker_group", "group")
_KEY: Final = (*_PLACE, "sequence")
_MESSAGE: Final = ("subject", "broker_group", "sequence", "id", "key", "created_at", "appended_at")
# Headers of a copy that name the original: its subject, and its sequence there.
_ORIGINS: Final = ((states.DEAD_SUBJECT, states.DEAD_SEQUENCE), (states.REPLAY_SUBJECT, states.REPLAY_SEQUENCE))

# Events that name messages, beside `pulled`; and events that concern all that a consumer, or a group, holds.
_NAMED: Final = tuple(event for event in states.STATE_AFTER if event not in {"pulled", "left"})
_ENDED: Final = (*states.ENDS_CONSUMER, *states.MOVES_CURSOR)
_ENDINGS: Final = {"left": "released", "expired": "expired", "sought": "forgotten", "removed": "forgotten"}
_BEYOND: Final = (1 << 63) - 1  # above every sequence
_COLUMNS: Final = (
    *_MESSAGE, "group", "state", "attempts", "pulls", "redrives", "first_pulled_at", "acked_at", "dead_at", "due_at",
    "acks", "wait_ms", "handling_ms", "total_ms",
)  # fmt: skip
_GROUPS: Final = (
    "subject string, broker_group string, `group` string, cursor bigint, moved_at bigint, moved_to bigint, "
    "is_once boolean, is_moved_later boolean, told_from_ms bigint"
)
_ENDING: Final = "struct<position: bigint, at: timestamp, event: string>"


class _Group(NamedTuple):
    """One group on one subject."""

    subject: str
    broker_group: str
    group: str
    cursor: int | None  # None: the group was removed
    moved_at: int | None  # the position of the last event that moved its cursor, or removed it
    moved_to: int | None
    is_once: bool  # at-most-once
    is_moved_later: bool  # whether the cursor was moved after something had been handed out
    told_from_ms: int  # since when the action log of that broker group has events


def lives(
    spark: SparkSession,
    picking: Picking,
    groups: Iterable[str] | None = None,
    consumption: ConsumptionStatus | None = None,
) -> DataFrame:
    """The columns above, in no order; of some groups, or of all. The events are read at once, and kept as long as the
    frame lives. The messages are read when the frame is used, so persist a frame that is used more than once.
    `consumption` is the answer of the brokers, if the caller has asked for the same groups before."""
    wanted = None if groups is None else frozenset(groups)
    consumption = consumption or look(picking, wanted)
    extents = {**consumption.extents, **_archived_extents(spark, picking, consumption)}
    messages = _messages(spark, picking, consumption)
    events = _events(spark, picking, consumption, wanted)
    return followed(spark, messages, events, consumption, extents)


def followed(
    spark: SparkSession,
    messages: DataFrame,
    events: DataFrame,
    consumption: ConsumptionStatus,
    extents: Mapping[SubjectPart, SubjectExtent],
) -> DataFrame:
    """The rows of `lives`, from messages that were read, and their events."""
    known = _groups(events, consumption)
    holds = _holds(events, with_moves=any(each.is_moved_later for each in known))
    low, high = F.greatest("first_sequence", "first"), F.least(F.col("first_sequence") + F.col("count"), F.col("end"))
    within = holds.join(F.broadcast(_extents(spark, extents)), ["subject", "broker_group"]).filter(low < high)
    acts = _acts(within.withColumn("sequence", F.explode(F.sequence(low, high - 1))))  # a row for each message
    groups_now = spark.createDataFrame(known, _GROUPS)
    told = messages.join(F.broadcast(groups_now), ["subject", "broker_group"]).join(acts, list(_KEY), "left")
    told = told.filter(F.col("cursor").isNotNull() | F.col("last").isNotNull()).withColumn("state", _state())
    told = told.withColumn("due_at", F.when(F.col("state") == states.RETRYING, F.col("last.due_at")))
    return _timed(_gathered(told, has_copies=bool(consumption.inboxes)))


# --- reading ----------------------------------------------------------------------------------------------------------


def _archived_extents(
    spark: SparkSession, picking: Picking, consumption: ConsumptionStatus
) -> dict[SubjectPart, SubjectExtent]:
    """The extents of subjects in an archive. A replaced log of the broker is refused: its events did not happen to the
    messages that the archive has of the old log."""
    if picking.archive is None:
        return {}
    state = archive_log.load(Files(spark, picking.archive)).named(consumption.log_ids)
    found = {}
    for part in consumption.parts:
        known, spans, now = state.log_id(*part), state.ranges_of(*part), consumption.log_ids[part.broker_group]
        if spans:
            found[part] = SubjectExtent(spans[0].first, spans[-1].end)
        if known not in {None, now}:
            raise Misuse(
                f"{picking.archive} holds {part.subject} of another log ({known}) than the broker at {picking.url} has "
                f"({now}): the broker has new data, and knows nothing of those messages"
            )
    return found


def _messages(spark: SparkSession, picking: Picking, consumption: ConsumptionStatus) -> DataFrame:
    """The messages, those of inboxes too. `home`, `home_group` and `place` name the message that a row is about. `copy`
    is the order of copies, below 0 for the message itself."""
    own = pickings.messages(spark, picking, consumption.log_ids).select(*_MESSAGE)
    if picking.archive is None:
        ends = F.broadcast(_extents(spark, consumption.extents).drop("first"))
        own = own.join(ends, ["subject", "broker_group"]).filter(F.col("sequence") < F.col("end")).select(*_MESSAGE)
    if not consumption.inboxes:
        return _placed(own, F.col("subject"), F.col("broker_group"), F.col("sequence"), F.lit(-1))
    inboxes = replace(picking, subjects=tuple(consumption.inboxes), archive=None)
    owners = spark.createDataFrame(list(consumption.inboxes.items()), "subject string, owner string")
    meant = _with_origin(pickings.messages(spark, inboxes), owners).filter(F.col("origin").isNull()).select(*_MESSAGE)
    everything = Picking(inboxes.subjects, url=picking.url, patience_s=picking.patience_s)
    copies = _with_origin(pickings.messages(spark, everything), owners).filter(F.col("origin").isNotNull())
    whole = _placed(own.unionByName(meant), F.col("subject"), F.col("broker_group"), F.col("sequence"), F.lit(-1))
    # The broker group of a copy's original: for a redriven copy its own, for a replayed one that of a header.
    headers, group = F.col("headers"), F.col("broker_group")
    is_redriven = F.coalesce(headers[_ORIGINS[0][0]] == F.col("owner"), F.lit(False))
    home_group = F.when(is_redriven, group).otherwise(F.coalesce(headers[states.REPLAY_GROUP], group))
    return whole.unionByName(_placed(copies, F.col("owner"), home_group, F.col("origin"), F.col("sequence")))


def _with_origin(inbox: DataFrame, owners: DataFrame) -> DataFrame:
    """The messages of inboxes with `origin`, the sequence of the message that was redriven, or replayed to one
    group."""
    headers, owner = F.col("headers"), F.col("owner")
    origins = (F.when(headers[subject] == owner, headers[sequence].try_cast("long")) for subject, sequence in _ORIGINS)
    return inbox.join(F.broadcast(owners), "subject").withColumn("origin", F.coalesce(*origins))


def _placed(messages: DataFrame, home: Column, home_group: Column, place: Column, copy: Column) -> DataFrame:
    of = home.alias("home"), home_group.alias("home_group"), place.alias("place")
    return messages.select(*_MESSAGE, *of, copy.cast("long").alias("copy"))


def _events(
    spark: SparkSession, picking: Picking, consumption: ConsumptionStatus, groups: frozenset[str] | None
) -> DataFrame:
    """The events of the wanted messages, read once."""
    if not consumption.extents:
        return spark.createDataFrame([], EVENTS)
    read = pickings.events(spark, picking.url, picking.patience_s, consumption.names, picking.since, groups)
    kinds = {"configured", *states.STATE_AFTER, *_ENDED}
    return read.filter(F.col("event").isin(*kinds) & F.col("group").isNotNull()).localCheckpoint()


def _groups(events: DataFrame, consumption: ConsumptionStatus) -> list[_Group]:
    """The present and the removed groups: few enough for the driver."""
    position, is_moved = F.col("position"), F.col("event").isin(*states.MOVES_CURSOR)
    to = F.when(F.col("event") == "removed", F.lit(_BEYOND)).otherwise(F.col("first_sequence"))
    told = events.groupBy(*_PLACE).agg(
        F.max(F.when(is_moved, F.struct("position", to.alias("to")))).alias("moved"),
        F.max(F.when(F.col("event") == "configured", F.struct("position", "detail"))).alias("configured"),
        F.min(F.when(F.col("event") == "pulled", position)).alias("pulled"),
    )
    seen = {(SubjectPart(row["subject"], row["broker_group"]), row["group"]): row for row in told.collect()}
    found = []
    for part, group in sorted({*consumption.cursors, *seen}):
        row = seen.get((part, group))
        moved, configured, pulled = row[-3:] if row is not None else (None, None, None)
        found.append(
            _Group(
                *part,
                group,
                consumption.cursors.get((part, group)),
                None if moved is None else moved["position"],
                None if moved is None else moved["to"],
                configured is not None and configured["detail"] == Mode.AT_MOST_ONCE.value,
                moved is not None and pulled is not None and moved["position"] > pulled,
                consumption.told_from_ms.get(part.broker_group, 0),
            )
        )
    return found


def _extents(spark: SparkSession, extents: Mapping[SubjectPart, SubjectExtent]) -> DataFrame:
    """The extents as a frame: ranges of events are cut to them."""
    rows = [(*part, *extent) for part, extent in extents.items()]
    return spark.createDataFrame(rows, "subject string, broker_group string, first bigint, end bigint")


# --- events, message by message ---------------------------------------------------------------------------------------


def _holds(events: DataFrame, *, with_moves: bool) -> DataFrame:
    """The events of ranges. A `pulled` event also has `ending`: the next event that ended all that its consumer held;
    `with_moves` includes moves of the group's cursor. The window runs backwards, because a frame that grows is cheap,
    and a frame that shrinks is not."""
    pulled = events.filter(F.col("event") == "pulled")
    is_whole = F.col("first_sequence").isNull() | (F.col("event") == "sought")  # concerns no range
    of_groups = F.col("event").isin(*states.MOVES_CURSOR)
    all_ended = events.filter(F.col("event").isin(*_ENDED) & is_whole)
    ended = all_ended.filter(~of_groups)
    if with_moves:
        consumers = pulled.select(*_PLACE, "consumer").distinct()
        moves = all_ended.filter(of_groups).drop("consumer").join(consumers, list(_PLACE))
        ended = ended.unionByName(moves.select(*events.columns))
    ending = F.struct("position", "at", "event")
    marked = pulled.withColumn("ending", F.lit(None).cast(_ENDING)).unionByName(ended.withColumn("ending", ending))
    backwards = Window.partitionBy(*_PLACE, "consumer").orderBy(F.desc("position"))
    until_here = backwards.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    marked = marked.withColumn("ending", F.last("ending", ignorenulls=True).over(until_here))
    named = events.filter(F.col("event").isin(*_NAMED) & F.col("first_sequence").isNotNull())
    return marked.filter(F.col("event") == "pulled").unionByName(named.withColumn("ending", F.lit(None).cast(_ENDING)))


def _acts(each: DataFrame) -> DataFrame:
    """One row for each message and group with events: attempts, counts, times, and the last event."""
    in_order = Window.partitionBy(*_KEY).orderBy("position", "event")
    event, ending = F.col("event"), F.col("ending")
    rows = each.withColumn("next", F.lead(F.struct("event", "at", "position", "detail")).over(in_order))
    rows = rows.withColumn("before", F.lag("event").over(in_order))
    is_pulled, is_acked = event == "pulled", event == "acked"
    is_settled = F.coalesce(F.col("next.event") != "pulled", F.lit(False)) & (
        ending.isNull() | (F.col("next.position") <= F.col("ending.position"))
    )
    outcome = (
        F.when(is_acked, F.lit("acked"))
        .when(is_settled, F.col("next.event"))
        .when(ending.isNotNull(), _translated(F.col("ending.event"), _ENDINGS))
        .when(F.col("next").isNotNull(), F.lit("forgotten"))
        .otherwise(states.IN_HAND)
    )
    ended_at = F.when(is_acked, F.col("at")).when(is_settled, F.col("next.at")).otherwise(F.col("ending.at"))
    attempt = F.struct(
        "position",
        "attempt",
        "consumer",
        F.when(is_pulled, F.col("at")).alias("pulled_at"),
        ended_at.alias("ended_at"),
        outcome.alias("outcome"),
        F.when(is_settled, F.col("next.detail")).alias("reason"),
    )
    is_attempt = is_pulled | (is_acked & F.coalesce(F.col("before") != "pulled", F.lit(True)))
    return rows.groupBy(*_KEY).agg(
        F.sort_array(F.collect_list(F.when(is_attempt, attempt))).alias("attempts"),
        F.count_if(is_pulled).alias("pulls"),
        F.count_if(is_acked).alias("acks"),
        F.min(F.when(is_pulled, F.col("at"))).alias("first_pulled_at"),
        F.min(F.when(is_acked, F.col("at"))).alias("acked_at"),
        F.max(F.when(event == "dead", F.col("at"))).alias("dead_at"),
        F.max(F.struct("position", "event", "due_at", "ending")).alias("last"),
    )


# --- what came of it --------------------------------------------------------------------------------------------------


def _state() -> Column:
    """The state of one copy, by the rules of `fairway.client.message_states`."""
    last, sequence = F.col("last.event"), F.col("sequence")
    is_older = F.col("last").isNull() | (F.col("last.position") < F.col("moved_at"))
    is_moved = F.col("moved_at").isNotNull() & is_older
    is_done = last.isin(*states.DONE_BY)
    is_once = F.col("is_once") & (last == "pulled")
    is_told = F.unix_millis("appended_at") >= F.col("told_from_ms")
    without_events = (
        F.when(sequence >= F.coalesce("cursor", sequence), states.WAITING)
        .when(is_told, states.SKIPPED)
        .otherwise(states.UNKNOWN)
    )
    is_to_come = sequence >= F.col("moved_to")
    return (
        F.when(is_moved & ~is_to_come & F.coalesce(~is_done & ~is_once, F.lit(True)), states.SKIPPED)
        .when(last.isNull(), without_events)
        .when(is_moved & is_to_come, states.WAITING)
        .when(is_once, states.HANDED_OUT)
        .when((last == "pulled") & F.col("last.ending").isNotNull(), states.RETURNED)
        .otherwise(_translated(last, states.STATE_AFTER))
    )


def _gathered(told: DataFrame, *, has_copies: bool) -> DataFrame:
    """The message and its copies in the inbox as one row; copies of an unwanted message are dropped."""
    handed_out = F.transform(  # nothing ends an attempt of an at-most-once group, so it ends when it is handed out
        "attempts",
        lambda each: each.withField("outcome", F.lit(states.HANDED_OUT)).withField("ended_at", each["pulled_at"]),
    )
    attempts = F.when(F.col("is_once"), handed_out).otherwise(F.col("attempts"))
    counts = {name: F.coalesce(F.col(name), F.lit(0)) for name in ("pulls", "acks")}
    told = told.withColumns({"attempts": F.coalesce(attempts, F.array()), **counts})
    if not has_copies:  # the usual case; the rest is a shuffle
        return told.withColumn("redrives", F.lit(0).cast("long"))
    home = F.col("home").alias("subject"), F.col("home_group").alias("broker_group")
    place = (*home, F.col("place").alias("sequence"), "group")
    gathered = told.groupBy(*place).agg(
        F.max(F.when(F.col("copy") < 0, F.struct("id", "key", "created_at", "appended_at"))).alias("message"),
        F.max_by("state", "copy").alias("state"),
        F.max_by("due_at", "copy").alias("due_at"),
        F.sort_array(F.flatten(F.collect_list("attempts"))).alias("attempts"),
        *(F.sum(name).alias(name) for name in counts),
        F.count_if(F.col("copy") >= 0).alias("redrives"),
        *(F.min(name).alias(name) for name in ("first_pulled_at", "acked_at")),
        F.max("dead_at").alias("dead_at"),
    )
    return gathered.filter(F.col("message").isNotNull()).select("*", "message.*")


def _timed(rows: DataFrame) -> DataFrame:
    acked = F.get(F.filter("attempts", lambda each: each["outcome"] == "acked"), 0)
    without_position = F.transform("attempts", lambda each: each.dropFields("position"))
    return (
        rows.withColumn("handling_ms", _ms_between(acked["pulled_at"], acked["ended_at"]))
        .withColumn("wait_ms", _ms_between(F.col("appended_at"), F.col("first_pulled_at")))
        .withColumn("total_ms", _ms_between(F.col("created_at"), F.col("acked_at")))
        .withColumn("attempts", without_position)
        .select(*_COLUMNS)
    )


def _ms_between(begin: Column, end: Column) -> Column:
    return F.unix_millis(end) - F.unix_millis(begin)


def _translated(word: Column, into: dict[str, str]) -> Column:
    pairs = [F.lit(each) for pair in into.items() for each in pair]
    return F.create_map(*pairs)[word]
