"""The handshake: both sides agree on a version and on features. Pure decisions; `connection` acts on them.

HELLO and its answer keep their frame layout for ever and carry version 0. So any two versions can at least find out
that they have no version in common. The server chooses the highest common version. A feature counts if both sides have
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fairway import limits
from fairway.errors import Code, Misuse, Refused, RemoteProtocolError
from fairway.protocol.connection_states import HandshakeDone
from fairway.protocol.messages import Hello, Welcome

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
