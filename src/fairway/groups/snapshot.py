"""The state of a group as bytes, for the checkpoint, and back.

MessagePack; masks that are all ones, nearly all of them, are written as a count. What belongs to one life (leases, what
arrived) is left out: two states with the same snapshot are the same group.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from fairway import limits
from fairway.errors import Misuse, RemoteProtocolError
from fairway.groups.attempts import Attempt, Attempts, bounded
from fairway.groups.config import GroupConfig
from fairway.groups.keys import Keys
from fairway.groups.lot import Lot
from fairway.groups.member import Member
from fairway.groups.state import GroupState
from fairway.names import ConsumerName

FORMAT = 1


class _LotPicture(msgspec.Struct, array_like=True, frozen=True):
    base: int
    mask: int | bytes  # so many ones, or the mask itself, little-endian
    attempt: int
    extra: int  # due_ms, or the number of the response


class _Attempt(msgspec.Struct, array_like=True, frozen=True):
    attempt: int
    time_ms: int
    consumer: str
    reason: str


class _Member(msgspec.Struct, array_like=True, frozen=True):
    id: int
    name: str
    version: int
    number: int
    lots: list[_LotPicture]


class _MemberWithSecret(_Member, frozen=True):
    """A member that showed a secret when it joined. Earlier readers step over the field."""

    verifier: bytes = b""


class _Order(msgspec.Struct, array_like=True, frozen=True):
    """Of a group that is ordered, or was; u64 each, little-endian, by sequence."""

    number: int
    is_mixed: bool
    sequences: bytes = b""  # of open messages that have a key
    keys: bytes = b""
    parked: bytes = b""  # sequences
    halted: bytes = b""  # keys
    is_halted: bool = False
    resting: bytes = b""  # keys, in their order
    rest_until: bytes = b""  # ms since 1970 UTC


class _Snapshot(msgspec.Struct, array_like=True, frozen=True):
    format: int
    config: GroupConfig
    cursor: int
    is_paused: bool
    paused: list[str]
    next_consumer_id: int
    absent_since_ms: int
    lost_count: int
    members: list[_MemberWithSecret]
    stock: list[_LotPicture]
    dying: list[_LotPicture]
    reasons: list[bytes] = []  # of those that die, in the same order
    has_gap: bool = False
    order: _Order | None = None
    declined_count: int = 0


class _SnapshotWithHistory(_Snapshot, frozen=True):
    """Written only where an attempt has failed of something that is owed; readers of before step over it."""

    histories: list[list[_Attempt]] = []  # each once
    history_of: list[int] = []  # of each lot (members', stock, dying): its place among them, from 1 on; 0 has none


def write(state: GroupState) -> bytes:
    members: list[Any] = [_member(each) for each in sorted(state.roster, key=lambda member: member.id)]
    snapshot = _Snapshot(
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
        _order(state) if state.is_ordered or state.number else None,  # which fences do not forget
        state.declined_count,
    )
    return msgspec.msgpack.encode(_with_history(state, snapshot))


def read(data: bytes) -> GroupState:
    try:
        found = msgspec.msgpack.decode(data, type=_SnapshotWithHistory)
    except (msgspec.DecodeError, Misuse) as error:
        raise RemoteProtocolError(f"a group's snapshot cannot be read: {error}") from error
    if found.format != FORMAT:
        raise RemoteProtocolError(f"a group's snapshot of format {found.format}: this program reads {FORMAT}")
    state = GroupState()
    state.set_config(found.config)
    state.cursor = found.cursor
    state.is_paused = found.is_paused
    state.paused = {ConsumerName(name) for name in found.paused}
    state.next_consumer_id = found.next_consumer_id
    state.absent_since_ms = found.absent_since_ms
    state.lost_count = found.lost_count
    state.has_gap = found.has_gap
    state.declined_count = found.declined_count
    histories = _read_histories(found)
    for each in found.members:
        member = Member(each.id, ConsumerName(each.name), each.version, each.number)
        member.verifier = each.verifier
        for packed in each.lots:
            member.hold(_lot(packed, next(histories), number=packed.extra))
        state.roster.add(member, 0)
        state.held_count += len(member.lots)
        state.held_beside_bytes += sum(lot.beside_bytes for lot in member.lots.values())
    for packed in found.stock:
        state.stock.add(_lot(packed, next(histories), due_ms=packed.extra))
    reasons = found.reasons or [b""] * len(found.dying)
    if len(reasons) != len(found.dying):
        raise RemoteProtocolError("a group's snapshot has not one reason for each lot that dies")
    for packed, reason in zip(found.dying, reasons, strict=True):
        lot = _lot(packed, next(histories))
        lot.reason = reason
        state.dying.add(lot)
    _restore_order(state, found.order)
    return state


def _with_history(state: GroupState, snapshot: _Snapshot) -> _Snapshot:
    """The same with the attempts that failed, each history once: the parts of a lot share one."""
    members = sorted(state.roster, key=lambda member: member.id)
    held = [lot for member in members for lot in member.lots.values() for _ in lot.parts or (lot,)]
    places: dict[Attempts, int] = {(): 0}
    history_of = [
        places.setdefault(lot.history, len(places)) for lot in chain(held, _by_name(state.stock), _by_name(state.dying))
    ]
    if len(places) == 1:
        return snapshot
    histories = [[_Attempt(*msgspec.structs.astuple(each)) for each in history] for history in places if history]
    return _SnapshotWithHistory(**msgspec.structs.asdict(snapshot), histories=histories, history_of=history_of)


def _read_histories(found: _SnapshotWithHistory) -> Iterator[Attempts]:
    """Of each lot in the order of the snapshot."""
    count = sum(len(member.lots) for member in found.members) + len(found.stock) + len(found.dying)
    history_of = found.history_of or [0] * count
    if len(history_of) != count or not all(0 <= place <= len(found.histories) for place in history_of):
        raise RemoteProtocolError("a group's snapshot has not one history for each lot")
    histories: list[Attempts] = [()]
    for each in found.histories:
        attempts = tuple(Attempt(*msgspec.structs.astuple(attempt)) for attempt in each)
        histories.append(bounded(attempts, limits.HISTORY_ATTEMPTS_MAX))
    return (histories[place] for place in history_of)


def _order(state: GroupState) -> _Order:
    keys = state.keys
    if keys is None:
        return _Order(state.number, state.is_mixed, is_halted=state.is_halted)
    pairs = keys.pairs()
    return _Order(
        state.number,
        state.is_mixed,
        _numbers(sequence for sequence, _ in pairs),
        _numbers(key for _, key in pairs),
        _numbers(keys.parked()),
        _numbers(sorted(keys.halted)),
        state.is_halted,
        _numbers(keys.resting),
        _numbers(keys.resting.values()),
    )


def _restore_order(state: GroupState, found: _Order | None) -> None:
    if state.config.is_keyed:
        state.keys = Keys()
    if found is None:
        return
    state.number, state.is_mixed, state.is_halted = found.number, found.is_mixed, found.is_halted
    if state.keys is not None:
        sequences, keys = _read_numbers(found.sequences), _read_numbers(found.keys)
        if len(sequences) != len(keys):
            raise RemoteProtocolError("a group's snapshot has not one key for each message")
        pairs = zip(sequences, keys, strict=True)
        state.keys.restore(pairs, _read_numbers(found.parked), _read_numbers(found.halted))
        for lot in state.stock:
            state.keys.hold_back(lot.ranges)
        resting, until_ms = _read_numbers(found.resting), _read_numbers(found.rest_until)
        if len(resting) != len(until_ms):
            raise RemoteProtocolError("a group's snapshot has not one time for each key that rests")
        state.keys.resting.update(zip(resting, until_ms, strict=True))


def _numbers(values: Iterable[int]) -> bytes:
    return array("Q", values).tobytes()


def _read_numbers(data: bytes) -> array[int]:
    try:
        return array("Q", data)
    except ValueError as error:
        raise RemoteProtocolError(f"a group's snapshot cannot be read: {error}") from error


def _by_name(lots: Iterable[Lot]) -> list[Lot]:
    return sorted(lots, key=lambda lot: lot.name)


def _member(member: Member) -> _Member:
    lots = [
        _packed(Lot(lot.base, mask, lot.attempt), number)
        for lot in member.lots.values()
        for number, mask in lot.parts or ((lot.number, lot.mask),)
    ]
    known = member.id, str(member.name), member.version, member.number, lots
    return _MemberWithSecret(*known, member.verifier) if member.verifier else _Member(*known)


def _packed(lot: Lot, extra: int) -> _LotPicture:
    mask = lot.mask
    if mask & (mask + 1) == 0:
        return _LotPicture(lot.base, mask.bit_length(), lot.attempt, extra)
    return _LotPicture(lot.base, mask.to_bytes((mask.bit_length() + 7) // 8, "little"), lot.attempt, extra)


def _lot(packed: _LotPicture, history: Attempts, *, due_ms: int = 0, number: int = 0) -> Lot:
    bits = packed.mask if isinstance(packed.mask, int) else 8 * len(packed.mask)
    if not 0 < bits <= limits.LOT_MESSAGES_MAX:  # 1,000 is a whole number of bytes
        raise RemoteProtocolError(f"a lot of {bits} messages in a group's snapshot")
    mask = (1 << packed.mask) - 1 if isinstance(packed.mask, int) else int.from_bytes(packed.mask, "little")
    return Lot(packed.base, mask, packed.attempt, due_ms=due_ms, number=number, history=history)
