"""Secrets: who may go on with a producer stream, act as a consumer, or follow a master as a certain copy.

A producer id is no secret: every consumer and every scan sees it. So a sender draws a random secret for each stream and
shows it with each of the stream's batches, beside the batch and never in it. The broker keeps a *verifier*, a hash from
which the secret cannot be found, and takes nothing more in that stream from anybody who shows another secret or none.

A sender that has many streams may keep one key and derive the secrets from it.

A consumer id is no secret either: `describe` and traces show it. A consumer draws a random secret for its session and
shows it with every JOIN. While the lease of a member lasts, only a JOIN with the member's secret resumes that member.

The id of a copy's data directory is no secret: the registry shows it to everybody. The process that runs a copy draws a
random secret when it starts, publishes the verifier in the copy's own node of the registry, and shows the secret with
every FOLLOW.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from fairway.errors import Code, Refused
from fairway.world.rng import Rng

SECRET_BYTES: Final = 16  # 128 bits: nobody guesses one, not even one of many
SECRET_BYTES_MAX: Final = 64
VERIFIER_BYTES: Final = 32
_VERIFIER: Final = b"fairway stream verifier 1\0"
_CONSUMER_VERIFIER: Final = b"fairway consumer verifier 1\0"
_COPY_VERIFIER: Final = b"fairway copy verifier 1\0"
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


def consumer_verifier_of(secret: bytes, consumer: str) -> bytes:
    """What a broker keeps of the secret of a consumer's session; empty where the consumer shows no secret."""
    if not secret:
        return b""
    name = consumer.encode()
    return hashlib.sha256(_CONSUMER_VERIFIER + len(name).to_bytes(2, "little") + name + secret).digest()


def copy_verifier_of(secret: bytes, directory: str) -> bytes:
    """What a copy publishes of its secret; empty where the copy has none. `directory`: the id of its data directory, in
    hex. It is hashed along, so that the verifier is of one copy only."""
    if not secret:
        return b""
    name = directory.encode()
    return hashlib.sha256(_COPY_VERIFIER + len(name).to_bytes(2, "little") + name + secret).digest()


def checked(secret: bytes, of: str) -> bytes:
    """The secret that a client shows of a stream or a session, or none; `Refused` for one that is easily guessed, or is
    no secret at all."""
    if secret and not SECRET_BYTES <= len(secret) <= SECRET_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"a {of}'s secret has {SECRET_BYTES} to {SECRET_BYTES_MAX} bytes, this one has {len(secret)}: draw "
            f"{SECRET_BYTES} random bytes for each {of}",
        )
    return secret


def is_same(one: bytes, other: bytes) -> bool:
    """Compare in a time that tells nothing of where they differ."""
    return hmac.compare_digest(one, other)
