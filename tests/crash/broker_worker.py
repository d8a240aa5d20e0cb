"""A producer or a consumer in a process of its own: `python -m tests.crash.broker_worker ORDERS`.

The same clients as in simulation, on real sockets; what they see goes to standard output (`broker_witness`). SIGUSR1:
calm down, that is finish what was begun, and take and ack what is there. SIGTERM: end at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from fairway.groups import GroupConfig
from fairway.groups.config import Backoff
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import SeededRng
from tests.crash.broker_witness import Scribe
from tests.simulation.broker_clients import Consumer, Mood, Producer, Scene
from tests.simulation.broker_truth import Owner

LEASE_MS = 1_500
CONFIG = GroupConfig(version=2, lease_ms=LEASE_MS, attempts_max=1_000, backoff=Backoff(first_ms=50, cap_ms=400))
CALM_WAIT_MS = 300


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    name: str  # of the consumer, or of the producer if there is no group
    seed: str
    port: int
    subject: str
    group: str = ""
    is_back: bool = False  # a consumer of that name was killed: this one remembers nothing of it


async def work(orders: Orders) -> None:
    loop = asyncio.get_running_loop()
    mood = Mood(wait_ms=CALM_WAIT_MS)
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(mood, "is_calm", True))
    loop.add_signal_handler(signal.SIGTERM, over.set)
    scribe = Scribe()
    scene = Scene(RealClock(), SeededRng(orders.seed), lambda _: RealNet(), lambda _: None, "127.0.0.1", orders.port)
    if orders.group:
        owner = Owner(orders.group, orders.subject, LEASE_MS * 1_000_000, 0)
        consumer = Consumer(scene, scribe, mood, owner, orders.name, CONFIG)
        if orders.is_back:
            scribe.note_asked(owner, consumer.holder, None, "forgot")
        running = asyncio.ensure_future(consumer.run())
    else:
        producer = Producer(scene, scribe, mood, orders.name, orders.subject, pace_ms=8)
        running = asyncio.ensure_future(_produce(producer, mood, over))
    ended = asyncio.ensure_future(over.wait())
    await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    for each in (running, ended):
        each.cancel()
    if running.done():
        running.result()  # nothing but the end of a producer: whatever else it raises is a failure


async def _produce(producer: Producer, mood: Mood, over: asyncio.Event) -> None:
    """Until everything that was begun is acknowledged."""
    feeding = asyncio.ensure_future(producer.run())
    while not (mood.is_calm and producer.is_done):
        if feeding.done():
            feeding.result()
        await asyncio.sleep(0.02)
    feeding.cancel()
    over.set()


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.argv[1], type=Orders)))
