"""What an actor keeps through a nap: the time that it did not use, up to a millisecond, and never more."""

from __future__ import annotations

import pytest

from fairway.scheduling.actor import Actor
from fairway.scheduling.virtual_time import CREDIT_NS, VirtualTime

MS = 1_000_000


def actor_of(virtual_ns: float, *, is_new: bool = False) -> Actor:
    actor = Actor("a", 1.0, 0.0, 0)
    actor.virtual_ns = virtual_ns
    actor.slices = 0 if is_new else 1
    return actor


@pytest.mark.parametrize(
    ("used_ns", "starts_ns"),
    [
        (10 * MS, 10 * MS),  # nobody ran meanwhile
        (10 * MS - CREDIT_NS // 2, 10 * MS - CREDIT_NS // 2),  # a nap: it keeps what it had not used
        (0, 10 * MS - CREDIT_NS),  # a day: it keeps a millisecond
        (12 * MS, 12 * MS),  # it has used more than the others: sleeping does not make up for that
    ],
)
def test_where_one_that_comes_back_starts(used_ns: int, starts_ns: int) -> None:
    order = VirtualTime()
    order.advance(0, 1.0, 10 * MS)
    actor = actor_of(used_ns)
    order.enter(actor)
    assert actor.virtual_ns == starts_ns


def test_a_newcomer_has_no_credit() -> None:
    order = VirtualTime()
    order.advance(0, 1.0, 10 * MS)
    actor = actor_of(0, is_new=True)
    order.enter(actor)
    assert actor.virtual_ns == 10 * MS


def test_many_naps_add_up_to_one_credit() -> None:
    """One that comes back a thousand times, each time when another has run, gets half of the time and one credit."""
    order = VirtualTime()
    napping, busy = actor_of(0), actor_of(0)
    used_ns = {"napping": 0, "busy": 0}
    for _ in range(1_000):
        order.enter(napping)
        while napping.virtual_ns <= busy.virtual_ns:
            order.charge(napping, MS // 10)
            used_ns["napping"] += MS // 10
        order.charge(busy, MS // 2)
        used_ns["busy"] += MS // 2
        order.advance(0, 1.0, busy.virtual_ns)
    assert used_ns["napping"] <= used_ns["busy"] + CREDIT_NS
