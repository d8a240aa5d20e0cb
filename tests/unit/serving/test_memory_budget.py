"""Bounds that many share: who is refused, who has to go."""

from __future__ import annotations

from contextlib import suppress

import pytest

from fairway.errors import Code, InvariantViolated, Refused
from fairway.limits import KIB, MIB
from fairway.serving.memory_budget import Allowance, Budget


def test_an_allowance_is_taken_and_given_back() -> None:
    allowance: Allowance[str] = Allowance(800, "wait")
    allowance.take("a", 300)
    with pytest.raises(Refused, match="too many bytes wait") as refused:
        allowance.take("a", 101)
    assert (refused.value.code, allowance.taken_bytes) == (Code.BUSY, 300)
    assert refused.value.retry_after_ms
    allowance.take("a", 100)
    allowance.give_back("a", 400)
    assert allowance.taken_bytes == 0
    allowance.take("a", 100)
    with pytest.raises(InvariantViolated):
        allowance.give_back("a", 101)


def test_one_that_is_larger_than_the_allowance_may_still_be_there_alone() -> None:
    allowance: Allowance[str] = Allowance(100, "wait")
    allowance.take("a", 1_000)
    with pytest.raises(Refused):
        allowance.take("b", 1, is_urgent=True)


def fill(
    allowance: Allowance[int], holder: int, size: int, *, is_urgent: bool = False, is_patient: bool = False
) -> None:
    """Take as often as that is granted."""
    with suppress(Refused):
        while True:
            allowance.take(holder, size, is_urgent=is_urgent, is_patient=is_patient)


def test_any_number_of_long_polls_leaves_room_for_a_large_batch() -> None:
    allowance: Allowance[int] = Allowance(128 * MIB, "wait")
    for holder in range(50):
        fill(allowance, holder, 32 * KIB, is_patient=True)
    assert allowance.taken_bytes <= 64 * MIB
    allowance.take(-1, 24 * MIB)


def test_nobody_can_have_all_and_what_is_urgent_finds_room_beside_any_number_who_take_what_they_can() -> None:
    allowance: Allowance[int] = Allowance(80 * MIB, "wait")
    fill(allowance, 0, 64 * KIB)
    assert allowance.taken_bytes <= 40 * MIB
    for holder in range(1, 1_000):
        fill(allowance, holder, 4 * KIB)
    fill(allowance, -1, 32 * KIB, is_urgent=True)
    allowance.take(-2, 32 * KIB, is_urgent=True)
    assert not allowance.is_exhausted


def test_one_that_is_gone_holds_nothing() -> None:
    allowance: Allowance[str] = Allowance(800, "wait")
    allowance.take("a", 100)
    allowance.take("b", 100)
    allowance.forget("a")
    assert allowance.taken_bytes == 100
    allowance.give_back("a", 100)
    assert allowance.taken_bytes == 100


class Holders:
    """Names with weights; an evicted one weighs nothing any more."""

    def __init__(self, bytes_max: int) -> None:
        self.weights: dict[str, int] = {}
        self.evicted: list[str] = []
        self.budget: Budget[str] = Budget(bytes_max, lambda name: self.weights.get(name, 0), self._evict)

    def _evict(self, name: str) -> None:
        self.evicted.append(name)
        self.weights[name] = 0

    def hold(self, name: str, size: int, *, anew: bool = False) -> None:
        self.weights[name] = size
        self.budget.note(name, anew=anew)


def test_whoever_has_held_on_longest_lets_go_first_and_makes_some_room() -> None:
    holders = Holders(100)
    for name in "abcd":
        holders.hold(name, 25)
    assert not holders.evicted
    holders.hold("e", 10)
    assert holders.evicted == ["a", "b"]  # one would do, but the next byte would need another
    assert (holders.budget.taken_bytes, holders.budget.evictions) == (60, 2)


def test_growing_keeps_ones_place_and_beginning_anew_does_not() -> None:
    holders = Holders(100)
    for name in "ab":
        holders.hold(name, 10)
    holders.hold("a", 20)
    holders.hold("a", 30, anew=True)
    holders.hold("c", 65)
    assert holders.evicted == ["b", "a"]


def test_what_went_away_without_a_word_is_weighed_again_before_anybody_has_to_go() -> None:
    holders = Holders(100)
    holders.hold("a", 90)
    holders.weights["a"] = 5
    holders.hold("b", 90)
    assert not holders.evicted
    assert holders.budget.taken_bytes == 95


def test_who_is_gone_holds_nothing() -> None:
    holders = Holders(100)
    holders.hold("a", 90)
    holders.budget.forget("a")
    holders.budget.forget("a")
    assert holders.budget.taken_bytes == 0
    holders.hold("a", 0)
    assert holders.budget.taken_bytes == 0
