"""Who a message is: the stream that bore it, and its place in that stream.

A producer id names one stream (one process, one subject, one broker group), and sequences in a stream have no gaps. So
message i of a batch is (producer id, first sequence + i), unless it carries an explicit id: a delayed, redriven or
replayed message keeps the id it was born with. Producer id 0 names nobody.

The text form is the 128 bits as one big-endian number in Crockford's base 32: 26 characters, no I, L, O or U, and
sorted as text it is sorted as a number. The first character carries 3 bits, so it is at most `7`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from fairway.batch.layout import U64_MAX
from fairway.errors import Misuse

TEXT_CHARS: Final = 26
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [high + low for high in _ALPHABET for low in _ALPHABET]
_LOW_BITS: Final = 30  # of a stream's ids these change, and the rest hardly ever does
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_LOW_SHIFTS: Final = range(_LOW_BITS - 10, -1, -10)
_HIGH_SHIFTS: Final = range(5 * (TEXT_CHARS - 2) - _LOW_BITS, -1, -10)
# Small letters are read as capitals, and the letters that people mistake for digits as those digits, as Crockford says.
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
