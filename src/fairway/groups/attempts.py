"""The failed attempts of a message: which consumer had it, when it failed and why. Kept for its dead letter.

A lot carries the attempts of its messages, and its parts share them. `State` notes an attempt when it fails, from the
events alone, so a replay and a copy of the group find the same ones. Two bounds keep them small:

    of one message   `HISTORY_ATTEMPTS_MAX`: the first few and the last ones stay, those in between go
    of one group     `HISTORY_LOTS_MAX`: beyond so many lots in flight a failure is counted, and not noted

Attempts have numbers, so a reader sees which are missing. The dead letter carries them as JSON in one header:

    {"left_out": 0, "attempts": [{"attempt": 1, "time_ms": 1700000000000, "consumer": "ann", "reason": "no such room"}]}
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from fairway import limits

_FIRST_KEPT = 4  # how it began; the rest of the room is for how it ended
_COUNT_MAX = 2**53  # what every reader of JSON can count
_COUNT_DIGITS_MAX = 12  # of `fairway.dead.attempts`; nobody makes so many attempts
_TIME_MS_MAX = 253_402_300_799_999  # the end of the year 9999: beyond it no calendar shows a time


class Attempt(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One attempt that failed."""

    attempt: Annotated[int, msgspec.Meta(ge=1, le=_COUNT_MAX)]  # over redrives too, in a dead letter
    time_ms: Annotated[int, msgspec.Meta(ge=0, le=_TIME_MS_MAX)]  # when it failed, since 1970 UTC
    consumer: str  # its name; empty: nobody had the message, and the broker gave it up
    reason: str


Attempts = tuple[Attempt, ...]


class AttemptHistory(msgspec.Struct, frozen=True):
    """What a dead letter says about its attempts."""

    left_out: Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MAX)]  # how many there were beside these
    attempts: Attempts


def failed(attempt: int, time_ms: int, consumer: str, reason: bytes) -> Attempt:
    """The reason is cut where it is long: `fairway.dead.reason` has the last one whole. Many attempts have the same
    consumer and the same reason, so these are interned."""
    text = reason[: limits.HISTORY_REASON_BYTES_MAX].decode(errors="ignore")
    return Attempt(attempt, time_ms, sys.intern(str(consumer)), sys.intern(text))


def added(attempts: Attempts, last: Attempt) -> Attempts:
    """One attempt more, within the bound of one message."""
    return bounded((*attempts, last), limits.HISTORY_ATTEMPTS_MAX)


def bounded(attempts: Attempts, most: int) -> Attempts:
    """At most so many of them: the first ones and the last ones."""
    if len(attempts) <= most:
        return attempts
    first = min(_FIRST_KEPT, most // 2)
    return attempts[:first] + attempts[len(attempts) - most + first :]


def joined(before: Attempts, later: Attempts, count_before: int) -> Attempts:
    """The attempts of a message that was redriven: those of its lives before, then those of the last one."""
    return before + tuple(msgspec.structs.replace(each, attempt=each.attempt + count_before) for each in later)


def encode(attempts: Attempts, count: int, most: int = limits.HISTORY_ATTEMPTS_MAX) -> str:
    """The header of a dead letter that had `count` attempts. Fewer of them where they would be too many bytes."""
    kept = bounded(attempts, most)
    while True:
        data = msgspec.json.encode(AttemptHistory(max(count - len(kept), 0), kept))
        if len(data) <= limits.HISTORY_BYTES_MAX or not kept:
            return data.decode()
        kept = bounded(kept, len(kept) - 1)


def decode(text: str) -> AttemptHistory | None:
    """None: there is none, or somebody else has written it."""
    if len(text) > limits.HISTORY_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(text, type=AttemptHistory)
    except msgspec.DecodeError:
        return None


def count_of(text: str) -> int:
    """What `fairway.dead.attempts` says; 0 where that is no number of attempts. Programs that send to an inbox may
    write anything there."""
    return int(text) if len(text) <= _COUNT_DIGITS_MAX and text.isascii() and text.isdigit() else 0
