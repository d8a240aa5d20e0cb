"""Fairway: a message queue without partitions, whose log Spark can read.

    with fairway.connect("fairway://127.0.0.1:20880") as fw:
        fw.send("order.changed", b"...", key="o-42").result()           # a receipt: the message is durable
        fw.send("order.remind", b"...", after=timedelta(days=3))        # delivered in three days
        with fw.consumer("order.changed", group="hotel") as consumer:
            for message in consumer:
                message.ack()

`fairway.aio` has the same names for asyncio. The packages:

    client       the library: clients, producers, consumers, forwarders, the spool
    sql          outbox, inbox and election in the user's database
    spark        the Spark data source
    career       leader election for the user's programs
    testing      a broker in memory, for tests
    cli          the command line
    demo         the demonstrations of `fairway demo`
    broker       the broker: produce, pull, settle, dead letters, inboxes
    delay        the delay server
    meta         the meta server: routes and the registry
    groups       a consumer group, as a pure state machine
    protocol     the protocol and the client's sessions, without I/O
    batch        the batch format
    storage      the logs on disk
    replication  masters and replicas
    registry     the registry: SQLite or ZooKeeper
    serving      parts of every server: connections, memory bounds, metrics, HTTP probes
    scheduling   actors and virtual time
    lookup       requests to meta servers: routes, and the registry over the wire
    simulation   clock, disk, network and registry from one seed, for tests
    runtime      clock, disk, network and threads

The modules `errors`, `limits`, `names`, `coalesce`, `group_events`, `redaction` and `pytest_plugin` stand beside the
packages.
`__main__` is the entry point of the command line.
"""

from __future__ import annotations

from fairway.batch import MessageId
from fairway.career import Candidacy, Career, Leadership, elect
from fairway.client.app import App
from fairway.client.coalescing import CoalescingStatistics, QueueCoordinator, QueueEntry, RequestStatus
from fairway.client.core import ClientOptions
from fairway.client.delayed_messages import DelayedMessage, DelayedOutcome, InTransit, Redirection
from fairway.client.forwarder_buffer import FailedItem, ForwarderCounts, ForwarderOptions, Outgoing
from fairway.client.handler_results import Reject, Retry
from fairway.client.idempotence import AsyncExpiringStore, ClaimState, ExpiringInbox, ExpiringStore, MemoryInbox
from fairway.client.spool.spool import SpoolOptions, SpoolState
from fairway.client.sync.client import Client, connect
from fairway.client.sync.connection import SyncPending as Pending
from fairway.client.sync.consumer import Consumer
from fairway.client.sync.forwarder import Forwarder
from fairway.errors import (
    BadName,
    BufferFull,
    CircuitOpen,
    Code,
    Deposed,
    FairwayError,
    Misuse,
    NotSent,
    OutcomeUnknown,
    Refused,
    RemoteProtocolError,
    StorageFault,
    Unreachable,
)
from fairway.groups.config import AfterDead, Backoff, Coalesce, GroupConfig, Mode, Order, TagFilter
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.delivery import Message
from fairway.protocol.line import ReconnectOptions
from fairway.protocol.producer_session import ProducerOptions
from fairway.protocol.receipts import BatchReceipt, Receipt, SpoolBatchReceipt, SpoolReceipt

__version__ = "0.1.0.dev0"

__all__ = [
    "AfterDead",
    "App",
    "AsyncExpiringStore",
    "Backoff",
    "BadName",
    "BatchReceipt",
    "BufferFull",
    "Candidacy",
    "Career",
    "CircuitOpen",
    "ClaimState",
    "Client",
    "ClientOptions",
    "Coalesce",
    "CoalescingStatistics",
    "Code",
    "Consumer",
    "ConsumerOptions",
    "DelayedMessage",
    "DelayedOutcome",
    "Deposed",
    "ExpiringInbox",
    "ExpiringStore",
    "FailedItem",
    "FairwayError",
    "Forwarder",
    "ForwarderCounts",
    "ForwarderOptions",
    "GroupConfig",
    "InTransit",
    "Leadership",
    "MemoryInbox",
    "Message",
    "MessageId",
    "Misuse",
    "Mode",
    "NotSent",
    "Order",
    "OutcomeUnknown",
    "Outgoing",
    "Pending",
    "ProducerOptions",
    "QueueCoordinator",
    "QueueEntry",
    "Receipt",
    "ReconnectOptions",
    "Redirection",
    "Refused",
    "Reject",
    "RemoteProtocolError",
    "RequestStatus",
    "Retry",
    "SpoolBatchReceipt",
    "SpoolOptions",
    "SpoolReceipt",
    "SpoolState",
    "StorageFault",
    "TagFilter",
    "Unreachable",
    "__version__",
    "connect",
    "elect",
]
