"""For tests of programs that use Fairway: the real broker and the real client, in memory, on a clock that tests move.

    with fairway.testing.MemoryBroker() as broker:
        fw = broker.connect()                                  # a fairway.Client
        fw.send("order.changed", b"...").result()
        consumer = fw.consumer("order.changed", group="hotel")
        consumer.poll(timeout=1).retry(after=3600)
        broker.clock.advance(hours=1)
        assert consumer.poll(timeout=1).attempt == 2

Nothing is listened on, no thread is started, no file is written, and no time passes but virtual time: three days cost
what happens in them. pytest finds the fixture `fairway_broker` by itself.
"""

from __future__ import annotations

from fairway.batch.arrays import numpy_or_none

if numpy_or_none() is None:
    raise ModuleNotFoundError(
        "fairway.testing runs a broker, which needs numpy: pip install 'fairway[server]'", name="numpy"
    )

from fairway.testing.expiring_store import AsyncMemoryStore, MemoryStore
from fairway.testing.memory_broker import MemoryBroker, VirtualClock
from fairway.testing.memory_link import StillWaiting

__all__ = ["AsyncMemoryStore", "MemoryBroker", "MemoryStore", "StillWaiting", "VirtualClock"]
