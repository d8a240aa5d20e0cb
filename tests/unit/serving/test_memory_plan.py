"""How a ceiling is divided, and what is said where the parts do not fit under it."""

from __future__ import annotations

import re

import pytest

from fairway import limits
from fairway.errors import Misuse
from fairway.limits import MIB
from fairway.serving.memory_plan import MemoryNeeds, MemoryPlan, broker_plan, delay_plan, meta_plan

BUFFER_MIB = 128
PENDING_MAX = limits.DELAY_PENDING_MAX


def test_the_default_ceiling_has_room_for_all_defaults() -> None:
    alone = broker_plan(limits.MEMORY_MIB, BUFFER_MIB)
    both = broker_plan(limits.MEMORY_MIB, BUFFER_MIB, PENDING_MAX)
    for plan in (alone, both):
        assert plan.subjects_max >= limits.SUBJECTS_MAX
        assert plan.groups_bytes >= limits.GROUPS_MAX * (limits.GROUP_BYTES + limits.GROUP_RESERVE_BYTES)
        assert plan.connections_max >= limits.CONNECTIONS_MAX
    assert delay_plan(limits.MEMORY_MIB, BUFFER_MIB, PENDING_MAX).delay_subjects_max >= limits.SUBJECTS_MAX
    assert meta_plan(limits.MEMORY_MIB, BUFFER_MIB).registry_bytes >= limits.SUBJECTS_MAX * limits.NODE_BYTES


def _total(plan: MemoryPlan) -> float:
    """The least that all of it takes at its worst, checkpoint included."""
    pictured = 1.5 * plan.groups_bytes + 3 * (plan.streams_bytes + plan.delay_streams_bytes + plan.registry_bytes)
    names = 2 * (plan.names_bytes + plan.delay_names_bytes)
    return plan.fixed_bytes + pictured + names + plan.connections_max * limits.CONNECTION_BYTES


@pytest.mark.parametrize("memory_mib", [1_024, 2_000, 4_096, 30_000])
def test_parts_and_budgets_leave_an_eighth_for_the_allocator(memory_mib: int) -> None:
    plans = [broker_plan(memory_mib, 66), delay_plan(memory_mib, 66, 1_000_000), meta_plan(memory_mib, 66)]
    if memory_mib > 1_500:
        plans.append(broker_plan(memory_mib, 66, 1_000_000))
    for plan in plans:
        assert _total(plan) <= memory_mib * MIB * 7 / 8


NEEDS = [
    MemoryNeeds(66, has_broker=True),
    MemoryNeeds(300, has_broker=True),
    MemoryNeeds(128, has_broker=True, pending_max=15_000_000),
    MemoryNeeds(128, pending_max=15_000_000),
    MemoryNeeds(128),
]


@pytest.mark.parametrize("needs", NEEDS)
def test_the_smallest_ceiling_is_the_smallest(needs: MemoryNeeds) -> None:
    assert needs.left(needs.smallest_mib) >= limits.BUDGETS_BYTES_MIN
    with pytest.raises(Misuse, match=f"Give --memory-mib {needs.smallest_mib}"):
        needs.left(needs.smallest_mib - 1)


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("less_mib", [1, 50, 200, 700])
def test_whatever_is_proposed_fits(needs: MemoryNeeds, less_mib: int) -> None:
    memory_mib = needs.smallest_mib - less_mib
    with pytest.raises(Misuse) as caught:
        needs.left(memory_mib)
    proposed = str(caught.value).rpartition("Give ")[2]
    if found := re.search(r"--buffer-mib (\d+)", proposed):
        assert int(found[1]) >= 66
        assert needs._replace(buffer_mib=int(found[1])).left(memory_mib)
    if found := re.search(r"--pending-max (\d+)", proposed):
        assert needs._replace(pending_max=int(found[1])).left(memory_mib)


def test_the_sentence_names_the_parts() -> None:
    with pytest.raises(Misuse) as caught:
        broker_plan(1_000, 128)
    sentence = str(caught.value)
    for part in ("--memory-mib 1000", "the process 96", "3 x --buffer-mib 128: 384", "appends 130", "indexes 178"):
        assert part in sentence
