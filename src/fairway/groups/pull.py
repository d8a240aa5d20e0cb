"""Decisions about pulls: which lots a consumer gets. Pure.

A pull chooses in this order:

    1. a response of its own that did not arrive, again, under its number
    2. lots that a consumer handed back, or lost with its lease
    3. retries that are due
    4. fresh messages from the cursor on, as far as the caller says that they are there

One response may hold lots of 2, 3 and 4 together. `LotSelection` chooses lots one after another until a bound is
reached.

A group ordered by key uses `KeyedChoice`. Unheld messages are the first of their keys, except *early* ones, which wait
(`keys`). Of the fresh messages `choose` takes those that are the first of their keys, and parks the others, or declines
them if the group coalesces. A consumer that handles messages of one key one after another may also get a run (`runs`).
Runs take at most half of the response while there are other keys, because messages of other keys can be handled in
parallel. Afterwards runs take whatever room is left. A run may be extended, in a later response and without that bound,
while no other member has asked in vain for messages: nobody else is kept from work by that.

`choose` looks at fresh messages from the cursor on, and is cheap if no key stands in the way. A message whose key has a
message out, or a message chosen just now, is parked; it may still go out behind those. The look ends
before the first message that cannot be passed. That message would be parked beyond `parked_max`, or a consumer holds
its key from the group's other source (its inbox, or its subject).

A group of strict order uses `StrictChoice`. No message goes out before the first one, even if the first must wait or is
on its way to dead letter. The active member holds everything that is held, so it knows which messages come first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from fairway import group_events, limits
from fairway.coalesce import CoalescingAnswer, Keep, Machine
from fairway.errors import InvariantViolated, invariant
from fairway.group_events import GroupEvent, Range
from fairway.groups.config import Coalesce, GroupConfig, Mode, Order
from fairway.groups.decisions import BUSY_RETRY_AFTER_MS, GroupOutcome, Handout, PullDecision
from fairway.groups.keys import NO_KEY, Keys
from fairway.groups.lots import Lot, head_of, mask_of, ranges_of, sequences_of
from fairway.groups.members import Member
from fairway.groups.runs import Runs
from fairway.groups.state import GroupState

_SOMEBODY = -1 << 63  # stands for the head of a key, whichever message that is


class OrderedSelection(NamedTuple):
    """Offsets from the first fresh message, ascending. Every offset before `end` is chosen, parked or declined.
    Declined offsets below 0 were parked before. The messages `behind` are parked, but go out behind the chosen ones."""

    chosen: Sequence[int]
    parked: Sequence[int]
    end: int
    declined: Sequence[int] = ()
    behind: Sequence[int] = ()


class Room(NamedTuple):
    """The room in a response."""

    messages: int
    behind: int = 0  # of these, at most so many behind others of their keys


def choose(
    keys: Keys,
    first: int,
    fresh: Sequence[int],
    room: Room,
    config: GroupConfig,
    beside: Collection[int],
    now_ms: int,
    runs: Runs,
) -> OrderedSelection:
    """Choose fresh messages: `fresh` has their keys from `first` on, `beside` the keys held from the other source."""
    head = fresh[: room.messages]
    if keys.is_free(head) and not (beside and not set(beside).isdisjoint(head)):
        return OrderedSelection(range(len(head)), (), len(head))
    if config.coalesce is not Coalesce.NONE:
        return _choose_or_decline(keys, first, fresh, room.messages, config, beside, now_ms)
    chosen: list[int] = []
    behind: list[int] = []
    parked: list[int] = []
    run_room: dict[int, int] = {}  # by key: how many more may follow
    left, behind_left, parked_left = room.messages, room.behind, config.parked_max - keys.behind_count
    out, end = keys.out, len(fresh)
    for offset, key in enumerate(fresh):
        if not left:
            end = offset
            break
        may_follow = run_room.get(key)
        if may_follow is None:
            if key in out:
                may_follow = runs.next_room_of(key)
            elif keys.rests_until(key, now_ms):
                may_follow = 0
            elif key in beside:
                end = offset
                break
            else:
                chosen.append(offset)
                left -= 1
                if key != NO_KEY:
                    run_room[key] = runs.most
                continue
        if parked_left <= 0:
            end = offset
            break
        parked_left -= 1
        parked.append(offset)
        if may_follow and behind_left > 0:
            run_room[key] = may_follow - 1
            behind_left -= 1
            left -= 1
            behind.append(offset)
        else:
            run_room[key] = 0
    return OrderedSelection(chosen, parked, end, (), behind)


def _choose_or_decline(
    keys: Keys,
    first: int,
    fresh: Sequence[int],
    most: int,
    config: GroupConfig,
    beside: Collection[int],
    now_ms: int,
) -> OrderedSelection:
    """The choice in a group that coalesces."""
    chosen: list[int] = []
    taken: set[int] = set()
    waiting = _Waiting(keys, config.parked_max, config.coalesce, first)
    end = len(fresh)
    for offset, key in enumerate(fresh):
        if len(chosen) >= most:
            end = offset
            break
        if key != NO_KEY and (key in taken or key in keys.out or keys.rests_until(key, now_ms)):
            if not waiting.add(offset, key):
                end = offset
                break
        elif key in beside:
            end = offset
            break
        else:
            chosen.append(offset)
            taken.add(key)
    return OrderedSelection(chosen, sorted(waiting.parked), end, sorted(waiting.declined))


class _Waiting:
    """Messages that cannot go out now: parked, or declined by the rules of `fairway.coalesce`."""

    __slots__ = ("_coalesce", "_first", "_keys", "_room", "_tails", "declined", "parked")

    def __init__(self, keys: Keys, parked_max: int, coalesce: Coalesce, first: int) -> None:
        self._keys = keys
        self._room = parked_max - keys.behind_count
        self._coalesce = coalesce
        self._first = first
        self._tails: dict[int, int] = {}  # by key: the offset of the waiting message
        self.parked: set[int] = set()
        self.declined: list[int] = []

    def add(self, offset: int, key: int) -> bool:
        """Park or decline a message; False: there is no room."""
        if self._coalesce is not Coalesce.NONE:
            tail = self._tails.get(key)
            if tail is None and (behind := self._keys.parked_behind(key)):
                tail = behind[-1] - self._first
            if tail is not None:
                self._decline(offset, key, tail)
                return True
        if len(self.parked) >= self._room:
            return False
        self.parked.add(offset)
        self._tails[key] = offset
        return True

    def _decline(self, offset: int, key: int, tail: int) -> None:
        keep = Keep.LATEST if self._coalesce is Coalesce.LATEST else Keep.FIRST
        entry = Machine(_SOMEBODY, tail).enqueue(offset, keep)
        if entry.declined is not None:
            self.declined.append(entry.declined)
            self.parked.discard(entry.declined)
        if entry.answer is CoalescingAnswer.WAIT:
            self.parked.add(offset)
            self._tails[key] = offset


def strictly(unheld_lots: Iterable[Lot], now_ms: int, before: int | None) -> Iterator[tuple[int, tuple[Range, ...]]]:
    """Unheld messages by sequence, up to the first lot that is not due, and below `before`: attempt and ranges of
    pieces to hand out in order. After each piece, the rest of a lot is named for its first message."""
    runs = sorted((first, count, lot) for lot in unheld_lots for first, count in lot.ranges)
    for lot, of_lot in groupby(runs, key=itemgetter(2)):
        if lot.due_ms > now_ms:
            return
        ranges = tuple((first, count) for first, count, _ in of_lot)
        if before is not None and ranges[-1][0] + ranges[-1][1] > before:
            ranges = tuple((first, min(count, before - first)) for first, count in ranges if first < before)
            if ranges:
                yield lot.attempt, ranges
            return
        yield lot.attempt, ranges


def lots_of(offsets: Sequence[int], messages_max: int, lots_max: int) -> list[Sequence[int]]:
    """Split the offsets into lots; no lot spans more than a lot may."""
    lots: list[Sequence[int]] = []
    at = 0
    while at < len(offsets) and len(lots) < lots_max:
        lot = offsets[at : at + messages_max]
        span = lot[-1] - lot[0]
        if span >= limits.LOT_MESSAGES_MAX:
            lot = [each for each in lot if each - lot[0] < limits.LOT_MESSAGES_MAX]
        lots.append(lot)
        at += len(lot)
    return lots


def runs_of(offsets: Sequence[int], first: int) -> tuple[Range, ...]:
    """Ascending offsets from `first` as ranges of sequences."""
    if isinstance(offsets, range):
        return ((first + offsets.start, len(offsets)),) if offsets else ()
    if not offsets:
        return ()
    breaks = [at for at, (one, other) in enumerate(pairwise(offsets), 1) if other - one != 1]
    return tuple([(first + offsets[at], end - at) for at, end in pairwise((0, *breaks, len(offsets)))])


FULL_MEMORY = (
    "the memory for what groups have in hand is full: ack what you hold, or give the broker more (--memory-mib)"
)


class PullRequest(NamedTuple):
    """What a pull asks for, and what its caller has found for it (`GroupStateMachine.pull`)."""

    messages_max: int
    fresh: Range | None
    now_ms: int
    number_after: int
    keys: Sequence[int]
    beside: Collection[int]
    run_max: int
    extends_runs: bool
    bytes_left: int | None


class LotSelection:
    """Chooses unheld lots that are ready, then fresh messages."""

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

    def __init__(self, state: GroupState, member: Member, asked: PullRequest) -> None:
        self._state = state
        self._member = member
        self._now_ms = asked.now_ms
        self._messages_left = asked.messages_max
        self._lots_left = min(limits.RESPONSE_LOTS_MAX, limits.MEMBER_LOTS_MAX - len(member.lots))
        self._is_short = False  # of memory
        bytes_left = asked.bytes_left
        if bytes_left is not None and bytes_left < self._lots_left * limits.HELD_LOT_BYTES:
            least = max(limits.GROUP_LOTS_MIN - state.held_count, 0)
            self._lots_left = min(self._lots_left, max(bytes_left // limits.HELD_LOT_BYTES, least))
            self._is_short = self._lots_left <= 0
        # A response may have arrived above the highest known number, because a crash may have taken its PULL.
        self._number = max(member.number, member.arrived, asked.number_after) + 1
        if state.is_ordered:  # above every number of any member: the number is the fence of its messages
            self._number = max(self._number, state.number + 1)
        self._lots: list[Handout] = []
        self._events: list[GroupEvent] = []

    def made(self, fresh: Range | None) -> PullDecision:
        is_busy = self._lots_left <= 0
        if not is_busy:
            for lot in self._state.unheld_lots.ready(self._now_ms):
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
        """Hand out fresh messages. True: the group's bound stands in the way."""
        state = self._state
        invariant(first >= state.cursor, "fresh messages begin at or above the cursor")
        if first > state.cursor:
            self._events.append(group_events.skipped(state.cursor, first, group_events.SKIPPED, self._now_ms))
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
        self._events.append(group_events.pulled(self._member.id, attempt, ranges, self._number, self._now_ms, keys))


class KeyedChoice(LotSelection):
    """The selection in a group by key. `keys` are of the fresh messages, `beside` are held from the other source."""

    __slots__ = ("_beside", "_by_key", "_keys", "_runs", "_runs_max")

    def __init__(self, state: GroupState, member: Member, asked: PullRequest) -> None:
        super().__init__(state, member, asked)
        if state.keys is None:
            raise InvariantViolated("a group by key knows its keys")
        self._by_key = state.keys
        self._keys = asked.keys
        self._beside = asked.beside
        behind_max = min(asked.run_max, limits.RUN_MESSAGES_MAX) - 1 if state.config.may_run else 0
        may_extend = asked.extends_runs and behind_max > 0 and not state.roster.has_other_hungry(member)
        self._runs = Runs(state.keys, max(behind_max, 0), partial(_begun_once, member) if may_extend else None)
        self._runs_max = asked.messages_max if may_extend else asked.messages_max // 2

    def made(self, fresh: Range | None) -> PullDecision:
        is_busy = self._lots_left <= 0
        if not is_busy:
            for lot in self._state.unheld_lots.ready(self._now_ms):
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
        """The lot's mask without messages whose keys the other source has in hand, or whose turn has not come."""
        mask = lot.mask
        for first, count in lot.ranges:
            for sequence in range(first, first + count):
                if sequence in self._by_key.early or self._by_key.key_of(sequence) in self._beside:
                    mask &= ~(1 << sequence - lot.base)
        return mask

    def _choose_fresh(self, first: int, count: int) -> bool:
        """Hand out the first of each key, and some behind them; the others are parked, or declined."""
        state, now_ms = self._state, self._now_ms
        invariant(len(self._keys) == count, "a group by key is told the key of every fresh message")
        if first > state.cursor:
            self._events.append(group_events.skipped(state.cursor, first, group_events.SKIPPED, now_ms))
        if not self._messages_left:
            return False
        if len(self._by_key) >= limits.GROUP_KEYED_MAX:
            return True
        group_left = state.config.lots_max - state.in_flight
        lots_left = min(self._lots_left, max(group_left, 0))
        found = self._found(first, self._keys)
        lots = lots_of(found.chosen, state.config.lot_messages_max, lots_left)
        taken = sum(map(len, lots))
        is_busy = taken < len(found.chosen) and group_left <= 0
        if taken < len(found.chosen):  # messages behind the last lot wait for the next pull
            found = self._found(first, self._keys[: found.chosen[taken]])
        for lot in lots:
            keys = self._keys[lot.start : lot.stop] if isinstance(lot, range) else [self._keys[each] for each in lot]
            self._hand_out(1, runs_of(lot, first), len(lot), keys)
            self._runs.lead(keys)
        if found.declined:
            self._events.append(group_events.declined(first + found.end, runs_of(found.declined, first), now_ms))
        if found.parked:
            key_at = self._keys.__getitem__
            keys = list(map(key_at, found.parked))
            self._events.append(group_events.parked(first + found.end, runs_of(found.parked, first), keys, now_ms))
            behind = set(found.behind)
            waiting = [(first + at, key) for at, key in zip(found.parked, keys, strict=True) if at not in behind]
            self._runs.park(waiting)
            self._runs.follow((first + each for each in found.behind), map(key_at, found.behind))
            self._messages_left -= len(found.behind)
        return is_busy

    def _found(self, first: int, keys: Sequence[int]) -> OrderedSelection:
        runs = self._runs
        room = Room(self._messages_left, self._runs_max - len(runs.chosen))
        return choose(self._by_key, first, keys, room, self._state.config, self._beside, self._now_ms, runs)

    def _hand_out_runs(self) -> None:
        """Hand out all runs, by sequence, so that a message without room is behind the others."""
        state = self._state
        lots_left = min(self._lots_left, state.config.lots_max - state.in_flight - len(self._lots))
        self._messages_left = len(self._runs.chosen)
        for lot in lots_of(sorted(self._runs.chosen), state.config.lot_messages_max, max(lots_left, 0)):
            self._hand_out(1, runs_of(lot, 0), len(lot), is_behind=True)


def _begun_once(member: Member) -> set[int]:
    """What the member holds at the first attempt."""
    held: set[int] = set()
    for lot in member.lots.values():
        if lot.attempt == 1:
            held.update(sequences_of(lot.mask, lot.base))
    return held


class StrictChoice(LotSelection):
    """The selection in a group of strict order, for the active member."""

    __slots__ = ()

    def made(self, fresh: Range | None) -> PullDecision:
        state = self._state
        is_busy = self._lots_left <= 0
        if not is_busy and not state.is_halted:
            first_dying = min((lot.first_open for lot in state.dying), default=None)
            for attempt, ranges in strictly(state.unheld_lots, self._now_ms, first_dying):
                if not self._choose_piece(attempt, ranges):
                    break
            stocked = sum(lot.open_count for lot in state.unheld_lots)
            is_all = sum(count for lot in self._lots for _, count in lot.ranges) == stocked
            if fresh is not None and is_all and first_dying is None:
                is_busy = self._choose_fresh(*fresh)
        return self._answer(is_busy)

    def _choose_piece(self, attempt: int, ranges: tuple[Range, ...]) -> bool:
        """Hand out a piece; False: there is no room for more."""
        if not self._messages_left or not self._lots_left:
            return False
        mask = mask_of(ranges, ranges[0][0])
        chosen = head_of(mask, self._messages_left)
        self._hand_out(attempt, ranges_of(chosen, ranges[0][0]), chosen.bit_count())
        return chosen == mask


PAUSED_RETRY_AFTER_MS = 1_000


def decide(state: GroupState, member: Member, asked: PullRequest) -> PullDecision:
    if asked.messages_max < 1:
        return PullDecision(GroupOutcome.BAD_REQUEST, sentence="a pull asks for at least one message")
    if member.version != state.config.version:
        return PullDecision(
            GroupOutcome.OTHER_VERSION, sentence=f"the group's configuration is version {state.config.version}"
        )
    again = _unarrived(state, member, asked.now_ms)
    if again is not None:
        return again
    if state.is_paused or member.name in state.paused:
        state.roster.note_hunger(member, is_hungry=False)
        return PullDecision(GroupOutcome.PAUSED, retry_after_ms=PAUSED_RETRY_AFTER_MS)
    if not state.is_ordered:
        return LotSelection(state, member, asked).made(asked.fresh)
    fresh = None if state.is_mixed and state.in_flight else asked.fresh
    if state.config.order is not Order.STRICT:
        decision = KeyedChoice(state, member, asked).made(fresh)
        state.roster.note_hunger(member, is_hungry=decision.outcome is GroupOutcome.EMPTY)
        return decision
    if member.id != state.roster.eldest_id:
        return PullDecision(GroupOutcome.STANDBY)
    return StrictChoice(state, member, asked).made(fresh)


def _unarrived(state: GroupState, member: Member, now_ms: int) -> PullDecision | None:
    """The oldest response that did not arrive. The lots go out again under the same number, without the messages
    settled since, and without those that the consumer got in earlier responses. There is no event, unless the response
    extended a run that has failed since: then these messages are parked again."""
    if not member.unarrived:
        return None
    number = member.unarrived[0]
    happened, lots = [], []
    loose = set() if state.keys is None else state.keys.loose(_begun_once(member))
    for lot in member.responses[number]:
        mask = lot.open_in_response(number)
        if loose and lot.attempt == 1:
            gone = [each for each in sequences_of(mask, lot.base) if each in loose]
            for each in gone:
                mask ^= 1 << each - lot.base
            if gone:
                ranges = runs_of(gone, 0)
                happened.append(
                    group_events.returned(member.id, 1, lot.base, ranges, group_events.RELEASED, b"", now_ms)
                )
        if mask:
            ranges = ranges_of(mask, lot.base)
            lots.append(Handout(lot.base, lot.attempt, ranges, state.keys is not None and state.keys.has_run(ranges)))
    if not lots:
        return PullDecision(GroupOutcome.EMPTY, tuple(happened))
    return PullDecision(
        GroupOutcome.DONE,
        tuple(happened),
        number=number,
        lots=tuple(lots),
        is_again=True,
        is_durable_first=bool(happened),
    )
