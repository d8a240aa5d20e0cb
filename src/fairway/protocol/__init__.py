"""The Fairway protocol without I/O: bytes in, events out. No socket and no clock is read in this package.

The wire, used by servers and clients:

    frames               bytes ↔ frames; every length is bounded before anything is allocated
    messages             control messages of the connection, of producing and of consuming
    admin_messages       control messages of operators, tools and Spark
    delay_messages       control messages about delayed messages
    route_messages       control messages to meta servers
    replication_messages control messages between a replica and its master
    codec                verbs ↔ message types, and their bytes
    connection_states    the states of a connection, as a table, its events, and the decisions of the handshake
    connection           one connection: frames, states, handshake and heartbeat together

The client, above the wire:

    line                 one client's connection to one broker, reconnected for ever; sessions live on a line.
                         `RetryDelays` and `CircuitBreaker`: what follows when the broker fails again and again
    request_queue        single requests, each with one answer
    producer_session     the producer: buffer, batches, and a window in flight
    batch_builder        the batch that is being filled, and the checks of a message
    producer_stream      the sealed batches of one subject, in order, each stored once
    resend               the window of batches in flight and what an answer says about a batch, for all who resend
    receipts             pending outcomes and receipts of sends
    spool_port           the port to the spool, and batches lent to another session
    consumer_session     the consumer: join, pull, settle, renew the lease, leave
    consumer_options     options, counters and events of a consumer
    consumer_lease       until when a consumer's messages are certainly its own
    delivery             pulled batches, and `Message`
    prefetch_buffer      messages that wait for the program, and how many to pull ahead
    lots                 the state of every message that a consumer holds
    settlements          acks and other outcomes on their way to the broker

A send travels so: `ProducerSession.add` fills a batch. The `Line` asks the session, the `Connection` writes a PRODUCE
frame, and the server's `Connection` reports `RequestReceived`. The server calls `respond`, the client's `Line` brings
the answer back, and the batch's `Pending` messages get their receipts.

`docs/internals/protocol.md` is the specification, for authors of clients in other languages.
"""

from fairway.protocol.connection import Connection
from fairway.protocol.connection_states import (
    BatchesReceived,
    Closed,
    ConnectionEvent,
    ConnectionOptions,
    ConnectionState,
    HandshakeDone,
    PeerLeaving,
    RefusalReceived,
    RefusalSent,
    RequestReceived,
    ResponseReceived,
    Role,
    Why,
)
from fairway.protocol.frames import Frame, FrameReader, FrameTooLarge
from fairway.protocol.messages import ControlMessage, Verb
from fairway.runtime.buffers import Bytes

__all__ = [
    "BatchesReceived",
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
