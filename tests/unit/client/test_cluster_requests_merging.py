"""One answer from the answers of many broker groups."""

from __future__ import annotations

import pytest

from fairway.client.cluster.requests import check_mergeable, joined, merge
from fairway.errors import Code, Misuse, Refused
from fairway.protocol.admin_messages import (
    BrokerState,
    Depth,
    Describe,
    Described,
    GroupDescription,
    Redrive,
    Redriven,
    Seek,
    Sought,
    SubjectDescription,
)
from fairway.protocol.delay_messages import Cancel, Decided, DelayTally, Fate, Stretch, Tallied, Which
from fairway.protocol.messages import Whence

DESCRIBE = Describe(Depth.GROUPS)


def broker(free_bytes: int = 10, durability: str = "sync") -> BrokerState:
    return BrokerState("b", 1, 2, True, False, 100, 3, 200, durability, free_bytes, 50)


def group(name: str, lag: int, *, is_paused: bool = False, oldest_ms: int | None = None) -> GroupDescription:
    return GroupDescription(
        name, 10, 9, lag, 1, 0, 0, 0, 0, 0, 0, 1, 1.0, is_paused, 1, 2, oldest_ms=oldest_ms
    )  # fmt: skip


def test_groups_are_added_up_by_name() -> None:
    one = Described(broker(), [SubjectDescription("s", 0, 20, False, 1, [group("g", 3, oldest_ms=7)])])
    other = Described(
        broker(5), [SubjectDescription("s", 5, 40, True, 2, [group("g", 4, is_paused=True), group("h", 1)])]
    )
    found = merge(DESCRIBE, [one, other])
    assert isinstance(found, Described)
    [subject] = found.subjects
    assert (subject.first_sequence, subject.committed_end, subject.is_read_only) == (5, 60, False)
    assert [(each.name, each.lag, each.is_paused) for each in subject.groups] == [("g", 7, True), ("h", 1, False)]
    assert subject.groups[0].oldest_ms == 7
    assert subject.groups[0].consumers_count == 2, "each is on all of them"
    assert (found.broker.connections, found.broker.free_bytes) == (6, 5)


def test_pages_of_one_group_become_one() -> None:
    pages = [
        Described(broker(), [SubjectDescription("s", 0, 20, False, 2, [group("g", 3)])], "more"),
        Described(
            broker(),
            [SubjectDescription("s", 0, 20, False, 2, [group("h", 3)]), SubjectDescription("t", 0, 1, False, 0)],
        ),
    ]
    found = joined(pages)
    assert [(each.name, [of.name for of in each.groups]) for each in found.subjects] == [("s", ["g", "h"]), ("t", [])]


def test_a_refusal_counts_unless_others_know_better() -> None:
    unknown, busy = Refused(Code.NO_SUCH_GROUP, "nobody"), Refused(Code.BUSY, "later")
    seek, sought = Seek("s", "g", Whence.EARLIEST), Sought(3, 5, 1)
    assert merge(seek, [unknown, sought]) == sought
    with pytest.raises(Refused, match="nobody"):
        merge(seek, [unknown, unknown])
    with pytest.raises(Refused, match="later"):
        merge(seek, [sought, busy])


def test_what_is_asked_for_by_sequence_is_for_one_group() -> None:
    check_mergeable(Seek("s", "g", Whence.SEQUENCE, 3), ["a"])
    with pytest.raises(Misuse, match="a place in one broker group"):
        check_mergeable(Seek("s", "g", Whence.SEQUENCE, 3), ["a", "b"])


def test_an_id_is_unknown_if_nobody_knows_it() -> None:
    found = merge(Redrive("s", "g", ["x", "y"]), [Redriven(1, ["x"]), Redriven(0, ["x", "y"])])
    assert found == Redriven(1, ["x"])


@pytest.mark.parametrize(
    ("fates", "fate"),
    [
        ((Fate.UNKNOWN, Fate.CANCELLED), Fate.CANCELLED),
        ((Fate.ALREADY_DISPATCHED, Fate.UNKNOWN), Fate.ALREADY_DISPATCHED),
        ((Fate.UNKNOWN, Fate.UNKNOWN), Fate.UNKNOWN),
    ],
)
def test_a_delayed_message_is_with_one_of_them(fates: tuple[Fate, ...], fate: Fate) -> None:
    found = merge(Cancel("", "id", None), [Decided(each, int(each is Fate.CANCELLED)) for each in fates])
    assert found == Decided(fate, int(fate is Fate.CANCELLED))


def test_stretches_are_added_up() -> None:
    one, other = Tallied(3, [Stretch(0, 1), Stretch(60, 2)]), Tallied(5, [Stretch(60, 4), Stretch(120, 1)])
    found = merge(DelayTally(Which(), 60), [one, other])
    assert found == Tallied(8, [Stretch(0, 1), Stretch(60, 6), Stretch(120, 1)], [])
