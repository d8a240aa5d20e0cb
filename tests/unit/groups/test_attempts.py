"""A message keeps its failed attempts while it is owed: who had it, when and why, within bounds."""

from __future__ import annotations

import json

import msgspec
import pytest

from fairway import limits
from fairway.errors import RemoteProtocolError
from fairway.groups import Attempt, Attempts, GroupStateMachine, Handout, SettleVerdict
from fairway.groups.attempts import added, bounded, decode, encode, failed, joined
from fairway.names import ConsumerName
from tests.unit.groups.scene import BORN_MS, Scene


def dying(group: GroupStateMachine, end: int = 100) -> dict[int, Attempts]:
    return {each.first: each.history for each in group.begin_life(end, 0)}


def in_each_way(scene: Scene) -> list[GroupStateMachine]:
    """The group itself, the group of a replay or of a replica, and the group of a checkpoint."""
    replayed = GroupStateMachine()
    replayed.apply_all(scene.events)
    restored = GroupStateMachine.restore(scene.group.snapshot())
    assert scene.group.snapshot() == replayed.snapshot() == restored.snapshot()
    return [scene.group, replayed, restored]


def numbered(count: int) -> Attempts:
    return tuple(Attempt(number, 1_000 * number, "ann", "no") for number in range(1, count + 1))


def test_each_attempt_has_its_time_consumer_and_reason() -> None:
    scene = Scene(attempts_max=4, max_handling_ms=5_000)
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 1), after_ms=0, reason="no such hotel")
    scene.lot("ann", 1)
    scene.wait(6_000)
    scene.expire()  # held too long
    scene.lot("ann", 1)
    scene.wait(4_000)
    scene.happen(scene.group.configure(1, msgspec.structs.replace(scene.group.config, version=2), now_ms=scene.now_ms))
    scene.wait(20_000)
    scene.expire()  # the lease
    scene.join("bob")
    scene.settle("bob", SettleVerdict.REJECT, scene.lot("bob", 1), reason="closed")
    for group in in_each_way(scene):
        assert dying(group) == {
            0: (
                Attempt(1, BORN_MS, "ann", "no such hotel"),
                Attempt(2, BORN_MS + 6_000, "ann", "held longer than max_handling"),
                Attempt(3, BORN_MS + 30_000, "ann", "the consumer's lease ended"),
                Attempt(4, BORN_MS + 30_000, "bob", "closed"),
            )
        }


def test_what_counts_as_no_attempt_is_none() -> None:
    scene = Scene(attempts_max=1)
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RELEASE, scene.lot("ann", 1), reason="not mine")
    scene.lot("ann", 1)
    scene.leave("ann")
    scene.join("bob")
    scene.settle("bob", SettleVerdict.REJECT, scene.lot("bob", 1), reason="closed")
    for group in in_each_way(scene):
        assert dying(group) == {0: (Attempt(1, BORN_MS, "bob", "closed"),)}


def test_what_the_broker_gives_up_names_no_consumer() -> None:
    scene = Scene()
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 1), reason="later")
    decision = scene.group.forsake(1, now_ms=scene.now_ms)
    scene.happen(decision)
    assert [(each.attempt, each.consumer) for each in scene.group.history_of(decision.dying[0])] == [
        (1, "ann"),
        (2, ""),
    ]


def test_messages_of_one_lot_that_part_keep_what_they_had() -> None:
    scene = Scene(attempts_max=2)
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 4), after_ms=0, reason="all")
    again = scene.lot("ann", 4)
    scene.settle("ann", SettleVerdict.RETRY, again, [(1, 1)], reason="one")
    scene.settle("ann", SettleVerdict.RELEASE, again, [(2, 1)])
    scene.settle("ann", SettleVerdict.REJECT, again, [(3, 1)], reason="three")
    scene.ack("ann", again, [(0, 1)])
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 1), reason="two")
    for group in in_each_way(scene):
        reasons = {first: [each.reason for each in history] for first, history in dying(group).items()}
        assert reasons == {1: ["all", "one"], 2: ["all", "two"], 3: ["all", "three"]}


def test_a_part_that_is_buried_leaves_the_history_with_the_rest() -> None:
    scene = Scene(attempts_max=1)
    scene.join("ann")
    settled = scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 4), reason="all")
    [whole] = settled.dying
    scene.happen(scene.group.mark_dead(whole._replace(ranges=((0, 2),)), now_ms=scene.now_ms))
    for group in in_each_way(scene):
        assert [(first, len(history)) for first, history in dying(group).items()] == [(2, 1)]
    scene.happen(scene.group.seek(0, now_ms=scene.now_ms))
    assert scene.group.history_of(whole) == ()


def test_of_many_attempts_the_first_and_the_last_are_kept() -> None:
    scene = Scene(attempts_max=40)
    scene.join("ann")
    for _ in range(39):
        scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 1), after_ms=0, reason="é" * 500)
    scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann", 1), reason="closed")
    for group in in_each_way(scene):
        [history] = dying(group).values()
        assert [each.attempt for each in history] == [1, 2, 3, 4, *range(29, 41)]
        assert len(history) == limits.HISTORY_ATTEMPTS_MAX
        assert history[0].reason == "é" * (limits.HISTORY_REASON_BYTES_MAX // 2)
        found = decode(encode(history, 40))
        assert found is not None
        assert found.left_out == 40 - len(found.attempts)
        assert (found.attempts[0].attempt, found.attempts[-1].attempt) == (1, 40)


def test_beyond_the_bound_of_the_group_failures_are_counted_and_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HISTORY_LOTS_MAX", 3)
    scene = Scene(attempts_max=2, lots_max=1_000)
    scene.join("ann")
    handed = [scene.lot("ann", 1) for _ in range(5)]
    for lot in handed[:4]:
        scene.settle("ann", SettleVerdict.RETRY, lot, after_ms=0, reason="first")
    scene.ack("ann", handed[4])
    taken: list[Handout] = []
    while len(taken) < 4:
        taken += scene.pull("ann", 1, fresh=(5, 0)).lots
    scene.ack("ann", taken[1])
    for lot in (taken[0], *taken[2:]):
        scene.settle("ann", SettleVerdict.RETRY, lot, reason="second")
    for group in in_each_way(scene):
        shown = {first: [each.attempt for each in history] for first, history in dying(group).items()}
        assert shown == {0: [2], 2: [2], 3: [2]}


def test_a_lease_that_takes_many_lots_keeps_the_bound_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HISTORY_LOTS_MAX", 3)
    scene = Scene(attempts_max=1)
    scene.join("ann")
    for _ in range(5):
        scene.lot("ann", 1)
    scene.wait(scene.group.config.lease_ms)
    scene.expire()
    for group in in_each_way(scene):
        assert set(dying(group).values()) == {()}


def test_a_snapshot_says_a_shared_history_once_and_nothing_where_nothing_failed() -> None:
    scene = Scene()
    scene.join("ann")
    lot = scene.lot("ann", 10)
    assert len(msgspec.msgpack.decode(scene.group.snapshot())) == 15  # as before histories were kept
    scene.settle("ann", SettleVerdict.RETRY, lot, after_ms=0, reason="no such hotel")
    for _ in range(10):
        scene.pull("ann", 1)
    data = scene.group.snapshot()
    assert data.count(b"no such hotel") == 1
    scene.ack("ann", Handout(0, 2, ((0, 1),)))
    assert len(msgspec.msgpack.decode(data)) == 17


@pytest.mark.parametrize(
    ("histories", "history_of"),
    [
        ([[]], [2]),
        ([[]], [-1]),
        ([[]], [1, 1]),
        ([], [1]),
    ],
)
def test_a_snapshot_with_histories_that_cannot_be_is_refused(histories: list[object], history_of: list[int]) -> None:
    scene = Scene()
    scene.join("ann")
    scene.settle("ann", SettleVerdict.RETRY, scene.lot("ann", 1))
    fields = msgspec.msgpack.decode(scene.group.snapshot())
    fields[15:] = [histories, history_of]
    with pytest.raises(RemoteProtocolError):
        GroupStateMachine.restore(msgspec.msgpack.encode(fields))


def test_a_snapshot_of_a_version_that_keeps_more_attempts_is_read_with_as_many_as_this_one_keeps() -> None:
    scene = Scene()
    scene.join("ann")
    scene.settle("ann", SettleVerdict.REJECT, scene.lot("ann", 1))
    fields = msgspec.msgpack.decode(scene.group.snapshot())
    fields[15:] = [[[[number, BORN_MS, "ann", "no"] for number in range(1, 51)]], [1]]
    [history] = dying(GroupStateMachine.restore(msgspec.msgpack.encode(fields))).values()
    assert [each.attempt for each in history] == [1, 2, 3, 4, *range(39, 51)]


def test_the_header_is_bounded_in_bytes() -> None:
    every: Attempts = ()
    for number in range(1, 17):
        every = added(every, failed(number, BORN_MS, ConsumerName("n" * limits.NAME_CHARS_MAX), b"\x01" * 1_000))
    text = encode(every, 16)
    assert len(text.encode()) <= limits.HISTORY_BYTES_MAX
    found = decode(text)
    assert found is not None
    assert 2 <= len(found.attempts) == 16 - found.left_out < 16
    assert (found.attempts[0].attempt, found.attempts[-1].attempt) == (1, 16)
    assert json.loads(encode(every, 16, 0)) == {"left_out": 16, "attempts": []}


def test_the_lives_of_a_redriven_message_are_one_history() -> None:
    both = joined(numbered(3), numbered(2), 3)
    assert [each.attempt for each in both] == [1, 2, 3, 4, 5]
    assert [each.attempt for each in bounded(both, 2)] == [1, 5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        '{"left_out":0,"attempts":[{"attempt":0,"time_ms":1,"consumer":"a","reason":"b"}]}',
        '{"left_out":0,"attempts":[{"attempt":1,"time_ms":999999999999999999,"consumer":"a","reason":"b"}]}',
        '{"left_out":-1,"attempts":[]}',
        '{"left_out":99999999999999999999999999,"attempts":[]}',
        '{"left_out":0,"attempts":[]}' + " " * limits.HISTORY_BYTES_MAX,
    ],
)
def test_a_header_that_somebody_else_wrote_is_none(text: str) -> None:
    assert decode(text) is None
