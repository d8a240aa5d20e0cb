"""Fairway for asyncio: the same names as `fairway`, awaited.

async with fairway.aio.connect("fairway://127.0.0.1:20880") as fw:
    receipt = await fw.send("order.changed", b"...")
"""

from __future__ import annotations

from fairway.career import AioCandidacy as Candidacy
from fairway.career import AioCareer as Career
from fairway.career import elect_async as elect
from fairway.client.aio.client import AioClient as Client
from fairway.client.aio.client import connect
from fairway.client.aio.connection import AioBatch as PendingBatch
from fairway.client.aio.connection import AioPending as Pending
from fairway.client.aio.consumer import AioConsumer as Consumer
from fairway.client.aio.forwarder import AioForwarder as Forwarder
from fairway.client.coalescing import AioQueueCoordinator as QueueCoordinator
from fairway.client.coalescing import AioQueueEntry as QueueEntry

__all__ = [
    "Candidacy",
    "Career",
    "Client",
    "Consumer",
    "Forwarder",
    "Pending",
    "PendingBatch",
    "QueueCoordinator",
    "QueueEntry",
    "connect",
    "elect",
]
