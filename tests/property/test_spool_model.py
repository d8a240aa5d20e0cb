"""Through all faults of broker, network, process and disk, a message with a receipt of either kind is stored once, in
order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.client.spool.drain import SpooledBatch
from fairway.client.spool.journal import Journal
from fairway.errors import OutcomeUnknown, StorageFault
from fairway.protocol.producer_stream import ProducerStream
from tests.property.spool_world import SpoolWorld

STEPS = 300


def run(seed: int) -> SpoolWorld:
    world = SpoolWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.heal()
    return world


def check(world: SpoolWorld) -> Counter[str]:
    """The promises, one by one; how often each kind of outcome came."""
    stored = Counter(slot.payload for slot in world.broker.log)
    places = {slot.payload: slot.sequence for slot in world.broker.log}
    outcomes: Counter[str] = Counter({"lives": world.lives, "power cuts": world.power_cuts})
    last: dict[str, int] = {}
    for each in world.check_receipts(stored, outcomes):
        sequence = places[each.payload]
        assert sequence > last.get(each.subject, -1), "in the order in which they were sent"
        last[each.subject] = sequence
    assert world.spool.messages == 0, "the spool is drained"
    assert (world.producing.messages, world.producing.size_bytes) == (0, 0)
    return outcomes


def check_all(seeds: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(seeds):
        met += check(run(seed))
    return met


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_receipts_of_both_kinds_tell_the_truth(seed: int) -> None:
    check(run(seed))


def test_every_kind_of_outcome_is_met() -> None:
    """The model would prove nothing if it met only fair weather."""
    met = check_all(15)
    assert met["lives"] > 30
    assert met["power cuts"] > 10
    assert met["spooled"] > 300
    assert met["aside"] > 0
    assert met["NoneType"] > met["spooled"]


def test_a_disk_that_fails_a_sync_ends_the_spool_and_says_so() -> None:
    """Nobody knows what is on it: no more receipts, and the next message is refused with the reason."""
    world = SpoolWorld(3)
    world.broker.is_away = True
    world.disks[world.own.number].fail_sync()
    while not world.sent:
        world.send()
    for _ in range(200):
        world.clock.advance(20)
        world.move(is_whole=True)
    assert [type(each.batch.exception()) for each in world.sent] == [OutcomeUnknown] * len(world.sent)
    with pytest.raises(StorageFault, match=r"the spool spool has failed: cannot sync"):
        world.producing.add("red", b"x")


def test_a_spool_that_gives_new_numbers_to_what_was_sent_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be stored under its number goes out under another."""
    monkeypatch.setattr(ProducerStream, "hand_over", _as_if_new)
    with pytest.raises(AssertionError):
        check_all(60)


def _as_if_new(lane: ProducerStream) -> bool:
    spooled = lane.waiting.popleft()
    if spooled.identity is None:
        lane._unnumbered -= spooled.pending.count
    spooled.number(lane._stream)
    return False


def test_a_spool_that_answers_before_the_sync_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Journal.__init__

    def hasty(self: Journal, *args: object, **settings: object) -> None:
        make(self, *args, **{**settings, "is_synced": False})  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "__init__", hasty)
    with pytest.raises(AssertionError):
        check_all(60)


def test_a_drain_that_forgets_its_doubts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost connection it begins the stream anew, as if nothing had arrived."""
    from fairway.client.spool import drain

    judge = drain.SpoolDrain._mend

    def careless(self: drain.SpoolDrain, flow: drain.SubjectQueue, now_ns: int) -> None:
        head: SpooledBatch = next(flow.batches())
        judge(self, flow, now_ns)
        if not flow.is_held and head.is_doubtful:
            self._restream(flow, head)

    monkeypatch.setattr(drain.SpoolDrain, "_mend", careless)
    with pytest.raises(AssertionError):
        check_all(60)
