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


class ConnectionState(enum.Enum):
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


class ReceivedKind(enum.IntEnum):
    """What can arrive. (Integers, because one is looked up for every frame and their hash costs a tenth.)"""

    HELLO = 1
    WELCOME = 2  # the answer to HELLO
    PING = 3
    PONG = 4  # the answer to PING
    GOODBYE = 5
    ACCUSATION = 6  # GOODBYE with a code
    REQUEST = 7
    ANSWER = 8


DRAINING: Final = frozenset({ConnectionState.LEAVING, ConnectionState.ASKED, ConnectionState.PARTING})

NEXT: Final[dict[tuple[ConnectionState, Move], ConnectionState]] = {
    (ConnectionState.GREETING, Move.GREETED): ConnectionState.OPEN,
    (ConnectionState.OPEN, Move.SAID_GOODBYE): ConnectionState.LEAVING,
    (ConnectionState.OPEN, Move.HEARD_GOODBYE): ConnectionState.ASKED,
    (ConnectionState.LEAVING, Move.HEARD_GOODBYE): ConnectionState.PARTING,
    (ConnectionState.ASKED, Move.SAID_GOODBYE): ConnectionState.PARTING,
    (ConnectionState.PARTING, Move.SETTLED): ConnectionState.CLOSED,
    (ConnectionState.GREETING, Move.ENDED): ConnectionState.CLOSED,
    (ConnectionState.OPEN, Move.ENDED): ConnectionState.CLOSED,
    (ConnectionState.LEAVING, Move.ENDED): ConnectionState.CLOSED,
    (ConnectionState.ASKED, Move.ENDED): ConnectionState.CLOSED,
    (ConnectionState.PARTING, Move.ENDED): ConnectionState.CLOSED,
}

_ALIVE: Final = frozenset({ReceivedKind.PING, ReceivedKind.PONG, ReceivedKind.ACCUSATION})

MAY_HEAR: Final[dict[tuple[Role, ConnectionState], frozenset[ReceivedKind]]] = {
    (Role.SERVER, ConnectionState.GREETING): frozenset({ReceivedKind.HELLO, ReceivedKind.ACCUSATION}),
    (Role.SERVER, ConnectionState.OPEN): _ALIVE | {ReceivedKind.REQUEST, ReceivedKind.GOODBYE},
    (Role.SERVER, ConnectionState.LEAVING): _ALIVE | {ReceivedKind.REQUEST, ReceivedKind.GOODBYE},
    (Role.SERVER, ConnectionState.ASKED): _ALIVE,
    (Role.SERVER, ConnectionState.PARTING): _ALIVE,
    (Role.SERVER, ConnectionState.CLOSED): frozenset(),
    (Role.CLIENT, ConnectionState.GREETING): frozenset({ReceivedKind.WELCOME, ReceivedKind.ACCUSATION}),
    (Role.CLIENT, ConnectionState.OPEN): _ALIVE | {ReceivedKind.ANSWER, ReceivedKind.GOODBYE},
    (Role.CLIENT, ConnectionState.LEAVING): _ALIVE | {ReceivedKind.ANSWER, ReceivedKind.GOODBYE},
    (Role.CLIENT, ConnectionState.ASKED): _ALIVE | {ReceivedKind.ANSWER},
    (Role.CLIENT, ConnectionState.PARTING): _ALIVE | {ReceivedKind.ANSWER},
    (Role.CLIENT, ConnectionState.CLOSED): frozenset(),
}

# (verb, is it an answer): the connection's own verbs; from FIRST_REQUEST_VERB on everything is a request or an answer.
OWN: Final[dict[tuple[int, bool], ReceivedKind]] = {
    (Verb.HELLO, False): ReceivedKind.HELLO,
    (Verb.HELLO, True): ReceivedKind.WELCOME,
    (Verb.PING, False): ReceivedKind.PING,
    (Verb.PING, True): ReceivedKind.PONG,
    (Verb.GOODBYE, False): ReceivedKind.GOODBYE,
}


def after(state: ConnectionState, move: Move) -> ConnectionState:
    """Where a move leads; a move that the table does not have is a bug of ours."""
    following = NEXT.get((state, move))
    if following is None:
        raise InvariantViolated(f"a connection that is {state.value} has no way on when {move.value}")
    return following
