"""The sink: rows into batches, each of which can be stored once only.

A task's rows go out as streams that are named by what the task is: the query, the number of the micro-batch, the
partition, the subject. So a task that runs again (a retry, a speculative copy, the whole micro-batch after a crash)
sends the same streams, the same batches, the same bytes, and the broker answers with the receipts of the first time. If
the rows are others, the broker finds other bytes in the same place and refuses: SEQUENCE_CONFLICT.

The boundaries of batches depend on the rows alone, not on the frames in which Spark hands them over. A stream ends
after as many batches as the broker remembers of one, and the next begins. In a cluster all of them go to one broker
group of the subject (`pinning`).
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
from fairway.batch.secret import derived_secret
from fairway.errors import FairwayError, Misuse
from fairway.names import GroupName, Subject
from fairway.protocol.messages import Produce
from fairway.spark.encoding import Encoder
from fairway.spark.options import WriteOptions
from fairway.spark.pinning import PROBE_SEQUENCE, GroupConnections
from fairway.spark.sending import NotTheSame, Sending
from fairway.world.clock import RealClock
from fairway.world.rng import RealRng
from fairway.world.wire import spare_the_collector

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
_IGNORED: Final = frozenset({"broker_group", "sequence", "appended_at"})  # what was read here may be written back
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # local properties of tasks
_CARRIED: Final = ("payload", "key", "tags", "headers", "created_at")


@dataclass
class StoredBatches(WriterCommitMessage):
    """What a task has stored."""

    messages: int
    duplicates: int  # of them, those that an earlier run had stored


class TaskIdentity(NamedTuple):
    """Who a task is, whenever and wherever it runs."""

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
        """What the broker is shown of a stream. A task that runs again finds it, who reads a producer id does not: the
        name of the query stands in no message."""
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
        self.sending: Sending | None = None  # to whom, from the first batch on

    @property
    def stream_id(self) -> int:
        """Of the first of its streams: where that is known, the others belong."""
        return self._identity.producer_id(self.subject, self.is_due, 0)

    def probe(self) -> bytes:
        """A batch of the first stream that can never be stored, for it leaves a gap."""
        return Encoder(self._first).encode(
            producer_id=self.stream_id, first_sequence=PROBE_SEQUENCE, created_ms=self._created_ms
        )

    def add(self, rows: pa.RecordBatch) -> Iterator[bytes]:
        """Batches, as they become full. What is full is a matter of the rows alone."""
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
    """One task."""

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
        """Where messages for the subject go: there, or to the inbox of the one group that is meant."""
        return str(subject if self._group is None else Subject.inbox(self._group, subject))

    def _by_due(self, rows: pa.RecordBatch) -> Iterator[tuple[bool, pa.RecordBatch]]:
        """Those that are to be delivered at once, and those with a time."""
        if not self._has_due:
            yield False, rows.select(self._carried)
            return
        has_time = rows.column("due_at").is_valid()
        for is_due, mask in ((False, pc.invert(has_time)), (True, has_time)):
            chosen = rows.filter(mask)
            if chosen.num_rows:
                yield is_due, chosen.select([*self._carried, "due_at"] if is_due else self._carried)


def _checked(schema: StructType, options: WriteOptions) -> list[str]:
    """The columns; `Misuse` names what is missing, unknown or of another type."""
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
    """Which micro-batch of which streaming query a task works for."""

    query: str
    number: int


def _micro_batch() -> MicroBatch | None:
    """Spark says it in properties that tasks inherit from the thread of the query: for `writeStream`, and for a write
    in `foreachBatch` by the thread that Spark calls. None: no query, or Spark does not say."""
    context = TaskContext.get()
    if context is None:
        return None
    query, number = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    return None if query is None or number is None else MicroBatch(query, int(number))


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("fairway")`: appends. A job that runs again appends again, unless the option writeId says that
    it is the same one. In `foreachBatch` the micro-batch is what runs again, and a write is named as that of
    `writeStream` is."""

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
        """Nothing: every batch was durable when its task ended."""

    def abort(self, messages: list[Any]) -> None:
        """Nothing can be taken back: what was stored stays, and a job with a writeId goes on from there."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`writeStream.format("fairway")`: every micro-batch once, however often it runs."""

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
        """Nothing: every batch was durable when its task ended."""

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Nothing: the micro-batch runs again, and finds what it had stored."""
