"""What a consumer gets when it pulls. The order of choice:

    1. a response of its own that did not arrive, again, under its number
    2. what somebody handed back, or lost with its lease
    3. retries that are due
    4. fresh messages from the cursor on, as far as the caller says they are there

One response may hold lots of 2, 3 and 4 together. In a group by key each of them is the first of its key (`keys`), and
of 4 those are parked that are not (`ordering`). Where there is room left, and the consumer handles a run of messages of
one key one after another, those go with them that are parked behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fairway.groups.choosing import LotSelection
from fairway.groups.choosing_ordered import KeyedChoice, StrictChoice
from fairway.groups.config import Order
from fairway.groups.decisions import GroupOutcome, Handout, PullDecision
from fairway.groups.lot import Range, ranges_of
from fairway.groups.member import Member
from fairway.groups.state import GroupState

PAUSED_RETRY_AFTER_MS = 1_000


def decide(
    state: GroupState,
    member: Member,
    messages_max: int,
    fresh: Range | None,
    now_ms: int,
    number_after: int,
    keys: Sequence[int] = (),
    beside: Collection[int] = (),
    run_max: int = 1,
    bytes_left: int | None = None,
) -> PullDecision:
    """`fresh` is (first, count) at or above the cursor; what lies between is skipped, with a count of 0 as well."""
    if messages_max < 1:
        return PullDecision(GroupOutcome.BAD_REQUEST, sentence="a pull asks for at least one message")
    if member.version != state.config.version:
        return PullDecision(
            GroupOutcome.OTHER_VERSION, sentence=f"the group's configuration is version {state.config.version}"
        )
    again = _unarrived(state, member)
    if again is not None:
        return again
    if state.is_paused or member.name in state.paused:
        return PullDecision(GroupOutcome.PAUSED, retry_after_ms=PAUSED_RETRY_AFTER_MS)
    if not state.is_ordered:
        return LotSelection(state, member, messages_max, now_ms, number_after, bytes_left).made(fresh)
    if state.is_mixed and state.in_flight:
        fresh = None
    if state.config.order is not Order.STRICT:
        choice = KeyedChoice(state, member, messages_max, now_ms, number_after, keys, beside, run_max, bytes_left)
        return choice.made(fresh)
    if member.id != state.roster.eldest_id:
        return PullDecision(GroupOutcome.STANDBY)
    return StrictChoice(state, member, messages_max, now_ms, number_after, bytes_left).made(fresh)


def _unarrived(state: GroupState, member: Member) -> PullDecision | None:
    """No event: the same lots under the same number, less what has been settled since, and less what the consumer had
    of the same lot before."""
    if not member.unarrived:
        return None
    number = member.unarrived[0]
    lots = []
    for lot in member.responses[number]:
        ranges = ranges_of(lot.open_in_response(number), lot.base)
        lots.append(Handout(lot.base, lot.attempt, ranges, state.keys is not None and state.keys.has_run(ranges)))
    return PullDecision(GroupOutcome.DONE, number=number, lots=tuple(lots), is_again=True)
