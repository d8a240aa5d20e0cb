"""Actions: packed, unpacked, and still there after a restart."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.errors import RemoteProtocolError
from fairway.group_events import ActionKind, GroupEvent
from fairway.storage import action_log
from fairway.storage.action_log import Action
from tests.unit.storage.helpers import FIRST_ACTIONS, ROOMY, World, ack, actions_in, records_of

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
ranges = st.lists(st.tuples(u64, u64), max_size=5).map(tuple)
events = st.builds(GroupEvent, st.sampled_from(ActionKind), i64, u32, u32, i64, u64, ranges, st.binary(max_size=40))
actions = st.builds(Action, u32, u32, events)


@given(st.lists(actions, max_size=6))
def test_what_was_packed_is_unpacked(given_actions: list[Action]) -> None:
    body = action_log.pack(given_actions)
    assert len(body) % 8 == 0
    assert list(action_log.unpack(body)) == given_actions


@given(st.binary(max_size=200))
def test_any_other_bytes_are_an_error_of_our_own_family(body: bytes) -> None:
    with suppress(RemoteProtocolError):
        list(action_log.unpack(body))


def test_a_detail_that_is_cut_short_is_an_error() -> None:
    body = action_log.pack([ack(0, detail=b"x" * 64)])
    with pytest.raises(RemoteProtocolError):
        list(action_log.unpack(body[:-8]))


def test_actions_are_there_after_a_restart_in_their_order() -> None:
    written = [ack(number, detail=b"%d" % number) for number in range(20)]
    with World(options=ROOMY) as world:
        for each in written[:10]:
            world.act(each)
        world.act(*written[10:])
        world.crash()
        store = world.open()
        assert store.findings == []
        assert actions_in(records_of(world.disk, FIRST_ACTIONS, store.identity.actions_id)) == written
