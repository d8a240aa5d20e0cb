"""The states of a connection, as a table.

Both sides of a connection go through the same states. What differs is who may say what:

    GREETING   the client has said HELLO, the server has not yet answered. Nothing else may be said.
    OPEN       requests and answers; PING and PONG either way.
    LEAVING    we have said GOODBYE. The other side may not know yet: its requests are refused, its answers are taken.
    ASKED      the other side has said GOODBYE. We ask for nothing more, and say GOODBYE when nothing is in flight.
    PARTING    both have said it. What is in flight is still answered.
    CLOSED     for whatever reason; bytes that still arrive are dropped.

LEAVING, ASKED and PARTING are the three faces of draining. A connection in which both have said GOODBYE and nothing is
in flight is closed, by whoever notices first, and no outcome is in doubt. A GOODBYE *with a code* is no farewell but
an accusation: the sender closes at once, and what was in flight has an unknown outcome.

`NEXT` says where a state leads, `MAY_HEAR` what may arrive in it. What is in neither table cannot happen: on our side
that is a bug, on the other side a RemoteProtocolError.
"""

from __future__ import annotations

import enum
from typing import Final

from fairway.errors import InvariantViolated
from fairway.protocol.messages import Verb


class Role(enum.Enum):
    CLIENT = "client"
    SERVER = "server"


class State(enum.Enum):
    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"
    ASKED = "asked to leave"
    PARTING = "parting"
    CLOSED = "closed"


class Move(enum.Enum):
    """What takes a connection from one state to the next."""

    GREETED = "the handshake is done"
    SAID_GOODBYE = "we said goodbye"
    HEARD_GOODBYE = "the other side said goodbye"
    SETTLED = "nothing is in flight"
    ENDED = "the connection is lost, broken, silent or refused"


class Heard(enum.IntEnum):
    """What can arrive. (Integers, because one is looked up for every frame and their hash costs a tenth.)"""

    HELLO = 1
    WELCOME = 2  # the answer to HELLO
    PING = 3
    PONG = 4  # the answer to PING
    GOODBYE = 5
    ACCUSATION = 6  # GOODBYE with a code
    REQUEST = 7
    ANSWER = 8


DRAINING: Final = frozenset({State.LEAVING, State.ASKED, State.PARTING})

NEXT: Final[dict[tuple[State, Move], State]] = {
    (State.GREETING, Move.GREETED): State.OPEN,
    (State.OPEN, Move.SAID_GOODBYE): State.LEAVING,
    (State.OPEN, Move.HEARD_GOODBYE): State.ASKED,
    (State.LEAVING, Move.HEARD_GOODBYE): State.PARTING,
    (State.ASKED, Move.SAID_GOODBYE): State.PARTING,
    (State.PARTING, Move.SETTLED): State.CLOSED,
    (State.GREETING, Move.ENDED): State.CLOSED,
    (State.OPEN, Move.ENDED): State.CLOSED,
    (State.LEAVING, Move.ENDED): State.CLOSED,
    (State.ASKED, Move.ENDED): State.CLOSED,
    (State.PARTING, Move.ENDED): State.CLOSED,
}

_ALIVE: Final = frozenset({Heard.PING, Heard.PONG, Heard.ACCUSATION})

MAY_HEAR: Final[dict[tuple[Role, State], frozenset[Heard]]] = {
    (Role.SERVER, State.GREETING): frozenset({Heard.HELLO, Heard.ACCUSATION}),
    (Role.SERVER, State.OPEN): _ALIVE | {Heard.REQUEST, Heard.GOODBYE},
    (Role.SERVER, State.LEAVING): _ALIVE | {Heard.REQUEST, Heard.GOODBYE},
    (Role.SERVER, State.ASKED): _ALIVE,
    (Role.SERVER, State.PARTING): _ALIVE,
    (Role.SERVER, State.CLOSED): frozenset(),
    (Role.CLIENT, State.GREETING): frozenset({Heard.WELCOME, Heard.ACCUSATION}),
    (Role.CLIENT, State.OPEN): _ALIVE | {Heard.ANSWER, Heard.GOODBYE},
    (Role.CLIENT, State.LEAVING): _ALIVE | {Heard.ANSWER, Heard.GOODBYE},
    (Role.CLIENT, State.ASKED): _ALIVE | {Heard.ANSWER},
    (Role.CLIENT, State.PARTING): _ALIVE | {Heard.ANSWER},
    (Role.CLIENT, State.CLOSED): frozenset(),
}

# (verb, is it an answer): the connection's own verbs; from FIRST_REQUEST_VERB on everything is a request or an answer.
OWN: Final[dict[tuple[int, bool], Heard]] = {
    (Verb.HELLO, False): Heard.HELLO,
    (Verb.HELLO, True): Heard.WELCOME,
    (Verb.PING, False): Heard.PING,
    (Verb.PING, True): Heard.PONG,
    (Verb.GOODBYE, False): Heard.GOODBYE,
}


def after(state: State, move: Move) -> State:
    """Where a move leads; a move that the table does not have is a bug of ours."""
    following = NEXT.get((state, move))
    if following is None:
        raise InvariantViolated(f"a connection that is {state.value} has no way on when {move.value}")
    return following
