"""The columns of a message, for Spark and for Arrow: the two must agree in every type and nullability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from fairway.errors import Misuse

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

MESSAGES: Final = StructType(
    [
        StructField("subject", StringType(), False),
        StructField("broker_group", StringType(), False),
        StructField("sequence", LongType(), False),
        StructField("id", StringType(), False),
        StructField("key", StringType(), True),
        StructField("tags", ArrayType(StringType(), True), True),
        StructField("headers", MapType(StringType(), StringType(), True), True),
        StructField("payload", BinaryType(), False),
        StructField("created_at", TimestampType(), False),
        StructField("appended_at", TimestampType(), False),
    ]
)

_ARROW: Final[dict[str, pa.DataType]] = {
    "subject": pa.string(),
    "broker_group": pa.string(),
    "sequence": pa.int64(),
    "id": pa.string(),
    "key": pa.string(),
    "tags": pa.list_(pa.string()),
    "headers": pa.map_(pa.string(), pa.string()),
    "payload": pa.binary(),
    "created_at": TIMESTAMP,
    "appended_at": TIMESTAMP,
}


def messages(*, include_headers: bool) -> StructType:
    return StructType([field for field in MESSAGES.fields if include_headers or field.name != "headers"])


def columns_of(
    schema: StructType, whole: StructType = MESSAGES, source: str = "fairway"
) -> tuple[tuple[str, bool], ...]:
    """The columns that a reader is to give, and whether they may be null: all, or those that the user asked for."""
    known: dict[str, DataType] = {field.name: field.dataType for field in whole.fields}
    for field in schema.fields:
        if field.name not in known:
            raise Misuse(f"format {source} has no column {field.name!r}: there are {', '.join(known)}")
        if field.dataType != known[field.name]:
            raise Misuse(
                f"column {field.name} is {known[field.name].simpleString()}, not {field.dataType.simpleString()}: "
                "read it as it is, and cast it afterwards"
            )
    return tuple((field.name, field.nullable) for field in schema.fields)


def arrow_schema(columns: tuple[tuple[str, bool], ...], types: Mapping[str, pa.DataType] = _ARROW) -> pa.Schema:
    return pa.schema([pa.field(name, types[name], nullable=is_nullable) for name, is_nullable in columns])
