"""Three views of a group's state: a description for people, an estimate of its memory, and bytes for the checkpoint.

`describe` walks over everything in flight: call it for a command, not for every pull.

`weigh` estimates memory from counts. The broker bounds the memory of all groups together, and asks after every
decision. Each term is a count that the state keeps anyway, times the measured bytes of one item (`limits`).
`tests/unit/groups/test_snapshot.py` compares the estimate with what Python has allocated. A held lot may fail and get
one attempt more. Its room counts from the pull on, so a failure or the end of a lease takes no memory that was not
counted before.

`write` and `read` convert the state to MessagePack and back. Masks that are all ones, nearly all of them, are written
as a count. State that does not survive a restart (leases, arrived responses) is left out: two states with the same
snapshot are the same group.
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
from fairway.groups.config import GroupConfig, Order
from fairway.groups.keys import Keys
from fairway.groups.lots import Lot
from fairway.groups.members import Member
from fairway.groups.state import GroupState
from fairway.limits import (
    GROUP_BYTES,
    HELD_LOT_BYTES,
    KEYED_BYTES,
    LOT_BYTES,
    MEMBER_BYTES,
    NOTED_KEY_BYTES,
    PARKED_BYTES,
    PAUSED_NAME_BYTES,
)
from fairway.names import ConsumerName

MS_NS = 1_000_000


class ConsumerDescription(msgspec.Struct, frozen=True):
    name: str
    id: int
    lease_left_ms: int
    is_paused: bool
    config_version: int
    messages: int  # held
    lots: int
    response: int  # number of the last one


class Description(msgspec.Struct, frozen=True):
    """A description of a group. Counts are messages, except `lots`."""

    config_version: int
    is_paused: bool
    cursor: int
    lag: int  # not yet handed out
    in_flight: int  # held by a consumer
    returned: int  # handed back, or due: the next pull gets them
    retrying: int  # waiting for its next attempt
    dying: int  # on its way to the dead-letter subject
    lost: int  # taken by retention or rot before the group had handled them
    lots: int  # unacked lots
    oldest_unacked: int  # the cursor, if no message below it is open
    consumers: list[ConsumerDescription]
    order: str = "none"
    parked: int = 0  # behind others of their keys, never handed out
    is_full: bool = False  # the maximum is parked or following: the group parks no more messages
    halted: int = 0  # keys, not messages; 1 for a group of strict order
    declined: int = 0  # so far: other messages of their keys do what they ask for
    coalesce: str = "none"
    rate_per_s: float = 0
    rate_per_key: float = 0
    active: str = ""  # in strict order: the consumer that gets messages


def describe(state: GroupState, end: int, now_ns: int, now_ms: int) -> Description:
    waiting = [lot for lot in state.unheld_lots if lot.due_ms > now_ms]
    stocked = sum(lot.open_count for lot in state.unheld_lots)
    retrying = sum(lot.open_count for lot in waiting)
    keys = state.keys
    return Description(
        config_version=state.config.version,
        is_paused=state.is_paused,
        cursor=state.cursor,
        lag=max(end - state.cursor, 0),
        in_flight=sum(lot.open_count for _, lot in state.roster.held()),
        returned=stocked - retrying,
        retrying=retrying,
        dying=sum(lot.open_count for lot in state.dying),
        lost=state.lost_count,
        lots=state.in_flight,
        oldest_unacked=oldest_unacked(state),
        consumers=[_consumer(state, member, now_ns) for member in sorted(state.roster, key=lambda each: each.id)],
        order=state.config.order.value,
        parked=0 if keys is None else keys.parked_count,
        is_full=keys is not None and keys.behind_count >= state.config.parked_max,
        halted=int(state.is_halted) if keys is None else len(keys.halted),
        declined=state.declined_count,
        coalesce=state.config.coalesce.value,
        rate_per_s=state.config.rate_per_s,
        rate_per_key=state.config.rate_per_key,
        active=str(state.roster.name_of(state.roster.eldest_id) or "") if state.config.order is Order.STRICT else "",
    )


def oldest_unacked(state: GroupState) -> int:
    """The first sequence that is not handled yet; retention must keep it and all later ones."""
    held = (lot for _, lot in state.roster.held())
    oldest = min(
        (lot.first_open for lots in (held, state.unheld_lots, state.dying) for lot in lots), default=state.cursor
    )
    parked = None if state.keys is None else state.keys.first_parked
    return oldest if parked is None else min(oldest, parked)


def _consumer(state: GroupState, member: Member, now_ns: int) -> ConsumerDescription:
    renewed_ns = now_ns if member.has_lasting_lease else member.renewed_ns
    ends_ns = renewed_ns + state.config.lease_ms * MS_NS
    return ConsumerDescription(
        name=str(member.name),
        id=member.id,
        lease_left_ms=max(ends_ns - now_ns, 0) // MS_NS,
        is_paused=member.name in state.paused,
        config_version=member.version,
        messages=sum(lot.open_count for lot in member.lots.values()),
        lots=len(member.lots),
        response=member.number,
    )


def weigh(state: GroupState) -> int:
    """Estimated bytes, rounded up. Called after every decision, so only counts are read."""
    unheld_lots, dying = state.unheld_lots, state.dying
    total = (
        GROUP_BYTES
        + len(state.roster) * MEMBER_BYTES
        + state.held_count * HELD_LOT_BYTES
        + (len(unheld_lots) + len(dying)) * LOT_BYTES
        + state.held_beside_bytes
        + unheld_lots.beside_bytes
        + dying.beside_bytes
        + len(state.paused) * PAUSED_NAME_BYTES
    )
    keys = state.keys
    if keys is None:
        return total
    # In a group with a rate per key, parked messages become unheld lots one by one, each a lot of its own.
    parked_bytes = LOT_BYTES if state.config.rate_per_key else PARKED_BYTES
    return (
        total
        + len(keys) * KEYED_BYTES
        + keys.behind_count * parked_bytes
        + (len(keys.resting) + len(keys.halted)) * NOTED_KEY_BYTES
    )


def bytes_per_fresh(state: GroupState) -> int:
    """The most memory that one message takes when it is first handed out, or parked."""
    if state.keys is not None:
        return KEYED_BYTES + max(LOT_BYTES if state.config.rate_per_key else 0, PARKED_BYTES)
    return -(-HELD_LOT_BYTES // state.config.lot_messages_max)


FORMAT = 1


class _LotPicture(msgspec.Struct, array_like=True, frozen=True):
    base: int
    mask: int | bytes  # a count of ones, or the mask itself, little-endian
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
    """A member that showed a secret when it joined. Earlier readers ignore the field."""

    verifier: bytes = b""


class _Order(msgspec.Struct, array_like=True, frozen=True):
    """The order of a group that is ordered, or was; u64 each, little-endian, by sequence."""

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
    unheld_lots: list[_LotPicture]
    dying: list[_LotPicture]
    reasons: list[bytes] = []  # of the dying lots, in the same order
    has_gap: bool = False
    order: _Order | None = None
    declined_count: int = 0


class _SnapshotWithHistory(_Snapshot, frozen=True):
    """Written only if an open message has a failed attempt; earlier readers ignore these fields."""

    histories: list[list[_Attempt]] = []  # each once
    history_of: list[int] = []  # per lot (members', unheld, dying): index into `histories`, from 1 on; 0: none


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
        [_packed(lot, lot.due_ms) for lot in _by_name(state.unheld_lots)],
        [_packed(lot, 0) for lot in _by_name(state.dying)],
        [lot.reason for lot in _by_name(state.dying)],
        state.has_gap,
        _order(state) if state.is_ordered or state.number else None,  # fences must keep growing
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
    for packed in found.unheld_lots:
        state.unheld_lots.add(_lot(packed, next(histories), due_ms=packed.extra))
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
    """Add the failed attempts, each history once: the parts of a lot share one."""
    members = sorted(state.roster, key=lambda member: member.id)
    held = [lot for member in members for lot in member.lots.values() for _ in lot.parts or (lot,)]
    places: dict[Attempts, int] = {(): 0}
    history_of = [
        places.setdefault(lot.history, len(places))
        for lot in chain(held, _by_name(state.unheld_lots), _by_name(state.dying))
    ]
    if len(places) == 1:
        return snapshot
    histories = [[_Attempt(*msgspec.structs.astuple(each)) for each in history] for history in places if history]
    return _SnapshotWithHistory(**msgspec.structs.asdict(snapshot), histories=histories, history_of=history_of)


def _read_histories(found: _SnapshotWithHistory) -> Iterator[Attempts]:
    """The history of each lot, in the order of the snapshot."""
    count = sum(len(member.lots) for member in found.members) + len(found.unheld_lots) + len(found.dying)
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
        for lot in state.unheld_lots:
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
