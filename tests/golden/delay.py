"""The golden directory of a delay server: small, with every kind of record, opened by every later version.

    python -m tests.golden.delay        writes it where it is not there yet

It is never written again, like the one of the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairway import batch
from fairway.batch import MessageId
from fairway.delay.schedule.manifest import DAY_MS, HOUR_MS
from fairway.delay.dispatch.dispatcher import Intent
from fairway.delay.engine import Engine
from fairway.delay.engine import DelayOptions
from fairway.names import Subject
from fairway.storage.store import StoreOptions
from fairway.runtime.clock import Clock, ManualClock
from fairway.runtime.disk import Disk
from fairway.runtime.rng import Rng, SeededRng
from fairway.simulation.disk import SimDisk
from fairway.simulation import Simulation

FOLDER = Path(__file__).parent / "delay_v1"  # whose streams have no secrets
EXPECTED = Path(__file__).parent / "delay_v1.json"
KEYED_FOLDER = Path(__file__).parent / "delay_v1_keyed"  # as this version writes it
KEYED_EXPECTED = Path(__file__).parent / "delay_v1_keyed.json"
OPTIONS = DelayOptions(
    store=StoreOptions(segment_bytes=2_048, action_segment_bytes=1_024, low_water_bytes=0),
    hold_ms=0,
    remembered_max=0,
)
ORDERS, BILLS = Subject("orders"), Subject("bills.EU-1_x")
DIRECTORIES = ("", "messages", "actions", "index", "checkpoints", "schedule")
START_MS = 1_700_000_000_000


def engine_on(disk: Disk, clock: Clock, rng: Rng, defer: Callable[..., object]) -> Engine:
    return Engine(disk, clock, rng, defer=defer, route=lambda _subject: "east", options=OPTIONS)


class Author:
    """Writes the directory, one synced step at a time."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.disk = SimDisk(SeededRng("golden disk"), world.loop.call_later)
        self._clock = ManualClock(START_MS)
        self._sequence = 0
        self.engine = engine_on(self.disk, self._clock, SeededRng("golden delay"), world.loop.call_soon)
        self._wait()

    def _wait(self) -> list[Intent]:
        found = []
        for _ in range(20):
            found += self.engine.on_time()
            self._world.run(asyncio.sleep(0.1))
        return found

    def schedule(self, subject: Subject, after_ms: list[int], **columns: Any) -> None:
        payloads = [b"message %d" % (self._sequence + index) for index in range(len(after_ms))]
        data = batch.encode(
            payloads,
            producer_id=0x1234,
            first_sequence=0,
            created_ms=self._clock.wall_ms(),
            due_ms=[START_MS + each for each in after_ms],
            ids=[MessageId(0x5678, self._sequence + index) for index in range(len(after_ms))],
            **columns,
        )
        data = batch.restamp(data, producer_id=0x1234 + self._sequence, first_sequence=0)
        self._sequence += len(after_ms)
        self.engine.schedule(subject, data)
        self._wait()

    def write_story(self) -> None:
        """Hours, days and months; a batch over several buckets; catalogues; sent, intended, cancelled, put off,
        forgotten; a checkpoint."""
        self.schedule(ORDERS, [HOUR_MS, 90 * DAY_MS, HOUR_MS, 5 * DAY_MS], keys=["a", "b", None, "d"])
        self.schedule(BILLS, [400 * DAY_MS] * 3, tags=[["x"], ["y"], None])
        self.schedule(ORDERS, [2 * HOUR_MS, 2 * HOUR_MS + 5])
        self.engine.cancel_key(ORDERS, "d")
        self.engine.reschedule(MessageId(0x5678, 4), START_MS + 20 * DAY_MS)
        for file in self.engine.log:
            file.catalogue(self._clock.wall_ms(), messages_min=1)
        self._wait()
        self.schedule(BILLS, [401 * DAY_MS])  # behind the catalogue
        self.engine.log.publish()
        self._clock.advance(HOUR_MS)
        for intent in self._wait():
            self.engine.sent(intent.number)
        self._wait()
        self.engine.store.checkpoint()
        self._world.run(asyncio.sleep(1))
        self.engine.cancel(MessageId(0x5678, 5))
        self._clock.advance(HOUR_MS + 1)
        self._wait()  # intended, and nobody learns whether it was sent


async def content(engine: Engine, intents: list[Intent]) -> dict[str, Any]:
    """What version 1 means, as JSON."""
    pending = await engine.page(engine.filter())
    return {
        "pending": [[str(each.id), each.subject_id, each.key, each.due_ms] for each in pending.messages],
        "intents": [[each.number, each.target, each.subject, each.data.hex()] for each in intents],
        "buckets": [[each.number, each.span.grain, each.span.start_ms, each.span.end_ms] for each in engine.log],
    }


def write(folder: Path = KEYED_FOLDER, expected: Path = KEYED_EXPECTED) -> bool:
    """Write the golden directory unless it is there."""
    if folder.exists():
        return False
    with Simulation("golden") as world:
        author = Author(world)
        author.write_story()
        for directory in DIRECTORIES:
            (folder / directory).mkdir(exist_ok=True, parents=True)
            for name in author.disk.listing(directory):
                if directory or name == "identity":
                    file = author.disk.open(f"{directory}/{name}" if directory else name)
                    if file.size:
                        (folder / directory / name).write_bytes(file.read(0, file.size))
        disk = author.disk.crash_process()
        engine = engine_on(disk, ManualClock(START_MS), SeededRng("reader"), world.loop.call_soon)
        intents = []
        for _ in range(10):
            intents += engine.on_time()
            world.run(asyncio.sleep(0.1))
        held = world.run(content(engine, intents))
    expected.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    return True


if __name__ == "__main__":
    print("written" if write() else "it is there already, and is never written again")
