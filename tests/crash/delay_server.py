"""A delay server in a process of its own, to be killed at a named place: `python -m tests.crash.delay_server ORDERS`.

By itself beside a broker, or behind the port of a broker in this very process. Its wall clock may be ahead of the
machine's: so days pass between two lives, and what was scheduled weeks ahead comes near, is split, and is due. A place
is `DIRECTORY:POINT`, a named point of the disk's work in one of its directories, or a step of its own:

    load    between two steps of a start
    split   between two steps of a split
    noted   a broker has stored a batch, and that is not noted yet

Says `ready PORT` when it listens. SIGTERM stops it cleanly.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from fairway.broker.server import Broker, BrokerOptions, BrokerWorld
from fairway.delay.engine import DelayOptions
from fairway.delay.server import DelayServer, ServerOptions
from fairway.delay.service import Delay, DelayWorld
from fairway.limits import KIB, MIB
from fairway.protocol.messages import Produced
from fairway.runtime.clock import RealClock
from fairway.runtime.disk import Completion, File, Part, parent
from fairway.runtime.net import RealNet
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng

_WRITTEN = ("before-write", "after-write", "after-sync")
_PUBLISHED = ("publish-created", "publish-written", "publish-synced", "publish-renamed", "publish-dirsynced")
_REMOVED = ("before-remove", "after-remove", "after-remove-dirsync")
PLACES = (
    *(f"messages:{point}" for point in _WRITTEN),  # append
    *(f"schedule:{point}" for point in (*_WRITTEN, "after-dirsync", *_PUBLISHED, *_REMOVED)),  # move, split
    *(f"actions:{point}" for point in _WRITTEN),  # dispatch; after the sync: what is intended, and not sent
    "noted",
    "load",
    "split",
)

# Small, so that within seconds segments roll, and a start and a split have many steps.
_DEFAULT = DelayOptions()
OPTIONS = replace(
    _DEFAULT,
    messages_per_step=48,
    catalogue_messages=96,
    hold_ms=100,
    store=replace(
        _DEFAULT.store,
        segment_bytes=64 * KIB,
        action_segment_bytes=64 * KIB,
        low_water_bytes=1 * MIB,
        checkpoint_every_bytes=64 * KIB,
    ),
)


class Doom(msgspec.Struct, frozen=True):
    """Where to die: at the nth passing of a place."""

    place: str
    nth: int


class Orders(msgspec.Struct, frozen=True):
    """One life."""

    root: str
    port: int
    broker_port: int = 0  # 0: a broker of its own process
    shift_ms: int = 0  # how far its clock is ahead
    doom: Doom | None = None


class Fate:
    """Told of each place that is passed, on whichever thread; ends the process at the one it waits for."""

    def __init__(self, doom: Doom | None) -> None:
        self._doom = doom
        self._left = doom.nth if doom else 0
        self.committed_directory = ""  # of a commit that the disk's owner may carry out itself

    def at_point(self, point: str) -> None:
        """Of the disk: the thread that is there has the name of its directory, if it is not the owner's."""
        directory = threading.current_thread().name.partition("disk-writer:")[2]
        self.at(f"{directory or self.committed_directory}:{point}")

    def at(self, place: str) -> None:
        if self._doom is not None and place == self._doom.place:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class ShiftedClock(RealClock):
    """Ahead of the machine's."""

    def __init__(self, shift_ms: int) -> None:
        self._shift_ms = shift_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self._shift_ms


class DoomedDisk(RealDisk):
    """Says which directory a commit is for."""

    def __init__(self, root: Path, post: Callable[..., object], fate: Fate) -> None:
        super().__init__(root, post=post, at=fate.at_point)
        self._fate = fate

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        self._fate.committed_directory = parent(file.name)
        super().commit(file, parts, done, sync=sync)
        self._fate.committed_directory = ""


class DoomedDelay(Delay):
    """Passes the places that are not the disk's."""

    fate = Fate(None)

    def _turn(self) -> int:
        if not self.engine.is_loaded:
            self.fate.at("load")
        elif self.engine._housekeeper.is_busy:
            self.fate.at("split")
        return super()._turn()

    def _sent(self, number: int, receipt: Produced | None) -> None:
        self.fate.at("noted")
        super()._sent(number, receipt)


class DoomedServer(DelayServer):
    """The server of such a one."""

    @classmethod
    async def begin(cls, world: DelayWorld, port: int, broker_port: int) -> DoomedServer:
        options = ServerOptions(port=port, delay=OPTIONS)
        server = cls(world, options, DoomedDelay.open(world, OPTIONS))
        await server._listeners.open(options.host, options.port, options.http_port)
        server.delay.reach({"east": [("127.0.0.1", broker_port)]})
        return server


async def live(orders: Orders) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    fate = DoomedDelay.fate = Fate(orders.doom)
    root = Path(orders.root)
    disk = DoomedDisk(root / "delay", loop.call_soon_threadsafe, fate)
    world = DelayWorld(ShiftedClock(orders.shift_ms), disk, RealNet(), RealRng())
    if orders.broker_port:
        server = await DoomedServer.begin(world, orders.port, orders.broker_port)
        print(f"ready {server.port}", flush=True)
        await _first_of(asked.wait(), server.failed())
        await server.stop()
        return
    delay = DoomedDelay.open(world, OPTIONS)
    brokers_disk = RealDisk(root / "broker", post=loop.call_soon_threadsafe)
    brokers_world = BrokerWorld(RealClock(), brokers_disk, RealNet(), RealRng())
    broker = await Broker.start(brokers_world, BrokerOptions(port=orders.port), delay=delay.request_handler)
    delay.reach_here(("127.0.0.1", broker.port))
    print(f"ready {broker.port}", flush=True)
    await _first_of(asked.wait(), delay.failed(), broker.failed())
    await delay.stop()
    await broker.stop()


async def _first_of(*ways: object) -> None:
    ends = [asyncio.ensure_future(way) for way in ways]  # type: ignore[call-overload]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for each in ends:
        each.cancel()


if __name__ == "__main__":
    asyncio.run(live(msgspec.json.decode(sys.argv[1], type=Orders)))
