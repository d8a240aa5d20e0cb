"""The failed attempts of a message: which consumer had it, when it failed and why. Kept for its dead letter.

A lot carries the attempts of its messages, and its parts share them. `GroupState` notes an attempt when it fails, from
the events alone. So a replay and a copy of the group find the same attempts. Two bounds keep them small:

    of one message   `HISTORY_ATTEMPTS_MAX`: the first few and the last ones stay, the others are left out
    of one group     `HISTORY_LOTS_MAX`: beyond so many lots in flight a failure is counted, and not noted

Attempts have numbers, so a reader sees which are missing. The dead letter carries them as JSON in one header:

    {"left_out": 0, "attempts": [{"attempt": 1, "time_ms": 1700000000000, "consumer": "ann", "reason": "no such room"}]}
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from fairway import limits

_FIRST_KEPT = 4  # the first ones show how the failure began; the other places show how it ended
_COUNT_MAX = 2**53  # the largest number that every JSON reader can hold
_COUNT_DIGITS_MAX = 12  # of `fairway.dead.attempts`; no message has so many attempts
_TIME_MS_MAX = 253_402_300_799_999  # the end of the year 9999: later times fit no calendar


class Attempt(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One attempt that failed."""

    attempt: Annotated[int, msgspec.Meta(ge=1, le=_COUNT_MAX)]  # in a dead letter, counted across redrives
    time_ms: Annotated[int, msgspec.Meta(ge=0, le=_TIME_MS_MAX)]  # the time of the failure, since 1970 UTC
    consumer: str  # its name; empty: no consumer had the message, and the broker gave it up
    reason: str


Attempts = tuple[Attempt, ...]


class AttemptHistory(msgspec.Struct, frozen=True):
    """The attempts as a dead letter lists them."""

    left_out: Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MAX)]  # how many attempts are not listed
    attempts: Attempts


def failed(attempt: int, time_ms: int, consumer: str, reason: bytes) -> Attempt:
    """A failed attempt. A long reason is cut; `fairway.dead.reason` has the last reason whole. Many attempts share a
    consumer and a reason, so both strings are interned."""
    text = reason[: limits.HISTORY_REASON_BYTES_MAX].decode(errors="ignore")
    return Attempt(attempt, time_ms, sys.intern(str(consumer)), sys.intern(text))


def added(attempts: Attempts, last: Attempt) -> Attempts:
    """Add an attempt, within the bound of one message."""
    return bounded((*attempts, last), limits.HISTORY_ATTEMPTS_MAX)


def bounded(attempts: Attempts, most: int) -> Attempts:
    """At most `most` attempts: the first ones and the last ones."""
    if len(attempts) <= most:
        return attempts
    first = min(_FIRST_KEPT, most // 2)
    return attempts[:first] + attempts[len(attempts) - most + first :]


def joined(before: Attempts, later: Attempts, count_before: int) -> Attempts:
    """The attempts of a redriven message: those before the redrive, then the later ones."""
    return before + tuple(msgspec.structs.replace(each, attempt=each.attempt + count_before) for each in later)


def encode(attempts: Attempts, count: int, most: int = limits.HISTORY_ATTEMPTS_MAX) -> str:
    """The header of a dead letter that had `count` attempts, with fewer of them if they take too many bytes."""
    kept = bounded(attempts, most)
    while True:
        data = msgspec.json.encode(AttemptHistory(max(count - len(kept), 0), kept))
        if len(data) <= limits.HISTORY_BYTES_MAX or not kept:
            return data.decode()
        kept = bounded(kept, len(kept) - 1)


def decode(text: str) -> AttemptHistory | None:
    """The listed attempts; None if the header is missing or not ours."""
    if len(text) > limits.HISTORY_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(text, type=AttemptHistory)
    except msgspec.DecodeError:
        return None


def count_of(text: str) -> int:
    """The number in `fairway.dead.attempts`; 0 if it is not a number of attempts. Programs that send to an inbox may
    write anything there."""
    return int(text) if len(text) <= _COUNT_DIGITS_MAX and text.isascii() and text.isdigit() else 0
