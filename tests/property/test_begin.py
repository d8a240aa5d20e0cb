"""`begin`, which looks at lots, lets the same messages go as a look at each message by its definition."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from fairway.protocol.delivery import LazyBatch, Message, begin, may_begin
from fairway.protocol.lots import OPEN, RELEASE, ConsumerLot, Heir, SettlementQueue
from fairway.protocol.messages import SequenceRange, WireLot
from fairway.runtime.clock import ManualClock

COUNT = 4
NO_PAGE = cast(LazyBatch, None)
lots = st.fixed_dictionaries(
    {
        "fence": st.sampled_from([0, 7]),
        "is_final": st.booleans(),
        "is_lapsed": st.booleans(),
        "heir_of": st.none() | st.integers(0, COUNT - 1),
        "is_heir_lapsed": st.booleans(),
    }
)
leases = st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2))


def made(queue: SettlementQueue, at: int, told: dict[str, Any]) -> ConsumerLot:
    def lot() -> ConsumerLot:
        wire = WireLot(at, 1, [SequenceRange(at, COUNT)], told["fence"])
        return ConsumerLot(queue, wire, is_inbox=False, is_final=told["is_final"])

    made = lot()
    made.fill(0, COUNT, OPEN)
    made.is_lapsed = told["is_lapsed"]
    if told["heir_of"] is not None:
        heir = lot()
        heir.is_lapsed = told["is_heir_lapsed"]
        made.heirs.append(Heir(at + told["heir_of"], heir))
    return made


@given(st.lists(lots, max_size=4), leases, st.lists(st.integers(0, 4 * COUNT - 1), unique=True))
def test_begin_lets_go_what_its_definition_says(
    told: list[dict[str, Any]], lease: tuple[bool, int, int], left_out: list[int]
) -> None:
    clock = ManualClock()
    clock.advance(1)
    queue = SettlementQueue("orders", "billing", clock, None)
    queue.lease.is_attached = lease[0]
    queue.lease.end_ns, queue.lease.sure_ns = (each * 1_000_000 for each in lease[1:])
    made_lots = [made(queue, number * COUNT, each) for number, each in enumerate(told)]
    messages = [
        Message(b"", lot.first + index, lot, NO_PAGE)
        for lot in made_lots
        for index in range(COUNT)
        if lot.first + index not in left_out
    ]
    wanted = [each for each in messages if not (each._lot.has_lapsed(each.sequence) or each._lot.is_detached)]
    assert [each for each in messages if may_begin(each)] == wanted
    assert begin(messages) == wanted
    states = [each._lot.state[each.sequence - each._lot.first] for each in messages]
    assert states == [OPEN if each in wanted else RELEASE for each in messages]
