"""Makes Arrow record batches of events, one row for each range of messages; the columns of an event.

Python looks at every action once. Ranges and columns are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from fairway.client.action_log_reader import PRODUCED, SOUGHT, Ids, NameResolver, detail_of, event_of
from fairway.spark import frames
from fairway.spark.frames import Columns, repeated, times
from fairway.storage.action_log import RANGE_BYTES, ActionHeader, walk
from fairway.storage.record import Record

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


def columns_of(asked: StructType) -> Columns:
    return frames.columns_of(asked, EVENTS, "fairway.events")


def arrow_schema(columns: Columns) -> pa.Schema:
    return frames.arrow_schema(columns, EVENTS)


FRAME_ROWS: Final = 16_000
_NO_RANGE: Final = bytes(RANGE_BYTES)
_ENTRY: Final = np.dtype(
    [
        ("first_sequence", "<u8"), ("count", "<u4"), ("size", "<u4"), ("position", "<u8"), ("appended_ms", "<i8"),
        ("tag_filter", "<u8"), ("producer_id", "<u8"), ("producer_sequence", "<u8"), ("zero", "<u8"),
    ]
)  # fmt: skip

Resolve = Callable[[Ids], None]


class EventFilter(NamedTuple):
    """The events that the reader wants; None: any group."""

    groups: frozenset[str] | None
    is_subject: Callable[[str], bool]


class ActionFramer:
    """Takes records of the action log, gives frames."""

    def __init__(
        self, broker_group: str, columns: Columns, wanted: EventFilter, names: NameResolver, resolve: Resolve
    ) -> None:
        self._broker_group = broker_group
        self._schema = arrow_schema(columns)
        self._wanted = wanted
        self._names = names
        self._resolve = resolve  # fetches names; called before names are looked up
        self._clear()

    def _clear(self) -> None:
        self._actions: list[ActionHeader] = []
        self._positions: list[int] = []
        self._details: list[bytes] = []
        self._ranges: list[bytes] = []
        self._rows = 0

    def add(self, record: Record) -> Iterator[pa.RecordBatch]:
        """Add the events of a record; yields a frame when there is enough for one."""
        body, position = record.body, record.header.position
        for action in walk(body):
            self._actions.append(action)
            self._positions.append(position)
            detail_at = action.detail_at
            self._details.append(body[detail_at : detail_at + action.detail_bytes])
            self._ranges.append(body[action.ranges_at : detail_at] or _NO_RANGE)
            self._rows += action.ranges or 1
        if self._rows >= FRAME_ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """The events that have not made a frame yet."""
        if self._actions:
            frame = self._frame()
            self._clear()
            if frame.num_rows:
                yield frame

    def _frame(self) -> pa.RecordBatch:
        actions = self._actions
        self._resolve(
            Ids(
                {action.subject_id for action in actions if action.subject_id},
                {action.group_id for action in actions if action.group_id},
                {(action.group_id, action.consumer_id) for action in actions if action.consumer_id},
            )
        )
        columns = self._columns()
        frame = pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)
        mask = self._mask(columns)
        return frame if mask is None else frame.filter(mask)

    def _columns(self) -> dict[str, pa.Array]:
        actions, names = self._actions, self._names
        fixed = np.array([action[:10] for action in actions], np.int64)  # kind, …, lot, in the order of `ActionHeader`
        repeats = np.maximum(fixed[:, 1], 1)
        ranges = np.frombuffer(b"".join(self._ranges), "<u8").reshape(-1, 2).astype(np.int64)
        happened = [
            event_of(action.kind, action.due_ms, action.lot, detail)
            for action, detail in zip(actions, self._details, strict=True)
        ]
        is_sought = np.array([each == SOUGHT for each in happened])
        first = np.where(np.repeat(is_sought, repeats), np.repeat(fixed[:, 9], repeats), ranges[:, 0])
        is_without = np.repeat((fixed[:, 1] == 0) & ~is_sought, repeats)
        due_ms = np.repeat(fixed[:, 8], repeats)
        attempt = np.repeat(fixed[:, 6], repeats).astype(np.int32)

        def told(values: Iterable[str | None]) -> pa.Array:
            return pa.array(values, pa.string()).take(pa.array(np.repeat(np.arange(len(actions)), repeats)))

        details = zip(actions, self._details, strict=True)
        return {
            "event": told(happened),
            "subject": told(names.subject(action.subject_id) for action in actions),
            "broker_group": repeated(self._broker_group, len(ranges)),
            "group": told(names.group(action.group_id) for action in actions),
            "consumer": told(names.consumer(action.group_id, action.consumer_id) for action in actions),
            "first_sequence": pa.array(first, mask=is_without),
            "count": pa.array(ranges[:, 1]),
            "attempt": pa.array(attempt, mask=attempt == 0),
            "at": times(np.repeat(fixed[:, 7], repeats)),
            "due_at": times(due_ms, due_ms <= 0),
            "detail": told(detail_of(action.kind, action.lot, detail) for action, detail in details),
            "position": pa.array(np.repeat(np.array(self._positions, np.int64), repeats)),
            "id": pa.nulls(len(ranges), pa.string()),
            "key": pa.nulls(len(ranges), pa.string()),
        }

    def _mask(self, columns: dict[str, pa.Array]) -> pa.Array | None:
        groups, is_subject = self._wanted
        subjects = columns["subject"].dictionary_encode()
        hits = np.array([is_subject(name) for name in subjects.dictionary.to_pylist()] or [False])
        unknown = len(hits)  # the index for actions without a subject, which nobody asked for
        chosen = np.append(hits, False)[subjects.indices.fill_null(unknown).to_numpy(zero_copy_only=False)]
        if groups is not None:
            encoded = columns["group"].dictionary_encode()
            in_group = np.append([name in groups for name in encoded.dictionary.to_pylist()], False)
            at = encoded.indices.fill_null(len(in_group) - 1).to_numpy(zero_copy_only=False)
            chosen &= in_group[at].astype(bool)
        return None if chosen.all() else pa.array(chosen)


def produced(data: bytes, subject: str, broker_group: str, columns: Columns, begin: int, end: int) -> pa.RecordBatch:
    """A row for each batch that begins in the range, from entries of the consume log."""
    entries: Any = np.frombuffer(data, _ENTRY)
    first = entries["first_sequence"]
    entries = entries[(first >= begin) & (first < end)]
    rows = len(entries)
    schema = arrow_schema(columns)
    known = {
        "event": repeated(PRODUCED, rows),
        "subject": repeated(subject, rows),
        "broker_group": repeated(broker_group, rows),
        "first_sequence": pa.array(entries["first_sequence"].astype(np.int64)),
        "count": pa.array(entries["count"].astype(np.int64)),
        "at": times(entries["appended_ms"]),
        "position": pa.array(entries["position"].astype(np.int64)),
    }
    arrays = [known[name] if name in known else pa.nulls(rows, schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
