"""A broker in a process of its own, to be killed: `python -m tests.crash.broker_server ROOT PORT [KEEP_BYTES]`.

Says `ready PORT` when it listens. SIGTERM stops it cleanly; a store that fails ends it with status 1. It keeps all
messages, or about so many bytes of them.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.limits import KIB, MIB
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage.retention import Policy
from fairway.storage.store import StoreOptions

# Small, so that within seconds segments roll, are sealed and checkpointed.
STORE = StoreOptions(
    segment_bytes=256 * KIB,
    action_segment_bytes=256 * KIB,
    low_water_bytes=1 * MIB,
    checkpoint_every_bytes=128 * KIB,
)


async def serve(root: Path, port: int, keep_bytes: int | None = None) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    options = BrokerOptions(port=port, http_port=None, drain_ms_max=500, store=STORE)
    if keep_bytes is not None:
        policy = Policy(bytes_max=keep_bytes)
        options = replace(options, store=replace(STORE, retention=policy), housekeeping_ms=100)
    broker = await Broker.start(BrokerWorld(RealClock(), disk, RealNet(), RealRng()), options)
    print(f"ready {broker.port}", flush=True)
    ends = [asyncio.ensure_future(asked.wait()), asyncio.ensure_future(broker.failed())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for each in ends:
        each.cancel()
    await broker.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *map(int, sys.argv[2:])))
