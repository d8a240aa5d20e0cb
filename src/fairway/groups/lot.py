"""A lot: a span of sequences that goes about as one thing, with a bit mask of the messages in it that are still open.

There is no global list of intervals: a lot is found by its name, (first sequence, attempt), and what happens to it
costs the same whatever else is in flight (measured in the prototype: 20 k acks/s with a list, 2.4 M/s with lots).

Bit i of the mask is the message at `base + i`. A lot is re-based on its first open message, and so renamed, whenever
it changes hands; while it is held it keeps its name, because its holder knows it by that.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fairway import limits
from fairway.errors import invariant
from fairway.groups.attempts import Attempts

Range = tuple[int, int]  # first sequence, count
Name = tuple[int, int]  # first sequence, attempt


class Lot(msgspec.Struct, eq=False, gc=False):
    """Some messages of one subject, all at the same attempt, in one place. No work for the collector."""

    base: int
    mask: int
    attempt: int
    due_ms: int = 0  # while nobody holds it: when it may be handed out, wall clock; 0 is at once
    number: int = 0  # while it is held: the response that it went out in, the last one
    handed_ns: int = 0  # and when, monotonic
    reason: bytes = b""  # while it dies: why
    history: Attempts = ()  # those that failed, of all its messages
    parts: tuple[tuple[int, int], ...] = ()  # (response, mask) where it went out in several, one after another

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
        """Memory of what a lot has beside itself: failed attempts, parts, why it dies."""
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
        return self.mask & sum(mask for each, mask in self.parts if each <= number)  # which share no bit

    def part(self, mask: int, attempt: int, due_ms: int = 0) -> Lot:
        """A lot of its own from some of the messages, named for the first of them."""
        shift = (mask & -mask).bit_length() - 1
        return Lot(self.base + shift, mask >> shift, attempt, due_ms, history=self.history)


def full(first: int, count: int, attempt: int) -> Lot:
    return Lot(first, (1 << count) - 1, attempt)


def gathered(sequences: Iterable[int]) -> list[Lot]:
    """Messages that were never handed out, ascending, as few lots."""
    lots: list[Lot] = []
    for sequence in sequences:
        offset = sequence - lots[-1].base if lots else limits.LOT_MESSAGES_MAX
        if offset < limits.LOT_MESSAGES_MAX:
            lots[-1].mask |= 1 << offset
        else:
            lots.append(Lot(sequence, 1, attempt=1))
    return lots


def mask_of(ranges: Iterable[Range], base: int) -> int:
    """The bits of these ranges. Nothing is shifted that does not lie in a lot at `base`."""
    mask = 0
    for first, count in ranges:
        offset = first - base
        invariant(offset >= 0 and 0 < count <= limits.LOT_MESSAGES_MAX - offset, "a range must lie in its lot")
        mask |= ((1 << count) - 1) << offset
    return mask


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
