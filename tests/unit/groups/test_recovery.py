"""After a crash: the same group again, but for the events that nobody waited for."""

from __future__ import annotations

import pytest

from fairway import limits
from fairway.errors import RemoteProtocolError
from fairway.groups import GroupOutcome, GroupStateMachine, Handout, SettleVerdict
from fairway.names import ConsumerName
from tests.unit.groups.scene import Scene


def busy_scene() -> Scene:
    """Something in every place."""
    scene = Scene(end=60, max_handling_ms=60_000)
    scene.join("ann")
    scene.join("bob")
    scene.ack("ann", scene.lot("ann"), [(1, 3), (7, 1)])
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), [(12, 2)])
    scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann"), reason="broken")
    scene.pull("bob", fresh=(35, 5))
    scene.pull("bob", arrives=False)
    scene.leave("ann")
    scene.join("cid")
    scene.happen(scene.group.pause(ConsumerName("cid"), now_ms=scene.now_ms))
    return scene


def test_the_events_give_the_state_again() -> None:
    scene = busy_scene()
    again = GroupStateMachine()
    again.apply_all(scene.events)
    assert again.snapshot() == scene.group.snapshot()


def test_a_snapshot_and_the_later_events_give_the_state_again() -> None:
    scene = busy_scene()
    for cut in range(len(scene.events)):
        early = GroupStateMachine()
        early.apply_all(scene.events[:cut])
        restored = GroupStateMachine.restore(early.snapshot())
        restored.apply_all(scene.events[cut:])
        assert restored.snapshot() == scene.group.snapshot()


def test_a_snapshot_that_cannot_be_read_is_an_error_not_an_empty_group() -> None:
    data = busy_scene().group.snapshot()
    for broken in (b"", data[:-1], data[:1] + b"\x02" + data[2:]):
        with pytest.raises(RemoteProtocolError):
            GroupStateMachine.restore(broken)


def test_a_new_life_grants_full_leases() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    scene.wait(14_000)
    scene.crash()
    scene.wait(14_000)
    assert not scene.expire().events
    assert scene.ack("ann", lot).settled == 10


def test_what_went_out_in_a_lost_pull_is_fresh_again() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    scene.pull("ann")
    scene.crash(lost=1)
    assert scene.lot("bob").first == 0


def test_a_consumer_that_got_a_lost_response_gets_the_next_under_a_number_of_its_own() -> None:
    scene = Scene()
    scene.join("ann")
    scene.pull("ann")
    scene.crash(lost=1)
    assert scene.pull("ann").number == 2


def test_an_ack_from_beyond_the_cursor_is_believed_and_what_lies_below_goes_out_after_one_lease() -> None:
    scene = Scene(end=30)
    scene.join("ann")
    scene.join("bob")
    scene.lot("bob")
    lot = scene.lot("ann")
    scene.crash(lost=2)
    assert scene.ack("ann", lot, [(12, 8)]).settled == 8
    assert scene.group.cursor == 20
    assert scene.lot("bob").first == 20
    scene.wait(14_999)
    assert scene.pull("bob").outcome is GroupOutcome.EMPTY
    scene.wait(1)
    assert scene.pull("bob", 100).lots == (Handout(0, 1, ((0, 12),)),)


def test_whoever_holds_what_was_orphaned_may_still_ack_it() -> None:
    scene = Scene(end=20)
    scene.join("ann")
    scene.join("bob")
    below, above = scene.lot("bob"), scene.lot("ann")
    scene.crash(lost=2)
    scene.ack("ann", above)
    assert scene.ack("bob", below, [(0, 9)]).settled == 9
    scene.wait(15_000)
    assert scene.lot("ann") == Handout(9, 1, ((9, 1),))


def test_a_redelivery_whose_pull_was_lost_may_still_be_acked_by_its_holder() -> None:
    scene = Scene(end=10)
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"), after_ms=0)
    again = scene.lot("ann")
    scene.crash(lost=1)
    assert scene.ack("ann", again).settled == 10
    assert scene.group.oldest_unacked == 10


def test_nothing_is_believed_that_this_life_would_know() -> None:
    scene = Scene(end=10)
    scene.join("ann")
    assert scene.ack("ann", Handout(0, 1, ((0, 5),))).stale == 5
    scene.crash()
    scene.end = 20
    assert scene.ack("ann", Handout(8, 1, ((8, 5),))).settled == 2
    assert scene.ack("ann", Handout(10, 1, ((10, 5),))).stale == 5


def test_one_ack_cannot_orphan_a_whole_backlog() -> None:
    scene = Scene(end=10**9)
    scene.join("ann")
    scene.crash()
    far = limits.BELIEF_MESSAGES_MAX + 1
    assert scene.ack("ann", Handout(far, 1, ((far, 1),))).stale == 1


def test_an_ack_that_would_make_more_lots_than_the_group_may_have_is_not_believed_and_nothing_is_lost() -> None:
    """After a power cut in `memory` mode a million sequences are left out, and all of them lay below one ack."""
    scene = Scene(end=10**6 + 10, lots_max=40)
    scene.join("ann")
    scene.crash()
    far = 10**6
    assert scene.ack("ann", Handout(far, 1, ((far, 10),))).stale == 10
    assert scene.group.cursor == 0
    near = 50_000
    assert scene.ack("ann", Handout(near, 1, ((near, 10),))).settled == 10
    assert lots(scene) == 50
    scattered = Handout(near + 10, 1, tuple((near + 11 + 2 * each, 1) for each in range(100)))
    assert scene.ack("ann", scattered).stale == 100
    assert scene.ack("ann", scattered, scattered.ranges[:20]).settled == 20
    assert lots(scene) == 70
    assert scene.ack("ann", Handout(0, 1, ((0, 10),))).settled == 10, "what makes no lots is believed all the same"


def lots(scene: Scene) -> int:
    return scene.group.describe(scene.end, now_ns=scene.now_ns, now_ms=scene.now_ms).lots


def test_a_seek_forgets_what_is_in_flight_and_says_how_much() -> None:
    scene = busy_scene()
    sought = scene.group.seek(5, now_ms=scene.now_ms)
    assert (sought.held, sought.waiting, sought.dying_count) == (15, 16, 10)
    scene.happen(sought)
    assert scene.group.cursor == scene.group.oldest_unacked == 5
    assert scene.lot("bob").first == 5


def test_after_a_seek_no_ack_from_before_moves_the_cursor() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    scene.crash(lost=1)
    scene.happen(scene.group.seek(0, now_ms=scene.now_ms))
    assert scene.ack("ann", lot).stale == 10


def test_what_retention_takes_dies_if_it_was_pulled_and_is_counted_as_lost_if_not() -> None:
    scene = Scene()
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann"))
    held = scene.lot("ann")
    decision = scene.group.forsake(15, now_ms=scene.now_ms)
    scene.happen(decision)
    assert sorted(each.ranges for each in decision.dying) == [((0, 10),), ((10, 5),)]
    assert scene.ack("ann", held).settled == 5
    scene.happen(scene.group.forsake(50, now_ms=scene.now_ms))
    assert scene.group.describe(100, now_ns=0, now_ms=scene.now_ms).lost == 30
    assert scene.group.cursor == 50


def test_an_orphan_that_never_existed_is_dropped() -> None:
    scene = Scene(end=30)
    scene.join("ann")
    scene.lot("ann")
    lot = scene.lot("ann")
    scene.crash(lost=2)
    scene.ack("ann", lot)
    scene.wait(15_000)
    scene.beat("ann")
    chosen = scene.group.pull(
        ConsumerName("ann"), arrived=2, messages_max=100, fresh=None, now_ns=scene.now_ns, now_ms=scene.now_ms
    )
    scene.happen(scene.group.drop(chosen.lots[0], now_ms=scene.now_ms))
    assert scene.group.oldest_unacked == 20


def test_describe_shows_what_people_ask() -> None:
    scene = busy_scene()
    scene.wait(1_000)
    shown = scene.group.describe(70, now_ns=scene.now_ns, now_ms=scene.now_ms)
    assert (shown.cursor, shown.lag, shown.oldest_unacked) == (50, 20, 0)
    assert (shown.in_flight, shown.returned, shown.retrying, shown.dying) == (15, 14, 2, 10)
    bob, cid = shown.consumers
    assert (bob.name, bob.messages, bob.lots, bob.lease_left_ms) == ("bob", 15, 2, 14_000)
    assert cid.is_paused


def test_the_action_log_gives_events_back() -> None:
    from fairway.storage.action_log import Action, pack, unpack

    scene = busy_scene()
    again = [action.event for action in unpack(pack(Action(3, 4, event) for event in scene.events))]
    assert again == scene.events


def test_why_a_message_dies_is_in_the_events_and_in_the_snapshot() -> None:
    scene = Scene(attempts_max=1)
    scene.join("ann")
    scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann", 2), [(1, 1)], reason="no such hotel")
    scene.wait(scene.group.config.lease_ms)
    scene.expire()
    restored = GroupStateMachine.restore(scene.group.snapshot())
    scene.crash()
    for group in (scene.group, restored):
        dying = {each.first: each.reason for each in group.begin_life(scene.end, 0)}
        assert dying == {1: "no such hotel", 0: "the consumer's lease ended"}


def test_what_is_in_doubt_waits_for_a_lease_and_its_ack_is_believed_meanwhile() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("ben")
    lot = scene.lot("ann")
    scene.crash()
    scene.happen(scene.group.doubt(now_ms=scene.now_ms))
    assert scene.ack("ann", lot, [(0, 4)]).settled == 4
    assert not scene.pull("ben", fresh=(10, 0)).lots
    scene.wait(scene.group.config.lease_ms)
    scene.crash()
    assert scene.pull("ben", fresh=(10, 0)).lots == (Handout(4, 1, ((4, 6),)),)
