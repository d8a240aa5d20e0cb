"""The parts of `send_many` that both clients share: slices of a long list, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fairway import limits
from fairway.client.cluster.partitioner import Partitioner
from fairway.client.cluster.server_connection import ConnectionT
from fairway.client.core import Duration
from fairway.client.sync.receipts import SyncBatch
from fairway.errors import Misuse
from fairway.protocol.receipts import BatchReceipt

SLICE_MESSAGES = 4 * limits.BATCH_MESSAGES_MAX  # the first batches travel while the next slice is encoded


class MessageSlice(NamedTuple):
    """A part of the messages, with the same part of every column."""

    payloads: Sequence[bytes]
    columns: dict[str, Any]

    def part(self, places: Sequence[int]) -> MessageSlice:
        """The messages at these indexes."""
        columns = {name: [column[at] for at in places] for name, column in self.columns.items()}
        return MessageSlice([self.payloads[at] for at in places], columns)


def slices(payloads: Sequence[bytes] | bytes | str, **columns: Sequence[Any] | None) -> Iterator[MessageSlice]:
    """Yield the messages in order, a slice at a time. Columns that are None are left out."""
    if isinstance(payloads, bytes | bytearray | str):
        raise TypeError(f"payloads are a list of bytes, not one {type(payloads).__name__}: write [payload]")
    given = {name: column for name, column in columns.items() if column is not None}
    count = len(payloads)
    for name, column in given.items():
        if len(column) != count:
            raise Misuse(f"{len(column)} {name} for {count} payloads: give one for each, or None for the whole column")
    if count <= SLICE_MESSAGES:
        if count:
            yield MessageSlice(payloads, given)
        return
    for at in range(0, count, SLICE_MESSAGES):
        end = at + SLICE_MESSAGES
        yield MessageSlice(payloads[at:end], {name: column[at:end] for name, column in given.items()})


def shares_of(partitioner: Partitioner[ConnectionT], part: MessageSlice) -> dict[ConnectionT, MessageSlice]:
    """Divide a slice with keys among the connections."""
    if not partitioner.is_ordered or len(partitioner.connections) < 2:
        return {partitioner.pick(None): part}
    return {connection: part.part(places) for connection, places in partitioner.shares(part.columns["keys"]).items()}


class PendingMany:
    """The outcome of `send_many`: the outcomes of its batches, in order."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[SyncBatch]) -> None:
        self.batches = batches

    def done(self) -> bool:
        return all(batch.done() for batch in self.batches)

    def result(self, timeout: Duration | None = None) -> list[BatchReceipt]:
        """Wait for the receipts of all batches. Raises the first failure, or TimeoutError."""
        for batch in self.batches:
            batch.wait(timeout)
        return [batch.receipt() for batch in self.batches]

    def exceptions(self, timeout: Duration | None = None) -> list[Exception]:
        """Wait for all outcomes: the errors of failed batches, empty if all are durable."""
        found = (batch.exception(timeout) for batch in self.batches)
        return [error for error in found if error is not None]

    def __len__(self) -> int:
        """The number of batches."""
        return len(self.batches)
