"""Fairway: a message queue without partitions, whose log Spark can read.

The public surface:

    with fairway.connect("fairway://127.0.0.1:20880") as fw:
        fw.send("order.changed", b"...", key="o-42").result()           # a receipt: it is durable
        fw.send("order.remind", b"...", after=timedelta(days=3))        # delivered then, and not before
        with fw.consumer("order.changed", group="hotel") as consumer:
            for message in consumer:
                message.ack()

`fairway.aio` has the same names for asyncio.
"""

from __future__ import annotations

from fairway.batch import MessageId
from fairway.career import Candidacy, Career, Leadership, elect
from fairway.client.app import App
from fairway.client.coalescing import CoalescingStatistics, RequestStatus
from fairway.client.coalescing_threads import QueueCoordinator, QueueEntry
from fairway.client.consumer import Consumer
from fairway.client.core import ClientOptions
from fairway.client.delaying import DelayedMessage, DelayedOutcome, InTransit, Redirection
from fairway.client.forwarder import Forwarder
from fairway.client.forwarder_items import FailedItem, ForwarderCounts, ForwarderOptions, Outgoing
from fairway.client.handling import Reject, Retry
from fairway.client.idempotence_expiring import AsyncExpiringStore, ClaimState, ExpiringInbox, ExpiringStore
from fairway.client.idempotence_memory import MemoryInbox
from fairway.client.pending import SyncPending as Pending
from fairway.client.spool import SpoolOptions, SpoolState
from fairway.client.sync import Client, connect
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
from fairway.protocol.consumption import ConsumerOptions
from fairway.protocol.delivery import Message
from fairway.protocol.line import ReconnectOptions
from fairway.protocol.pending import BatchReceipt, Receipt, SpoolBatchReceipt, SpoolReceipt
from fairway.protocol.producing import ProducerOptions

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
