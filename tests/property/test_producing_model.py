"""Through all faults on the way, a receipt means stored once and in order, and "not sent" means not stored."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.errors import NotSent, OutcomeUnknown, Refused
from fairway.protocol.producer_stream import SealedBatch, StreamIdentity
from tests.property.producing_world import World

STEPS = 250


def run(seed: int) -> World:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.heal()
    return world


def check(world: World) -> Counter[str]:
    """The promises, one by one; how often each kind of outcome came."""
    stored = Counter(slot.payload for slot in world.broker.log)
    places = {(slot.subject, slot.sequence): slot.payload for slot in world.broker.log}
    last: dict[str, int] = {}
    outcomes: Counter[str] = Counter()
    for each in world.sent:
        assert each.batch.done(), "everything is settled in the end"
        error = each.batch.exception()
        outcomes[type(error).__name__] += 1
        if error is None:
            receipt = each.batch.receipt()
            sequence = receipt.first_sequence + each.index
            assert stored[each.payload] == 1, "a receipt: stored, and once"
            assert places[each.subject, sequence] == each.payload, "where the receipt says"
            assert sequence > last.get(each.subject, -1), "in the order in which they were sent"
            last[each.subject] = sequence
        elif isinstance(error, OutcomeUnknown):
            assert stored[each.payload] <= 1, "unknown: at most once"
        else:
            assert isinstance(error, (NotSent, Refused)), error
            assert stored[each.payload] == 0, f"certainly not stored: {error}"
    assert (world.producing.messages, world.producing.size_bytes) == (0, 0)
    return outcomes


def check_all(seeds: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(seeds):
        met += check(run(seed))
    return met


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_receipts_and_refusals_tell_the_truth(seed: int) -> None:
    check(run(seed))


def test_every_kind_of_outcome_is_met() -> None:
    """The model would prove nothing if it met only fair weather."""
    met = check_all(60)
    assert met.keys() >= {"NoneType", "NotSent", "OutcomeUnknown", "Refused"}
    assert met["NoneType"] > met.total() / 4


def test_a_producer_that_forgets_its_doubts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is sent under a new number, as if it were certainly not stored."""
    monkeypatch.setattr(SealedBatch, "is_doubtful", property(lambda _: False))
    with pytest.raises(AssertionError):
        check_all(60)


def test_a_producer_that_is_too_sure_of_a_hole_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before a hole is taken as not stored, too."""

    def cut(stream: StreamIdentity, _: int) -> None:
        stream.is_broken, stream.cut_at = True, 0

    monkeypatch.setattr(StreamIdentity, "cut", cut)
    with pytest.raises(AssertionError):
        check_all(200)
