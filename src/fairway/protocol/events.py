"""What a connection tells its owner: what arrived, and how it ended."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from fairway.errors import Code, Refused, RemoteProtocolError
from fairway.protocol.messages import ControlMessage, Verb
from fairway.world.buffers import Bytes


class HandshakeDone(msgspec.Struct, frozen=True, gc=False):
    """The conversation may begin; what was agreed on."""

    version: int
    features: tuple[str, ...]
    peer: str  # name and version of the other side's library
    frame_bytes_max: int  # the largest frame that the other side takes
    heartbeat_ms: int
    requests_max: int


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """To the server. It is in flight until `respond` or `refuse` is called with its correlation id."""

    correlation: int
    verb: Verb
    message: ControlMessage
    attachments: tuple[Bytes, ...]
    control_bytes: int  # of the message, encoded: for the owner's memory budget


class ResponseReceived(msgspec.Struct, frozen=True, gc=False):
    """To the client: the answer to its request."""

    correlation: int
    message: ControlMessage
    attachments: tuple[Bytes, ...]


class RefusalReceived(msgspec.Struct, frozen=True, gc=False):
    """To the client: its request was refused, and nothing changed."""

    correlation: int
    refused: Refused


class RefusalSent(msgspec.Struct, frozen=True, gc=False):
    """To the server: the connection has refused a request, or the handshake (0), by itself. There is nothing to do."""

    correlation: int
    code: Code


class PeerLeaving(msgspec.Struct, frozen=True, gc=False):
    """The other side has said goodbye. What is in flight will still be answered; then the connection closes itself."""

    reason: str
    retry_after_ms: int | None


ConnectionEvent: TypeAlias = (
    HandshakeDone | RequestReceived | ResponseReceived | RefusalReceived | RefusalSent | PeerLeaving
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
    """The end. Requests in `unanswered` have an unknown outcome, except where the connection was never open."""

    why: Why
    sentence: str
    unanswered: tuple[int, ...] = ()  # correlation ids of what was in flight
    code: Code | None = None  # TURNED_AWAY, DISMISSED, ACCUSED: as the other side (or we, sending it away) put it
    retry_after_ms: int | None = None
    error: RemoteProtocolError | None = None  # BROKEN
