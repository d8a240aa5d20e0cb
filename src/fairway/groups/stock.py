"""Lots that nobody holds: handed back, waiting for their next attempt, or orphaned by a crash. And lots that die.

    returned   due at 0: at once, oldest first
    waiting    due at a time: a heap, from which what is due moves on to `_due`

Moving from waiting to due is no event: it follows from the time. Every lot in here is named for its first open message,
so a PULL in the log says exactly which one it took.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from fairway import limits
from fairway.errors import invariant
from fairway.groups.lot import Lot, Name, Range, mask_of

_BLOCK_BITS = 10  # 1,024 sequences: a lot spans at most two blocks


class LotTable:
    """Lots by name."""

    def __init__(self) -> None:
        self._lots: dict[Name, Lot] = {}
        self.beside_bytes = 0  # of all lots here (`Lot.beside_bytes`)

    def __len__(self) -> int:
        return len(self._lots)

    def __contains__(self, name: Name) -> bool:
        return name in self._lots

    def __iter__(self) -> Iterator[Lot]:
        return iter(self._lots.values())

    def get(self, name: Name) -> Lot | None:
        return self._lots.get(name)

    def add(self, lot: Lot) -> None:
        invariant(lot.mask & 1 == 1, "a lot that nobody holds is named for its first open message")
        invariant(lot.name not in self._lots, "a message is in one place")
        self._lots[lot.name] = lot
        self.beside_bytes += lot.beside_bytes

    def remove(self, name: Name) -> Lot:
        lot = self._lots.pop(name)
        self.beside_bytes -= lot.beside_bytes
        return lot

    def take(self, name: Name, ranges: Iterable[Range]) -> Lot:
        """Part of a lot, or all of it, out of here; what remains is renamed."""
        lot = self.remove(name)
        taken = mask_of(ranges, lot.base)
        invariant(taken & ~lot.mask == 0, "only what is in a lot can be taken from it")
        rest = lot.mask & ~taken
        if rest:
            left = lot.part(rest, lot.attempt, lot.due_ms)
            left.reason = lot.reason
            self.add(left)
        return lot.part(taken, lot.attempt)

    def clear(self) -> None:
        self._lots.clear()
        self.beside_bytes = 0


class UnheldLots(LotTable):
    """What can be handed out again, now or later."""

    def __init__(self) -> None:
        super().__init__()
        self._returned: OrderedDict[Name, Lot] = OrderedDict()
        self._due: OrderedDict[Name, Lot] = OrderedDict()
        self._heap: list[tuple[int, Name]] = []  # may name lots that are gone: seen when they come up
        self._blocks: dict[int, dict[Name, Lot]] = {}

    def add(self, lot: Lot) -> None:
        super().add(lot)
        if lot.due_ms:
            heapq.heappush(self._heap, (lot.due_ms, lot.name))
        else:
            self._returned[lot.name] = lot
        for block in _blocks_of(lot):
            self._blocks.setdefault(block, {})[lot.name] = lot

    def gather(self, lot: Lot) -> None:
        """Add one that is ready, together with another such one where a lot can hold both: what is parked becomes ready
        message by message, and a response has room for a few lots only."""
        end = lot.base + lot.mask.bit_length()
        near = self._blocks.get(lot.base >> _BLOCK_BITS, {}).values()
        others = [each for each in near if _may_join(each, lot, end)]
        if not others:
            self.add(lot)
            return
        other = min(others, key=lambda each: each.name)
        if other.base < lot.base:
            other.mask |= lot.mask << lot.base - other.base
            for block in _blocks_of(other):
                self._blocks.setdefault(block, {})[other.name] = other
            return
        self.remove(other.name)
        self.add(Lot(lot.base, lot.mask | other.mask << other.base - lot.base, lot.attempt))

    def remove(self, name: Name) -> Lot:
        lot = super().remove(name)
        if lot.due_ms:
            self._due.pop(name, None)
        else:
            del self._returned[name]
        for block in _blocks_of(lot):
            lots = self._blocks[block]
            del lots[name]
            if not lots:
                del self._blocks[block]
        return lot

    def clear(self) -> None:
        super().clear()
        for part in (self._returned, self._due, self._heap, self._blocks):
            part.clear()

    def ready(self, now_ms: int) -> Iterator[Lot]:
        """What may be handed out now: what was handed back first, then what is due."""
        if not self._lots:
            return iter(())
        self._promote(now_ms)
        return chain(self._returned.values(), self._due.values())

    def next_due_ms(self, now_ms: int) -> int | None:
        """When something falls due that is not due yet."""
        self._promote(now_ms)
        return self._heap[0][0] if self._heap else None

    def rebuild_heap(self) -> None:
        """Leave out of the heap what is gone: after a replay, most of it."""
        self._heap = [(lot.due_ms, lot.name) for lot in self if lot.due_ms and lot.name not in self._due]
        heapq.heapify(self._heap)

    def touching(self, first: int, count: int) -> list[Lot]:
        """Lots with an open message in that range, by sequence."""
        blocks = range(first >> _BLOCK_BITS, (first + count - 1 >> _BLOCK_BITS) + 1)
        found = {lot.name: lot for block in blocks for lot in self._blocks.get(block, {}).values()}
        return sorted((lot for lot in found.values() if _overlap(lot, first, count)), key=lambda lot: lot.name)

    def _promote(self, now_ms: int) -> None:
        heap = self._heap
        while heap:
            due_ms, name = heap[0]
            lot = self._lots.get(name)
            if lot is not None and lot.due_ms == due_ms:
                if due_ms > now_ms:
                    return
                self._due[name] = lot
            heapq.heappop(heap)


def _may_join(other: Lot, lot: Lot, end: int) -> bool:
    """Whether both are ready, at the same attempt, and near enough to each other."""
    if other.due_ms or other.attempt != lot.attempt:
        return False
    span = max(end, other.base + other.mask.bit_length()) - min(other.base, lot.base)
    return span <= limits.LOT_MESSAGES_MAX


def _blocks_of(lot: Lot) -> range:
    last = lot.base + lot.mask.bit_length() - 1
    return range(lot.base >> _BLOCK_BITS, (last >> _BLOCK_BITS) + 1)


def _overlap(lot: Lot, first: int, count: int) -> bool:
    return open_in(lot, first, count) != 0


def open_in(lot: Lot, first: int, count: int) -> int:
    """The bits of a lot that are open and in that range."""
    start = max(first - lot.base, 0)
    end = min(first + count - lot.base, lot.mask.bit_length())
    return lot.mask & (((1 << end - start) - 1) << start) if end > start else 0
