"""Two producers for two brokers lend each other what they cannot bring to their own. Through all faults on the way, a
receipt means stored once, at one of them, and "not sent" means not stored at either."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.errors import FairwayError, NotSent, OutcomeUnknown, Refused
from fairway.protocol.producer_stream import SealedBatch
from fairway.protocol.receipts import BatchReceipt
from fairway.runtime.rng import SeededRng
from tests.property.producing_world import World

STEPS = 300


class Side(World):
    """One of the two; its payloads are its own."""

    def _fresh(self, count: int) -> list[bytes]:
        return [b"%d/%s" % (self.seed, payload) for payload in super()._fresh(count)]

    def repay(self, sealed: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        self.producing.repaid(sealed, outcome)


class Pair:
    """Both, at one time."""

    def __init__(self, seed: int) -> None:
        self.rng = SeededRng(f"pair {seed}")
        self.sides = (Side(2 * seed), Side(2 * seed + 1))
        self.lent = 0

    def step(self) -> None:
        at = self.rng.below(2)
        self._at_one_time(self.sides[at].step, at)
        if self.rng.below(6) == 0:
            self.lend(self.sides[at], self.sides[1 - at], ("red", "blue")[self.rng.below(2)])

    def _at_one_time(self, act: object, at: int) -> None:
        before_ns = self.sides[at].now_ns
        act()  # type: ignore[operator]
        self.sides[1 - at].clock.advance((self.sides[at].now_ns - before_ns) / 1e6)

    def lend(self, lender: Side, borrower: Side, subject: str) -> None:
        lent = lender.producing.lend(subject, is_due=False)
        borrower.producing.borrow(subject, lent, lender.repay, is_due=False)
        self.lent += len(lent)

    def heal(self) -> None:
        for side in self.sides:
            side.broker.is_moody = side.broker.is_away = False
        for _ in range(3_000):
            if not any(side.producing.messages for side in self.sides):
                break
            for side in self.sides:
                side.clock.advance(50)
                side.move(is_whole=True)
        for side in self.sides:
            while side.ghosts:
                side.haunt(side.ghosts[0])


def run(seed: int) -> Pair:
    pair = Pair(seed)
    for _ in range(STEPS):
        pair.step()
    pair.heal()
    return pair


def check(pair: Pair) -> Counter[str]:
    """The promises, one by one; how often each kind of outcome came."""
    logs = [side.broker.log for side in pair.sides]
    stored = Counter(slot.payload for log in logs for slot in log)
    places = [{(slot.subject, slot.sequence): slot.payload for slot in log} for log in logs]
    outcomes: Counter[str] = Counter(lent=pair.lent)
    for each in (sent for side in pair.sides for sent in side.sent):
        assert each.batch.done(), "everything is settled in the end"
        error = each.batch.exception()
        outcomes[type(error).__name__] += 1
        if error is None:
            place = each.subject, each.batch.receipt().first_sequence + each.index
            assert stored[each.payload] == 1, "a receipt: stored, and once"
            assert any(log.get(place) == each.payload for log in places), "where the receipt says, at one of them"
        elif isinstance(error, OutcomeUnknown):
            assert stored[each.payload] <= 1, "unknown: at most once"
        else:
            assert isinstance(error, (NotSent, Refused)), error
            assert stored[each.payload] == 0, f"certainly not stored: {error}"
    for side in pair.sides:
        assert (side.producing.messages, side.producing.size_bytes) == (0, 0)
        assert side.producing.flush().is_done
    return outcomes


def check_all(seeds: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(seeds):
        met += check(run(seed))
    return met


@settings(max_examples=40)
@given(st.integers(0, 2**31))
def test_receipts_and_refusals_tell_the_truth(seed: int) -> None:
    check(run(seed))


def test_every_kind_of_outcome_is_met() -> None:
    met = check_all(15)
    assert met.keys() >= {"NoneType", "NotSent", "OutcomeUnknown", "Refused"}
    assert met["lent"] > 100


def test_a_producer_that_lends_what_may_be_stored_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SealedBatch, "is_doubtful", property(lambda _: False))
    with pytest.raises(AssertionError):
        check_all(30)
