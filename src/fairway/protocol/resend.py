"""Resending: what an answer says about a batch, and so whether its sender may send the same bytes again.

Four senders share this module: the producer (`producer_stream`), the drain of a spool, the dispatch of a delay server,
and the outbox. Their batches carry a producer id and a sequence, so the broker's dedupe window makes sending the same
bytes twice harmless. A refusal has one of five outcomes:

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

What follows from an outcome differs on purpose:

              producer                  spool                    delay server             outbox
    LATER     waits                     waits                    waits                    leaves the row to a relay
    GAP       a new stream, for batches certainly not stored     a stream for that batch  the relay looks for the row
    TAKEN     fails the batch           a new stream             a stream for that batch  the relay moves the row
    REFUSED   fails the batch           sets the batch aside     waits: never drops one   the relay sets the row aside
"""

from __future__ import annotations

import enum
from typing import Final

from fairway import batch
from fairway.errors import Code, Refused, StoredRange
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
    header = batch.peek(data)
    return refused.stored == (StoredRange(header.first_sequence, header.count, header.crc),)
