"""Decisions of operators and of the store: configure, pause, seek; messages that are unreadable or deleted."""

from __future__ import annotations

import msgspec

from fairway import group_events, limits
from fairway.group_events import GroupEvent, Range
from fairway.groups.config import GroupConfig, encode
from fairway.groups.decisions import Dying, GroupDecision, GroupOutcome, Handout, SeekDecision
from fairway.groups.lots import Lot, open_in, ranges_of
from fairway.groups.members import Member
from fairway.groups.pull import runs_of
from fairway.groups.state import GroupState
from fairway.names import ConsumerName

RETENTION = "retention could keep it no longer"
_RANGES_PER_EVENT = 10_000  # an action counts its ranges in 16 bits


def decide_configure(state: GroupState, expected_version: int, config: GroupConfig, now_ms: int) -> GroupDecision:
    """Compare and set: the new version must follow the one that the caller expects. A caller that expects no group and
    wants the configuration in force succeeds without an event."""
    current = state.config.version
    if expected_version == 0 and current and msgspec.structs.replace(config, version=current) == state.config:
        return GroupDecision(GroupOutcome.DONE)  # a program that asks for the same at each of its starts
    if expected_version != current:
        sentence = (
            f"the configuration is version {current} by now, and another one: to change it, configure version "
            f"{current + 1} with expected_version={current}"
        )
        return GroupDecision(GroupOutcome.OTHER_VERSION, sentence=sentence)
    if config.version != current + 1:
        return GroupDecision(
            GroupOutcome.BAD_REQUEST, sentence=f"the next version is {current + 1}, not {config.version}"
        )
    return GroupDecision(GroupOutcome.DONE, (group_events.configured(encode(config), now_ms),))


def decide_pause(state: GroupState, is_paused: bool, name: ConsumerName | None, now_ms: int) -> GroupDecision:
    """Pause or resume the whole group, or one consumer, whether or not it is a member now."""
    before = state.is_paused if name is None else name in state.paused
    if before == is_paused:
        return GroupDecision(GroupOutcome.DONE)
    if name is not None and is_paused and len(state.paused) >= limits.MEMBERS_MAX:
        return GroupDecision(
            GroupOutcome.BUSY, sentence=f"{len(state.paused)} consumers are paused, which is all that may be"
        )
    return GroupDecision(GroupOutcome.DONE, (group_events.paused(is_paused, name or "", now_ms),))


def decide_go_on(state: GroupState, key: int, now_ms: int) -> GroupDecision:
    halted = set() if state.keys is None else state.keys.halted
    is_there = bool(halted) or state.is_halted if key == 0 else key in halted
    return GroupDecision(GroupOutcome.DONE, (group_events.gone_on(key, now_ms),) if is_there else ())


def decide_seek(state: GroupState, to: int, now_ms: int) -> SeekDecision:
    """Move the cursor. The group forgets everything in flight, because a seek is a clean start."""
    if to < 0:
        return SeekDecision(GroupOutcome.BAD_REQUEST, sentence="a sequence is not negative")
    return SeekDecision(
        GroupOutcome.DONE,
        (group_events.sought(to, now_ms),),
        held=sum(lot.open_count for _, lot in state.roster.held()),
        waiting=sum(lot.open_count for lot in state.unheld_lots)
        + (0 if state.keys is None else state.keys.parked_count),
        dying_count=sum(lot.open_count for lot in state.dying),
    )


def decide_drop(state: GroupState, absent: Handout, is_lost: bool, now_ms: int) -> GroupDecision:
    """Drop unreadable messages from the lots that nobody holds. They count as lost if rot took them."""
    ranges = _stocked(state, absent)
    detail = group_events.LOST if is_lost else b""
    event = group_events.acked(0, absent.attempt, absent.first, ranges, now_ms, detail)
    return GroupDecision(GroupOutcome.DONE, (event,) if ranges else ())


def decide_lose(member: Member, held: Handout, now_ms: int) -> GroupDecision:
    """Count messages of a response as lost: the response did not arrive, and rot took them before it could be
    resent."""
    lot = member.lots.get((held.first, held.attempt))
    if lot is None:
        return GroupDecision(GroupOutcome.DONE)
    mask = 0
    for first, count in held.ranges:
        mask |= open_in(lot, first, count)
    if not mask:
        return GroupDecision(GroupOutcome.DONE)
    ranges = ranges_of(mask, lot.base)
    return GroupDecision(
        GroupOutcome.DONE, (group_events.acked(member.id, lot.attempt, lot.base, ranges, now_ms, group_events.LOST),)
    )


def decide_reject(state: GroupState, lot: Handout, reason: str, now_ms: int) -> GroupDecision:
    """Make dead letters of messages that nobody holds, without handing them out."""
    ranges = _stocked(state, lot)
    if not ranges:
        return GroupDecision(GroupOutcome.DONE)
    event = group_events.returned(0, lot.attempt, lot.first, ranges, group_events.REJECTED, reason.encode(), now_ms)
    return GroupDecision(GroupOutcome.DONE, (event,), (Dying(ranges[0][0], lot.attempt, ranges, reason),))


def _stocked(state: GroupState, wanted: Handout) -> tuple[Range, ...]:
    """The requested messages that nobody holds, under this name."""
    lot = state.unheld_lots.get((wanted.first, wanted.attempt))
    if lot is None:
        return ()
    mask = 0
    for first, count in wanted.ranges:
        mask |= open_in(lot, first, count)
    return ranges_of(mask, lot.base)


def decide_skip(state: GroupState, first: int, to: int, is_lost: bool, now_ms: int) -> GroupDecision:
    happened = []
    if not is_lost:
        first = max(first, to)
    if first > state.cursor:
        happened.append(group_events.skipped(state.cursor, first, group_events.SKIPPED, now_ms))
    if to > max(first, state.cursor):
        happened.append(group_events.skipped(max(first, state.cursor), to, group_events.LOST, now_ms))
    return GroupDecision(GroupOutcome.DONE, tuple(happened))


def decide_mark_dead(state: GroupState, dying: Dying, is_lost: bool, now_ms: int) -> GroupDecision:
    """Count only messages that are still dying: a seek, or an earlier `mark_dead`, may have come in between."""
    detail = group_events.LOST if is_lost else b""
    named = state.dying.get((dying.first, dying.attempt))
    lots = list(state.dying) if named is None else [named]  # parts of a lot are renamed: rare, so search
    happened = []
    for lot in lots:
        if lot.attempt == dying.attempt:
            mask = 0
            for first, count in dying.ranges:
                mask |= open_in(lot, first, count)
            if mask:
                happened.append(group_events.died(lot.attempt, lot.base, ranges_of(mask, lot.base), now_ms, detail))
    return GroupDecision(GroupOutcome.DONE, tuple(happened))


def decide_forsake(state: GroupState, first_kept: int, now_ms: int) -> GroupDecision:
    """Retention will delete everything below: pulled messages become dead letters, others count as lost."""
    happened: list[GroupEvent] = []
    dying: list[Dying] = []
    owed = [(member.id, lot) for member, lot in state.roster.held()] + [(0, lot) for lot in state.unheld_lots]
    for consumer_id, lot in owed:
        ranges = _below(lot, first_kept)
        if ranges:
            reason = RETENTION.encode()
            happened.append(
                group_events.returned(consumer_id, lot.attempt, lot.base, ranges, group_events.REJECTED, reason, now_ms)
            )
            dying.append(Dying(ranges[0][0], lot.attempt, ranges, RETENTION))
    happened += _lost_parked(state, first_kept, now_ms)
    if first_kept > state.cursor:
        happened.append(group_events.skipped(state.cursor, first_kept, group_events.LOST, now_ms))
    return GroupDecision(GroupOutcome.DONE, tuple(happened), tuple(dying))


def _lost_parked(state: GroupState, first_kept: int, now_ms: int) -> list[GroupEvent]:
    """Count messages as lost that were parked and never handed out."""
    if state.keys is None:
        return []
    ranges = runs_of([each for each in state.keys.parked() if each < first_kept], 0)
    parts = [ranges[at : at + _RANGES_PER_EVENT] for at in range(0, len(ranges), _RANGES_PER_EVENT)]
    return [group_events.lost_parked(state.cursor, part, now_ms) for part in parts]


def _below(lot: Lot, end: int) -> tuple[Range, ...]:
    return ranges_of(open_in(lot, lot.base, end - lot.base), lot.base) if end > lot.base else ()
