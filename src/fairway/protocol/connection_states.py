"""The states of a connection, as a table, the handshake, and the events that a connection reports to its owner.

Both sides of a connection go through the same states, but may send different frames:

    GREETING   the client has sent HELLO, the server has not yet answered. No other frame may be sent.
    OPEN       requests and answers; PING and PONG either way.
    LEAVING    this side has sent GOODBYE. The peer may not know yet: its requests are refused, its answers are taken.
    ASKED      the peer has sent GOODBYE. This side sends no more requests, and GOODBYE when nothing is in flight.
    PARTING    both sides have sent GOODBYE. Requests in flight are still answered.
    CLOSED     for any reason; bytes that still arrive are dropped.

LEAVING, ASKED and PARTING are the three forms of draining. When both sides have sent GOODBYE and nothing is in flight,
the side that notices first closes the connection, and no outcome is in doubt. A GOODBYE *with a code* (ACCUSATION) ends
the connection at once: requests in flight then have an unknown outcome.

`NEXT` says where a move leads from a state, `MAY_HEAR` which frames may arrive in a state. A move that is not in `NEXT`
is a bug of ours. A frame that is not in `MAY_HEAR` is a RemoteProtocolError.

In the handshake both sides agree on a version and on features. HELLO and its answer keep their frame layout for ever
and carry version 0. So any two versions can at least find out that they have no version in common. The server chooses
the highest common version. A feature counts if both sides have it.

The module also defines the events, and `Closed` with `Why`: how a connection ended.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from fairway import limits
from fairway.errors import Code, InvariantViolated, Misuse, Refused, RemoteProtocolError
from fairway.protocol.messages import ControlMessage, Hello, Produce, Verb, Welcome
from fairway.runtime.buffers import Bytes


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
    """A step from one state to the next."""

    GREETED = "the handshake is done"
    SAID_GOODBYE = "we said goodbye"
    HEARD_GOODBYE = "the other side said goodbye"
    SETTLED = "nothing is in flight"
    ENDED = "the connection is lost, broken, silent or refused"


class ReceivedKind(enum.IntEnum):
    """A kind of frame that can arrive. The kinds are integers because hashing an enum member costs a tenth per
    frame."""

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

# (verb, is it an answer) of the connection's own frames. Verbs from FIRST_REQUEST_VERB on are requests or answers.
OWN: Final[dict[tuple[int, bool], ReceivedKind]] = {
    (Verb.HELLO, False): ReceivedKind.HELLO,
    (Verb.HELLO, True): ReceivedKind.WELCOME,
    (Verb.PING, False): ReceivedKind.PING,
    (Verb.PING, True): ReceivedKind.PONG,
    (Verb.GOODBYE, False): ReceivedKind.GOODBYE,
}


def after(state: ConnectionState, move: Move) -> ConnectionState:
    """The state that a move leads to. A move that the table does not have is a bug of ours."""
    following = NEXT.get((state, move))
    if following is None:
        raise InvariantViolated(f"a connection that is {state.value} has no way on when {move.value}")
    return following


class HandshakeDone(msgspec.Struct, frozen=True, gc=False):
    """The handshake is done; these are the terms."""

    version: int
    features: tuple[str, ...]
    peer: str  # name and version of the peer's library
    frame_bytes_max: int  # the largest frame that the peer takes
    heartbeat_ms: int
    requests_max: int


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """To the server: a request, in flight until `respond` or `refuse` is called with its correlation id."""

    correlation: int
    verb: Verb
    message: ControlMessage
    attachments: tuple[Bytes, ...]
    control_bytes: int  # of the encoded message: for the owner's memory budget

    def batches(self, message: Produce) -> BatchesReceived:
        """A PRODUCE request, whose message is `message`, as a row of one."""
        return BatchesReceived(message, [self.correlation], list(self.attachments), self.control_bytes)


class BatchesReceived(msgspec.Struct, frozen=True, gc=False):
    """To the server: PRODUCE requests in a row, to the same subject and with the same secret. Each of them has a
    correlation id and a batch of its own, and is in flight as any other request."""

    message: Produce
    correlations: list[int]
    batches: list[Bytes]
    control_bytes: int  # of one encoded message

    def requests(self) -> Iterator[RequestReceived]:
        """The same requests one by one."""
        for correlation, batch in zip(self.correlations, self.batches, strict=True):
            yield RequestReceived(correlation, Verb.PRODUCE, self.message, (batch,), self.control_bytes)


class ResponseReceived(msgspec.Struct, frozen=True, gc=False):
    """To the client: the answer to its request."""

    correlation: int
    message: ControlMessage
    attachments: tuple[Bytes, ...]


class RefusalReceived(msgspec.Struct, frozen=True, gc=False):
    """To the client: the server refused its request, and nothing changed."""

    correlation: int
    refused: Refused


class RefusalSent(msgspec.Struct, frozen=True, gc=False):
    """To the server: the connection has refused a request, or the handshake (0), by itself. The owner does nothing."""

    correlation: int
    code: Code


class PeerLeaving(msgspec.Struct, frozen=True, gc=False):
    """The peer has sent GOODBYE. Requests in flight are still answered, then the connection closes itself."""

    reason: str
    retry_after_ms: int | None


ConnectionEvent: TypeAlias = (
    HandshakeDone | RequestReceived | BatchesReceived | ResponseReceived | RefusalReceived | RefusalSent | PeerLeaving
)


class Why(enum.Enum):
    """How a connection ended."""

    PARTED = "both sides said goodbye and nothing was in flight"
    TURNED_AWAY = "the handshake was refused"
    BROKEN = "the other side broke the rules"
    DISMISSED = "we ended the connection and said why"
    ACCUSED = "the other side ended the connection and said why"
    SILENT = "nothing was heard for too long"
    LOST = "the transport closed it"


class Closed(msgspec.Struct, frozen=True, gc=False):
    """How the connection ended. Requests in `unanswered` have an unknown outcome, unless the connection never
    opened."""

    why: Why
    sentence: str
    unanswered: tuple[int, ...] = ()  # correlation ids of the requests in flight
    code: Code | None = None  # TURNED_AWAY, DISMISSED, ACCUSED: as the peer gave it, or this side
    retry_after_ms: int | None = None
    error: RemoteProtocolError | None = None  # BROKEN


# --- the handshake ----------------------------------------------------------------------------------------------------

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
GREETING_VERSION: Final = 0  # in the header of HELLO and its answer
FEATURE_CHARS_MAX: Final = 32  # so that all of them and a name fit into a HELLO
INBOX: Final = "inbox"  # a feature: PRODUCE to a group's private inbox
FEED: Final = "registry-feed"  # a feature: REGISTER has the act FEED


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The settings that one side brings to a connection. Only the server decides `heartbeat_ms` and `requests_max`."""

    name: str = "fairway"  # for people: name and version of the program
    version_min: int = VERSION_MIN
    version_max: int = VERSION_MAX
    features: tuple[str, ...] = ()
    frame_bytes_max: int = limits.FRAME_BYTES_MAX
    heartbeat_ms: int = limits.HEARTBEAT_MS
    requests_max: int = limits.CONNECTION_REQUESTS_MAX
    handshake_ms: int = limits.HANDSHAKE_MS
    has_heartbeat: bool = True  # False: this side never pings, because its transport reports the other side's end

    def __post_init__(self) -> None:
        if not limits.HELLO_FRAME_BYTES_MAX <= self.frame_bytes_max <= limits.FRAME_BYTES_MAX:
            raise Misuse(f"frame_bytes_max must be {limits.HELLO_FRAME_BYTES_MAX} to {limits.FRAME_BYTES_MAX}")
        if not limits.HEARTBEAT_MS_MIN <= self.heartbeat_ms <= limits.HEARTBEAT_MS_MAX:
            raise Misuse(f"heartbeat_ms must be {limits.HEARTBEAT_MS_MIN} to {limits.HEARTBEAT_MS_MAX}")
        if self.requests_max < 1 or not 1 <= self.version_min <= self.version_max <= 255:
            raise Misuse("requests_max must be at least 1, and versions a range within 1 to 255")
        if len(self.features) > limits.FEATURES_MAX or max(map(len, self.features), default=0) > FEATURE_CHARS_MAX:
            raise Misuse(f"at most {limits.FEATURES_MAX} features of {FEATURE_CHARS_MAX} characters can be offered")
        if len(self.name) > limits.NAME_CHARS_MAX:
            raise Misuse(f"a name of {len(self.name)} characters: at most {limits.NAME_CHARS_MAX} are allowed")


def hello(options: ConnectionOptions) -> Hello:
    """The client's HELLO."""
    return Hello(
        options.version_min, options.version_max, list(options.features), options.name, options.frame_bytes_max
    )


def answer(said: Hello, options: ConnectionOptions) -> Welcome | Refused:
    """The server's answer to a HELLO."""
    version = min(said.version_max, options.version_max)
    if said.version_min > said.version_max:
        return Refused(Code.BAD_REQUEST, f"protocol versions {said.version_min} to {said.version_max} are no range")
    if version < max(said.version_min, options.version_min):
        return Refused(
            Code.UNSUPPORTED,
            f"no common protocol version: this server speaks {options.version_min} to {options.version_max}, "
            f"the client {said.version_min} to {said.version_max}; upgrade the older of the two",
        )
    if said.frame_bytes_max < limits.HELLO_FRAME_BYTES_MAX:
        return Refused(Code.BAD_REQUEST, f"frame_bytes_max must be at least {limits.HELLO_FRAME_BYTES_MAX}")
    if len(said.features) > limits.FEATURES_MAX:
        return Refused(Code.BAD_REQUEST, f"at most {limits.FEATURES_MAX} features can be offered")
    features = [feature for feature in dict.fromkeys(said.features) if feature in options.features]
    return Welcome(version, features, options.name, options.frame_bytes_max, options.heartbeat_ms, options.requests_max)


def agreed_by_server(said: Hello, welcome: Welcome) -> HandshakeDone:
    """The terms for the server, from its answer."""
    return HandshakeDone(
        welcome.version,
        tuple(welcome.features),
        said.client,
        min(said.frame_bytes_max, limits.FRAME_BYTES_MAX),
        welcome.heartbeat_ms,
        welcome.requests_max,
    )


def agreed_by_client(welcome: Welcome, options: ConnectionOptions) -> HandshakeDone:
    """The terms for the client; a Welcome that the client did not offer is the server's protocol error."""
    if not options.version_min <= welcome.version <= options.version_max:
        raise RemoteProtocolError(
            f"the server chose protocol version {welcome.version}: "
            f"{options.version_min} to {options.version_max} were offered"
        )
    if not set(welcome.features) <= set(options.features):
        raise RemoteProtocolError("the server chose features that were not offered")
    if welcome.frame_bytes_max < limits.HELLO_FRAME_BYTES_MAX or welcome.requests_max < 1:
        raise RemoteProtocolError("the server leaves no room for a request")
    if not limits.HEARTBEAT_MS_MIN <= welcome.heartbeat_ms <= limits.HEARTBEAT_MS_MAX:
        raise RemoteProtocolError(f"the server asks for a heartbeat of {welcome.heartbeat_ms} ms")
    return HandshakeDone(
        welcome.version,
        tuple(welcome.features),
        welcome.server,
        min(welcome.frame_bytes_max, limits.FRAME_BYTES_MAX),
        welcome.heartbeat_ms,
        welcome.requests_max,
    )
