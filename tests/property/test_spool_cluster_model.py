"""Through all faults of brokers, network, process and disk, and wherever subjects go, a message with a receipt of
either kind is stored once, in one broker group. The messages of a key of an ordered subject keep their order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry
from tests.property.spool_cluster_world import ORDERED, ClusterWorld

STEPS = 300


def run(seed: int) -> ClusterWorld:
    world = ClusterWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.heal()
    return world


def check(world: ClusterWorld) -> Counter[str]:
    """The promises, one by one; how often each kind of outcome came."""
    stored = Counter(slot.payload for log in world.logs().values() for slot in log)
    outcomes = Counter(world.counts)
    world.check_receipts(stored, outcomes)
    assert world.spool.messages == 0, f"the spool is drained: {world.spool.state()}"
    assert world.unsettled == 0
    _check_order(world)
    return outcomes


def _check_order(world: ClusterWorld) -> None:
    pairs = zip(world.sent, world.keys, strict=True)
    key_of = {each.payload: key for each, key in pairs if each.batch.exception() is None}
    for name, log in world.logs().items():
        last: dict[str, int] = {}
        for slot in log:
            key = key_of.get(slot.payload)
            if slot.subject == ORDERED and key is not None:
                number = int(slot.payload)
                assert number > last.get(key, -1), f"{key} in {name}: in the order in which they were sent"
                last[key] = number


def check_all(seeds: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(seeds):
        met += check(run(seed))
    return met


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_receipts_of_both_kinds_tell_the_truth(seed: int) -> None:
    check(run(seed))


def test_every_kind_of_outcome_is_met() -> None:
    """The model would prove nothing if it met only fair weather."""
    met = check_all(10)
    assert met["lives"] > 20
    assert met["power cuts"] > 5
    assert met["spooled"] > 200


def test_a_spool_that_sends_elsewhere_what_may_be_stored_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of unknown outcome is not pinned to its group."""

    def careless(self: Journal, entry: SpoolEntry) -> bool:
        return False

    monkeypatch.setattr(Journal, "may_be_stored", careless)
    with pytest.raises(AssertionError):
        check_all(60)


def test_a_spool_that_does_not_remember_where_it_sent_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last life sent, and where to, is not looked at in the next."""
    read = Journal._read

    def forgetful(self: Journal, survey: object) -> None:
        read(self, survey)  # type: ignore[arg-type]
        self.doubts.clear()
        self.placed.clear()

    monkeypatch.setattr(Journal, "_read", forgetful)
    with pytest.raises(AssertionError):
        check_all(60)
