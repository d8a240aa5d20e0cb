"""The same in groups that keep an order.

By key: what is in the stock is the first of its key, and of what is fresh those are chosen that are, too; the others
are parked, or declined where the group coalesces (`ordering`). Where the consumer can keep them apart, each may have a
run of those with it that come behind it (`runs`): half of the response at most while there are other keys, for each of
those can be handled at the same time, and whatever is left then.

Strictly: nothing goes before what comes first, even if that is to wait, or is on its way to dead letter. All that is in
hand is in this member's hands, so it knows what comes before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fairway import limits
from fairway.errors import InvariantViolated, invariant
from fairway.groups import events, ordering
from fairway.groups.choosing import LotSelection
from fairway.groups.decisions import PullDecision
from fairway.groups.lot import Lot, Range, head_of, mask_of, ranges_of
from fairway.groups.member import Member
from fairway.groups.runs import Runs
from fairway.groups.state import GroupState


class KeyedChoice(LotSelection):
    """`keys` are those of the fresh messages; `beside` those that consumers have in hand from the other source."""

    __slots__ = ("_beside", "_by_key", "_keys", "_runs", "_runs_max")

    def __init__(
        self,
        state: GroupState,
        member: Member,
        messages_max: int,
        now_ms: int,
        number_after: int,
        keys: Sequence[int],
        beside: Collection[int],
        run_max: int,
        bytes_left: int | None,
    ) -> None:
        super().__init__(state, member, messages_max, now_ms, number_after, bytes_left)
        if state.keys is None:
            raise InvariantViolated("a group by key knows its keys")
        self._by_key = state.keys
        self._keys = keys
        self._beside = beside
        run_max = min(run_max, limits.RUN_MESSAGES_MAX) if state.config.may_run else 1
        self._runs = Runs(state.keys, max(run_max - 1, 0))
        self._runs_max = messages_max // 2

    def made(self, fresh: Range | None) -> PullDecision:
        is_busy = self._lots_left <= 0
        if not is_busy:
            for lot in self._state.stock.ready(self._now_ms):
                if not self._choose_again(lot):
                    break
            self._runs.lead(key for lot in self._lots if lot.attempt == 1 for key in self._by_key.keys_of(lot.ranges))
            self._messages_left -= self._runs.grow(min(self._runs_max, self._messages_left))
            if fresh is not None:
                is_busy = self._choose_fresh(*fresh)
            self._runs.grow(self._messages_left)
            self._hand_out_runs()
        return self._answer(is_busy)

    def _choose_again(self, lot: Lot) -> bool:
        if not self._beside and not self._by_key.early:
            return super()._choose_again(lot)
        mask = self._less_barred(lot)
        if not mask or not self._messages_left or not self._lots_left:
            return bool(self._messages_left and self._lots_left)
        chosen = head_of(mask, self._messages_left)
        self._hand_out(lot.attempt, ranges_of(chosen, lot.base), chosen.bit_count())
        return True

    def _less_barred(self, lot: Lot) -> int:
        """Without those whose keys the other source has in hand, and those whose turn it is not."""
        mask = lot.mask
        for first, count in lot.ranges:
            for sequence in range(first, first + count):
                if sequence in self._by_key.early or self._by_key.key_of(sequence) in self._beside:
                    mask &= ~(1 << sequence - lot.base)
        return mask

    def _choose_fresh(self, first: int, count: int) -> bool:
        """Those that are the first of their keys, and some behind them; the others are parked, or declined."""
        state, now_ms = self._state, self._now_ms
        invariant(len(self._keys) == count, "a group by key is told the key of every fresh message")
        if first > state.cursor:
            self._events.append(events.skipped(state.cursor, first, events.SKIPPED, now_ms))
        if not self._messages_left:
            return False
        if len(self._by_key) >= limits.GROUP_KEYED_MAX:
            return True
        group_left = state.config.lots_max - state.in_flight
        lots_left = min(self._lots_left, max(group_left, 0))
        found = self._found(first, self._keys)
        lots = ordering.lots_of(found.chosen, state.config.lot_messages_max, lots_left)
        taken = sum(map(len, lots))
        is_busy = taken < len(found.chosen) and group_left <= 0
        if taken < len(found.chosen):  # what comes behind the last lot waits for the next pull
            found = self._found(first, self._keys[: found.chosen[taken]])
        for lot in lots:
            keys = self._keys[lot.start : lot.stop] if isinstance(lot, range) else [self._keys[each] for each in lot]
            self._hand_out(1, ordering.runs_of(lot, first), len(lot), keys)
            self._runs.lead(keys)
        if found.declined:
            self._events.append(events.declined(first + found.end, ordering.runs_of(found.declined, first), now_ms))
        if found.parked:
            keys = [self._keys[offset] for offset in found.parked]
            self._events.append(events.parked(first + found.end, ordering.runs_of(found.parked, first), keys, now_ms))
            self._runs.park(zip([first + offset for offset in found.parked], keys, strict=True))
            self._runs.follow((first + offset, self._keys[offset]) for offset in found.behind)
            self._messages_left -= len(found.behind)
        return is_busy

    def _found(self, first: int, keys: Sequence[int]) -> ordering.OrderedSelection:
        config, runs = self._state.config, self._runs
        room = ordering.Room(self._messages_left, runs.most, self._runs_max - len(runs.chosen))
        return ordering.choose(self._by_key, first, keys, room, config, self._beside, self._now_ms)

    def _hand_out_runs(self) -> None:
        """All that is behind others in this response, by sequence: so whatever is left out is behind the rest."""
        state = self._state
        lots_left = min(self._lots_left, state.config.lots_max - state.in_flight - len(self._lots))
        self._messages_left = len(self._runs.chosen)
        for lot in ordering.lots_of(sorted(self._runs.chosen), state.config.lot_messages_max, max(lots_left, 0)):
            self._hand_out(1, ordering.runs_of(lot, 0), len(lot), is_behind=True)


class StrictChoice(LotSelection):
    """For the active member."""

    __slots__ = ()

    def made(self, fresh: Range | None) -> PullDecision:
        state = self._state
        is_busy = self._lots_left <= 0
        if not is_busy and not state.is_halted:
            first_dying = min((lot.first_open for lot in state.dying), default=None)
            for attempt, ranges in ordering.strictly(state.stock, self._now_ms, first_dying):
                if not self._choose_piece(attempt, ranges):
                    break
            stocked = sum(lot.open_count for lot in state.stock)
            is_all = sum(count for lot in self._lots for _, count in lot.ranges) == stocked
            if fresh is not None and is_all and first_dying is None:
                is_busy = self._choose_fresh(*fresh)
        return self._answer(is_busy)

    def _choose_piece(self, attempt: int, ranges: tuple[Range, ...]) -> bool:
        """False: there is no room for more of it."""
        if not self._messages_left or not self._lots_left:
            return False
        mask = mask_of(ranges, ranges[0][0])
        chosen = head_of(mask, self._messages_left)
        self._hand_out(attempt, ranges_of(chosen, ranges[0][0]), chosen.bit_count())
        return chosen == mask
