"""Resending: the window of a stream's batches in flight, and what an answer says about a batch.

The batches of one stream leave in order, several at a time. `SendWindow` holds them in two collections, and may be
recovering:

    sent        in flight, or come back without a receipt; in order
    waiting     not (or no longer) in flight; in order, behind those of `sent`
    recovering  a batch came back. The window sends no more until everything in flight has come back too. Then all
                batches that are not stored return to `waiting` and leave again, in their old order.

The batches carry a producer id and a sequence, so the broker's dedupe window makes sending the same bytes twice
harmless. A broker refuses a batch behind one that it has not stored. So only the oldest batch without a receipt is
judged by its refusal. The refusal has one of five outcomes:

    STORED      the broker refuses the batch as a conflict, and names exactly this batch: the refusal is a receipt
    LATER       the refusal passes: the broker may store the same bytes later
    GAP         an earlier batch of the stream is not stored, or the broker does not know the stream (any more)
    TAKEN       another sender has the place or the whole stream: an earlier run that a backup has undone, or a stranger
    REFUSED     the broker will never store this batch

A SEQUENCE_CONFLICT proves only that the broker has stored something at the place of the refused batch:

    the broker names exactly this batch      the batch is stored: a receipt
    the broker names something else          the batch is certainly not stored there
    the broker cannot tell                   nobody knows

Only the first lets a sender drop the batch. A producer that has not restarted knows its own batches, and does not
compare; the others resend batches of earlier processes, and do.

Three senders have a window: the producer (`producer_stream`), and two whose batches are on disk, the drain of a spool
and the dispatch of a delay server (`BacklogWindow`). A producer judges each refusal when it comes, because somebody
waits for the outcome. A `BacklogWindow` judges once, when everything is back. The outbox shares the outcomes alone
(ADR 0033): its batches wait for no other batch, and a relay resends what is refused, from the row.

What follows from an outcome differs on purpose:

              producer                  spool                    delay server             outbox
    LATER     waits                     waits                    waits                    leaves the row to a relay
    GAP       a new stream, for batches certainly not stored     a stream for that batch  the relay looks for the row
    TAKEN     fails the batch           a new stream             a stream for that batch  the relay moves the row
    REFUSED   fails the batch           sets the batch aside     waits: never drops one   the relay sets the row aside
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

from fairway.batch import peek
from fairway.errors import Code, InvariantViolated, Refused, StoredRange, invariant
from fairway.protocol.line import Answer, ConnectionLost, RequestOutcome, RetryDelays
from fairway.protocol.messages import Produced
from fairway.runtime.buffers import Bytes


class SendOutcome(enum.Enum):
    """How sending a batch ended."""

    STORED = "stored"  # now, or before
    LATER = "later"  # refused for now, or the outcome is unknown
    TAKEN = "taken"  # the broker has something else, or something unknown, at the batch's place
    GAP = "gap"  # an earlier batch of its stream is not stored, or the broker has forgotten the stream
    REFUSED = "refused"  # for good


_OUTCOMES: Final = {
    Code.BUSY: SendOutcome.LATER,
    Code.READ_ONLY: SendOutcome.LATER,
    Code.NOT_MASTER: SendOutcome.LATER,
    Code.EXPIRED: SendOutcome.LATER,
    Code.DRAINING: SendOutcome.LATER,
    Code.TOO_MANY_CONNECTIONS: SendOutcome.LATER,
    Code.SEQUENCE_GAP: SendOutcome.GAP,
    Code.UNKNOWN_PRODUCER: SendOutcome.GAP,
    Code.SEQUENCE_CONFLICT: SendOutcome.TAKEN,
    Code.FOREIGN_STREAM: SendOutcome.TAKEN,
}  # every other code: REFUSED


def outcome_of(code: Code) -> SendOutcome:
    """What a refusal with this code says about the batch. `is_receipt` must be asked first, where it matters."""
    return _OUTCOMES.get(code, SendOutcome.REFUSED)


def is_receipt(refused: Refused, data: Bytes) -> bool:
    """Whether the refusal says that the broker has stored exactly these bytes at their place."""
    if refused.code is not Code.SEQUENCE_CONFLICT or refused.stored is None:
        return False
    header = peek(data)
    return refused.stored == (StoredRange(header.first_sequence, header.count, header.crc),)


def receipt_of(outcome: RequestOutcome) -> Produced | None:
    """Of a stored batch: the receipt; None if the broker only confirms that it already has the batch."""
    return outcome.message if isinstance(outcome, Answer) and isinstance(outcome.message, Produced) else None


def is_repeat(outcome: RequestOutcome) -> bool:
    """Of a stored batch: whether the broker had it before."""
    receipt = receipt_of(outcome)
    return receipt is None or receipt.is_duplicate


BatchT = TypeVar("BatchT")


class SendWindow(Generic[BatchT]):
    """The batches of one stream, in order. A subclass decides what follows from an outcome."""

    def __init__(self, backoff: RetryDelays, batches_max: int) -> None:
        """At most `batches_max` batches are in flight."""
        self.waiting: deque[BatchT] = deque()
        self.sent: dict[BatchT, bool] = {}  # whether in flight
        self.in_flight = 0
        self.is_recovering = False
        self.retry_ns = 0  # nothing leaves before
        self.backoff = backoff
        self.batches_max = batches_max

    def batches(self) -> Iterator[BatchT]:
        """All batches, the oldest first."""
        return chain(self.sent, self.waiting)

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.sent

    def is_in_flight(self, batch: BatchT) -> bool:
        return self.sent.get(batch, False)

    def take(self, room: int, now_ns: int) -> list[BatchT]:
        """Take the batches that leave now, at most `room`."""
        leaving: list[BatchT] = []
        if now_ns < self.retry_ns or (self.is_recovering and not self.recover()):
            return leaving
        self.retry_ns = 0
        room = min(room, self.batches_max - self.in_flight)
        while self.waiting and len(leaving) < room and self.may_leave(self.waiting[0]):
            batch = self.waiting.popleft()
            self.sent[batch] = True
            leaving.append(batch)
        self.in_flight += len(leaving)
        return leaving

    def may_leave(self, batch: BatchT, /) -> bool:
        """Whether the first waiting batch may follow those of `sent`. It leaves at once if so."""
        return True

    def note_stored(self, batch: BatchT) -> None:
        """The batch has come back with a receipt."""
        self.in_flight -= 1
        del self.sent[batch]

    def note_failed(self, batch: BatchT) -> None:
        """The batch has come back without a receipt."""
        self.in_flight -= 1
        self.sent[batch] = False
        self.is_recovering = True

    def recover(self) -> bool:
        """Begin again with the oldest batch that is not stored. False: a batch is still in flight."""
        if self.in_flight:
            return False
        self.is_recovering = False
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        return True

    def remove(self, batch: BatchT) -> None:
        """Take out a batch that is not in flight."""
        if batch in self.sent:
            del self.sent[batch]
        else:
            self.waiting.remove(batch)


class BacklogBatch:
    """A batch that is on disk until the broker has stored it."""

    __slots__ = ("data", "trouble")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.trouble: Refused | ConnectionLost | None = None  # how the last attempt failed


BacklogT = TypeVar("BacklogT", bound=BacklogBatch)


class BacklogWindow(SendWindow[BacklogT]):
    """The window of a sender whose batches are on disk. Its owner decides once everything in flight has come back."""

    def __init__(self, backoff: RetryDelays, batches_max: int) -> None:
        super().__init__(backoff, batches_max)
        self.refused: Refused | None = None  # why the window waits; for the owner to set

    def answered(self, batch: BacklogT, outcome: RequestOutcome) -> bool:
        """Take the outcome of a batch. Returns whether the broker has stored the batch, now or before."""
        if not isinstance(outcome, Answer) and not (isinstance(outcome, Refused) and is_receipt(outcome, batch.data)):
            batch.trouble = outcome
            self.note_failed(batch)
            return False
        self.note_stored(batch)
        if not self.is_recovering:
            self.refused = None
            self.backoff.reset()
        return True

    @property
    def must_decide(self) -> bool:
        """Whether a batch has failed and everything in flight has come back."""
        return self.is_recovering and not self.in_flight

    def begin_again(self) -> tuple[BacklogT, Refused | ConnectionLost]:
        """Recover. Returns the oldest batch that is not stored, and how its last attempt failed."""
        invariant(self.recover(), "a window recovers when everything in flight has come back")
        head = self.waiting[0]
        trouble = head.trouble
        for each in self.waiting:
            each.trouble = None
        if trouble is None:
            raise InvariantViolated("the first batch that is not stored has failed")
        return head, trouble
