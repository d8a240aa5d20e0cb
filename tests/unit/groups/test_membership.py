"""Joining, leaving, leases; broadcast."""

from __future__ import annotations

import pytest

from fairway.batch.checksum import tag_mask
from fairway.errors import Misuse
from fairway.group_events import ActionKind
from fairway.groups import Dying, GroupConfig, GroupOutcome, GroupStateMachine, Handout, SettleVerdict, TagFilter
from fairway.groups.config import HOUR_MS
from tests.unit.groups.scene import BORN_MS, MS_NS, Scene


def test_a_consumer_that_stops_renewing_expires_and_its_messages_go_to_the_others_at_once() -> None:
    scene = Scene(end=10)
    scene.join("ann")
    scene.join("bob")
    scene.pull("ann")
    scene.wait(14_999)
    scene.beat("bob")
    assert not scene.expire().events
    scene.wait(1)
    assert [event.kind for event in scene.expire().events] == [ActionKind.EXPIRE]
    assert scene.lot("bob") == Handout(0, 2, ((0, 10),))


def test_one_that_renews_is_not_evicted_however_slow_its_handler() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    for _ in range(100):
        scene.wait(10_000)
        scene.beat("ann")
        assert not scene.expire().events
    assert scene.ack("ann", lot).settled == 10


def test_a_hung_handler_loses_its_lot_and_nothing_else() -> None:
    scene = Scene(end=20, max_handling_ms=30_000)
    scene.join("ann")
    hung = scene.lot("ann")
    scene.wait(20_000)
    kept = scene.lot("ann")
    scene.wait(10_000)
    scene.beat("ann")
    assert [event.kind for event in scene.expire().events] == [ActionKind.EXPIRE]
    assert scene.ack("ann", hung).stale == 10
    assert scene.ack("ann", kept).settled == 10
    assert scene.lot("ann") == Handout(0, 2, ((0, 10),))


def test_the_last_attempt_may_be_an_expired_one() -> None:
    scene = Scene(attempts_max=1)
    scene.join("ann")
    lot = scene.lot("ann")
    scene.ack("ann", lot, [(0, 4)])
    scene.wait(15_000)
    (dying,) = scene.expire().dying
    assert (dying.first, dying.attempt, dying.ranges) == (4, 1, ((4, 6),))
    scene.happen(scene.group.mark_dead(dying, now_ms=scene.now_ms))
    assert scene.group.oldest_unacked == 10


def test_one_that_leaves_hands_back_at_once_and_no_attempt_is_counted() -> None:
    scene = Scene()
    scene.join("ann")
    scene.join("bob")
    lot = scene.lot("ann")
    scene.leave("ann")
    assert scene.lot("bob") == lot
    assert scene.pull("ann").outcome is GroupOutcome.NOT_A_MEMBER
    scene.leave("ann")


def test_a_consumer_that_restarts_without_its_memory_gets_what_it_held_as_the_next_attempt() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann")
    scene.arrived.clear()
    assert [event.kind for event in scene.join("ann").events] == [ActionKind.EXPIRE, ActionKind.JOIN]
    assert scene.lot("ann") == Handout(lot.first, 2, lot.ranges)


def test_a_message_that_kills_its_handler_ends_in_dead_letter() -> None:
    scene = Scene(end=1, attempts_max=3)
    dying: list[Dying] = []
    for _ in range(4):
        dying += scene.join("ann").dying
        scene.pull("ann", arrives=False)
    assert [each.ranges for each in dying] == [((0, 1),)]


def test_members_are_bounded() -> None:
    scene = Scene(is_broadcast=True)
    scene.join("ann")
    assert scene.join("bob").outcome is GroupOutcome.BUSY


def test_a_member_with_another_version_is_told_so() -> None:
    scene = Scene()
    refused = scene.join("ann", version=7)
    assert (refused.outcome, refused.config) == (GroupOutcome.OTHER_VERSION, scene.group.config)
    assert scene.join("ann", version=1).outcome is GroupOutcome.DONE


def test_a_new_version_is_rolled_out_by_compare_and_set_and_members_join_again() -> None:
    scene = Scene()
    scene.join("ann", version=1)
    scene.join("bob")
    lot = scene.lot("ann")
    config = GroupConfig(version=2, tags=TagFilter(("paid",)))
    scene.happen(scene.group.configure(1, config, now_ms=scene.now_ms))
    assert scene.group.configure(1, config, now_ms=scene.now_ms).outcome is GroupOutcome.OTHER_VERSION
    assert scene.group.configure(2, config, now_ms=scene.now_ms).outcome is GroupOutcome.BAD_REQUEST
    assert scene.pull("ann").outcome is GroupOutcome.OTHER_VERSION
    assert scene.ack("ann", lot).settled == 10
    assert scene.join("ann", version=1).outcome is GroupOutcome.OTHER_VERSION
    assert scene.join("bob").config == config
    assert scene.pull("bob").outcome is GroupOutcome.DONE


def test_any_or_all_tags_of_a_filter() -> None:
    paid, web = tag_mask("paid"), tag_mask("web")
    assert TagFilter().may_match(0)
    assert TagFilter(("paid", "web")).may_match(web)
    assert not TagFilter(("paid", "web"), is_all=True).may_match(web)
    assert TagFilter(("paid", "web"), is_all=True).may_match(paid | web)
    assert not TagFilter(("paid",)).may_match(0)


@pytest.mark.parametrize(
    "config",
    [{"attempts_max": 0}, {"lot_messages_max": 1_001}, {"lease_ms": 0}, {"lots_max": 0}, {"max_handling_ms": 0}],
)
def test_a_configuration_out_of_bounds_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        GroupConfig(**config)  # type: ignore[arg-type]
    with pytest.raises(Misuse):
        TagFilter(("tag",) * 17)


def test_a_broadcast_consumer_that_comes_back_in_time_misses_nothing() -> None:
    scene = Scene(is_broadcast=True)
    scene.join("ann")
    scene.ack("ann", scene.lot("ann"))
    scene.leave("ann")
    scene.wait(HOUR_MS)
    assert not scene.join("ann", arrived=1, resume_at=100).is_gap
    assert scene.lot("ann").first == 10


def test_a_broadcast_consumer_that_comes_back_later_is_told_of_the_gap() -> None:
    scene = Scene(end=200, is_broadcast=True)
    scene.join("ann")
    scene.pull("ann")
    scene.wait(15_000)
    scene.expire()
    scene.wait(HOUR_MS + 1)
    joined = scene.join("ann", arrived=1, resume_at=100)
    assert (joined.outcome, joined.is_gap) == (GroupOutcome.DONE, True)
    assert scene.lot("ann").first == 100


def test_a_broadcast_consumer_whose_group_is_gone_is_told_of_the_gap() -> None:
    assert Scene(is_broadcast=True).join("ann", arrived=9, resume_at=100).is_gap
    assert not Scene(is_broadcast=True).join("ann", resume_at=100).is_gap


def test_of_a_gap_is_told_until_it_must_have_been_heard() -> None:
    """The answer that tells it may be lost, with the connection, with the lease, or with the broker."""
    scene = Scene(end=200, is_broadcast=True)
    assert scene.join("ann", arrived=9, resume_at=100).is_gap
    assert scene.join("ann", arrived=9, resume_at=150).is_gap
    scene.wait(15_000)
    scene.expire()
    assert scene.join("ann", arrived=9, resume_at=150).is_gap
    scene.group = GroupStateMachine.restore(scene.group.snapshot())
    assert scene.join("ann", arrived=9, resume_at=150).is_gap
    assert scene.lot("ann").first == 100  # nothing more was missed meanwhile
    assert not scene.join("ann", arrived=10, resume_at=150).is_gap
    scene.leave("ann")
    assert not scene.join("ann", arrived=10, resume_at=150).is_gap


def test_a_group_without_members_is_removable_after_its_idle_time() -> None:
    scene = Scene(idle_ms_max=1_000)
    seen = [scene.group.removable_at_ms]
    scene.join("ann")
    seen.append(scene.group.removable_at_ms)
    scene.wait(500)
    scene.leave("ann")
    seen.append(scene.group.removable_at_ms)
    assert seen == [BORN_MS + 1_000, None, BORN_MS + 1_500]


def test_one_timer_suffices() -> None:
    scene = Scene(max_handling_ms=12_000)

    def deadline_ms() -> int | None:
        found = scene.group.next_deadline_ns(now_ns=scene.now_ns, now_ms=scene.now_ms)
        return None if found is None else found // MS_NS

    assert deadline_ms() is None
    scene.join("ann")
    assert deadline_ms() == 15_000
    lot = scene.lot("ann")
    assert deadline_ms() == 12_000
    scene.settle("ann", SettleVerdict.RETRY, lot)
    assert deadline_ms() == 5_000
    scene.wait(5_000)
    assert scene.group.has_ready(scene.now_ms)
    assert deadline_ms() == 15_000


def test_many_leases_that_end_together_are_taken_in_turns() -> None:
    scene = Scene(end=2_000, lot_messages_max=1)
    for name in ("ann", "bob", "cid"):
        scene.join(name)
        for _ in range(4):
            scene.pull(name, 50)
    scene.wait(15_000)
    turns = []
    while (scene.group.next_deadline_ns(now_ns=scene.now_ns, now_ms=scene.now_ms) or 2**63) <= scene.now_ns:
        turns.append(len(scene.expire().events))
    assert turns == [2, 1]
