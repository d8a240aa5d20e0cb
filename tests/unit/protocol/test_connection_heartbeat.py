"""Heartbeats: who hears nothing asks, twice; then the other side is dead."""

from __future__ import annotations

import pytest

from fairway.protocol import ConnectionOptions, Role, Why, messages
from fairway.protocol.connection import Beat, HeartbeatTimer
from tests.unit.protocol.feeding import Pair, opened

MS = 1_000_000
HEARTBEAT_MS = 500


def beating() -> Pair:
    return opened(server=ConnectionOptions(heartbeat_ms=HEARTBEAT_MS))


@pytest.mark.parametrize("role", Role)
def test_three_missed_intervals_are_death(role: Role) -> None:
    pair = beating()
    us = pair.client if role is Role.CLIENT else pair.server
    for interval in (1, 2):
        assert us.next_deadline() == interval * HEARTBEAT_MS * MS
        us.on_time(interval * HEARTBEAT_MS * MS - 1)
        assert us.take() == []
        us.on_time(interval * HEARTBEAT_MS * MS)
        assert len(us.take()) == 1, "a PING"
    us.on_time(3 * HEARTBEAT_MS * MS - 1)
    assert us.is_open
    us.on_time(3 * HEARTBEAT_MS * MS)
    assert us.closed is not None
    assert us.closed.why is Why.SILENT


def test_the_dead_take_what_was_in_flight_with_them() -> None:
    pair = beating()
    pull = pair.client.request(messages.Pull("s", "g", "c", 1, 1, 30_000, 0))
    for interval in (1, 2, 3):
        pair.client.on_time(interval * HEARTBEAT_MS * MS)
    assert pair.client.closed is not None
    assert pair.client.closed.unanswered == (pull,)


@pytest.mark.parametrize("role", Role)
def test_an_idle_pair_lives_for_ever(role: Role) -> None:
    pair = beating()
    us = pair.client if role is Role.CLIENT else pair.server
    for _ in range(100):
        deadline = us.next_deadline()
        assert deadline is not None
        pair.now_ns = deadline
        us.on_time(pair.now_ns)
        assert pair.to_server() == pair.to_client() == pair.to_server() == []
    assert us.closed is None
    assert pair.now_ns == 100 * HEARTBEAT_MS * MS


def test_any_byte_is_a_sign_of_life() -> None:
    pair = beating()
    pair.client.on_time(HEARTBEAT_MS * MS)
    pair.client.feed(b"\x30", 700 * MS)
    assert pair.client.next_deadline() == (700 + HEARTBEAT_MS) * MS


def test_a_side_that_slept_asks_before_it_judges() -> None:
    pulse = HeartbeatTimer(500, 0)
    assert pulse.on_time(100_000 * MS) is Beat.PING
    assert pulse.due_ns == 100_500 * MS
    assert pulse.on_time(100_000 * MS) is Beat.NOTHING
    assert pulse.on_time(200_000 * MS) is Beat.PING
    assert pulse.on_time(200_500 * MS) is Beat.DEAD
