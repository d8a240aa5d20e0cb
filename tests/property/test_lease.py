"""A consumer's own account of its lease, against the broker's: with any delays, on both ways, it never ends later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fairway.protocol.consumer_lease import NEVER_NS, Lease
from fairway.protocol.messages import Joined

LEASE_MS = 3_000
MS_NS = 1_000_000
delays = st.integers(0, 3 * LEASE_MS)


def joined(epoch: int = 1, leads_ms: int | None = None) -> Joined:
    return Joined(b"\x80", 1, LEASE_MS, False, epoch, leads_ms)


@given(st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=20))
def test_the_consumers_end_of_the_lease_is_never_later_than_the_brokers(trips: list[tuple[int, int, int]]) -> None:
    """Each request leaves some time after the one before it, and takes its time there and back."""
    lease = Lease()
    lease.join(0, joined())
    sent_ms, heard = 0, []
    for wait_ms, there_ms, back_ms in trips:
        sent_ms += wait_ms
        heard.append((sent_ms + there_ms + back_ms, sent_ms, sent_ms + there_ms))
    broker_end_ms = LEASE_MS
    for _, sent, handled_ms in sorted(heard):  # answers arrive in any order
        lease.renew(sent * MS_NS, LEASE_MS)
        broker_end_ms = max(broker_end_ms, handled_ms + LEASE_MS)
        assert lease.end_ns <= broker_end_ms * MS_NS
        assert lease.sure_ns == lease.end_ns


@given(st.lists(st.tuples(delays, delays, st.integers(0, 6_000)), min_size=1, max_size=20))
def test_nobody_else_leads_before_the_consumer_thinks_so(trips: list[tuple[int, int, int]]) -> None:
    """The broker counts `leads_ms` from the arrival of the request, the consumer from its sending."""
    lease = Lease()
    lease.join(0, joined(leads_ms=0))
    sent_ms = certain_ms = 0
    for wait_ms, there_ms, leads_ms in trips:
        sent_ms += wait_ms
        certain_ms = max(certain_ms, sent_ms + there_ms + leads_ms)
        lease.renew(sent_ms * MS_NS, LEASE_MS)
        lease.confirm(sent_ms * MS_NS, leads_ms)
        assert lease.sure_ns <= certain_ms * MS_NS
        assert lease.sure_ns <= lease.end_ns


@given(st.integers(0, 50_000), st.integers(1, 10_000), st.lists(st.integers(-1, 1), min_size=1, max_size=20))
def test_a_master_that_is_certain_for_ever_shorter_times_is_not_asked_all_the_time(
    round_trip_us: int, leads_ms: int, jitters_ms: list[int]
) -> None:
    """The registry is silent: each answer says what is left, a little more or a little less for the way there."""
    lease = Lease()
    now_ns, until_ns = 0, leads_ms * MS_NS
    lease.join(now_ns, joined(leads_ms=leads_ms))
    asked_ns = now_ns
    for jitter_ms in jitters_ms:
        due_ns = lease.confirm_due_ns()
        assert due_ns - asked_ns >= 250 * MS_NS
        now_ns = max(due_ns, now_ns + round_trip_us * 1_000)
        asked_ns = now_ns
        left_ms = max((until_ns - asked_ns) // MS_NS + jitter_ms, 0)
        lease.renew(asked_ns, LEASE_MS)
        lease.confirm(asked_ns, left_ms)
    assert lease.confirm_due_ns() < NEVER_NS


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_only_the_same_epoch_confirms_what_was_handed_out(epochs: list[int]) -> None:
    lease = Lease()
    before = 0
    for number, epoch in enumerate(epochs):
        lease.detach()
        assert [lease.is_attached] == [False]
        assert lease.join(number, joined(epoch)) == (epoch != 0 and epoch == before)
        assert [lease.is_attached] == [True]
        before = epoch
