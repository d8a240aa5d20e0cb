"""What every server does alike with a PRODUCE request, whatever it stores the batch for."""

from __future__ import annotations

from typing import Final

from fairway.batch.secret import SECRET_BYTES
from fairway.errors import Code, Refused
from fairway.protocol.messages import Produce, Produced
from fairway.storage.message_log import Receipt
from fairway.storage.store import Store

_SECRET_BYTES_MAX: Final = 64


def checked_secret(message: Produce) -> bytes:
    """The secret that a sender shows, or none; `Refused` for one that is easily guessed, or is no secret at all."""
    secret = message.secret
    if secret and not SECRET_BYTES <= len(secret) <= _SECRET_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"a stream's secret has {SECRET_BYTES} to {_SECRET_BYTES_MAX} bytes, this one has {len(secret)}: draw "
            f"{SECRET_BYTES} random bytes for each stream",
        )
    return secret


def produced(receipt: Receipt, store: Store) -> Produced:
    """The answer, once the receipt counts."""
    return Produced(
        receipt.first_sequence,
        receipt.count,
        receipt.appended_ms,
        receipt.is_duplicate,
        store.messages.log.epoch,
    )
