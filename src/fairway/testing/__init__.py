"""Tests of programs that use Fairway: the real broker and the real client, in memory, on a clock that tests move.

    with fairway.testing.MemoryBroker() as broker:
        fw = broker.connect()                                  # a fairway.Client
        fw.send("order.changed", b"...").result()
        consumer = fw.consumer("order.changed", group="hotel")
        consumer.poll(timeout=1).retry(after=3600)
        broker.clock.advance(hours=1)
        assert consumer.poll(timeout=1).attempt == 2

The broker opens no port, starts no thread and writes no file, and only virtual time passes: three days cost as much as
the events in them. pytest finds the fixture `fairway_broker` by itself.

memory_broker     `MemoryBroker`, its clock, and the clients that it makes; a store for `fairway.ExpiringInbox`
"""

from __future__ import annotations

from fairway.batch.layout import numpy_or_none

if numpy_or_none() is None:
    raise ModuleNotFoundError(
        "fairway.testing runs a broker, which needs numpy: pip install 'fairway[server]'", name="numpy"
    )

from fairway.testing.memory_broker import AsyncMemoryStore, MemoryBroker, MemoryStore, StillWaiting, VirtualClock

__all__ = ["AsyncMemoryStore", "MemoryBroker", "MemoryStore", "StillWaiting", "VirtualClock"]
