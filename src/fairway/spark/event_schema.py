"""The columns of an event, for Spark and for Arrow."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from fairway.spark import schema
from fairway.spark.schema import TIMESTAMP

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
        StructField("id", StringType(), True),
        StructField("key", StringType(), True),
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
    "id": pa.string(),
    "key": pa.string(),
}


def columns_of(asked: StructType) -> tuple[tuple[str, bool], ...]:
    return schema.columns_of(asked, EVENTS, "fairway.events")


def arrow_schema(columns: tuple[tuple[str, bool], ...]) -> pa.Schema:
    return schema.arrow_schema(columns, _ARROW)
