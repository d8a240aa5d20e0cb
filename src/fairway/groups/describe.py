"""A group as people want to see it. Walks over everything in flight: for a command, not for every pull."""

from __future__ import annotations

import msgspec

from fairway.groups.config import Order
from fairway.groups.member import Member
from fairway.groups.state import GroupState

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
    """Counts are messages, but for `lots`."""

    config_version: int
    is_paused: bool
    cursor: int
    lag: int  # not yet handed out
    in_flight: int  # held by a consumer
    returned: int  # handed back, or due: the next pull gets it
    retrying: int  # waiting for its next attempt
    dying: int  # on its way to the dead-letter subject
    lost: int  # taken by retention or rot before this group was done with it
    lots: int  # un-acked ranges
    oldest_unacked: int  # the cursor, if nothing below it is owed
    consumers: list[ConsumerDescription]
    order: str = "none"
    parked: int = 0  # behind others of their keys, never handed out
    is_full: bool = False  # as many are parked as may be: nothing fresh goes out until one of them does
    halted: int = 0  # keys, not messages; 1 for a group of strict order
    declined: int = 0  # so far: others of their keys did what they asked for
    coalesce: str = "none"
    rate_per_s: float = 0
    rate_per_key: float = 0
    active: str = ""  # in strict order: the consumer that is handed messages


def describe(state: GroupState, end: int, now_ns: int, now_ms: int) -> Description:
    waiting = [lot for lot in state.stock if lot.due_ms > now_ms]
    stocked = sum(lot.open_count for lot in state.stock)
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
    """The first sequence that the group still owes somebody: what retention must keep."""
    held = (lot for _, lot in state.roster.held())
    oldest = min((lot.first_open for lots in (held, state.stock, state.dying) for lot in lots), default=state.cursor)
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
