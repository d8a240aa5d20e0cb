"""The process that is killed: writes to a store as busily as it can, until somebody or a named point ends it.

What it is about to do and what it was told is durable goes to standard output, one line and one `write` each, so that
whatever was said before the kill has been said:

    begin                                                   about to open the store
    open                                                    recovered, writing from here on
    sent PRODUCER FIRST                                     about to produce this batch
    acked PRODUCER FIRST COUNT SEQUENCE DUPLICATE           that batch is durable, at this sequence of its subject
    floor SUBJECT SEQUENCE                                  about to let retention delete what lies below
    acting NUMBER / acted NUMBER                            the same for the action log
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import traceback
from collections.abc import Sequence

import msgspec

from fairway.runtime.clock import RealClock
from fairway.runtime.disk import Completion, File, Part
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.storage import retention
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store, StoreOptions
from tests.crash.streams import action_at, batch_at, subject_of

# Small, so that within a tenth of a second segments roll, are sealed, checkpointed and deleted.
OPTIONS = StoreOptions(
    segment_bytes=24 * 1024,
    action_segment_bytes=16 * 1024,
    low_water_bytes=1024 * 1024,
    checkpoint_every_bytes=32 * 1024,
    retention=retention.Policy(bytes_max=192 * 1024),
)
IN_FLIGHT_MAX = 6  # batches per stream
PAUSE_S_MAX = 0.004


class Doom(msgspec.Struct, frozen=True):
    """Where to die: at the nth passing of a named point of the disk, while opening or while running."""

    phase: str
    point: str
    nth: int


class Orders(msgspec.Struct, frozen=True):
    """What one life of the writer is to do."""

    root: str
    seed: int
    round: int
    resume: dict[int, int]  # by producer: the first sequence whose fate is not known to be "acked"
    next_action: int
    doom: Doom | None = None
    synced: bool = True


class Fate:
    """Told of each point that the disk passes, on whichever thread; ends the process at the one it waits for."""

    def __init__(self, doom: Doom | None) -> None:
        self.phase = "open"
        self._doom = doom
        self._left = doom.nth if doom else 0

    def __call__(self, point: str) -> None:
        if self._doom is not None and (self.phase, point) == (self._doom.phase, self._doom.point):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class UnsyncedDisk(RealDisk):
    """The planted bug: commits are answered without a sync. A kill does not show it, a power cut does."""

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        super().commit(file, parts, done, sync=False)


def say(*words: object) -> None:
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


class Writer:
    """Several streams, actions and retention side by side on one store."""

    def __init__(self, store: Store, orders: Orders) -> None:
        self._store = store
        self._orders = orders
        self._rng = random.Random(f"{orders.seed}/{orders.round}")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for producer_id, first in self._orders.resume.items():
                tasks.create_task(self._feed(producer_id, first))
            tasks.create_task(self._act())
            tasks.create_task(self._retain())

    async def _feed(self, producer_id: int, first: int) -> None:
        subject = subject_of(producer_id)
        while True:
            flight: list[tuple[int, AppendReceipt]] = []
            for _ in range(self._rng.randint(1, IN_FLIGHT_MAX)):
                data = batch_at(self._orders.seed, producer_id, first)
                say("sent", producer_id, first)
                receipt = self._store.produce(subject, data)
                flight.append((first, receipt))
                first += receipt.count
            for at, receipt in flight:
                await self._store.durable(receipt)
                say("acked", producer_id, at, receipt.count, receipt.first_sequence, int(receipt.is_duplicate))
            await self._pause()

    async def _act(self) -> None:
        number = self._orders.next_action
        while True:
            say("acting", number)
            header = self._store.act([action_at(self._orders.seed, number)])
            await self._store.actions.log.flusher.durable(header.end)
            say("acted", number)
            number += 1
            await self._pause()

    async def _retain(self) -> None:
        while True:
            await self._pause()
            log = self._store.messages.log
            doomed = retention.plan(log.segments, 0, OPTIONS.retention, below=self._store.messages.sealed_end).doomed
            if doomed:
                kept_from = log.segments[len(doomed)].base
                for state in self._store.messages.views.subjects:
                    say("floor", state.name, self._floor(state.id, kept_from))
                self._store.retain()

    def _floor(self, subject_id: int, kept_from: int) -> int:
        """The first sequence of a subject that lies at or above a position."""
        entries = self._store.messages.views.entries.entries(subject_id, 0, kept_from)
        return max((entry.end_sequence for entry in entries), default=0)

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0, self._rng.random() * PAUSE_S_MAX)))


async def live(orders: Orders) -> None:
    loop = asyncio.get_running_loop()
    fate = Fate(orders.doom)
    disk = (RealDisk if orders.synced else UnsyncedDisk)(orders.root, post=loop.call_soon_threadsafe, at=fate)
    say("begin")
    store = Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=OPTIONS)
    fate.phase = "run"
    say("open")
    await Writer(store, orders).run()


def main(orders: bytes) -> None:
    try:
        asyncio.run(live(msgspec.json.decode(orders, type=Orders)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the disk's threads would keep a failed writer alive
        raise


if __name__ == "__main__":
    main(sys.argv[1].encode())
