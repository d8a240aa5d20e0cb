"""The state of a group as bytes, for the checkpoint, and back.

MessagePack; masks that are all ones, nearly all of them, are written as a count. What belongs to one life (leases, what
arrived) is left out: two states with the same snapshot are the same group.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fairway import limits
from fairway.errors import Misuse, RemoteProtocolError
from fairway.groups.config import GroupConfig
from fairway.groups.lot import Lot
from fairway.groups.member import Member
from fairway.groups.state import State
from fairway.names import Consumer

FORMAT = 1


class _Lot(msgspec.Struct, array_like=True, frozen=True):
    base: int
    mask: int | bytes  # so many ones, or the mask itself, little-endian
    attempt: int
    extra: int  # due_ms, or the number of the response


class _Member(msgspec.Struct, array_like=True, frozen=True):
    id: int
    name: str
    version: int
    number: int
    lots: list[_Lot]


class _Snapshot(msgspec.Struct, array_like=True, frozen=True):
    format: int
    config: GroupConfig
    cursor: int
    is_paused: bool
    paused: list[str]
    next_consumer_id: int
    absent_since_ms: int
    lost_count: int
    members: list[_Member]
    stock: list[_Lot]
    dying: list[_Lot]
    reasons: list[bytes] = []  # of those that die, in the same order
    has_gap: bool = False


def write(state: State) -> bytes:
    members = [_member(each) for each in sorted(state.roster, key=lambda member: member.id)]
    return msgspec.msgpack.encode(
        _Snapshot(
            FORMAT,
            state.config,
            state.cursor,
            state.is_paused,
            sorted(map(str, state.paused)),
            state.next_consumer_id,
            state.absent_since_ms,
            state.lost_count,
            members,
            [_packed(lot, lot.due_ms) for lot in _by_name(state.stock)],
            [_packed(lot, 0) for lot in _by_name(state.dying)],
            [lot.reason for lot in _by_name(state.dying)],
            state.has_gap,
        )
    )


def read(data: bytes) -> State:
    try:
        found = msgspec.msgpack.decode(data, type=_Snapshot)
    except (msgspec.DecodeError, Misuse) as error:
        raise RemoteProtocolError(f"a group's snapshot cannot be read: {error}") from error
    if found.format != FORMAT:
        raise RemoteProtocolError(f"a group's snapshot of format {found.format}: this program reads {FORMAT}")
    state = State()
    state.config = found.config
    state.cursor = found.cursor
    state.is_paused = found.is_paused
    state.paused = {Consumer(name) for name in found.paused}
    state.next_consumer_id = found.next_consumer_id
    state.absent_since_ms = found.absent_since_ms
    state.lost_count = found.lost_count
    state.has_gap = found.has_gap
    for each in found.members:
        member = Member(each.id, Consumer(each.name), each.version, each.number)
        for packed in each.lots:
            member.hold(_lot(packed, number=packed.extra))
        state.roster.add(member, 0)
        state.held_count += len(member.lots)
    for packed in found.stock:
        state.stock.add(_lot(packed, due_ms=packed.extra))
    reasons = found.reasons or [b""] * len(found.dying)
    if len(reasons) != len(found.dying):
        raise RemoteProtocolError("a group's snapshot has not one reason for each lot that dies")
    for packed, reason in zip(found.dying, reasons, strict=True):
        lot = _lot(packed)
        lot.reason = reason
        state.dying.add(lot)
    return state


def _by_name(lots: Iterable[Lot]) -> list[Lot]:
    return sorted(lots, key=lambda lot: lot.name)


def _member(member: Member) -> _Member:
    lots = [
        _packed(Lot(lot.base, mask, lot.attempt), number)
        for lot in member.lots.values()
        for number, mask in lot.parts or ((lot.number, lot.mask),)
    ]
    return _Member(member.id, str(member.name), member.version, member.number, lots)


def _packed(lot: Lot, extra: int) -> _Lot:
    mask = lot.mask
    if mask & (mask + 1) == 0:
        return _Lot(lot.base, mask.bit_length(), lot.attempt, extra)
    return _Lot(lot.base, mask.to_bytes((mask.bit_length() + 7) // 8, "little"), lot.attempt, extra)


def _lot(packed: _Lot, *, due_ms: int = 0, number: int = 0) -> Lot:
    bits = packed.mask if isinstance(packed.mask, int) else 8 * len(packed.mask)
    if not 0 < bits <= limits.LOT_MESSAGES_MAX:  # 1,000 is a whole number of bytes
        raise RemoteProtocolError(f"a lot of {bits} messages in a group's snapshot")
    mask = (1 << packed.mask) - 1 if isinstance(packed.mask, int) else int.from_bytes(packed.mask, "little")
    return Lot(packed.base, mask, packed.attempt, due_ms=due_ms, number=number)
