"""Decisions about outcomes: a consumer acks, retries, rejects or releases messages that it was handed.

Only the outcome of the holder counts. If the member no longer holds a message (its lease ended, another consumer has
it), the message counts as stale. Repeating an outcome is harmless. An outcome is stale too if the message went out in a
response that had not arrived when the member set the outcome: it belongs to an earlier handout, which a seek has
undone.

There is one exception, after a crash. The broker does not wait for a PULL to be durable, so it may have forgotten a
handout. The group believes an ack for a message that nobody holds, if it lies below the end that was committed before
the crash. Messages between the cursor and such an ack may be with consumers too, so they become lots that wait. If
these would be too many lots, the group does not believe the ack, and hands its messages out once more. In an ordered
group the broker waits for the PULL, so there is nothing to believe.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from fairway import group_events, limits
from fairway.group_events import Range
from fairway.groups.config import Mode
from fairway.groups.decisions import BUSY_RETRY_AFTER_MS, Dying, GroupOutcome, SettleDecision
from fairway.groups.lots import mask_of, open_in, ranges_of
from fairway.groups.members import Member
from fairway.groups.state import GroupState


class SettleVerdict(enum.IntEnum):
    """The outcomes, with the numbers of the protocol."""

    ACK = 1
    RETRY = 2
    REJECT = 3  # a dead letter at once
    RELEASE = 4  # handed back untouched: counts no attempt


def decide(
    state: GroupState,
    member: Member,
    verdict: SettleVerdict,
    first: int,
    attempt: int,
    ranges: Sequence[Range],
    *,
    now_ms: int,
    arrived: int = 0,
    after_ms: int | None = None,
    draw: float = 0.0,
    reason: str = "",
    fence: int = 0,
    may_grow: bool = True,
) -> SettleDecision:
    complaint = _complaint(first, ranges, after_ms)
    if complaint:
        return SettleDecision(GroupOutcome.BAD_REQUEST, sentence=complaint)
    said = mask_of(ranges, first)
    lot = member.lots.get((first, attempt))
    if lot is None:
        return _decide_unheld(state, member, verdict, first, attempt, said, now_ms, may_grow)
    settled = said & (lot.open_up_to(arrived) if arrived else lot.mask)
    if fence:
        settled &= lot.open_in_response(fence)
    stale = (said ^ settled).bit_count()
    if not settled:
        return SettleDecision(GroupOutcome.DONE, stale=stale)
    parts = ranges_of(settled, first)
    if verdict is SettleVerdict.ACK:
        event = group_events.acked(member.id, attempt, first, parts, now_ms)
        return SettleDecision(GroupOutcome.DONE, (event,), settled=settled.bit_count(), stale=stale)
    is_full = not may_grow or state.in_flight >= 2 * state.config.lots_max
    if is_full and settled != lot.mask:
        # To split a lot makes more lots; a lot as a whole may always go.
        return SettleDecision(
            GroupOutcome.BUSY, sentence="too many ranges in flight to split a lot", retry_after_ms=BUSY_RETRY_AFTER_MS
        )
    due_ms = _due_ms(state, verdict, attempt, after_ms, draw, now_ms)
    why = reason.encode()[: limits.REASON_BYTES_MAX]
    event = group_events.returned(member.id, attempt, first, parts, due_ms, why, now_ms)
    is_last = due_ms > 0 and attempt >= state.config.attempts_max
    is_dying = due_ms == group_events.REJECTED or is_last
    dying = (Dying(parts[0][0], attempt, parts, reason),) if is_dying else ()
    return SettleDecision(GroupOutcome.DONE, (event,), dying, settled=settled.bit_count(), stale=stale)


def _complaint(first: int, ranges: Sequence[Range], after_ms: int | None) -> str:
    """Why the request can never be valid. This check comes before any shift by the request's numbers."""
    if not 1 <= len(ranges) <= limits.SETTLE_RANGES_MAX:
        return f"{len(ranges)} ranges in one settlement: it has 1 to {limits.SETTLE_RANGES_MAX}"
    if any(at < first or count < 1 or at + count > first + limits.LOT_MESSAGES_MAX for at, count in ranges):
        return f"a range outside its lot, which has at most {limits.LOT_MESSAGES_MAX} messages"
    if after_ms is not None and not 0 <= after_ms <= limits.RETRY_AFTER_MS_MAX:
        return f"a retry after {after_ms} ms: at most one day; send a delayed message instead"
    return ""


def _due_ms(
    state: GroupState, verdict: SettleVerdict, attempt: int, after_ms: int | None, draw: float, now_ms: int
) -> int:
    if verdict is SettleVerdict.REJECT:
        return group_events.REJECTED
    if verdict is SettleVerdict.RELEASE:
        return group_events.RELEASED
    wait_ms = state.config.backoff.delay_ms(attempt, draw) if after_ms is None else after_ms
    return max(1, now_ms + wait_ms)  # a time, not RELEASED


def _decide_unheld(
    state: GroupState,
    member: Member,
    verdict: SettleVerdict,
    first: int,
    attempt: int,
    said: int,
    now_ms: int,
    may_grow: bool,
) -> SettleDecision:
    believed = _believable(state, first, attempt, said) if verdict is SettleVerdict.ACK else 0
    if believed and not _has_room_below(state, ranges_of(believed, first), may_grow):
        believed &= (1 << max(state.cursor - first, 0)) - 1
    stale = (said & ~believed).bit_count()
    if not believed:
        return SettleDecision(GroupOutcome.DONE, stale=stale)
    event = group_events.acked(member.id, attempt, first, ranges_of(believed, first), now_ms)
    return SettleDecision(GroupOutcome.DONE, (event,), settled=believed.bit_count(), stale=stale, is_believed=True)


def _has_room_below(state: GroupState, ranges: Sequence[Range], may_grow: bool) -> bool:
    """Whether the group's bound leaves room for lots of the messages below these ranges."""
    lots, cursor = 0, state.cursor
    for first, count in ranges:
        lots += -(-max(first - cursor, 0) // limits.LOT_MESSAGES_MAX)
        cursor = max(cursor, first + count)
    return not lots or (may_grow and state.in_flight + lots <= 2 * state.config.lots_max)


def _believable(state: GroupState, first: int, attempt: int, said: int) -> int:
    """The messages that may have gone out in a lost PULL: nobody holds them, at this attempt."""
    known = state.recovered_end - first
    if known <= 0 or state.config.mode is Mode.AT_MOST_ONCE or state.is_ordered:
        return 0
    said &= (1 << min(known, limits.LOT_MESSAGES_MAX)) - 1
    open_ = 0
    for lot in state.unheld_lots.touching(first, limits.LOT_MESSAGES_MAX):
        if lot.attempt == attempt:
            bits = open_in(lot, first, limits.LOT_MESSAGES_MAX)
            shift = lot.base - first
            open_ |= bits << shift if shift >= 0 else bits >> -shift
    if attempt == 1 and first - state.cursor <= limits.BELIEF_MESSAGES_MAX:
        above = max(state.cursor - first, 0)
        if above < limits.LOT_MESSAGES_MAX:
            open_ |= ((1 << limits.LOT_MESSAGES_MAX) - 1) >> above << above
    return said & open_
