"""The state tables, exhaustively: every state with every move, every role and state with all that can arrive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from fairway.errors import InvariantViolated
from fairway.protocol import Connection, ConnectionState, Role, Why, codec, frames, messages
from fairway.protocol.connection_states import DRAINING, MAY_HEAR, NEXT, OWN, Move, ReceivedKind, after
from tests.unit.protocol.feeding import BATCH, Pair, joined, opened

HELLO = messages.Hello(1, 1, [], "somebody", 1 << 20)
WELCOME = messages.Welcome(1, [], "some server", 1 << 20, 10_000, 10)

# What arrives, as (verb, flags, correlation, message); the answer is to the client's first request.
ARRIVALS: dict[ReceivedKind, tuple[int, int, int, messages.ControlMessage]] = {
    ReceivedKind.HELLO: (1, 0, 0, HELLO),
    ReceivedKind.WELCOME: (1, 1, 0, WELCOME),
    ReceivedKind.PING: (2, 0, 0, messages.Ping()),
    ReceivedKind.PONG: (2, 1, 0, messages.Pong()),
    ReceivedKind.GOODBYE: (3, 0, 0, messages.Goodbye("enough")),
    ReceivedKind.ACCUSATION: (3, 0, 0, messages.Goodbye("no", "protocol_error")),
    ReceivedKind.REQUEST: (21, 0, 99, messages.Leave("s", "g", "c", 0)),
    ReceivedKind.ANSWER: (16, 1, 1, messages.Produced(1, 1, 1, False, 1)),
}


def connection_in(role: Role, state: ConnectionState) -> Connection:
    """A connection in that state, by the moves that lead there; a request is in flight wherever one can be."""
    pair = Pair() if state is ConnectionState.GREETING else opened()
    us, they = (pair.client, pair.server) if role is Role.CLIENT else (pair.server, pair.client)
    if state is not ConnectionState.GREETING:
        pair.client.request(messages.Produce("s"), [BATCH])
        pair.to_server()
        us.on_time(us.next_deadline() or 0)  # so that a PONG has its PING
    if state in {ConnectionState.LEAVING, ConnectionState.PARTING}:
        us.drain("we go")
    if state in {ConnectionState.ASKED, ConnectionState.PARTING}:
        they.drain("they go")
        pair.to_client() if role is Role.CLIENT else pair.to_server()
    if state is ConnectionState.CLOSED:
        us.lost()
    us.take()
    assert us.state is state
    return us


def arrival(heard: ReceivedKind, version: int) -> bytes:
    verb, flags, correlation, message = ARRIVALS[heard]
    return joined(frames.write(verb, flags, version, correlation, codec.encode(message)))


@pytest.mark.parametrize(("state", "move"), list(product(ConnectionState, Move)), ids=str)
def test_every_move_from_every_state(state: ConnectionState, move: Move) -> None:
    if (state, move) in NEXT:
        assert after(state, move) is NEXT[state, move]
    else:
        with pytest.raises(InvariantViolated, match="has no way on"):
            after(state, move)


def test_the_table_leads_from_the_greeting_to_the_end_and_never_back() -> None:
    order = list(ConnectionState)
    assert all(order.index(target) > order.index(state) for (state, _), target in NEXT.items())
    assert {state for state, _ in NEXT} == set(ConnectionState) - {ConnectionState.CLOSED}
    assert set(NEXT.values()) == set(ConnectionState) - {ConnectionState.GREETING}
    assert set(ConnectionState) - {ConnectionState.GREETING, ConnectionState.OPEN, ConnectionState.CLOSED} == DRAINING
    assert all(
        NEXT[state, Move.ENDED] is ConnectionState.CLOSED
        for state in ConnectionState
        if state is not ConnectionState.CLOSED
    )


def test_every_role_and_state_says_what_it_may_hear() -> None:
    assert set(MAY_HEAR) == set(product(Role, ConnectionState))
    assert set(OWN.values()) == set(ReceivedKind) - {ReceivedKind.ACCUSATION, ReceivedKind.REQUEST, ReceivedKind.ANSWER}


@pytest.mark.parametrize(("role", "state", "heard"), list(product(Role, ConnectionState, ReceivedKind)), ids=str)
def test_everything_that_can_arrive_in_every_state(role: Role, state: ConnectionState, heard: ReceivedKind) -> None:
    connection = connection_in(role, state)
    connection.feed(arrival(heard, version=0 if state is ConnectionState.GREETING else 1), 0)
    is_broken = connection.closed is not None and connection.closed.why is Why.BROKEN
    assert is_broken == (heard not in MAY_HEAR[role, state] and state is not ConnectionState.CLOSED)
    if is_broken:
        assert "came to a" in str(connection.closed.error if connection.closed else "")
        assert len(connection.take()) == 1, "the last GOODBYE says why"


AFTERWARDS: dict[tuple[ConnectionState, ReceivedKind], ConnectionState] = {
    (ConnectionState.GREETING, ReceivedKind.HELLO): ConnectionState.OPEN,
    (ConnectionState.GREETING, ReceivedKind.WELCOME): ConnectionState.OPEN,
    (ConnectionState.OPEN, ReceivedKind.GOODBYE): ConnectionState.ASKED,
    (ConnectionState.LEAVING, ReceivedKind.GOODBYE): ConnectionState.PARTING,  # a request is in flight
    (ConnectionState.PARTING, ReceivedKind.ANSWER): ConnectionState.CLOSED,  # it was the last one
    (ConnectionState.ASKED, ReceivedKind.ANSWER): ConnectionState.CLOSED,
}


@pytest.mark.parametrize("key", [key for key, allowed in MAY_HEAR.items() if allowed], ids=str)
def test_where_everything_that_may_arrive_leads(key: tuple[Role, ConnectionState]) -> None:
    role, state = key
    for heard in MAY_HEAR[role, state]:
        connection = connection_in(role, state)
        connection.feed(arrival(heard, version=0 if state is ConnectionState.GREETING else 1), 0)
        expected = ConnectionState.CLOSED if heard is ReceivedKind.ACCUSATION else AFTERWARDS.get((state, heard), state)
        assert connection.state is expected


CALLS: dict[str, Callable[[Connection], object]] = {
    "drain": lambda connection: connection.drain("enough"),
    "lost": lambda connection: connection.lost(),
    "on_time": lambda connection: connection.on_time(1 << 62),
    "take": lambda connection: connection.take(),
    "feed nothing": lambda connection: connection.feed(b"", 0),
}


@pytest.mark.parametrize(("role", "state", "call"), list(product(Role, ConnectionState, CALLS)), ids=str)
def test_what_the_owner_may_call_in_every_state(role: Role, state: ConnectionState, call: str) -> None:
    connection = connection_in(role, state)
    CALLS[call](connection)
    assert (connection.state is ConnectionState.CLOSED) == (connection.closed is not None)
