"""The sink: makes batches of a task's rows, each of which a broker stores once only.

A task sends its rows in streams whose producer ids are derived from the task's identity: the query, the number of the
micro-batch, the partition, the subject. A task that runs again (a retry, a speculative copy, the whole micro-batch
after a crash) sends the same streams, the same batches, the same bytes. The broker answers with the receipts of the
first run. If the rows differ, the broker finds other bytes at the same place, and refuses with SEQUENCE_CONFLICT.

The boundaries of batches depend on the rows alone, not on the frames in which Spark delivers them. A stream ends after
as many batches as a broker remembers per stream, and the next stream begins. In a cluster all streams of a task for one
subject go to one broker group (`sink_connections`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType, TimestampType

from fairway import batch, limits
from fairway.batch.identity import derived_secret
from fairway.errors import FairwayError, Misuse
from fairway.names import GroupName, Subject
from fairway.protocol.messages import Produce
from fairway.runtime.blocking_connection import spare_the_collector
from fairway.runtime.clock import RealClock
from fairway.runtime.rng import RealRng
from fairway.spark.encode import Encoder
from fairway.spark.options import WriteOptions
from fairway.spark.sink_connections import PROBE_SEQUENCE, GroupConnections, NotTheSame, Sending

BATCH_ROWS: Final = limits.BATCH_MESSAGES_MAX
BATCH_BYTES: Final = limits.MIB  # of payloads; a larger message has a batch of its own
_TEXT: Final = (StringType, BinaryType)
_COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "payload": _TEXT,
    "subject": (StringType,),
    "key": (StringType,),
    "headers": (MapType,),
    "created_at": (TimestampType,),
    "due_at": (TimestampType,),
}
_ANYTHING: Final = frozenset({"tags", "id"})
_IGNORED: Final = frozenset({"broker_group", "sequence", "appended_at"})  # so that rows of the source can be written
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # local properties of tasks
_CARRIED: Final = ("payload", "key", "tags", "headers", "created_at")


@dataclass
class StoredBatches(WriterCommitMessage):
    """What a task has stored."""

    messages: int
    duplicates: int  # of these: messages that an earlier run had stored


class TaskIdentity(NamedTuple):
    """The identity of a task, the same whenever and wherever it runs."""

    query: str
    batch: int
    partition: int

    def producer_id(self, subject: str, is_due: bool, chunk: int) -> int:
        name = "\0".join(
            ("fairway-sink-1", self.query, str(self.batch), str(self.partition), subject, str(int(is_due)))
        )
        digest = hashlib.sha256(f"{name}\0{chunk}".encode()).digest()
        return int.from_bytes(digest[:8], "little") or 1

    def secret(self, producer_id: int) -> bytes:
        """The secret that proves to the broker who owns a stream. A task that runs again derives the same secret. A
        reader of the producer id cannot: no message contains the name of the query."""
        key = hashlib.sha256(f"fairway-sink-key-1\0{self.query}".encode()).digest()
        return derived_secret(key, producer_id)


class _Route:
    """The rows of one task to one subject, due at once or later."""

    def __init__(self, identity: TaskIdentity, subject: str, is_due: bool, created_ms: int) -> None:
        self.subject = subject
        self.is_due = is_due
        self._identity = identity
        self._created_ms = created_ms
        self._rows: list[pa.RecordBatch] = []
        self._count = self._size = 0
        self._chunk = self._batches = self._sequence = 0
        self._first: pa.RecordBatch | None = None
        self.sending: Sending | None = None  # the connection, from the first batch on

    @property
    def stream_id(self) -> int:
        """The producer id of the first stream: the broker group that knows it gets the other streams too."""
        return self._identity.producer_id(self.subject, self.is_due, 0)

    def probe(self) -> bytes:
        """A batch of the first stream that no broker can store, because it leaves a gap."""
        return Encoder(self._first).encode(
            producer_id=self.stream_id, first_sequence=PROBE_SEQUENCE, created_ms=self._created_ms
        )

    def add(self, rows: pa.RecordBatch) -> Iterator[bytes]:
        """Add rows; yields batches as they become full. The rows alone decide when a batch is full."""
        if self._first is None:
            self._first = rows.slice(0, 1)
        self._rows.append(rows)
        self._count += rows.num_rows
        self._size += rows.nbytes
        if self._count >= BATCH_ROWS or self._size > BATCH_BYTES:
            yield from self._cut(is_last=False)

    def rest(self) -> Iterator[bytes]:
        if self._count:
            yield from self._cut(is_last=True)

    def _cut(self, *, is_last: bool) -> Iterator[bytes]:
        rows = pa.Table.from_batches(self._rows).combine_chunks().to_batches()[0]
        sizes = np.cumsum(np.asarray(pc.fill_null(pc.binary_length(rows.column("payload")), 0), np.int64))
        at = before = 0
        while at < rows.num_rows and (
            is_last or rows.num_rows - at >= BATCH_ROWS or int(sizes[-1]) - before > BATCH_BYTES
        ):
            fitting = int(np.searchsorted(sizes, before + BATCH_BYTES, side="right")) - at
            count = max(1, min(fitting, BATCH_ROWS, rows.num_rows - at))
            yield self._encode(rows.slice(at, count))
            at += count
            before = int(sizes[at - 1])
        self._count, self._size = rows.num_rows - at, int(sizes[-1]) - before
        self._rows = [rows.slice(at)] if self._count else []

    def _encode(self, rows: pa.RecordBatch) -> bytes:
        if self._batches == limits.STREAM_BATCHES_MAX:
            self._chunk, self._batches, self._sequence = self._chunk + 1, 0, 0
        data = Encoder(rows).encode(
            producer_id=self._identity.producer_id(self.subject, self.is_due, self._chunk),
            first_sequence=self._sequence,
            created_ms=self._created_ms,
        )
        self._batches += 1
        self._sequence += rows.num_rows
        return data


class _Writing:
    """The writing of one task."""

    def __init__(self, options: WriteOptions, columns: list[str], identity: TaskIdentity, created_ms: int) -> None:
        self._options = options
        self._identity = identity
        self._created_ms = created_ms
        carried = [*_CARRIED, "id"] if options.keep_ids else list(_CARRIED)
        self._carried = [name for name in carried if name in columns]
        self._has_subjects = options.subject is None
        self._group = None if options.group is None else GroupName(options.group)
        self._has_due = "due_at" in columns
        self._routes: dict[tuple[str, bool], _Route] = {}

    def write(self, frames: Iterator[pa.RecordBatch]) -> StoredBatches:
        ways = GroupConnections(self._options.url, self._options.patience_s)
        try:
            for route, data in self._batches(frames):
                if route.sending is None:
                    request = Produce(route.subject, secret=self._identity.secret(route.stream_id))
                    route.sending = ways.sending(route.stream_id, request, route.probe, is_due=route.is_due)
                secret = self._identity.secret(batch.peek(data).producer_id)
                route.sending.send(route.subject, data, secret)
            return StoredBatches(*ways.finish())
        finally:
            ways.close()

    def _batches(self, frames: Iterator[pa.RecordBatch]) -> Iterator[tuple[_Route, bytes]]:
        for frame in frames:
            for subject, of_subject in self._by_subject(frame):
                for is_due, rows in self._by_due(of_subject):
                    route = self._route(subject, is_due)
                    for data in route.add(rows):
                        yield route, data
        for route in self._routes.values():
            for data in route.rest():
                yield route, data

    def _route(self, subject: str, is_due: bool) -> _Route:
        route = self._routes.get((subject, is_due))
        if route is None:
            route = self._routes[subject, is_due] = _Route(self._identity, subject, is_due, self._created_ms)
        return route

    def _by_subject(self, frame: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not frame.num_rows:
            return
        if not self._has_subjects:
            yield self._address(Subject(self._options.subject or "")), frame
            return
        column = frame.column("subject")
        if column.null_count:
            raise Misuse('column subject has a null: fill it in, or say .option("subject", "orders") for all rows')
        parse = Subject.parse if self._group is None else Subject.parse_joinable
        for subject in pc.unique(column).to_pylist():
            yield self._address(parse(subject)), frame.filter(pc.equal(column, subject))

    def _address(self, subject: Subject) -> str:
        """The subject to send to: the given one, or that of an inbox if one group alone gets the messages."""
        return str(subject if self._group is None else Subject.inbox(self._group, subject))

    def _by_due(self, rows: pa.RecordBatch) -> Iterator[tuple[bool, pa.RecordBatch]]:
        """The rows to deliver at once, and the rows with a due time."""
        if not self._has_due:
            yield False, rows.select(self._carried)
            return
        has_time = rows.column("due_at").is_valid()
        for is_due, mask in ((False, pc.invert(has_time)), (True, has_time)):
            chosen = rows.filter(mask)
            if chosen.num_rows:
                yield is_due, chosen.select([*self._carried, "due_at"] if is_due else self._carried)


def _checked(schema: StructType, options: WriteOptions) -> list[str]:
    """The column names; `Misuse` names a column that is missing, unknown or of the wrong type."""
    for field in schema.fields:
        kinds = _COLUMNS.get(field.name)
        if kinds is None and field.name not in _ANYTHING | _IGNORED:
            raise Misuse(
                f"format fairway does not write a column {field.name!r}: there are "
                f"{', '.join([*_COLUMNS, *sorted(_ANYTHING)])}; drop it, or put it into the payload "
                "(to_json(struct(...)))"
            )
        if kinds is not None and not isinstance(field.dataType, kinds):
            wanted = " or ".join(kind.typeName() for kind in kinds)
            raise Misuse(f"column {field.name} is {field.dataType.simpleString()}: it must be {wanted}; cast it")
    names = schema.fieldNames()
    if "payload" not in names:
        raise Misuse("there is no column payload: select(to_json(struct(...)).alias('payload')), for example")
    if options.subject is None and "subject" not in names:
        raise Misuse('to which subject? Say .option("subject", "orders"), or give the rows a column subject')
    if options.group is not None and "due_at" in names:
        raise Misuse("a message for one group alone is delivered at once: drop the column due_at, or the option group")
    if options.keep_ids and "id" not in names:
        raise Misuse("option keepIds needs a column id, as the source gives it")
    return list(names)


def _task(query: str, batch: int) -> TaskIdentity:
    spare_the_collector()
    context = TaskContext.get()
    return TaskIdentity(query, batch, context.partitionId() if context is not None else 0)


class MicroBatch(NamedTuple):
    """The micro-batch of a streaming query that a task works for."""

    query: str
    number: int


def _micro_batch() -> MicroBatch | None:
    """The micro-batch, from properties that tasks inherit from the query's thread: for `writeStream`, and for a write
    in `foreachBatch` by the thread that Spark calls. None: there is no query, or Spark gives no properties."""
    context = TaskContext.get()
    if context is None:
        return None
    query, number = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    return None if query is None or number is None else MicroBatch(query, int(number))


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("fairway")`: appends. A job that runs again appends again, unless the option writeId marks both
    runs as the same job. In `foreachBatch` a repeated micro-batch writes nothing twice, as with `writeStream`."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise Misuse('a log is appended to, never overwritten: say .mode("append")')
        self._options = options
        self._columns = _checked(schema, options)
        self._write_id = options.write_id or f"once-{RealRng().bits(128):032x}"
        self._created_ms = 0 if options.write_id else RealClock().wall_ms()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBatches:
        batch = _micro_batch() if self._options.write_id is None else None
        if batch is None:
            identity = _task(f"write\0{self._write_id}", 0)
            return _Writing(self._options, self._columns, identity, self._created_ms).write(iterator)
        identity = _task(f"query\0{batch.query}", batch.number)
        try:
            return _Writing(self._options, self._columns, identity, 0).write(iterator)
        except NotTheSame as error:
            subject = self._options.subject or "a subject"
            raise NotTheSame(
                f"{error} Or this is the second write to {subject} in one foreachBatch: give each of them a name that "
                'holds the number of the micro-batch, .option("writeId", f"late-{batch_id}")'
            ) from error

    def commit(self, messages: list[Any]) -> None:
        """Do nothing: every batch was durable when its task ended."""

    def abort(self, messages: list[Any]) -> None:
        """Do nothing: stored batches stay, and a job with a writeId continues from there."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`writeStream.format("fairway")`: stores every micro-batch once, however often it runs."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._columns = _checked(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBatches:
        batch = _micro_batch()
        if batch is None:
            raise FairwayError(
                "this Spark does not say which query and micro-batch a task belongs to: use 4.2 or later"
            )
        identity = _task(f"query\0{self._options.write_id or batch.query}", batch.number)
        return _Writing(self._options, self._columns, identity, 0).write(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Do nothing: every batch was durable when its task ended."""

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Do nothing: the micro-batch runs again, and finds the batches that it had stored."""
