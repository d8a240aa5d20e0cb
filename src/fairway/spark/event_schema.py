"""The columns of an event, and the words for what happened."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from fairway.groups import events
from fairway.spark import schema
from fairway.spark.schema import TIMESTAMP
from fairway.storage.action_log import ActionKind

EVENTS: Final = StructType(
    [
        StructField("event", StringType(), False),
        StructField("subject", StringType(), True),
        StructField("broker_group", StringType(), False),
        StructField("group", StringType(), True),
        StructField("consumer", StringType(), True),
        StructField("first_sequence", LongType(), True),
        StructField("count", LongType(), False),
        StructField("attempt", IntegerType(), True),
        StructField("at", TimestampType(), False),
        StructField("due_at", TimestampType(), True),
        StructField("detail", StringType(), True),
        StructField("position", LongType(), False),
    ]
)

_ARROW: Final[dict[str, pa.DataType]] = {
    "event": pa.string(),
    "subject": pa.string(),
    "broker_group": pa.string(),
    "group": pa.string(),
    "consumer": pa.string(),
    "first_sequence": pa.int64(),
    "count": pa.int64(),
    "attempt": pa.int32(),
    "at": TIMESTAMP,
    "due_at": TIMESTAMP,
    "detail": pa.string(),
    "position": pa.int64(),
}

PRODUCED: Final = "produced"

# What an action is called, where its kind says it all.
_PLAIN: Final[dict[int, str]] = {
    ActionKind.GROUP_CONFIG: "configured",
    ActionKind.JOIN: "joined",
    ActionKind.LEAVE: "left",
    ActionKind.EXPIRE: "expired",
    ActionKind.PULL: "pulled",
    ActionKind.ACK: "acked",
    ActionKind.DEAD: "dead",
    ActionKind.DECLINE: "declined",
    ActionKind.WEIGHT: "weighed",
    ActionKind.RATE: "paced",
    ActionKind.REMOVE: "removed",
}
SOUGHT: Final = "sought"
_CURSOR: Final = {events.SOUGHT: SOUGHT, events.LOST: "lost"}


def columns_of(asked: StructType) -> tuple[tuple[str, bool], ...]:
    return schema.columns_of(asked, EVENTS, "fairway.events")


def arrow_schema(columns: tuple[tuple[str, bool], ...]) -> pa.Schema:
    return schema.arrow_schema(columns, _ARROW)


def event_of(kind: int, due_ms: int, lot: int, detail: bytes) -> str:
    """What happened, in a word."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return plain
    match kind:
        case ActionKind.RETRY if due_ms == events.RELEASED:
            return "released"
        case ActionKind.RETRY if due_ms == events.REJECTED:
            return "rejected"
        case ActionKind.RETRY:
            return "doubted" if detail == events.UNSURE else "retried"
        case ActionKind.CURSOR:
            return _CURSOR.get(detail, "skipped")
        case ActionKind.PAUSE:
            return "paused" if lot else "resumed"
        case ActionKind.READ_ONLY:
            return "closed" if lot else "opened"
        case _:
            return f"kind {kind}"  # of a later release


def detail_of(kind: int, lot: int, detail: bytes) -> str | None:
    """What people want to know besides: why, who is paused, which weight or rate."""
    match kind:
        case ActionKind.RETRY if detail != events.UNSURE:
            return detail.decode(errors="replace") or None
        case ActionKind.PAUSE:
            return detail.decode(errors="replace") or None
        case ActionKind.WEIGHT:
            return f"{lot / 1_000:g}"
        case ActionKind.RATE:
            return str(lot)
        case _:
            return None
