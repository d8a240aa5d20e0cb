"""The groups are made from the action log, also where a part of it has rotted."""

from __future__ import annotations

import msgspec
import pytest

from fairway.broker.groups import Groups
from fairway.errors import InvariantViolated, RemoteProtocolError
from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import GroupConfig, Order
from fairway.groups.config import encode
from fairway.names import ConsumerName, GroupName
from fairway.storage.action_log import Action, pack
from fairway.storage.record import Record, RecordHeader, RecordKind

NOW_MS = 1_700_000_000_000


def record_at(position: int, *actions: Action) -> Record:
    body = pack(actions)
    return Record(RecordHeader(RecordKind.ACTIONS, 0, position, 0, 1, 0, NOW_MS, len(actions), len(body), 0), body)


def configured(group_id: int, name: str, order: Order = Order.NONE) -> Action:
    detail = msgspec.msgpack.encode((name, encode(GroupConfig(version=1, order=order))))
    return Action(group_id, 1, GroupEvent(ActionKind.GROUP_CONFIG, NOW_MS, detail=detail))


PULL = Action(1, 1, GroupEvent(ActionKind.PULL, NOW_MS, consumer_id=7, attempt=1, lot=1, ranges=((0, 3),)))


def test_an_action_of_a_member_whose_join_has_rotted_is_no_reason_not_to_start() -> None:
    groups = Groups()
    first = record_at(64, configured(1, "billing"), configured(2, "shipping"))
    groups.replay(first)
    lost_end = first.header.end + 400  # a JOIN was there
    hole = record_at(lost_end, PULL)
    groups.replay(hole)
    joined = Action(2, 1, GroupEvent(ActionKind.JOIN, NOW_MS, consumer_id=1, detail=b"ann"))
    groups.replay(record_at(hole.header.end, joined))
    host = groups.find(1, GroupName("shipping"))
    assert host is not None
    assert [name for _, name in host.state_machine.members()] == ["ann"]
    assert groups.find(1, GroupName("billing")) is not None


@pytest.mark.parametrize("order", [Order.NONE, Order.KEY])
@pytest.mark.parametrize(
    "action",
    [
        Action(1, 1, GroupEvent(ActionKind.RETRY, NOW_MS, consumer_id=1, attempt=1, lot=0, ranges=((0, 3),))),
        Action(1, 1, GroupEvent(ActionKind.ACK, NOW_MS, consumer_id=0, attempt=2, lot=0, ranges=((0, 3),))),
        Action(
            1,
            1,
            GroupEvent(ActionKind.PULL, NOW_MS, 1, 2, lot=0, ranges=((0, 3),), detail=bytes(8)),
        ),
    ],
)
def test_nor_is_one_of_messages_that_were_handed_out_there(action: Action, order: Order) -> None:
    groups = Groups()
    joined = Action(1, 1, GroupEvent(ActionKind.JOIN, NOW_MS, consumer_id=1, detail=b"ann"))
    first = record_at(64, configured(1, "billing", order), joined)
    groups.replay(first)
    groups.replay(record_at(first.header.end + 400, action))  # a PULL was there
    host = groups.find(1, GroupName("billing"))
    assert host is not None
    assert [name for _, name in host.state_machine.members()] == ["ann"]


@pytest.mark.parametrize("order", [Order.NONE, Order.KEY])
def test_what_was_handed_to_a_member_whose_join_has_rotted_comes_again(order: Order) -> None:
    groups = Groups()
    joined = Action(1, 1, GroupEvent(ActionKind.JOIN, NOW_MS, consumer_id=1, lot=1, detail=b"ann"))
    first = record_at(64, configured(1, "billing", order), joined)
    groups.replay(first)
    keys = bytes(24) if order is Order.KEY else b""
    pulled = Action(1, 1, GroupEvent(ActionKind.PULL, NOW_MS, 7, 1, ranges=((0, 3),), detail=bytes(8) + keys))
    groups.replay(record_at(first.header.end + 400, pulled))
    assert handed_out(groups) == [0, 1, 2]


def test_what_a_pull_that_has_rotted_handed_out_comes_again() -> None:
    groups = Groups()
    joined = Action(1, 1, GroupEvent(ActionKind.JOIN, NOW_MS, consumer_id=1, lot=1, detail=b"ann"))
    first = record_at(64, configured(1, "billing"), joined)
    groups.replay(first)
    pulled = Action(1, 1, GroupEvent(ActionKind.PULL, NOW_MS, 1, 1, lot=5, ranges=((5, 2),), detail=bytes(8)))
    hole = record_at(first.header.end + 400, pulled)
    groups.replay(hole)
    acked = Action(1, 1, GroupEvent(ActionKind.ACK, NOW_MS, consumer_id=1, attempt=1, lot=5, ranges=((5, 2),)))
    groups.replay(record_at(hole.header.end, acked))
    assert handed_out(groups) == [0, 1, 2, 3, 4]


def handed_out(groups: Groups) -> list[int]:
    """To ann, of seven messages."""
    host = groups.find(1, GroupName("billing"))
    assert host is not None
    host.state_machine.begin_life(7, 0)
    pulled = host.state_machine.pull(
        ConsumerName("ann"), arrived=0, messages_max=100, fresh=None, now_ns=0, now_ms=NOW_MS
    )
    return [at for lot in pulled.lots for first, count in lot.ranges for at in range(first, first + count)]


def test_where_nothing_is_missing_it_is_a_bug() -> None:
    groups = Groups()
    first = record_at(64, configured(1, "billing"))
    groups.replay(first)
    with pytest.raises(InvariantViolated):
        groups.replay(record_at(first.header.end, PULL))


def test_a_picture_that_cannot_be_read_whole_is_not_taken_in_by_half() -> None:
    source = Groups()
    source.replay(record_at(64, configured(1, "billing"), configured(2, "shipping")))
    next_id, hosts, read_only = msgspec.msgpack.decode(source.picture())
    hosts[1][4] = b"no snapshot"
    groups = Groups()
    before = groups.picture()
    with pytest.raises(RemoteProtocolError):
        groups.restore(msgspec.msgpack.encode([next_id, hosts, read_only]), 500)
    assert (len(groups), groups.picture(), groups.is_whole(1)) == (0, before, False)


def test_a_gap_right_behind_a_picture_is_noticed() -> None:
    source, groups = Groups(), Groups()
    source.replay(record_at(64, configured(1, "billing")))
    groups.restore(source.picture(), 500)
    assert groups.is_whole(0)
    groups.replay(record_at(1_000, configured(2, "shipping")))
    assert not groups.is_whole(0)
