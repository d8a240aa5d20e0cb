"""Lots for one response, chosen one after another until a bound is reached."""

from __future__ import annotations

from collections.abc import Sequence

from fairway import limits
from fairway.errors import invariant
from fairway.groups import events
from fairway.groups.config import Mode
from fairway.groups.decisions import BUSY_RETRY_AFTER_MS, GroupOutcome, Handout, PullDecision
from fairway.groups.events import GroupEvent
from fairway.groups.lot import Lot, Range, head_of, ranges_of
from fairway.groups.member import Member
from fairway.groups.state import GroupState

FULL_MEMORY = (
    "the memory for what groups have in hand is full: ack what you hold, or give the broker more (--memory-mib)"
)


class LotSelection:
    """What was handed back or is due, then what is fresh."""

    __slots__ = (
        "_events",
        "_is_short",
        "_lots",
        "_lots_left",
        "_member",
        "_messages_left",
        "_now_ms",
        "_number",
        "_state",
    )

    def __init__(
        self,
        state: GroupState,
        member: Member,
        messages_max: int,
        now_ms: int,
        number_after: int,
        bytes_left: int | None = None,
    ) -> None:
        self._state = state
        self._member = member
        self._now_ms = now_ms
        self._messages_left = messages_max
        self._lots_left = min(limits.RESPONSE_LOTS_MAX, limits.MEMBER_LOTS_MAX - len(member.lots))
        self._is_short = False  # of memory
        if bytes_left is not None and bytes_left < self._lots_left * limits.HELD_LOT_BYTES:
            least = max(limits.GROUP_LOTS_MIN - state.held_count, 0)
            self._lots_left = min(self._lots_left, max(bytes_left // limits.HELD_LOT_BYTES, least))
            self._is_short = self._lots_left <= 0
        # What arrived may be above what is known to have gone out: a crash may have taken the PULL.
        self._number = max(member.number, member.arrived, number_after) + 1
        if state.is_ordered:  # above all numbers that anybody had: the fence of what goes out in it
            self._number = max(self._number, state.number + 1)
        self._lots: list[Handout] = []
        self._events: list[GroupEvent] = []

    def made(self, fresh: Range | None) -> PullDecision:
        is_busy = self._lots_left <= 0
        if not is_busy:
            for lot in self._state.stock.ready(self._now_ms):
                if not self._choose_again(lot):
                    break
            if fresh is not None:
                is_busy = self._choose_fresh(*fresh)
        return self._answer(is_busy)

    def _answer(self, is_busy: bool) -> PullDecision:
        happened = tuple(self._events)
        if not self._lots:
            outcome = GroupOutcome.BUSY if is_busy else GroupOutcome.EMPTY
            sentence = FULL_MEMORY if self._is_short else ""
            return PullDecision(
                outcome, happened, sentence=sentence, retry_after_ms=BUSY_RETRY_AFTER_MS if is_busy else None
            )
        is_durable_first = self._state.config.mode is Mode.AT_MOST_ONCE or self._state.is_ordered
        return PullDecision(
            GroupOutcome.DONE, happened, number=self._number, lots=tuple(self._lots), is_durable_first=is_durable_first
        )

    def _choose_again(self, lot: Lot) -> bool:
        if not self._messages_left or not self._lots_left:
            return False
        mask, count = lot.mask, lot.open_count
        if count > self._messages_left:
            count = self._messages_left
            mask = head_of(mask, count)
        self._hand_out(lot.attempt, ranges_of(mask, lot.base), count)
        return True

    def _choose_fresh(self, first: int, count: int) -> bool:
        """True: the group's bound stands in the way."""
        state = self._state
        invariant(first >= state.cursor, "fresh messages begin at or above the cursor")
        if first > state.cursor:
            self._events.append(events.skipped(state.cursor, first, events.SKIPPED, self._now_ms))
        group_left = state.config.lots_max - state.in_flight
        while count and self._messages_left and self._lots_left:
            if group_left <= 0:
                return True
            taken = min(count, self._messages_left, state.config.lot_messages_max)
            self._hand_out(1, ((first, taken),), taken)
            first += taken
            count -= taken
            group_left -= 1
        return False

    def _hand_out(
        self, attempt: int, ranges: tuple[Range, ...], count: int, keys: Sequence[int] = (), *, is_behind: bool = False
    ) -> None:
        self._messages_left -= count
        self._lots_left -= 1
        self._lots.append(Handout(ranges[0][0], attempt, ranges, is_behind))
        self._events.append(events.pulled(self._member.id, attempt, ranges, self._number, self._now_ms, keys))
