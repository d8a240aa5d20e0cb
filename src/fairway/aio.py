"""The asyncio twin of `fairway`: the same names, awaited.

async with fairway.aio.connect("fairway://127.0.0.1:20880") as fw:
    receipt = await fw.send("order.changed", b"...")
"""

from __future__ import annotations

from fairway.client.aio_consumer import AioConsumer as Consumer
from fairway.client.aio_face import AioClient as Client
from fairway.client.aio_face import connect
from fairway.client.aio_pending import AioBatch as PendingBatch
from fairway.client.aio_pending import AioPending as Pending

__all__ = ["Client", "Consumer", "Pending", "PendingBatch", "connect"]
