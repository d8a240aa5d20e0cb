"""The state tables, exhaustively: every state with every move, every role and state with all that can arrive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from fairway.errors import InvariantViolated
from fairway.protocol import Connection, Role, State, Why, codec, frames, messages
from fairway.protocol.states import DRAINING, MAY_HEAR, NEXT, OWN, Heard, Move, after
from tests.unit.protocol.feeding import BATCH, Pair, joined, opened

HELLO = messages.Hello(1, 1, [], "somebody", 1 << 20)
WELCOME = messages.Welcome(1, [], "some server", 1 << 20, 10_000, 10)

# What arrives, as (verb, flags, correlation, message); the answer is to the client's first request.
ARRIVALS: dict[Heard, tuple[int, int, int, messages.Message]] = {
    Heard.HELLO: (1, 0, 0, HELLO),
    Heard.WELCOME: (1, 1, 0, WELCOME),
    Heard.PING: (2, 0, 0, messages.Ping()),
    Heard.PONG: (2, 1, 0, messages.Pong()),
    Heard.GOODBYE: (3, 0, 0, messages.Goodbye("enough")),
    Heard.ACCUSATION: (3, 0, 0, messages.Goodbye("no", "protocol_error")),
    Heard.REQUEST: (21, 0, 99, messages.Leave("s", "g", "c", 0)),
    Heard.ANSWER: (16, 1, 1, messages.Produced(1, 1, 1, False, 1)),
}


def connection_in(role: Role, state: State) -> Connection:
    """A connection in that state, by the moves that lead there; a request is in flight wherever one can be."""
    pair = Pair() if state is State.GREETING else opened()
    us, they = (pair.client, pair.server) if role is Role.CLIENT else (pair.server, pair.client)
    if state is not State.GREETING:
        pair.client.request(messages.Produce("s"), [BATCH])
        pair.to_server()
        us.on_time(us.next_deadline() or 0)  # so that a PONG has its PING
    if state in {State.LEAVING, State.PARTING}:
        us.drain("we go")
    if state in {State.ASKED, State.PARTING}:
        they.drain("they go")
        pair.to_client() if role is Role.CLIENT else pair.to_server()
    if state is State.CLOSED:
        us.lost()
    us.take()
    assert us.state is state
    return us


def arrival(heard: Heard, version: int) -> bytes:
    verb, flags, correlation, message = ARRIVALS[heard]
    return joined(frames.write(verb, flags, version, correlation, codec.encode(message)))


@pytest.mark.parametrize(("state", "move"), list(product(State, Move)), ids=str)
def test_every_move_from_every_state(state: State, move: Move) -> None:
    if (state, move) in NEXT:
        assert after(state, move) is NEXT[state, move]
    else:
        with pytest.raises(InvariantViolated, match="has no way on"):
            after(state, move)


def test_the_table_leads_from_the_greeting_to_the_end_and_never_back() -> None:
    order = list(State)
    assert all(order.index(target) > order.index(state) for (state, _), target in NEXT.items())
    assert {state for state, _ in NEXT} == set(State) - {State.CLOSED}
    assert set(NEXT.values()) == set(State) - {State.GREETING}
    assert set(State) - {State.GREETING, State.OPEN, State.CLOSED} == DRAINING
    assert all(NEXT[state, Move.ENDED] is State.CLOSED for state in State if state is not State.CLOSED)


def test_every_role_and_state_says_what_it_may_hear() -> None:
    assert set(MAY_HEAR) == set(product(Role, State))
    assert set(OWN.values()) == set(Heard) - {Heard.ACCUSATION, Heard.REQUEST, Heard.ANSWER}


@pytest.mark.parametrize(("role", "state", "heard"), list(product(Role, State, Heard)), ids=str)
def test_everything_that_can_arrive_in_every_state(role: Role, state: State, heard: Heard) -> None:
    connection = connection_in(role, state)
    connection.feed(arrival(heard, version=0 if state is State.GREETING else 1), 0)
    is_broken = connection.closed is not None and connection.closed.why is Why.BROKEN
    assert is_broken == (heard not in MAY_HEAR[role, state] and state is not State.CLOSED)
    if is_broken:
        assert "came to a" in str(connection.closed.error if connection.closed else "")
        assert len(connection.take()) == 1, "the last GOODBYE says why"


AFTERWARDS: dict[tuple[State, Heard], State] = {
    (State.GREETING, Heard.HELLO): State.OPEN,
    (State.GREETING, Heard.WELCOME): State.OPEN,
    (State.OPEN, Heard.GOODBYE): State.ASKED,
    (State.LEAVING, Heard.GOODBYE): State.PARTING,  # a request is in flight
    (State.PARTING, Heard.ANSWER): State.CLOSED,  # it was the last one
    (State.ASKED, Heard.ANSWER): State.CLOSED,
}


@pytest.mark.parametrize("key", [key for key, allowed in MAY_HEAR.items() if allowed], ids=str)
def test_where_everything_that_may_arrive_leads(key: tuple[Role, State]) -> None:
    role, state = key
    for heard in MAY_HEAR[role, state]:
        connection = connection_in(role, state)
        connection.feed(arrival(heard, version=0 if state is State.GREETING else 1), 0)
        expected = State.CLOSED if heard is Heard.ACCUSATION else AFTERWARDS.get((state, heard), state)
        assert connection.state is expected


CALLS: dict[str, Callable[[Connection], object]] = {
    "drain": lambda connection: connection.drain("enough"),
    "lost": lambda connection: connection.lost(),
    "on_time": lambda connection: connection.on_time(1 << 62),
    "take": lambda connection: connection.take(),
    "feed nothing": lambda connection: connection.feed(b"", 0),
}


@pytest.mark.parametrize(("role", "state", "call"), list(product(Role, State, CALLS)), ids=str)
def test_what_the_owner_may_call_in_every_state(role: Role, state: State, call: str) -> None:
    connection = connection_in(role, state)
    CALLS[call](connection)
    assert (connection.state is State.CLOSED) == (connection.closed is not None)
