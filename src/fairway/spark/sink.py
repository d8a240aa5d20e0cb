"""The sink: makes batches of a task's rows, each of which a broker stores once only, and sends them.

A task sends its rows in streams whose producer ids are derived from the task's identity: the query, the number of the
micro-batch, the partition, the subject. A task that runs again (a retry, a speculative copy, the whole micro-batch
after a crash) sends the same streams, the same batches, the same bytes. The broker answers with the receipts of the
first run. If the rows differ, the broker finds other bytes at the same place, and refuses with SEQUENCE_CONFLICT.

The boundaries of batches depend on the rows alone, not on the frames in which Spark delivers them. A stream ends after
as many batches as a broker remembers per stream, and the next stream begins.

All rows of a task for one subject go to one broker group, so that a task that runs again finds its stored batches
there. On the first run the task chooses by rendezvous hashing: among the groups that take messages, the one with the
highest hash of stream and group. This spreads tasks evenly, and a new group takes only its share of them.

A later run must find the same group, although subjects are extended and groups drained meanwhile. So each run first
asks every group that holds the subject whether the group remembers the stream. The question is a batch of that stream
that leaves a gap, and can never be stored. A broker that remembers the stream refuses with SEQUENCE_GAP, another one
with UNKNOWN_PRODUCER. If a group remembers the stream, the rows go there. If none does, nothing of the stream was
stored, and the choice is free.

The question needs an answer from every group. The task waits for a group without a master, and names it when patience
runs out. The method fails only if two runs of one task choose different groups at the same moment. For that a
speculative copy, or a task that outlived its driver, must coincide with an extension of the subject between the two
questions.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from fairway.client import url as urls
from fairway.errors import Code, FairwayError, Misuse, Refused
from fairway.names import GroupName, Subject
from fairway.protocol.connection_states import ResponseReceived
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.route_messages import SubjectRoute
from fairway.runtime import host
from fairway.runtime.clock import RealClock
from fairway.runtime.host import spare_the_collector
from fairway.runtime.rng import RealRng
from fairway.spark.connection import LATER, NS, BlockingClient, Ticket
from fairway.spark.encode import Encoder
from fairway.spark.options import WriteOptions
from fairway.spark.server_groups import ServerGroupAddress, ServerGroups, caller_to, delay_places

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
            some = rows.filter(mask)
            if some.num_rows:
                yield is_due, some.select([*self._carried, "due_at"] if is_due else self._carried)


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


def _micro_batch() -> tuple[str, int] | None:
    """The query and the micro-batch of a task, from properties that tasks inherit from the query's thread: for
    `writeStream`, and for a write in `foreachBatch` by the thread that Spark calls. None: there is no query, or Spark
    gives no properties."""
    context = TaskContext.get()
    if context is None:
        return None
    query, number = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    return None if query is None or number is None else (query, int(number))


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
        identity = _task(f"query\0{batch[0]}", batch[1])
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
        identity = _task(f"query\0{self._options.write_id or batch[0]}", batch[1])
        return _Writing(self._options, self._columns, identity, 0).write(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Do nothing: every batch was durable when its task ended."""

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Do nothing: the micro-batch runs again, and finds the batches that it had stored."""


# --- connections ------------------------------------------------------------------------------------------------------

IN_FLIGHT: Final = 8  # batches; the broker gathers them into one sync
# Why a broker refuses messages for one group alone.
_NOBODY: Final = {
    Code.NO_SUCH_SUBJECT: "no subject {subject!r}, so nobody is group {group!r} on it: correct the option subject",
    Code.NO_SUCH_GROUP: "there is no group {group!r} on {subject}: `fairway groups {subject}` lists those that are",
    Code.BAD_NAME: "this broker takes no messages for one group alone ({refused}): upgrade it, or write to a subject "
    "that only this group consumes",
}


class NotTheSame(FairwayError):
    """A task ran again with other rows."""


class Sending:
    """Sends batches to one group of servers, in order."""

    def __init__(self, place: ServerGroupAddress, *, is_pinned: bool = False) -> None:
        """`is_pinned`: an earlier run of the task has stored batches there, so the rest must go there too."""
        self._caller = caller_to(place)
        self._is_pinned = is_pinned
        self._under_way: deque[Ticket] = deque()
        self.messages = self.duplicates = 0

    def send(self, subject: str, data: bytes, secret: bytes) -> None:
        self._under_way.append(self._caller.put(Produce(subject, self._is_pinned, secret), [data]))
        if len(self._under_way) >= IN_FLIGHT:
            self._settle_first()

    def finish(self) -> None:
        while self._under_way:
            self._settle_first()

    def close(self) -> None:
        self._caller.close()

    def _settle_first(self) -> None:
        since_ns = self._caller.now_ns
        while True:
            outcome = self._caller.outcome(self._under_way[0])
            if isinstance(outcome, ResponseReceived) and isinstance(outcome.message, Produced):
                self._under_way.popleft()
                self.messages += outcome.message.count
                self.duplicates += outcome.message.count if outcome.message.is_duplicate else 0
                return
            if not isinstance(outcome, Refused) or not is_passing(outcome):
                raise explained(outcome, self._under_way[0].message)
            self._again(outcome, since_ns)

    def _again(self, refused: Refused, since_ns: int) -> None:
        """Resend in order after a pause: the first batch was refused for now, so those behind it met a gap."""
        refusals = [ticket for ticket in self._under_way if isinstance(self._caller.outcome(ticket), Refused)]
        self._caller.pause(refused, since_ns)
        self._caller.resend(refusals)


def is_passing(refused: Refused) -> bool:
    """Whether a later attempt may succeed. A group with too few copies says when to ask again."""
    return refused.code in LATER or (refused.code is Code.READ_ONLY and refused.retry_after_ms is not None)


def explained(outcome: object, message: object) -> FairwayError:
    subject = Subject(message.subject if isinstance(message, Produce) else "?")
    if not isinstance(outcome, Refused):
        return FairwayError(f"PRODUCE to {subject} was answered with {outcome!r}")
    if subject.is_inbox and outcome.code in _NOBODY:
        group, of = Subject.parse_inbox(subject)
        return Misuse(_NOBODY[outcome.code].format(group=group, subject=of, refused=outcome))
    if outcome.code is Code.FOREIGN_STREAM:
        return FairwayError(
            f"somebody else has taken a stream of this task in {subject}: nothing was added. A write with a writeId of "
            f"its own begins new streams. ({outcome})"
        )
    if outcome.code is Code.SEQUENCE_CONFLICT:
        return NotTheSame(
            f"this task ran before and stored other rows in {subject}: nothing was added. The query must give the same "
            "rows each time it runs: no random values, no current time of its own, no ordering that may vary; sort "
            f"within partitions, or write to a checkpointed table first. ({outcome})"
        )
    return FairwayError(f"the broker does not take messages to {subject}: {outcome}")


PROBE_SEQUENCE: Final = 1 << 62  # beyond the end of any stream
_NAP_S: Final = 0.2
_REMEMBERED: Final = frozenset({Code.SEQUENCE_GAP, Code.SEQUENCE_CONFLICT})
_NOT_HERE: Final = frozenset({Code.NO_SUCH_SUBJECT, Code.NO_SUCH_GROUP, Code.BAD_NAME})


class GroupConnections:
    """The connections of one task: one for each group of servers that it sends to."""

    def __init__(self, url: str, patience_s: int) -> None:
        self._url = url
        self._patience_s = patience_s
        self._server_groups = ServerGroups(url, patience_s) if urls.parse_any(url).meta else None
        self._sendings: dict[tuple[ServerGroupAddress, bool], Sending] = {}  # the flag: an earlier run has sent there
        self._asked: dict[str, BlockingClient] = {}  # for the question whether a group remembers a stream

    def sending(self, stream_id: int, request: Produce, probe: Callable[[], bytes], *, is_due: bool) -> Sending:
        """The connection for a stream, to a broker or a delay server. `request` is the request of its batches."""
        is_pinned = False
        if self._server_groups is not None:
            group, is_pinned = self._found(self._server_groups, stream_id, request, probe, is_due=is_due)
            place = self._place(group)
        elif is_due:
            place = delay_places(self._url, self._patience_s)[0]
        else:
            place = ServerGroupAddress(self._url, self._patience_s)
        found = self._sendings.get((place, is_pinned))
        if found is None:
            found = self._sendings[place, is_pinned] = Sending(place, is_pinned=is_pinned)
        return found

    def _place(self, group: str) -> ServerGroupAddress:
        return ServerGroupAddress(self._url, self._patience_s, group)

    def _caller(self, group: str) -> BlockingClient:
        found = self._asked.get(group)
        if found is None:
            found = self._asked[group] = caller_to(self._place(group))
        return found

    def finish(self) -> tuple[int, int]:
        """Wait until everything is stored; returns the number of messages, and of those stored by an earlier run."""
        for each in self._sendings.values():
            each.finish()
        return (
            sum(each.messages for each in self._sendings.values()),
            sum(each.duplicates for each in self._sendings.values()),
        )

    def close(self) -> None:
        for sending in self._sendings.values():
            sending.close()
        for caller in self._asked.values():
            caller.close()
        if self._server_groups is not None:
            self._server_groups.close()

    # --- the group of a stream -------------------------------------------------------------------------------------

    def _found(
        self, known: ServerGroups, stream_id: int, request: Produce, probe: Callable[[], bytes], *, is_due: bool
    ) -> tuple[str, bool]:
        """The group that remembers the stream, or else one that takes it; and whether the group remembers it."""
        until_ns = known.now_ns + self._patience_s * NS
        while True:
            route = known.receivers(request.subject, is_due=is_due)
            if len(route.groups) == 1 and route.writable:
                return route.groups[0], False
            if route.groups and (found := self._among(route, stream_id, request, probe())) is not None:
                return found
            if known.now_ns > until_ns:
                raise FairwayError(f"nobody takes messages to {request.subject} at {known.where}: {route.why}")
            host.sleep(_NAP_S)

    def _among(self, route: SubjectRoute, stream_id: int, request: Produce, probe: bytes) -> tuple[str, bool] | None:
        """The group, and whether it remembers the stream; None: no group takes messages now."""
        answers = {group: self._answer(self._caller(group), request, probe) for group in route.groups}
        remembering = [group for group, code in answers.items() if code in _REMEMBERED]
        if remembering:
            return remembering[0], True
        here = [group for group, code in answers.items() if code not in _NOT_HERE]
        if not here:  # every group will refuse the batches with its reason
            return route.groups[0], False
        able = [group for group in route.writable if group in here]
        return (chosen(stream_id, able), False) if able else None

    def _answer(self, caller: BlockingClient, request: Produce, probe: bytes) -> Code:
        since_ns = caller.now_ns
        pinned = Produce(request.subject, is_pinned=True, secret=request.secret)  # so that a drained group answers too
        ticket = caller.put(pinned, [probe])
        while True:
            outcome = caller.outcome(ticket)
            if not isinstance(outcome, Refused):
                raise FairwayError(f"a batch that leaves a gap was taken at {caller.where}: {outcome!r}")
            if outcome.code in _REMEMBERED | _NOT_HERE or outcome.code is Code.UNKNOWN_PRODUCER:
                return outcome.code
            if not is_passing(outcome):
                raise explained(outcome, ticket.message)
            caller.pause(outcome, since_ns)
            caller.resend([ticket])


def chosen(stream_id: int, groups: Sequence[str]) -> str:
    """Rendezvous hashing: the same choice from the same groups, spread evenly over streams."""

    def weight(group: str) -> bytes:
        return hashlib.sha256(f"{stream_id:016x}\0{group}".encode()).digest()

    return max(groups, key=weight)
