"""What a SEQUENCE_CONFLICT says of the batch that was refused. It proves that something stands at its place, no more.

    the broker names exactly this batch      it is stored: a receipt
    the broker names something else          it is certainly not stored there
    the broker cannot tell                   nobody knows

Only the first lets a sender drop the batch. In the other cases the sender begins a new stream with it.
"""

from __future__ import annotations

from typing import Final

from fairway import batch
from fairway.errors import Code, Refused, StoredRange
from fairway.world.buffers import Bytes

# Something else has the place, or the whole stream: another life of the sender, which a backup has undone; a stranger.
TAKEN: Final = frozenset({Code.SEQUENCE_CONFLICT, Code.FOREIGN_STREAM})


def is_receipt(refused: Refused, data: Bytes) -> bool:
    """Whether the broker has stored exactly these bytes at their place."""
    if refused.code is not Code.SEQUENCE_CONFLICT or refused.stored is None:
        return False
    header = batch.peek(data)
    return refused.stored == (StoredRange(header.first_sequence, header.count, header.crc),)
