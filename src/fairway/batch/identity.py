"""Message ids, and the secrets of producer streams, consumer sessions and copies.

A message id is a producer id and a sequence: the stream that first carried the message, and its place in that stream. A
producer id names one stream (one process, one subject, one broker group), and sequences in a stream have no gaps. So
message i of a batch is (producer id, first sequence + i), unless it carries an explicit id. A delayed, redriven or
replayed message keeps its first id. Producer id 0 is reserved.

The text form is the 128 bits as one big-endian number in Crockford's base 32: 26 characters, no I, L, O or U. Ids sort
as text as they sort as numbers. The first character carries 3 bits, so it is at most `7`.

A producer id is no secret: every consumer and every scan sees it. So a sender draws a random secret for each stream and
sends it with each of the stream's batches, beside the batch and never in it. The broker keeps a *verifier*, a hash from
which the secret cannot be found. From then on the broker refuses batches of that stream with another secret or none. A
sender with many streams may keep one key and derive the secrets from it.

A consumer id is no secret either: `describe` and traces show it. A consumer draws a random secret for its session and
sends it with every JOIN. While the lease of a member lasts, only a JOIN with the member's secret resumes that member.

The id of a copy's data directory is no secret: the registry shows it to everybody. The process that runs a copy draws a
random secret when it starts, publishes the verifier in the copy's own node of the registry, and sends the secret with
every FOLLOW.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Final, NamedTuple

from fairway.batch.layout import U64_MAX
from fairway.errors import Code, Misuse, Refused
from fairway.runtime.rng import Rng

TEXT_CHARS: Final = 26
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [high + low for high in _ALPHABET for low in _ALPHABET]
_LOW_BITS: Final = 30  # in a stream's ids these bits change, and the others rarely do
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_LOW_SHIFTS: Final = range(_LOW_BITS - 10, -1, -10)
_HIGH_SHIFTS: Final = range(5 * (TEXT_CHARS - 2) - _LOW_BITS, -1, -10)
# As Crockford says: lower case equals upper case, and letters that people mistake for digits count as those digits.
_DIGITS: Final = {character: value for value, character in enumerate(_ALPHABET)} | {"I": 1, "L": 1, "O": 0}


@lru_cache(maxsize=4_096)
def _high_text(number: int) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in _HIGH_SHIFTS])


class MessageId(NamedTuple):
    """The identity of one message, for ever and on every copy."""

    producer_id: int
    sequence: int

    def __str__(self) -> str:
        number = self.producer_id << 64 | self.sequence
        low = number & _LOW_MASK
        return _high_text(number >> _LOW_BITS) + "".join([_PAIRS[low >> shift & 1023] for shift in _LOW_SHIFTS])

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """The id that `str` wrote."""
        if len(text) != TEXT_CHARS:
            raise Misuse(f"bad message id {text[:64]!r}: it has {len(text)} characters, an id has {TEXT_CHARS}")
        number = 0
        for character in text:
            digit = _DIGITS.get(character.upper())
            if digit is None:
                raise Misuse(f"bad message id {text!r}: {character!r} is not a digit of Crockford's base 32")
            number = number << 5 | digit
        if number >> 128:
            raise Misuse(f"bad message id {text!r}: it begins with {text[0]!r}, the largest id begins with '7'")
        return cls(number >> 64, number & U64_MAX)


SECRET_BYTES: Final = 16  # 128 bits: nobody can guess a secret, not even any of many
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
    """The secret of one stream of a sender that keeps `key`; empty without a key. `of` separates several secrets of one
    stream."""
    if not key:
        return b""
    message = _DERIVED + producer_id.to_bytes(8, "little") + of.encode()
    return hmac.digest(key, message, "sha256")[:SECRET_BYTES]


def verifier_of(secret: bytes, producer_id: int) -> bytes:
    """The verifier that a broker keeps. The producer id is hashed too, so that one guess tries one stream only."""
    return hashlib.sha256(_VERIFIER + producer_id.to_bytes(8, "little") + secret).digest()


def consumer_verifier_of(secret: bytes, consumer: str) -> bytes:
    """The verifier that a broker keeps of a consumer's session secret; empty if the consumer shows no secret."""
    if not secret:
        return b""
    name = consumer.encode()
    return hashlib.sha256(_CONSUMER_VERIFIER + len(name).to_bytes(2, "little") + name + secret).digest()


def copy_verifier_of(secret: bytes, directory: str) -> bytes:
    """The verifier that a copy publishes; empty if the copy has no secret. The id of its data directory (`directory`,
    in hex) is hashed too, so that the verifier fits one copy only."""
    if not secret:
        return b""
    name = directory.encode()
    return hashlib.sha256(_COPY_VERIFIER + len(name).to_bytes(2, "little") + name + secret).digest()


def checked(secret: bytes, of: str) -> bytes:
    """The secret that a client shows for a stream or a session, or none. `Refused` if its length makes it easy to
    guess, or too long."""
    if secret and not SECRET_BYTES <= len(secret) <= SECRET_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"a {of}'s secret has {SECRET_BYTES} to {SECRET_BYTES_MAX} bytes, this one has {len(secret)}: draw "
            f"{SECRET_BYTES} random bytes for each {of}",
        )
    return secret


def is_same(one: bytes, other: bytes) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(one, other)
