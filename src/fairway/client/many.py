"""What belongs to `send_many` in both faces: how a long list is cut, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fairway import limits
from fairway.client.core import Duration
from fairway.client.pending import SyncBatch
from fairway.client.spot import Partitioner
from fairway.client.ways import WayT
from fairway.errors import Misuse
from fairway.protocol.pending import BatchReceipt

SLICE_MESSAGES = 4 * limits.BATCH_MESSAGES_MAX  # added at a time: the first batches travel while the next are encoded


class MessageSlice(NamedTuple):
    """A part of the messages, with its part of every column that was given."""

    payloads: Sequence[bytes]
    columns: dict[str, Any]

    def part(self, places: Sequence[int]) -> MessageSlice:
        """Those at these places."""
        columns = {name: [column[at] for at in places] for name, column in self.columns.items()}
        return MessageSlice([self.payloads[at] for at in places], columns)


def slices(payloads: Sequence[bytes] | bytes | str, **columns: Sequence[Any] | None) -> Iterator[MessageSlice]:
    """The messages in order, a slice at a time."""
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


def shares_of(spot: Partitioner[WayT], part: MessageSlice) -> dict[WayT, MessageSlice]:
    """Which messages of a slice with keys go where."""
    if not spot.is_ordered or len(spot.ways) < 2:
        return {spot.pick(None): part}
    return {way: part.part(places) for way, places in spot.shares(part.columns["keys"]).items()}


class PendingMany:
    """The outcome of `send_many`: that of its batches, in their order."""

    __slots__ = ("batches",)

    def __init__(self, batches: list[SyncBatch]) -> None:
        self.batches = batches

    def done(self) -> bool:
        return all(batch.done() for batch in self.batches)

    def result(self, timeout: Duration | None = None) -> list[BatchReceipt]:
        """The receipts, once all is durable; raises the first failure, or TimeoutError."""
        for batch in self.batches:
            batch.wait(timeout)
        return [batch.receipt() for batch in self.batches]

    def exceptions(self, timeout: Duration | None = None) -> list[Exception]:
        """What went wrong, batch by batch; empty if all is durable."""
        found = (batch.exception(timeout) for batch in self.batches)
        return [error for error in found if error is not None]

    def __len__(self) -> int:
        """Batches."""
        return len(self.batches)
