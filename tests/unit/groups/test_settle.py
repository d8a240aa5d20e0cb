"""Ack, retry, dead letter: by reference."""

from __future__ import annotations

import pytest

from fairway import limits
from fairway.group_events import ActionKind
from fairway.groups import Backoff, GroupOutcome, Handout, SettleVerdict
from tests.unit.groups.scene import Scene


def test_acked_messages_are_gone_and_a_partly_acked_lot_keeps_the_rest() -> None:
    scene = Scene(end=10)
    scene.join("ann")
    lot = scene.lot("ann")
    assert scene.ack("ann", lot, [(0, 3), (5, 2)]).settled == 5
    scene.leave("ann")
    scene.join("bob")
    assert scene.lot("bob") == Handout(3, 1, ((3, 2), (7, 3)))


def test_one_slow_message_blocks_no_other() -> None:
    scene = Scene()
    scene.join("ann")
    slow = scene.lot("ann", 1)
    for _ in range(50):
        scene.ack("ann", scene.lot("ann", 1))
    assert scene.group.oldest_unacked == slow.first
    assert scene.group.describe(100, now_ns=0, now_ms=scene.now_ms).in_flight == 1


def test_an_ack_counts_only_from_the_holder() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    lot = scene.lot("ann")
    stale = scene.ack("bob", lot)
    assert (stale.outcome, stale.stale, stale.events) == (GroupOutcome.DONE, 10, ())
    assert scene.ack("ann", lot).stale == 0


def test_acking_twice_is_harmless() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    scene.ack("ann", lot)
    before = scene.group.snapshot()
    assert scene.ack("ann", lot).settled == 0
    assert scene.group.snapshot() == before


def test_a_late_ack_for_an_earlier_attempt_is_stale() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RETRY, lot, after_ms=0)
    assert scene.lot("ann").attempt == 2
    assert scene.ack("ann", lot).stale == 10


def test_an_ack_concerns_only_what_had_arrived_when_it_was_sent() -> None:
    scene = Scene(end=3)
    scene.join("ann")
    lot = scene.lot("ann")
    scene.happen(scene.group.seek(0, now_ms=scene.now_ms))
    again = scene.pull("ann")
    assert again.lots == (lot,)
    assert scene.settle("ann", SettleVerdict.ACK, lot, arrived=1).stale == 3
    assert scene.settle("ann", SettleVerdict.ACK, lot, arrived=again.number).settled == 3


def test_of_a_lot_that_came_in_parts_an_ack_concerns_those_that_had_arrived() -> None:
    scene = Scene(end=3)
    scene.join("ann")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot, [(0, 1)])
    assert scene.pull("ann", arrives=False).number == 2
    late = scene.settle("ann", SettleVerdict.ACK, lot, arrived=1)
    assert (late.settled, late.stale) == (2, 1)
    assert scene.settle("ann", SettleVerdict.ACK, lot, [(0, 1)], arrived=2).settled == 1


def test_a_failed_message_comes_again_when_it_is_due_to_any_consumer() -> None:
    scene = Scene(end=3)
    scene.join("ann")
    scene.join("bob")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), [(1, 1)])
    scene.wait(4_999)
    assert scene.pull("bob").outcome is GroupOutcome.EMPTY
    scene.wait(1)
    assert scene.lot("bob") == Handout(1, 2, ((1, 1),))


def test_backoff_doubles_up_to_its_cap_and_jitter_only_shortens_it() -> None:
    backoff = Backoff(first_ms=1_000, cap_ms=5_000, jitter=0.5)
    assert [backoff.delay_ms(attempt, 0.0) for attempt in (1, 2, 3, 4, 900)] == [1_000, 2_000, 4_000, 5_000, 5_000]
    assert backoff.delay_ms(2, 0.5) == 1_500


def test_released_messages_go_to_the_others_at_once_and_count_as_no_attempt() -> None:
    scene = Scene(end=3)
    scene.join("ann")
    scene.join("bob")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot)
    assert scene.lot("bob") == lot


def test_the_head_of_a_lot_may_be_released_and_come_back_to_the_same_consumer() -> None:
    scene = Scene(end=3)
    scene.join("ann")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot, [(0, 1)])
    assert scene.lot("ann") == Handout(0, 1, ((0, 1),))
    assert scene.ack("ann", lot).settled == 3


def test_after_the_last_attempt_the_decision_names_the_dead_and_they_are_not_handed_out_again() -> None:
    scene = Scene(end=3, attempts_max=2)
    scene.join("ann")
    assert not scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), after_ms=0).dying
    last = scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), [(1, 1)], after_ms=0, reason="no such order")
    assert [each.ranges for each in last.dying] == [((1, 1),)]
    assert last.dying[0].reason == "no such order"
    assert scene.pull("ann").outcome is GroupOutcome.EMPTY
    assert scene.group.oldest_unacked == 0
    scene.happen(scene.group.mark_dead(last.dying[0], now_ms=scene.now_ms))
    assert scene.group.describe(3, now_ns=0, now_ms=scene.now_ms).dying == 0


def test_a_rejected_message_dies_at_once() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    assert [each.ranges for each in scene.settle("ann", SettleVerdict.REJECT, lot, [(3, 2)]).dying] == [((3, 2),)]


def test_what_was_dying_at_a_crash_is_named_again_and_burying_it_twice_is_harmless() -> None:
    scene = Scene()
    scene.join("ann")
    (dying,) = scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann")).dying
    scene.crash()
    (again,) = scene.group.begin_life(scene.end, scene.now_ns)
    assert again[:3] == dying[:3]
    for _ in range(2):
        scene.happen(scene.group.mark_dead(again, now_ms=scene.now_ms))
    assert scene.group.begin_life(scene.end, scene.now_ns) == ()


@pytest.mark.parametrize(
    "ranges", [[], [(0, 0)], [(-1, 1)], [(0, 1_001)], [(2**63, 1)], [(1, 1)] * (limits.SETTLE_RANGES_MAX + 1)]
)
def test_ranges_outside_a_lot_are_refused(ranges: list[tuple[int, int]]) -> None:
    scene = Scene()
    scene.join("ann")
    assert scene.ack("ann", scene.lot("ann"), ranges).outcome is GroupOutcome.BAD_REQUEST


def test_a_retry_later_than_a_day_is_refused_not_shortened() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    refused = scene.settle("ann", SettleVerdict.RETRY, lot, after_ms=limits.RETRY_AFTER_MS_MAX + 1)
    assert refused.outcome is GroupOutcome.BAD_REQUEST
    assert (
        scene.settle("ann", SettleVerdict.RETRY, lot, after_ms=limits.RETRY_AFTER_MS_MAX).outcome is GroupOutcome.DONE
    )


def test_a_full_group_does_not_split_lots_but_takes_acks_and_whole_lots() -> None:
    scene = Scene(end=10, lots_max=1)
    scene.join("ann")
    lot = scene.lot("ann")
    assert scene.settle("ann", SettleVerdict.RETRY, lot, [(0, 1)]).outcome is GroupOutcome.DONE
    assert scene.settle("ann", SettleVerdict.RETRY, lot, [(1, 1)]).outcome is GroupOutcome.BUSY
    assert scene.ack("ann", lot, [(1, 1)]).settled == 1
    assert scene.settle("ann", SettleVerdict.RETRY, lot, [(2, 8)]).outcome is GroupOutcome.DONE


def test_reasons_are_bounded_in_the_log() -> None:
    scene = Scene()
    scene.join("ann")
    settled = scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), reason="x" * 10_000)
    assert (settled.events[0].kind, len(settled.events[0].detail)) == (ActionKind.RETRY, limits.REASON_BYTES_MAX)


def test_a_burial_counts_only_for_what_is_dying_still() -> None:
    """A seek forgets what was dying; a lot of the same name that dies later is another one."""
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann", 3)
    [old] = scene.settle("ann", SettleVerdict.REJECT, lot).dying
    scene.happen(scene.group.seek(0, now_ms=scene.now_ms))
    assert not scene.group.mark_dead(old, now_ms=scene.now_ms).events
    [new] = scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann", 1)).dying
    assert (new.first, new.attempt) == (old.first, old.attempt)
    scene.happen(scene.group.mark_dead(old, now_ms=scene.now_ms))
    assert scene.group.describe(10, now_ns=0, now_ms=0).dying == 0


def test_a_lot_may_be_buried_in_parts_and_in_any_order() -> None:
    scene = Scene()
    scene.join("ann")
    [dying] = scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann", 5)).dying
    for part in ((3, 2), (0, 1), (1, 2)):
        scene.happen(scene.group.mark_dead(dying._replace(first=part[0], ranges=(part,)), now_ms=scene.now_ms))
    assert scene.group.describe(10, now_ns=0, now_ms=0).dying == 0
