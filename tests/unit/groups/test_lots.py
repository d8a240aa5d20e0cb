"""Masks and ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import InvariantViolated
from fairway.groups.lots import Lot, full, head_of, mask_of, ranges_of

MASKS = st.sets(st.integers(0, 999), min_size=1).map(lambda bits: sum(1 << bit for bit in bits))


@given(MASKS, st.integers(0, 2**63))
def test_a_mask_is_its_ranges(mask: int, base: int) -> None:
    ranges = ranges_of(mask, base)
    assert mask_of(ranges, base) == mask
    assert all(first + count < later for (first, count), (later, _) in pairwise(ranges))


@given(MASKS, st.integers(1, 1_000))
def test_the_head_of_a_mask_is_its_lowest_ones(mask: int, count: int) -> None:
    head = head_of(mask, count)
    assert head.bit_count() == min(count, mask.bit_count())
    assert head & ~mask == 0
    assert mask & ~head == 0 or head < (mask & ~head) & -(mask & ~head)


@given(MASKS, st.integers(0, 2**63))
def test_a_part_is_named_for_its_first_message(mask: int, base: int) -> None:
    part = Lot(base, mask, 3).part(mask, 4)
    assert part.mask & 1
    assert (part.name, part.ranges) == ((ranges_of(mask, base)[0][0], 4), ranges_of(mask, base))


@pytest.mark.parametrize("ranges", [[(9, 1)], [(10, 0)], [(10, 1_001)], [(1_010, 1)], [(2**64, 1)]])
def test_nothing_is_shifted_by_a_range_outside_the_lot(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(InvariantViolated):
        mask_of(ranges, 10)


def test_a_full_lot() -> None:
    assert full(5, 1_000, 1).ranges == ((5, 1_000),)
