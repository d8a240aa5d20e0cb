"""Groups, without partitions: who gets what."""

from __future__ import annotations

import pytest

from fairway import limits
from fairway.errors import InvariantViolated
from fairway.group_events import ActionKind
from fairway.groups import GroupOutcome, GroupStateMachine, Handout, Mode, SettleVerdict
from fairway.names import ConsumerName
from tests.unit.groups.scene import Scene


def test_a_pull_takes_a_contiguous_range_and_moves_the_cursor() -> None:
    scene = Scene()
    scene.join("ann")
    assert scene.lot("ann", 7) == Handout(0, 1, ((0, 7),))
    assert scene.group.cursor == 7


def test_consumers_of_a_group_get_different_messages_and_nothing_is_rebalanced() -> None:
    scene = Scene()
    scene.join("ann")
    assert scene.lot("ann").ranges == ((0, 10),)
    scene.join("bob")
    assert scene.lot("bob").ranges == ((10, 10),)
    assert scene.lot("ann").ranges == ((20, 10),)


def test_a_lot_has_at_most_so_many_messages_and_a_response_holds_several() -> None:
    scene = Scene(end=5_000)
    scene.join("ann")
    pulled = scene.pull("ann", 2_500)
    assert [lot.ranges for lot in pulled.lots] == [((0, 1_000),), ((1_000, 1_000),), ((2_000, 500),)]
    assert {event.kind for event in pulled.events} == {ActionKind.PULL}


def test_a_response_has_a_bounded_number_of_lots() -> None:
    scene = Scene(end=5_000, lot_messages_max=1)
    scene.join("ann")
    assert len(scene.pull("ann", 5_000).lots) == limits.RESPONSE_LOTS_MAX


def test_nothing_there_is_an_empty_answer() -> None:
    scene = Scene(end=0)
    scene.join("ann")
    pulled = scene.pull("ann")
    assert (pulled.outcome, pulled.events) == (GroupOutcome.EMPTY, ())


def test_what_is_filtered_out_moves_the_cursor_without_being_handed_out() -> None:
    scene = Scene()
    scene.join("ann")
    pulled = scene.pull("ann", fresh=(40, 10))
    assert [event.kind for event in pulled.events] == [ActionKind.CURSOR, ActionKind.PULL]
    assert pulled.lots == (Handout(40, 1, ((40, 10),)),)
    skipped = scene.pull("ann", fresh=(90, 0))
    assert (skipped.outcome, scene.group.cursor) == (GroupOutcome.EMPTY, 90)


def test_fresh_messages_below_the_cursor_are_a_bug_of_the_caller() -> None:
    scene = Scene()
    scene.join("ann")
    scene.pull("ann")
    with pytest.raises(InvariantViolated):
        scene.pull("ann", fresh=(5, 5))


def test_responses_are_numbered_per_consumer() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    assert [scene.pull("ann").number, scene.pull("ann").number, scene.pull("bob").number] == [1, 2, 1]


def test_a_response_that_did_not_arrive_is_sent_again_under_its_number_before_anything_new() -> None:
    scene = Scene()
    scene.join("ann")
    lost = scene.pull("ann", arrives=False)
    again = scene.pull("ann")
    assert (again.number, again.lots, again.is_again, again.events) == (1, lost.lots, True, ())
    assert scene.pull("ann").lots == (Handout(10, 1, ((10, 10),)),)


def test_a_group_and_its_inbox_share_the_numbers_of_a_consumers_responses() -> None:
    main, inbox = Scene(), Scene()
    for scene in (main, inbox):
        scene.join("ann")
    name = ConsumerName("ann")
    main.pull("ann", arrives=False)
    assert (main.group.has_unarrived(name), inbox.group.has_unarrived(name)) == (True, False)
    after = main.group.last_number(name)
    pulled = inbox.group.pull(
        name, arrived=0, messages_max=1, fresh=(0, 9), now_ns=0, now_ms=inbox.now_ms, number_after=after
    )
    assert pulled.number == 2


def test_a_heartbeat_says_what_arrived() -> None:
    scene = Scene()
    scene.join("ann")
    scene.pull("ann", arrives=False)
    scene.arrived["ann"] = 1
    scene.beat("ann")
    scene.arrived["ann"] = 0
    assert not scene.pull("ann").is_again


def test_what_was_settled_is_not_sent_again() -> None:
    scene = Scene()
    scene.join("ann")
    (lot,) = scene.pull("ann", arrives=False).lots
    scene.ack("ann", lot, [(0, 4)])
    assert scene.pull("ann", arrives=False).lots == (Handout(0, 1, ((4, 6),)),)
    scene.ack("ann", lot, [(4, 6)])
    assert scene.pull("ann").lots[0].first == 10


def handed_back_and_lost(scene: Scene) -> Handout:
    """Ann has 0 to 9, gives 0 to 2 back, and the response that brings them again is lost."""
    scene.join("ann")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot, [(0, 3)])
    (part,) = scene.pull("ann", 3, arrives=False).lots
    assert part == Handout(0, 1, ((0, 3),))
    return part


def test_a_part_that_comes_again_brings_nothing_that_the_consumer_has() -> None:
    scene = Scene()
    part = handed_back_and_lost(scene)
    assert scene.pull("ann").lots == (part,)
    assert scene.ack("ann", Handout(0, 1, ((0, 10),))).settled == 10


def test_it_does_not_after_a_crash_either() -> None:
    scene = Scene()
    part = handed_back_and_lost(scene)
    scene.crash()
    assert scene.group.snapshot() == GroupStateMachine.restore(scene.group.snapshot()).snapshot()
    scene.join("ann", arrived=1)
    assert scene.pull("ann").lots == (part,)


def test_a_consumer_that_remembers_less_gets_both_parts_each_under_its_number() -> None:
    scene = Scene()
    scene.join("ann")
    scene.ack("ann", scene.lot("ann"))
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot, [(10, 3)])
    scene.pull("ann", 3)
    scene.join("ann", arrived=1)
    scene.arrived["ann"] = 1
    first, second = scene.pull("ann"), scene.pull("ann")
    assert (first.number, first.lots) == (2, (Handout(10, 1, ((13, 7),)),))
    assert (second.number, second.lots) == (3, (Handout(10, 1, ((10, 3),)),))


def test_a_consumer_that_reconnects_gets_what_did_not_arrive() -> None:
    scene = Scene()
    scene.join("ann")
    scene.pull("ann")
    lost = scene.pull("ann", arrives=False)
    assert scene.join("ann", arrived=1).events == ()
    assert scene.pull("ann").lots == lost.lots


def test_what_was_handed_back_goes_before_retries_and_those_before_fresh_messages() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    failed, left = scene.lot("ann", 2), scene.lot("bob", 2)
    scene.settle("ann", SettleVerdict.RETRY, failed, after_ms=1_000)
    scene.leave("bob")
    scene.wait(1_000)
    assert scene.pull("ann", 6).lots == (left, Handout(0, 2, ((0, 2),)), Handout(4, 1, ((4, 2),)))


def test_what_was_handed_back_goes_out_in_the_order_in_which_it_is_stored() -> None:
    scene = Scene()
    scene.join("ann")
    lots = [scene.lot("ann") for _ in range(3)]
    for lot in (lots[2], lots[0], lots[1]):
        scene.settle("ann", SettleVerdict.RELEASE, lot)
    scene.join("bob")
    handed = [lot.ranges for _ in range(5) for lot in scene.pull("bob", 5).lots]
    assert handed == [((0, 5),), ((5, 5),), ((10, 5),), ((15, 5),), ((20, 5),)]


def test_a_consumer_that_leaves_is_followed_where_its_messages_begin() -> None:
    """However many consumers have come and gone, each with more in hand than it handled."""
    scene = Scene()
    handled: list[int] = []
    for name in ("ann", "bob", "cid", "dan"):
        scene.join(name)
        lot = scene.lot(name, 4)
        scene.pull(name, 20)
        handled.append(lot.first)
        scene.settle(name, SettleVerdict.ACK, lot)
        scene.leave(name)
    assert handled == [0, 4, 8, 12]


def test_part_of_a_lot_goes_out_when_fewer_messages_are_asked_for() -> None:
    scene = Scene(end=10)
    scene.join("ann")
    scene.pull("ann")
    scene.leave("ann")
    scene.join("bob")
    assert scene.lot("bob", 4) == Handout(0, 1, ((0, 4),))
    assert scene.lot("bob", 100) == Handout(4, 1, ((4, 6),))


def test_un_acked_ranges_are_bounded_and_then_pulls_are_busy() -> None:
    scene = Scene(lots_max=3)
    scene.join("ann")
    lots = [scene.lot("ann", 1) for _ in range(3)]
    pulled = scene.pull("ann", 1)
    assert (pulled.outcome, pulled.events) == (GroupOutcome.BUSY, ())
    assert pulled.retry_after_ms
    scene.ack("ann", lots[0])
    assert scene.pull("ann", 1).outcome is GroupOutcome.DONE


def test_a_busy_group_still_hands_out_what_comes_back() -> None:
    scene = Scene(lots_max=1)
    scene.join("ann")
    lot = scene.lot("ann")
    scene.settle("ann", SettleVerdict.RELEASE, lot)
    assert scene.pull("ann").lots == (lot,)


def test_one_that_never_joined_is_told_so() -> None:
    scene = Scene()
    assert scene.pull("ann").outcome is GroupOutcome.NOT_A_MEMBER
    assert scene.beat("ann").outcome is GroupOutcome.NOT_A_MEMBER


@pytest.mark.parametrize(("arrived", "most"), [(-1, 1), (2**60, 1), (0, 0)])
def test_nonsense_is_refused_and_changes_nothing(arrived: int, most: int) -> None:
    scene = Scene()
    scene.join("ann")
    before = scene.group.snapshot()
    scene.arrived["ann"] = arrived
    assert scene.pull("ann", most).outcome is GroupOutcome.BAD_REQUEST
    assert scene.group.snapshot() == before


def test_at_most_once_is_durable_before_it_is_answered_and_settles_itself() -> None:
    scene = Scene(mode=Mode.AT_MOST_ONCE)
    scene.join("ann")
    assert scene.pull("ann", arrives=False).is_durable_first
    scene.wait(60_000)
    scene.expire()
    scene.join("bob")
    assert scene.lot("bob").first == 10
    assert scene.group.oldest_unacked == 20


def test_a_paused_group_hands_out_nothing_and_goes_on_when_resumed() -> None:
    scene = Scene()
    scene.join("ann")
    scene.happen(scene.group.pause(now_ms=scene.now_ms))
    assert scene.pull("ann").outcome is GroupOutcome.PAUSED
    scene.happen(scene.group.resume(now_ms=scene.now_ms))
    assert scene.pull("ann").outcome is GroupOutcome.DONE


def test_a_paused_consumer_stays_paused_when_it_comes_back() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    scene.happen(scene.group.pause(ConsumerName("ann"), now_ms=scene.now_ms))
    assert scene.pull("bob").outcome is GroupOutcome.DONE
    scene.leave("ann")
    scene.join("ann")
    assert scene.pull("ann").outcome is GroupOutcome.PAUSED
