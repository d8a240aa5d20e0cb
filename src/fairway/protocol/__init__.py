"""The wire, without a wire: bytes in, events out; no socket and no clock in this package.

    frames      bytes ↔ frames: bounded before anything is allocated
    messages    what is said: the conversation, producing, consuming      admin    what operators and Spark say
    delaying    what is said about messages that are not due yet
    codec       verbs ↔ message types, and their bytes
    states      the states of a connection, as a table                    handshake, heartbeat    its decisions
    connection  all of it together: what client and broker drive
    line        a client's connection, lost and found again                session    what lives on it
    producing   the producer's session: lane (sending again), filling, pending, breaker, backoff

`docs/protocol.md` is the specification, for those who write a client in another language.
"""

from fairway.protocol.connection import Connection
from fairway.protocol.events import (
    Closed,
    ConnectionEvent,
    HandshakeDone,
    PeerLeaving,
    RefusalReceived,
    RefusalSent,
    RequestReceived,
    ResponseReceived,
    Why,
)
from fairway.protocol.frames import Frame, FrameReader, FrameTooLarge
from fairway.protocol.handshake import ConnectionOptions
from fairway.protocol.messages import ControlMessage, Verb
from fairway.protocol.states import ConnectionState, Role
from fairway.world.buffers import Bytes

__all__ = [
    "Bytes",
    "Closed",
    "Connection",
    "ConnectionEvent",
    "ConnectionOptions",
    "ConnectionState",
    "ControlMessage",
    "Frame",
    "FrameReader",
    "FrameTooLarge",
    "HandshakeDone",
    "PeerLeaving",
    "RefusalReceived",
    "RefusalSent",
    "RequestReceived",
    "ResponseReceived",
    "Role",
    "Verb",
    "Why",
]
