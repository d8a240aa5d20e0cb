"""Lots: ranges of messages that move as one, and the tables of lots that nobody holds.

A `Lot` is a span of sequences with a bit mask of the messages that are still open. Bit i of the mask is the message at
`base + i`. There is no global list of intervals. A lot is found by its name, (first sequence, attempt), so an operation
costs the same whatever else is in flight. (A prototype made 20 k acks/s with a list, 2.4 M/s with lots.) A lot is
re-based on its first open message, and so renamed, whenever it changes hands. While a member holds the lot it keeps its
name, because the member knows the lot by it.

`UnheldLots` holds lots that can be handed out again: handed back, waiting for their next attempt, or orphaned by a
crash. Lots that die are in a plain `LotTable`.

    returned   due at 0: at once, by sequence
    waiting    due at a time: in a heap, from which lots that are due move on to `_due`

The move from waiting to due is no event, because it follows from the time. Every unheld lot is named for its first open
message, so a PULL in the log says exactly which lot it took.

Returned lots go out by sequence, not by the time of their return. A PULL that takes a part of a lot adds the rest
again. By time, the rest would go behind all other lots, and the next consumer would begin behind it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, compress

import msgspec

from fairway import limits
from fairway.errors import InvariantViolated, invariant
from fairway.group_events import Range
from fairway.groups.attempts import Attempts

Name = tuple[int, int]  # first sequence, attempt


class Lot(msgspec.Struct, eq=False, gc=False):
    """Messages of one subject, all at the same attempt, in one place. The garbage collector ignores lots."""

    base: int
    mask: int
    attempt: int
    due_ms: int = 0  # while unheld: the earliest handout, wall clock; 0 is at once
    number: int = 0  # while held: the number of its last response
    handed_ns: int = 0  # while held: the time of that handout, monotonic
    reason: bytes = b""  # while it dies: the reason
    history: Attempts = ()  # the failed attempts, shared by all its messages
    parts: tuple[tuple[int, int], ...] = ()  # (response, mask) if it went out in several responses, in order

    @property
    def name(self) -> Name:
        return self.base, self.attempt

    @property
    def open_count(self) -> int:
        return self.mask.bit_count()

    @property
    def first_open(self) -> int:
        return self.base + (self.mask & -self.mask).bit_length() - 1

    @property
    def ranges(self) -> tuple[Range, ...]:
        return ranges_of(self.mask, self.base)

    @property
    def beside_bytes(self) -> int:
        """Memory of a lot's extras: failed attempts, parts, and the reason of its death."""
        if not (self.history or self.parts or self.reason):
            return 0
        beside = len(self.history) * limits.ATTEMPT_BYTES + len(self.parts) * limits.LOT_PART_BYTES
        return beside + len(self.reason)

    def open_in_response(self, number: int) -> int:
        """The bits that are open and went out in that response."""
        if not self.parts:
            return self.mask if number == self.number else 0
        return self.mask & next((mask for each, mask in self.parts if each == number), 0)

    def open_up_to(self, number: int) -> int:
        """The bits that are open and went out in that response or an earlier one."""
        if number >= self.number:
            return self.mask
        return self.mask & sum(mask for each, mask in self.parts if each <= number)  # the masks share no bit

    def part(self, mask: int, attempt: int, due_ms: int = 0) -> Lot:
        """Make a lot of its own from some of the messages, named for the first of them."""
        shift = (mask & -mask).bit_length() - 1
        return Lot(self.base + shift, mask >> shift, attempt, due_ms, history=self.history)


def full(first: int, count: int, attempt: int) -> Lot:
    return Lot(first, (1 << count) - 1, attempt)


def gathered(sequences: Iterable[int]) -> list[Lot]:
    """Put messages that were never handed out, ascending, into as few lots as possible."""
    lots: list[Lot] = []
    for sequence in sequences:
        offset = sequence - lots[-1].base if lots else limits.LOT_MESSAGES_MAX
        if offset < limits.LOT_MESSAGES_MAX:
            lots[-1].mask |= 1 << offset
        else:
            lots.append(Lot(sequence, 1, attempt=1))
    return lots


def mask_of(ranges: Iterable[Range], base: int) -> int:
    """The bits of these ranges. Ranges outside a lot at `base` raise before any shift."""
    mask = 0
    for first, count in ranges:
        offset = first - base
        if offset < 0 or not 0 < count <= limits.LOT_MESSAGES_MAX - offset:
            raise InvariantViolated("a range must lie in its lot")
        mask |= ((1 << count) - 1) << offset
    return mask


def sequences_of(mask: int, base: int) -> Iterator[int]:
    """The sequences of the ones, lowest first. Loops in C."""
    bits = f"{mask:b}".encode().translate(_BITS)[::-1]
    return compress(range(base, base + len(bits)), bits)


def ranges_of(mask: int, base: int) -> tuple[Range, ...]:
    """The runs of ones, lowest first."""
    found = []
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        base += gap
        run = (~mask & (mask + 1)).bit_length() - 1
        found.append((base, run))
        mask >>= run
        base += run
    return tuple(found)


def head_of(mask: int, count: int) -> int:
    """The lowest `count` ones of a mask."""
    head = 0
    for first, run in ranges_of(mask, 0):
        taken = min(run, count)
        head |= ((1 << taken) - 1) << first
        count -= taken
        if not count:
            break
    return head


_BITS = bytes.maketrans(b"01", b"\0\1")
_STALE_NAMES_MAX = 64  # beyond this many and twice the lots, the heap is rebuilt
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
        """Take a part of a lot, or all of it; the rest is renamed."""
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
    """Lots that nobody holds and that can be handed out again, now or later."""

    def __init__(self) -> None:
        super().__init__()
        self._returned: dict[Name, Lot] = {}
        self._by_sequence: list[Name] = []  # a heap of returned lots; may name gone lots, and lots twice
        self._due: OrderedDict[Name, Lot] = OrderedDict()
        self._heap: list[tuple[int, Name]] = []  # may have names of lots that are gone: skipped when they come up
        self._blocks: dict[int, dict[Name, Lot]] = {}

    def add(self, lot: Lot) -> None:
        super().add(lot)
        if lot.due_ms:
            heapq.heappush(self._heap, (lot.due_ms, lot.name))
        else:
            self._return(lot.name, lot)
        for block in _blocks_of(lot):
            self._blocks.setdefault(block, {})[lot.name] = lot

    def gather(self, lot: Lot) -> None:
        """Add a lot that is ready, merged with another ready lot if one lot can hold both. Parked messages become ready
        one by one, and a response has room for a few lots only."""
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
        for part in (self._returned, self._by_sequence, self._due, self._heap, self._blocks):
            part.clear()

    def ready(self, now_ms: int) -> Iterator[Lot]:
        """Lots that may be handed out now: returned lots by sequence, then lots that are due."""
        if not self._lots:
            return iter(())
        self._promote(now_ms)
        return chain(self._returned_by_sequence(), self._due.values())

    def next_due_ms(self, now_ms: int) -> int | None:
        """When the next lot falls due that is not due yet."""
        self._promote(now_ms)
        return self._heap[0][0] if self._heap else None

    def rebuild_heap(self) -> None:
        """Remove the names of gone lots from the heap: after a replay, most of it."""
        self._heap = [(lot.due_ms, lot.name) for lot in self if lot.due_ms and lot.name not in self._due]
        heapq.heapify(self._heap)

    def touching(self, first: int, count: int) -> list[Lot]:
        """Lots with an open message in that range, by sequence."""
        blocks = range(first >> _BLOCK_BITS, (first + count - 1 >> _BLOCK_BITS) + 1)
        found = {lot.name: lot for block in blocks for lot in self._blocks.get(block, {}).values()}
        return sorted((lot for lot in found.values() if open_in(lot, first, count)), key=lambda lot: lot.name)

    def _return(self, name: Name, lot: Lot) -> None:
        self._returned[name] = lot
        heapq.heappush(self._by_sequence, name)
        if len(self._by_sequence) > 2 * len(self._returned) + _STALE_NAMES_MAX:
            self._by_sequence = sorted(self._returned)

    def _returned_by_sequence(self) -> Iterator[Lot]:
        """The heap in order, without changing it: a chosen lot leaves the heap only when its PULL is applied."""
        heap = self._by_sequence
        while heap and heap[0] not in self._returned:
            heapq.heappop(heap)
        next_up = [(heap[0], 0)] if heap else []
        before: Name | None = None
        while next_up:
            name, at = heapq.heappop(next_up)
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(next_up, (heap[child], child))
            lot = self._returned.get(name)
            if lot is not None and name != before:
                yield lot
            before = name

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
    """Whether both lots are ready, at the same attempt, and near enough to each other."""
    if other.due_ms or other.attempt != lot.attempt:
        return False
    span = max(end, other.base + other.mask.bit_length()) - min(other.base, lot.base)
    return span <= limits.LOT_MESSAGES_MAX


def _blocks_of(lot: Lot) -> range:
    last = lot.base + lot.mask.bit_length() - 1
    return range(lot.base >> _BLOCK_BITS, (last >> _BLOCK_BITS) + 1)


def open_in(lot: Lot, first: int, count: int) -> int:
    """The bits of a lot that are open and in that range."""
    start = max(first - lot.base, 0)
    end = min(first + count - lot.base, lot.mask.bit_length())
    return lot.mask & (((1 << end - start) - 1) << start) if end > start else 0


def open_among(lot: Lot, ranges: Iterable[Range]) -> int:
    """The bits of a lot that are open and in any of these ranges."""
    mask = 0
    for first, count in ranges:
        mask |= open_in(lot, first, count)
    return mask
