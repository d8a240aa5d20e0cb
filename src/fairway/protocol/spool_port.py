"""The port to the spool, where batches go when they cannot go to the broker; and batches lent to another producer.

    DIRECT   all is well: batches go to the broker
    HOLD     the last spooled batches are about to arrive: new batches wait for them, so that order is kept
    DIVERT   batches go to the spool, with the number and the bytes that they keep for ever

The spool settles a batch by a `SpoolBatchReceipt` once the batch is kept. From then on the spool, not the producer,
brings it to the broker. A batch that was sent before and may be stored keeps its number, so the broker's dedupe window
recognises it.

A subject may be on several broker groups, and a client has a `ProducerSession` for each. One session can lend sealed
batches that are certainly not stored to another session. The lender still counts the batch, waits for it and tells its
sender. The borrower numbers and sends the batch, and reports the outcome through `Borrowed`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from fairway.batch import MessageId
from fairway.errors import FairwayError, invariant
from fairway.protocol.producer_stream import SealedBatch
from fairway.protocol.receipts import BatchReceipt, PendingBatch, SpoolBatchReceipt


class SendPath(enum.Enum):
    """The way that batches take now."""

    DIRECT = "direct"
    HOLD = "hold"
    DIVERT = "divert"


class Handed(NamedTuple):
    """A batch that is handed to the spool."""

    subject: str
    messages: int
    was_sent: bool  # under its number: the broker may have stored it already
    data: bytes
    group: str = ""  # broker group, in a cluster, that the batch was meant for and may be stored at


class Buffer(Protocol):
    """The spool's view of a producer."""

    messages: int

    def oldest_ns(self) -> int | None:
        """When the oldest unsettled message was added; not cheap."""

    @property
    def is_failing(self) -> bool:
        """Whether the broker has failed again and again: the circuit is open."""

    @property
    def is_crammed(self) -> bool:
        """Whether a caller found the buffer full, and the spool is to take the overflow."""


class SpoolPort(Protocol):
    """The spool, as a producer session sees it."""

    @property
    def send_path(self) -> SendPath: ...

    @property
    def stream_key(self) -> bytes:
        """The key from which the stream secrets are derived; kept with the batches."""

    @property
    def fault(self) -> FairwayError | None:
        """Why the spool can never keep a batch again; None while all is well."""

    @property
    def trouble(self) -> str:
        """Why the spool takes no more for now, for people; empty while there is room."""

    def look(self, buffer: Buffer, now_ns: int) -> None:
        """Choose the way."""

    def next_look_ns(self) -> int | None:
        """When to call `look` again although nothing happens."""

    def room_for(self, messages: int, size_bytes: int) -> bool:
        """Whether the spool can keep this much more."""

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        """Keep these batches, in this order; `done(None)` when they are safe. After `DiskFull` none is kept, after any
        other fault nobody knows."""

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        """The receipt for a batch that is kept."""


Repay: TypeAlias = Callable[[SealedBatch, BatchReceipt | FairwayError], None]


class Borrowed(PendingBatch):
    """The pending outcome of a borrowed batch: passes the outcome to the lender, under the borrower's lock."""

    __slots__ = ("_lent", "_repay")

    def __init__(self, lent: SealedBatch, repay: Repay) -> None:
        super().__init__(lent.pending.subject, _nobody_calls)
        self.count = lent.pending.count
        self.is_seen = True  # the lender reports the failure
        self._lent = lent
        self._repay = repay

    def settle(self, outcome: BatchReceipt | Exception) -> None:
        super().settle(outcome)
        if isinstance(outcome, BatchReceipt | FairwayError):
            self._repay(self._lent, outcome)


def _nobody_calls(_: Callable[[], None]) -> None:
    invariant(False, "what is borrowed has no callbacks of users")
