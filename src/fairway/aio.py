"""The asyncio twin of `fairway`: the same names, awaited.

async with fairway.aio.connect("fairway://127.0.0.1:20880") as fw:
    receipt = await fw.send("order.changed", b"...")
"""

from __future__ import annotations

from fairway.career import AioCandidacy as Candidacy
from fairway.career import AioCareer as Career
from fairway.career import elect_async as elect
from fairway.client.aio_consumer import AioConsumer as Consumer
from fairway.client.aio_face import AioClient as Client
from fairway.client.aio_face import connect
from fairway.client.aio_forwarder import AioForwarder as Forwarder
from fairway.client.aio_pending import AioBatch as PendingBatch
from fairway.client.aio_pending import AioPending as Pending
from fairway.client.coalescing_aio import AioQueueCoordinator as QueueCoordinator
from fairway.client.coalescing_aio import AioQueueEntry as QueueEntry

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
