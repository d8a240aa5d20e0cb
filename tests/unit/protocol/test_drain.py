"""Orderly ends: whoever says goodbye first, everything in flight is answered and both sides close by themselves."""

from __future__ import annotations

from itertools import product

import pytest

from fairway.errors import Code, Misuse
from fairway.protocol import (
    ConnectionState,
    PeerLeaving,
    RefusalReceived,
    RefusalSent,
    ResponseReceived,
    Role,
    Why,
    messages,
)
from tests.unit.protocol.feeding import BATCH, Pair, opened

PRODUCE = messages.Produce("order.changed")
PRODUCED = messages.Produced(1, 1, 5, False, 1)


def with_requests(count: int) -> Pair:
    pair = opened()
    for _ in range(count):
        pair.client.request(PRODUCE, [BATCH])
    pair.to_server()
    return pair


def carry(pair: Pair) -> None:
    for _ in range(3):
        pair.to_server()
        pair.to_client()


def assert_parted(pair: Pair) -> None:
    for connection in (pair.client, pair.server):
        assert connection.closed is not None
        assert (connection.closed.why, connection.closed.unanswered) == (Why.PARTED, ())
        assert connection.take() == []


@pytest.mark.parametrize(("first", "requests"), list(product(["client", "server", "both"], [0, 1, 3])))
def test_everything_in_flight_is_answered_first(first: str, requests: int) -> None:
    pair = with_requests(requests)
    if first != "server":
        pair.client.drain("the program ends")
    if first != "client":
        pair.server.drain("the server stops", retry_after_ms=1_000)
    carry(pair)
    for correlation in range(1, requests + 1):
        assert pair.client.closed is None
        assert pair.server.closed is None
        assert pair.server.respond(correlation, PRODUCED)
        carry(pair)
    assert_parted(pair)


@pytest.mark.parametrize("role", Role)
def test_the_other_side_is_told_why_and_when_to_come_back(role: Role) -> None:
    pair = with_requests(1)
    us = pair.client if role is Role.CLIENT else pair.server
    us.drain("upgrade", retry_after_ms=2_000)
    us.drain("said once", retry_after_ms=1)
    events = pair.to_server() if role is Role.CLIENT else pair.to_client()
    assert events == [PeerLeaving("upgrade", 2_000)]


def test_requests_that_cross_the_goodbye_are_refused() -> None:
    pair = with_requests(1)
    pair.server.drain("the server stops")
    late = pair.client.request(PRODUCE, [BATCH])
    assert pair.to_server() == [RefusalSent(late, Code.DRAINING)]
    leaving, refusal = pair.to_client()
    assert isinstance(leaving, PeerLeaving)
    assert isinstance(refusal, RefusalReceived)
    assert (refusal.correlation, refusal.refused.code) == (late, Code.DRAINING)
    with pytest.raises(Misuse, match="asked to leave takes no requests"):
        pair.client.request(PRODUCE, [BATCH])
    pair.server.respond(1, PRODUCED)
    [answer] = pair.to_client()
    assert isinstance(answer, ResponseReceived)
    pair.to_server()
    assert_parted(pair)


def test_a_client_that_asks_after_its_goodbye_broke_the_rules() -> None:
    pair = with_requests(1)
    pair.client.drain("bye")
    pair.to_server()
    assert pair.server.state is ConnectionState.ASKED
    other = with_requests(0)
    other.client._correlation = 7
    other.client.request(PRODUCE, [BATCH])
    pair.server.feed(b"".join(other.client.take()), 0)
    assert pair.server.closed is not None
    assert pair.server.closed.why is Why.BROKEN


def test_pings_are_answered_while_draining() -> None:
    pair = with_requests(1)
    pair.server.drain("the server stops")
    carry(pair)
    pair.client.on_time(pair.client.next_deadline() or 0)
    pair.to_server()
    pair.to_client()
    assert pair.client.closed is None
    assert pair.server.closed is None


@pytest.mark.parametrize("role", Role)
def test_draining_before_the_handshake_just_ends(role: Role) -> None:
    pair = Pair()
    us = pair.client if role is Role.CLIENT else pair.server
    us.take()
    us.drain("changed my mind")
    assert us.closed is not None
    assert us.closed.why is Why.PARTED
    assert us.take() == []
