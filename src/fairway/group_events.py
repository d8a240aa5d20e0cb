"""Events of a group: all that the action log stores of a group, and all that rebuilds the group's state.

Groups decide and apply events. Storage writes each one behind the numbers of its group and subject. Readers of the log
show events as words. All of them share `ActionKind` and this table of fields:

    kind          consumer  attempt  due_ms      lot                ranges           detail
    GROUP_CONFIG                                                                     the configuration
    JOIN          id        1 if it              config version                      name
                            missed some
    VERIFIER      id                                                                 of the secret of its session
    LEAVE         id
    EXPIRE        id                                                                 (its lease ended)
    EXPIRE        id        of lot               name of lot        taken away       (one lot, held too long)
    PULL          id        of lot               name of lot        handed out       number of the response, and in
                                                                                     a group by key the keys of fresh
                                                                                     messages (keys of parked ones are
                                                                                     known)
    ACK           id or 0   of lot               name of lot        done             (0: nobody held it)
    ACK           id or 0   of lot               name of lot        lost: rot        LOST
    RETRY         id        of lot   when again  name of lot        failed           reason
    RETRY         id        of lot   when again  name of lot        in doubt         UNSURE: counts as no attempt
    RETRY         id        of lot   RELEASED    name of lot        handed back
    RETRY         id or 0   of lot   REJECTED    name of lot        to die           reason
    DEAD                    of lot               name of lot        in dead letter
    DEAD                    of lot               name of lot        lost: no copy    LOST
    CURSOR                                       new cursor         skipped          why
    CURSOR                                       new cursor         none: a seek     why
    CURSOR                                       the cursor         lost: parked     LOST
    PAUSE                                        1 pause, 0 resume                   consumer, or empty: all
    PARK                                         new cursor         behind others    their keys
                                                                    of their keys
    DECLINE                                      new cursor         declined         (of a coalescing group)
    GO_ON                                        key, or 0: all                      (halted keys)
    WEIGHT                                       thousandths                         (weight of the group's actor)
    RATE                                         messages/s, 0: any                  (out of the group's inbox)
    REMOVE                                                                           (the group, with all its state)
    READ_ONLY                                    1 on, 0 off                         (a subject's switch: no group)

A key is its hash, 8 bytes, little-endian.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

Range = tuple[int, int]  # first sequence, count

RELEASED = 0
REJECTED = -1

UNSURE = b"\xff"  # not text, so no consumer's reason is equal to it

SKIPPED = b"skipped"  # filtered out, or never there
LOST = b"lost"  # retention or rot took the messages before the group had handled them
SOUGHT = b"sought"

# Reasons of dead letters that no consumer returned. A replay finds the same reasons from the events.
LEASE_ENDED = "the consumer's lease ended"
HELD_TOO_LONG = "held longer than max_handling"

_NUMBER = struct.Struct("<Q")


class ActionKind(enum.IntEnum):
    """The kinds of actions, as the action log numbers them."""

    GROUP_CONFIG = 1
    JOIN = 2
    LEAVE = 3
    EXPIRE = 4
    PULL = 5
    ACK = 6
    RETRY = 7
    DEAD = 8
    DECLINE = 9
    CURSOR = 10
    PAUSE = 11
    WEIGHT = 12  # 12 to 15 concern the broker: a group's state machine never sees them
    READ_ONLY = 13
    RATE = 14
    REMOVE = 15
    PARK = 16
    GO_ON = 17
    VERIFIER = 18


class GroupEvent(NamedTuple):
    """One event. Sequences are of the one subject that the group's state belongs to."""

    kind: ActionKind
    time_ms: int
    consumer_id: int = 0
    attempt: int = 0
    due_ms: int = 0
    lot: int = 0
    ranges: tuple[Range, ...] = ()
    detail: bytes = b""


def configured(config: bytes, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.GROUP_CONFIG, time_ms, detail=config)


def joined(consumer_id: int, name: str, version: int, time_ms: int, *, is_gap: bool = False) -> GroupEvent:
    return GroupEvent(ActionKind.JOIN, time_ms, consumer_id, int(is_gap), lot=version, detail=name.encode())


def verified(consumer_id: int, verifier: bytes, time_ms: int) -> GroupEvent:
    """The member's session has a secret with this verifier. From now on only that secret resumes the member."""
    return GroupEvent(ActionKind.VERIFIER, time_ms, consumer_id, detail=verifier)


def left(consumer_id: int, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.LEAVE, time_ms, consumer_id)


def expired(consumer_id: int, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.EXPIRE, time_ms, consumer_id)


def held_too_long(consumer_id: int, attempt: int, lot: int, ranges: tuple[Range, ...], time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.EXPIRE, time_ms, consumer_id, attempt, 0, lot, ranges)


def pulled(
    consumer_id: int, attempt: int, ranges: tuple[Range, ...], number: int, time_ms: int, keys: Sequence[int] = ()
) -> GroupEvent:
    detail = _NUMBER.pack(number) + array("Q", keys).tobytes() if keys else _NUMBER.pack(number)
    return GroupEvent(ActionKind.PULL, time_ms, consumer_id, attempt, 0, ranges[0][0], ranges, detail)


def parked(cursor: int, ranges: tuple[Range, ...], keys: Sequence[int], time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.PARK, time_ms, lot=cursor, ranges=ranges, detail=array("Q", keys).tobytes())


def declined(cursor: int, ranges: tuple[Range, ...], time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.DECLINE, time_ms, lot=cursor, ranges=ranges)


def gone_on(key: int, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.GO_ON, time_ms, lot=key)


def acked(
    consumer_id: int, attempt: int, lot: int, ranges: tuple[Range, ...], time_ms: int, detail: bytes = b""
) -> GroupEvent:
    """An ACK. With LOST as its detail, no consumer can get these messages any more."""
    return GroupEvent(ActionKind.ACK, time_ms, consumer_id, attempt, 0, lot, ranges, detail)


def returned(
    consumer_id: int, attempt: int, lot: int, ranges: tuple[Range, ...], due_ms: int, reason: bytes, time_ms: int
) -> GroupEvent:
    """A RETRY: `due_ms` is a time, RELEASED or REJECTED."""
    return GroupEvent(ActionKind.RETRY, time_ms, consumer_id, attempt, due_ms, lot, ranges, reason)


def doubted(
    consumer_id: int, attempt: int, lot: int, ranges: tuple[Range, ...], due_ms: int, time_ms: int
) -> GroupEvent:
    """A RETRY of messages that a consumer may hold, or may believe to be settled."""
    return GroupEvent(ActionKind.RETRY, time_ms, consumer_id, attempt, due_ms, lot, ranges, UNSURE)


def died(attempt: int, lot: int, ranges: tuple[Range, ...], time_ms: int, detail: bytes = b"") -> GroupEvent:
    """A DEAD. With LOST as its detail, there was nothing left to copy to the dead-letter subject."""
    return GroupEvent(ActionKind.DEAD, time_ms, 0, attempt, 0, lot, ranges, detail)


def skipped(cursor: int, to: int, why: bytes, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.CURSOR, time_ms, lot=to, ranges=((cursor, to - cursor),), detail=why)


def lost_parked(cursor: int, ranges: tuple[Range, ...], time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.CURSOR, time_ms, lot=cursor, ranges=ranges, detail=LOST)


def sought(to: int, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.CURSOR, time_ms, lot=to, detail=SOUGHT)


def paused(is_paused: bool, name: str, time_ms: int) -> GroupEvent:
    return GroupEvent(ActionKind.PAUSE, time_ms, lot=int(is_paused), detail=name.encode())


def number_of(event: GroupEvent) -> int:
    """The number of the response that a PULL belongs to."""
    number: int = _NUMBER.unpack_from(event.detail)[0]
    return number


def keys_of(event: GroupEvent) -> list[int]:
    """The keys of a PULL of fresh messages in a group by key, or of a PARK, in order."""
    return array("Q", event.detail[_NUMBER.size if event.kind is ActionKind.PULL else 0 :]).tolist()
