"""Which fresh messages of a group by key may go out, and which are parked: pure, and cheap where nothing is in the way.

Messages are looked at from the cursor on. One whose key has a message out, or had one chosen just now, is parked behind
that, and in the latter case may go out with it; the others are chosen, up to what was asked for. The look ends before
the first message that cannot be passed: one that would be parked where no more may be, or whose key is in somebody's
hands from the group's other source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from fairway import limits
from fairway.coalesce import CoalescingAnswer, Keep, Machine
from fairway.groups.config import Coalesce, GroupConfig
from fairway.groups.keys import NO_KEY, Keys
from fairway.groups.lot import Lot, Range

_SOMEBODY = -1 << 63  # the head of a key, whoever that is


class OrderedSelection(NamedTuple):
    """Offsets from the first message that was looked at, ascending; all before `end` are in one of the three. Those
    below 0 that are declined were parked before. Some that are parked go out all the same, `behind` those chosen."""

    chosen: Sequence[int]
    parked: Sequence[int]
    end: int
    declined: Sequence[int] = ()
    behind: Sequence[int] = ()


class Room(NamedTuple):
    """In a response."""

    messages: int
    run: int = 0  # behind one that is chosen, of its key
    runs: int = 0  # of all keys


def choose(
    keys: Keys, first: int, fresh: Sequence[int], room: Room, config: GroupConfig, beside: Collection[int], now_ms: int
) -> OrderedSelection:
    """`fresh` are the keys of the messages from `first` on; `beside` those that the other source has in hand."""
    head = fresh[: room.messages]
    if keys.is_free(head) and not (beside and not set(beside).isdisjoint(head)):
        return OrderedSelection(range(len(head)), (), len(head))
    chosen: list[int] = []
    behind: list[int] = []
    taken: dict[int, int] = {}  # by key: how many more may follow
    waiting = _Waiting(keys, config.parked_max, config.coalesce, first)
    end = len(fresh)
    for offset, key in enumerate(fresh):
        if len(chosen) + len(behind) >= room.messages:
            end = offset
            break
        if key != NO_KEY and (key in taken or key in keys.out or keys.rests_until(key, now_ms)):
            if not waiting.add(offset, key):
                end = offset
                break
            if taken.get(key) and len(behind) < room.runs:
                taken[key] -= 1
                behind.append(offset)
        elif key in beside:
            end = offset
            break
        else:
            chosen.append(offset)
            taken[key] = room.run
    return OrderedSelection(chosen, sorted(waiting.parked), end, sorted(waiting.declined), behind)


class _Waiting:
    """Those that cannot go out now: parked, or declined by the law of `fairway.coalesce`."""

    __slots__ = ("_coalesce", "_first", "_keys", "_room", "_tails", "declined", "parked")

    def __init__(self, keys: Keys, parked_max: int, coalesce: Coalesce, first: int) -> None:
        self._keys = keys
        self._room = parked_max - keys.behind_count
        self._coalesce = coalesce
        self._first = first
        self._tails: dict[int, int] = {}  # by key: the offset of the one that waits
        self.parked: set[int] = set()
        self.declined: list[int] = []

    def add(self, offset: int, key: int) -> bool:
        """False: there is no room for it."""
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


def strictly(stock: Iterable[Lot], now_ms: int, before: int | None) -> Iterator[tuple[int, tuple[Range, ...]]]:
    """What nobody holds, by sequence, up to the first that is not due and below `before`: attempt and ranges of pieces
    that are to be handed out one after the other. What is left of a lot is named for its first message, each time."""
    runs = sorted((first, count, lot) for lot in stock for first, count in lot.ranges)
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
    """The same, as lots: none spans more than a lot may."""
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
    runs: list[Range] = []
    begin = previous = None
    for each in offsets:
        if previous is None or begin is None:
            begin = each
        elif each != previous + 1:
            runs.append((first + begin, previous + 1 - begin))
            begin = each
        previous = each
    if begin is not None and previous is not None:
        runs.append((first + begin, previous + 1 - begin))
    return tuple(runs)
