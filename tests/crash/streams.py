"""What the writer writes: batches that follow from seed, producer and sequence alone.

So the checker knows every byte without having been told, and the writer, started again, sends the very same ones.
"""

from __future__ import annotations

import random

from fairway import batch
from fairway.batch import Codec
from fairway.group_events import ActionKind, GroupEvent
from fairway.names import Subject
from fairway.storage.action_log import Action

REGULARS = (1, 2, 3, 4, 5)  # producers that go on from one life of the writer to the next
VISITORS_FROM = 100  # a producer of one life only: its number is this plus the round
_VISITED_SUBJECTS = 12
_SUBJECTS = {1: "orders", 2: "orders", 3: "payments", 4: "a", 5: "hotel.room-night_changed"}  # two share one

_COUNTS = (1, 1, 1, 4, 20, 100)
_PAYLOAD_BYTES = (0, 7, 100, 300)
_LARGE_PAYLOAD_BYTES = 40_000  # more than a segment holds
_LARGE_ONE_IN = 60


def subject_of(producer_id: int) -> Subject:
    regular = _SUBJECTS.get(producer_id)
    return Subject.parse(regular if regular is not None else f"visited-{producer_id % _VISITED_SUBJECTS}")


def batch_at(seed: int, producer_id: int, first_sequence: int) -> bytes:
    """The one batch of this producer that begins with this sequence."""
    rng = random.Random(f"{seed}/{producer_id}/{first_sequence}")
    count = rng.choice(_COUNTS)
    payloads = [rng.randbytes(rng.choice(_PAYLOAD_BYTES)) for _ in range(count)]
    if rng.randrange(_LARGE_ONE_IN) == 0:
        payloads[0] = rng.randbytes(_LARGE_PAYLOAD_BYTES)
    return batch.encode(
        payloads,
        producer_id=producer_id,
        first_sequence=first_sequence,
        created_ms=1_700_000_000_000 + first_sequence,
        keys=[f"key-{index % 7}" for index in range(count)] if rng.randrange(3) == 0 else None,
        tags=[["paid"]] * count if rng.randrange(4) == 0 else None,
        codec=rng.choice((Codec.NONE, Codec.ZSTD)),
    )


def action_at(seed: int, number: int) -> Action:
    """The one action of this number."""
    rng = random.Random(f"{seed}/action/{number}")
    spans = tuple((rng.randrange(1_000), rng.randrange(1, 9)) for _ in range(rng.randrange(4)))
    detail = rng.randbytes(rng.randrange(200))
    return Action(1, rng.randrange(1, 9), GroupEvent(ActionKind.ACK, number, lot=number, ranges=spans, detail=detail))
