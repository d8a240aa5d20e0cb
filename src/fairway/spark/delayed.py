"""The data source `fairway.delayed`: a row for each message that is pending at a delay server when asked.

Tasks divide the range of due times among themselves. Each task reads its part page by page, as `fairway delay list`
does. A delay server keeps no snapshot, so what is pending changes during the read. A message that is rescheduled
meanwhile may come twice or not at all; a message that becomes due meanwhile may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from fairway import limits
from fairway.batch.arrow import record_batch
from fairway.batch.check import open_columns
from fairway.errors import Code, FairwayError, InvariantViolated, Misuse, Refused
from fairway.names import Subject
from fairway.protocol import Bytes
from fairway.protocol.delay_messages import (
    DelayTally,
    PendingListed,
    PendingMessage,
    PendingPage,
    Stretch,
    Tallied,
    Which,
)
from fairway.protocol.messages import Whence
from fairway.runtime.host import spare_the_collector
from fairway.spark import frames
from fairway.spark.connection import BlockingClient
from fairway.spark.frames import TIMESTAMP, Columns
from fairway.spark.options import PATIENCE_S, by_lower_case, count_of, items_of, known, named, place_of, url_of
from fairway.spark.server_groups import ServerGroupAddress, caller_to, delay_places

NAME: Final = "fairway.delayed"
FRAME_ROWS: Final = 8_192
TASK_MESSAGES: Final = 200_000  # unless minPartitions says otherwise; a page has 700
TASKS_MAX: Final = 4  # a delay server serves eight listings at once, and other clients list too
FRAME_BYTES: Final = 8 << 20  # payload bytes that end a frame before `FRAME_ROWS`
_WIDTHS_MS: Final = tuple(hours * 3_600_000 for hours in (2, 24, 720))  # of a stretch; the widest fits two years
OPTIONS: Final = by_lower_case("url subject path keyPrefix dueFrom dueTo minPartitions patienceSeconds")

PENDING: Final = StructType(
    [
        StructField("subject", StringType(), False),
        StructField("id", StringType(), False),
        StructField("key", StringType(), True),
        StructField("due_at", TimestampType(), False),
        StructField("created_at", TimestampType(), True),
        StructField("size_bytes", LongType(), False),
        StructField("tags", ArrayType(StringType(), True), True),
        StructField("headers", MapType(StringType(), StringType(), True), True),
        StructField("payload", BinaryType(), False),
    ]
)
_UNSET: Final = pa.scalar(0, TIMESTAMP)  # the sender gave no time
_CONTENTS: Final = frozenset({"created_at", "tags", "headers", "payload"})  # columns for which a page attaches batches


@dataclass(frozen=True)
class DelayedOptions:
    """The options of a reader, parsed."""

    url: str
    subjects: tuple[str, ...]  # empty: all
    which: Which  # without the subject
    min_partitions: int | None
    patience_s: int


def delayed_options(raw: Mapping[str, str]) -> DelayedOptions:
    options = known(raw, OPTIONS, NAME)
    said = options.get("subject") or options.get("path") or ""
    subjects = items_of(said)
    return DelayedOptions(
        url=url_of(options),
        subjects=tuple(named("subject", each, Subject.parse) for each in subjects),
        which=Which(None, options.get("keyprefix"), _time_ms(options, "dueFrom"), _time_ms(options, "dueTo")),
        min_partitions=count_of(options, "minPartitions"),
        patience_s=count_of(options, "patienceSeconds") or PATIENCE_S,
    )


def _time_ms(options: Mapping[str, str], name: str) -> int | None:
    raw = options.get(name.lower())
    if raw is None:
        return None
    place = place_of(name, raw.strip())
    if place.whence is not Whence.TIME:
        raise Misuse(f"option {name}={raw!r}: it is a time such as 2026-01-31T08:00:00Z")
    return place.value


class DelayedSource(DataSource):
    """`spark.read.format("fairway.delayed")`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return PENDING

    def reader(self, schema: StructType) -> DelayedReader:
        return DelayedReader(delayed_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        raise Misuse("what is pending is a picture of now, not a stream: read it as a batch (spark.read)")


class Walk(NamedTuple):
    """The request that one task repeats page after page."""

    place: ServerGroupAddress
    which: Which
    columns: Columns


@dataclass
class DelayedSplit(InputPartition):
    """A task."""

    walk: Walk


class DelayedReader(DataSourceReader):
    """Reads what is pending when the tasks run."""

    def __init__(self, options: DelayedOptions, schema_: StructType) -> None:
        self._options = options
        self._columns = frames.columns_of(schema_, PENDING, NAME)

    def partitions(self) -> list[InputPartition]:
        options = self._options
        places = delay_places(options.url, options.patience_s)
        if not places:
            raise Misuse(f"no delay server is registered at {options.url}: start one (`fairway delay serve`)")
        filters = [replace(options.which, subject=subject) for subject in options.subjects or (None,)]
        tallies = []
        for place in places:
            with caller_to(place) as caller:
                tallies += [(place, which, _tally(caller, which)) for which in filters]
        messages = sum(tallied.count for _, _, tallied in tallies)
        tasks = options.min_partitions or min(-(-messages // TASK_MESSAGES), TASKS_MAX)
        size = max(-(-messages // max(tasks, 1)), 1)  # the number of messages of a task
        return [
            DelayedSplit(Walk(place, part, self._columns))
            for place, which, tallied in tallies
            for part in cut(which, tallied.stretches, size)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, DelayedSplit):
            spare_the_collector()
            with caller_to(partition.walk.place) as caller:
                yield from _frames(caller, partition.walk)


def cut(whole: Which, stretches: Sequence[Stretch], size: int) -> list[Which]:
    """Cut `whole` into parts of about `size` messages. Together they cover all times, also of messages that are
    scheduled meanwhile."""
    edges: list[int] = []
    counted = 0
    for each in stretches:
        if counted >= size:
            edges.append(each.start_ms)
            counted = 0
        counted += each.count
    bounds = [whole.from_ms, *edges, whole.to_ms]
    return [Which(whole.subject, whole.key_prefix, *bounds[at : at + 2]) for at in range(len(bounds) - 1)]


def _frames(caller: BlockingClient, walk: Walk) -> Iterator[pa.RecordBatch]:
    has_contents = any(name in _CONTENTS for name, _ in walk.columns)
    after, messages, batches = "", list[PendingMessage](), list[Bytes]()
    while True:
        asked = PendingListed(walk.which, after, limits.PENDING_PAGE_MAX, has_contents)
        try:
            page, attached = caller.ask_for_batches(asked, PendingPage)
        except Refused as refused:
            raise _explained(refused, caller) from refused
        messages += page.messages
        batches += attached
        size = sum(each.size_bytes for each in messages) if has_contents else 0
        if messages and (len(messages) >= FRAME_ROWS or size >= FRAME_BYTES or not page.next):
            yield _frame(messages, batches, walk.columns)
            messages, batches = [], []
        if not page.next:
            return
        after = page.next


def _frame(messages: Sequence[PendingMessage], batches: Sequence[Bytes], columns: Columns) -> pa.RecordBatch:
    wanted = frames.arrow_schema(columns, PENDING)
    contents = pa.Table.from_batches([record_batch(open_columns(bytes(each))) for each in batches]) if batches else None

    def column(name: str) -> Any:
        match name:
            case "due_at":
                return frames.times(np.array([each.due_ms for each in messages], np.int64))
            case "subject" | "id" | "key" | "size_bytes":
                return pa.array([getattr(each, name) for each in messages], wanted.field(name).type)
            case "created_at" if contents is not None:
                times = contents.column(name).combine_chunks()
                return pc.if_else(pc.equal(times, _UNSET), None, times)
            case _ if contents is not None:
                return contents.column(name).combine_chunks()
            case _:
                raise FairwayError("the delay server has listed messages and not sent them")

    return pa.RecordBatch.from_arrays([column(name) for name, _ in columns], schema=wanted)


def _tally(caller: BlockingClient, which: Which) -> Tallied:
    """How many messages are due when, as finely as the server counts."""
    for width_ms in _WIDTHS_MS:
        try:
            return caller.ask(DelayTally(which, width_ms), Tallied)
        except Refused as refused:
            is_too_fine = refused.code is Code.BAD_REQUEST and width_ms < _WIDTHS_MS[-1]
            if not is_too_fine:
                raise _explained(refused, caller) from refused
    raise InvariantViolated("the last width has an outcome")


def _explained(refused: Refused, caller: BlockingClient) -> FairwayError:
    return FairwayError(f"the server at {caller.where} does not say what is pending: {refused}")
