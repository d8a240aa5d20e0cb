"""Stream secrets: who may go on with a producer stream.

A producer id is no secret: every consumer and every scan sees it. So a sender draws a random secret for each stream and
shows it with each of the stream's batches, beside the batch and never in it. The broker keeps a *verifier*, a hash from
which the secret cannot be found, and takes nothing more in that stream from anybody who shows another secret or none.

A sender that has many streams may keep one key and derive the secrets from it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from fairway.world.rng import Rng

SECRET_BYTES: Final = 16  # 128 bits: nobody guesses one, not even one of many
VERIFIER_BYTES: Final = 32
_VERIFIER: Final = b"fairway stream verifier 1\0"
_DERIVED: Final = b"fairway stream secret 1\0"


def new_secret(rng: Rng) -> bytes:
    """A random secret, or a random key to derive secrets from."""
    return rng.bits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "little")


def derived_secret(key: bytes, producer_id: int, of: str = "") -> bytes:
    """The secret of one stream of a sender who keeps `key`; empty without a key. `of` tells apart what else is derived
    for one stream."""
    if not key:
        return b""
    message = _DERIVED + producer_id.to_bytes(8, "little") + of.encode()
    return hmac.digest(key, message, "sha256")[:SECRET_BYTES]


def verifier_of(secret: bytes, producer_id: int) -> bytes:
    """What a broker keeps. The producer id is hashed along, so that one guess tries one stream only."""
    return hashlib.sha256(_VERIFIER + producer_id.to_bytes(8, "little") + secret).digest()


def is_same(one: bytes, other: bytes) -> bool:
    """Compare in a time that tells nothing of where they differ."""
    return hmac.compare_digest(one, other)
