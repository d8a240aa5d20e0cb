"""What every server does alike with a PRODUCE request, whatever it stores the batch for."""

from __future__ import annotations

from fairway.batch.secret import checked
from fairway.protocol.messages import Produce, Produced
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store


def checked_secret(message: Produce) -> bytes:
    """The secret that a sender shows, or none; `Refused` for one that is easily guessed, or is no secret at all."""
    return checked(message.secret, "stream")


def produced(receipt: AppendReceipt, store: Store) -> Produced:
    """The answer, once the receipt counts."""
    return Produced(
        receipt.first_sequence,
        receipt.count,
        receipt.appended_ms,
        receipt.is_duplicate,
        store.messages.log.epoch,
    )
