"""`fairway trace` and the Spark jobs find the same state for every message, whatever event comes last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
from pyspark.sql import Row, SparkSession

from fairway import group_events
from fairway.cli.trace_timeline import Histories
from fairway.client.action_log_reader import NameResolver
from fairway.client.message_states import (
    MOVES_CURSOR,
    STATE_AFTER,
    STATES,
    MessageHistory,
    MessageLocation,
    state_without_events,
)
from fairway.group_events import LOST, REJECTED, RELEASED, SKIPPED, ActionKind, GroupEvent
from fairway.groups import GroupConfig, config
from fairway.groups.config import Mode
from fairway.spark.events.frames import EVENTS, ActionFramer, EventFilter, columns_of
from fairway.spark.jobs.message_lifecycle import followed
from fairway.spark.jobs.server_status import ConsumptionStatus
from fairway.spark.plan import SubjectExtent
from fairway.spark.server_groups import SubjectPart
from fairway.storage.action_log import Action, pack
from fairway.storage.record import Record, RecordHeader, RecordKind

SUBJECT = "told.twice"
MESSAGES = range(20)
APPENDED_MS = 500  # the first; each later one a millisecond after
TOLD_FROM_MS = 503
ANN, BOB, EVE = 1, 2, 3
GROUPS = {1: "every", 2: "quick", 3: "moved", 4: "gone", 5: "late", 6: "old", 7: "forth", 8: "again", 9: "again"}
CURSORS = {"every": 19, "quick": 5, "moved": 15, "late": 15, "old": 10, "forth": 15, "again": 2, "silent": 10}
DUE_MS = 90_000


def beginning(group: int, mode: Mode, now: Iterator[int]) -> Iterator[GroupEvent]:
    named = msgspec.msgpack.encode((GROUPS[group], config.encode(GroupConfig(mode=mode))))
    yield group_events.configured(named, next(now))
    for consumer, name in ((ANN, "ann"), (BOB, "bob"), (EVE, "eve")):
        yield group_events.joined(consumer, name, 0, next(now))
    yield group_events.sought(0, next(now))


def every_kind(now: Iterator[int]) -> Iterator[GroupEvent]:
    """A message, or a few, for every event. Of the last two a filter has passed over one, and one is to come."""
    yield group_events.pulled(ANN, 1, ((0, 7),), 1, next(now))
    yield group_events.pulled(BOB, 1, ((7, 1),), 1, next(now))
    yield group_events.pulled(EVE, 1, ((8, 1),), 1, next(now))
    yield group_events.acked(ANN, 1, 0, ((0, 1),), next(now))
    yield group_events.returned(ANN, 1, 0, ((1, 1),), DUE_MS, b"no stock", next(now))
    yield group_events.doubted(ANN, 1, 0, ((2, 1),), DUE_MS, next(now))
    yield group_events.returned(ANN, 1, 0, ((3, 1),), RELEASED, b"", next(now))
    yield group_events.returned(ANN, 1, 0, ((4, 2),), REJECTED, b"nonsense", next(now))
    yield group_events.died(1, 0, ((5, 1),), next(now))
    yield group_events.held_too_long(ANN, 1, 0, ((6, 1),), next(now))
    yield group_events.expired(BOB, next(now))
    yield group_events.left(EVE, next(now))
    yield group_events.declined(10, ((9, 1),), next(now))
    yield group_events.skipped(10, 11, SKIPPED, next(now))
    yield group_events.skipped(11, 12, LOST, next(now))
    yield group_events.parked(15, ((12, 3),), (1, 1, 1), next(now))
    yield group_events.pulled(ANN, 1, ((13, 1), (15, 3)), 2, next(now))
    yield group_events.lost_parked(15, ((14, 1),), next(now))
    yield group_events.acked(ANN, 1, 15, ((15, 1),), next(now), LOST)
    yield group_events.died(1, 15, ((16, 1),), next(now), LOST)
    yield group_events.returned(ANN, 1, 15, ((17, 1),), next(now), b"once more", next(now))
    yield group_events.pulled(ANN, 2, ((17, 1),), 3, next(now))


def handed_out(now: Iterator[int]) -> Iterator[GroupEvent]:
    yield group_events.pulled(ANN, 1, ((0, 20),), 1, next(now))
    yield group_events.left(ANN, next(now))
    yield group_events.sought(5, next(now))


def moved(now: Iterator[int]) -> Iterator[GroupEvent]:
    """The cursor goes back, and what was acked is acked again; then forward, over messages in hand."""
    yield group_events.pulled(ANN, 1, ((0, 10),), 1, next(now))
    yield group_events.acked(ANN, 1, 0, ((0, 3),), next(now))
    yield group_events.sought(1, next(now))
    yield group_events.pulled(BOB, 1, ((1, 9),), 2, next(now))
    yield group_events.acked(BOB, 1, 1, ((1, 1),), next(now))
    yield group_events.sought(15, next(now))


def gone(now: Iterator[int]) -> Iterator[GroupEvent]:
    yield group_events.pulled(ANN, 1, ((0, 4),), 1, next(now))
    yield group_events.acked(ANN, 1, 0, ((0, 1),), next(now))
    yield GroupEvent(ActionKind.REMOVE, next(now))


def late(now: Iterator[int]) -> Iterator[GroupEvent]:
    yield group_events.sought(15, next(now))


def old(now: Iterator[int]) -> Iterator[GroupEvent]:
    """A group that began before the log does."""
    yield group_events.parked(10, ((3, 1),), (1,), next(now))


def forth(now: Iterator[int]) -> Iterator[GroupEvent]:
    """The cursor goes back and forth again, over what was acked."""
    yield group_events.pulled(ANN, 1, ((0, 5),), 1, next(now))
    yield group_events.acked(ANN, 1, 0, ((0, 3),), next(now))
    yield group_events.sought(0, next(now))
    yield group_events.sought(15, next(now))


def made_again(now: Iterator[int]) -> Iterator[GroupEvent]:
    """Behind `gone`, under the same name and another number."""
    yield group_events.pulled(BOB, 1, ((0, 2),), 1, next(now))
    yield group_events.acked(BOB, 1, 0, ((1, 1),), next(now))


def records() -> Iterator[Record]:
    """The action log: each event in a record of its own."""
    now = itertools.count(1_000)
    of = {
        1: every_kind, 2: handed_out, 3: moved, 4: gone, 5: late, 6: old, 7: forth, 8: gone, 9: made_again,
    }  # fmt: skip
    for group, events in of.items():
        mode = Mode.AT_MOST_ONCE if GROUPS[group] == "quick" else Mode.AT_LEAST_ONCE
        begun = () if GROUPS[group] == "old" else beginning(group, mode, now)
        for event in itertools.chain(begun, events(now)):
            body = pack([Action(group, 1, event)])
            position = 64 * next(now)
            header = RecordHeader(RecordKind.ACTIONS, 0, position, position, 1, 0, event.time_ms, 1, len(body), 0)
            yield Record(header, body)


def told_one_by_one(names: NameResolver) -> dict[tuple[str | None, int], MessageHistory]:
    """As `fairway trace` does."""
    histories = Histories(names, lambda _: None, [MessageLocation(SUBJECT, each) for each in MESSAGES])
    for each in records():
        names.learn(each)
        histories.apply(each.body)
    return {(each.group, each.place.sequence): each for each in histories}


def told_at_once(spark: SparkSession, names: NameResolver) -> list[Row]:
    """As the Spark jobs do."""
    part = SubjectPart(SUBJECT)
    framer = ActionFramer(part.broker_group, columns_of(EVENTS), EventFilter(None, bool), names, lambda _: None)
    frames = [frame for each in records() for frame in framer.add(each)] + list(framer.rest())
    times = [datetime.fromtimestamp((APPENDED_MS + each) / 1_000, UTC) for each in MESSAGES]
    messages = spark.createDataFrame(
        [(*part, each, f"id {each}", None, times[each], times[each]) for each in MESSAGES],
        "subject string, broker_group string, sequence long, id string, key string, created_at timestamp, "
        "appended_at timestamp",
    )
    extents = {part: SubjectExtent(0, len(MESSAGES))}
    cursors = {(part, group): cursor for group, cursor in CURSORS.items()}
    asked = ConsumptionStatus(extents, cursors, {}, {part.broker_group: TOLD_FROM_MS}, {}, [])
    events = spark.createDataFrame(pa.Table.from_batches(frames))
    return followed(spark, messages, events, asked, extents).collect()


def test_both_find_the_same_whatever_event_comes_last(spark: SparkSession) -> None:
    names = NameResolver()
    names.subjects[1], names.groups[6] = SUBJECT, GROUPS[6]
    known = told_one_by_one(names)
    rows = told_at_once(spark, names)
    for row in rows:
        group, sequence = row["group"], row["sequence"]
        one = known.get((group, sequence), MessageHistory(MessageLocation(SUBJECT, sequence), group))
        without = state_without_events(sequence, CURSORS.get(group), APPENDED_MS + sequence, TOLD_FROM_MS)
        state = one.state if one.events else without
        due_ms = round(row["due_at"].timestamp() * 1_000) if row["due_at"] else 0
        seen = row["state"], row["pulls"], row["acks"], due_ms
        assert seen == (state, one.pulls, one.acks, one.due_ms if state == "retrying" else 0), row
    assert {(row["group"], row["sequence"]) for row in rows} >= {
        (group, sequence) for group in CURSORS for sequence in MESSAGES
    }
    assert {row["state"] for row in rows} == set(STATES), "a state that no message has"
    happened = {each.event for one in known.values() for each in one.events}
    assert happened == {*STATE_AFTER, *MOVES_CURSOR}, "an event that no message has"
