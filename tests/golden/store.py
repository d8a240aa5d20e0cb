"""The golden data directory: a small store that every later version must open, with what it holds.

    python -m tests.golden.store        writes it where it is not there yet

It is never written again: it stands for directories that lie on people's disks. A new format version gets a directory
of its own, and this one stays.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairway.group_events import GroupEvent, ActionKind
from fairway import batch
from fairway.names import Subject
from fairway.storage import action_log, segment
from fairway.storage.action_log import Action
from fairway.storage.record import RecordKind, Record
from fairway.storage.store import Store, StoreOptions
from fairway.runtime.clock import ManualClock
from fairway.runtime.disk import Disk
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk
from fairway.simulation import Simulation

FOLDER = Path(__file__).parent / "store_v1"
EXPECTED = Path(__file__).parent / "store_v1.json"
GUARDED_FOLDER = Path(__file__).parent / "store_v1_guarded"  # its streams have secrets
GUARDED_EXPECTED = Path(__file__).parent / "store_v1_guarded.json"
SET_BACK_FOLDER = Path(__file__).parent / "store_v1_set_back"  # its append times go back
SET_BACK_EXPECTED = Path(__file__).parent / "store_v1_set_back.json"
REMOVED_FOLDER = Path(__file__).parent / "store_v1_removed"  # some of its subjects were removed
REMOVED_EXPECTED = Path(__file__).parent / "store_v1_removed.json"
YEAR_MS = 365 * 24 * 3_600_000
SECRETS = {0x1234: bytes(range(16)), 0x5678: bytes(range(16, 32))}  # and producer 9abc has none
OPTIONS = StoreOptions(segment_bytes=2_048, action_segment_bytes=1_024, low_water_bytes=0)
ORDERS, BILLS = Subject("orders"), Subject("bills.EU-1_x")
DIRECTORIES = ("", "messages", "actions", "index", "checkpoints")


class Author:
    """Writes the store, one synced step at a time: nothing in it depends on how long anything takes."""

    def __init__(self, world: Simulation, *, is_guarded: bool = False) -> None:
        self._world = world
        self._is_guarded = is_guarded
        self.disk = SimDisk(SeededRng("golden disk"), world.loop.call_later)
        self._clock = ManualClock()
        self._sequences: dict[int, int] = {}
        self.store = self._open()

    def _open(self) -> Store:
        rng = SeededRng("golden store")
        store = Store.open(self.disk, self._clock, rng, defer=self._world.loop.call_soon, options=OPTIONS)
        self._world.run(asyncio.sleep(1))
        return store

    def restart(self) -> None:
        """A process that dies, and another one."""
        self.disk = self.disk.crash_process()
        self.store = self._open()

    def produce(self, subject: Subject, producer: int, payloads: list[bytes], **columns: Any) -> None:
        first = self._sequences.get(producer, 0)
        self._sequences[producer] = first + len(payloads)
        self._clock.advance(1_500)
        data = batch.encode(
            payloads, producer_id=producer, first_sequence=first, created_ms=self._clock.wall_ms(), **columns
        )
        secret = SECRETS.get(producer, b"") if self._is_guarded else b""
        self._world.run(self.store.durable(self.store.produce(subject, data, secret=secret)))
        self._world.run(asyncio.sleep(1))

    def act(self, *actions: Action) -> None:
        end = self.store.act(actions).end
        self._world.run(self.store.actions.log.flusher.durable(end))
        self._world.run(asyncio.sleep(1))

    def checkpoint(self) -> None:
        self.store.checkpoint()
        self._world.run(asyncio.sleep(1))

    def write_story(self) -> None:
        """Three segments, two subjects, two lives, every kind of action, a checkpoint and something after it."""
        for number in range(6):
            self.produce(ORDERS, 0x1234, [b"order %d" % number, bytes(range(number * 40))], producer_epoch=number // 3)
            self.produce(BILLS, 0x5678, [b"bill %d" % number], tags=[["paid", "eu"]], keys=[f"key-{number}"])
            self.act(_action(ActionKind(number + 1), number), _action(ActionKind.ACK, number))
        self.restart()
        for number in range(9):
            self.act(_action(ActionKind(number + 7), number, detail=b"because %d" % number))
            self.produce(ORDERS, 0x9ABC, [b"second life %d" % number] * 3, codec=batch.Codec.ZSTD)
        self.checkpoint()
        self.produce(BILLS, 0x5678, [b"after the checkpoint"])
        self.act(_action(ActionKind.ACK, 99))


    def remove(self, *names: Subject) -> None:
        find = self.store.messages.views.subjects.find
        self.store.remove_subjects([state for name in names if (state := find(name)) is not None])
        self._world.run(asyncio.sleep(1))

    def write_removed_story(self) -> None:
        """A removal before the checkpoint and one behind it, a name that is used again, one that is not written."""
        for number in range(3):
            self._fill(number)
        self.remove(BILLS)
        self._fill(3, bills=0xABCD)
        self.store.ensure_subject(Subject("unwritten"))
        self.checkpoint()
        self.produce(Subject("short-lived"), 0x77, [b"gone"])
        self.remove(Subject("short-lived"))
        self._fill(4, bills=0xABCD)

    def write_set_back_story(self) -> None:
        """A clock that is ahead and put right, twice: before the checkpoint, and between the checkpoint and the end."""
        self._fill(0)
        self._jump(YEAR_MS)
        self._fill(1)
        self._jump(-YEAR_MS)
        self._fill(2)
        self._jump(2 * YEAR_MS)
        self._fill(3)
        self.checkpoint()
        self._fill(4)
        self._jump(-2 * YEAR_MS)
        self._fill(5)

    def _fill(self, number: int, bills: int = 0x5678) -> None:
        for each in range(3):
            self.produce(ORDERS, 0x1234, [b"order %d.%d" % (number, each) * 20])
            self.produce(BILLS, bills, [b"bill %d.%d" % (number, each)])
            self.act(_action(ActionKind.ACK, 10 * number + each))

    def _jump(self, ms: int) -> None:
        """Of the clock; the store follows it after a minute."""
        self._clock.jump(ms)
        self.store.follow_clock()
        self._clock.advance(61_000)


def _action(kind: ActionKind, number: int, detail: bytes = b"") -> Action:
    ranges = tuple((number * 10 + index, index + 1) for index in range(number % 3))
    return Action(7, number % 2 + 1, GroupEvent(kind, 1_700_000_000_000 + number, 3, number, 5 * number, number * 10, ranges, detail))


# --- what a store holds ----------------------------------------------------------------------------------------------


def content(store: Store, disk: Disk) -> dict[str, Any]:
    """What version 1 means, as JSON."""
    views = store.messages.views
    return {
        "identity": [f"{each:016x}" for each in store.identity],
        "subjects": {
            str(each.name): {"id": each.id, "next_sequence": each.next_sequence, "batches": _batches(store, each.id)}
            for each in views.subjects
        },
        "actions": [_spelled(each) for each in _actions(disk, store.identity.actions_id)],
        "streams": len(views.dedupe),
    }


def _batches(store: Store, subject_id: int) -> list[dict[str, Any]]:
    stored = store.messages.read(subject_id, 0, messages_max=10_000, bytes_max=1 << 20)
    return [
        {
            "first_sequence": each.entry.first_sequence,
            "position": each.entry.position,
            "size": each.entry.size,
            "appended_ms": each.entry.appended_ms,
            "tag_filter": f"{each.entry.tag_filter:016x}",
            "producer_id": f"{each.entry.producer_id:016x}",
            "producer_sequence": each.entry.producer_sequence,
            "payloads": [payload.hex() for payload in batch.decode(each.data).payloads],
        }
        for each in stored
    ]


def _actions(disk: Disk, log_id: int) -> Iterator[Action]:
    for found in records(disk, action_log.DIRECTORY, log_id):
        if found.header.kind == RecordKind.ACTIONS:
            yield from action_log.unpack(found.body)


def _spelled(action: Action) -> dict[str, Any]:
    event = action.event
    return {
        "group_id": action.group_id,
        "subject_id": action.subject_id,
        **event._asdict(),
        "kind": event.kind.name,
        "ranges": list(map(list, event.ranges)),
        "detail": event.detail.hex(),
    }


def records(disk: Disk, log: str, log_id: int) -> Iterator[Record]:
    """Every record of a log; there must be nothing else."""
    for name in disk.listing(log):
        base = segment.base_of(name)
        if base is not None:
            file = disk.open(f"{log}/{name}")
            for found in segment.SegmentScan(file, base, base + segment.HEADER_BYTES, log_id):
                if isinstance(found, segment.Damage):
                    raise AssertionError(f"{name} is damaged at {found.start}: {found.why}")
                yield found
            file.close()


def write(
    folder: Path = FOLDER,
    expected: Path = EXPECTED,
    *,
    is_guarded: bool = False,
    is_set_back: bool = False,
    is_removed: bool = False,
) -> bool:
    """Write the golden directory unless it is there."""
    if folder.exists():
        return False
    with Simulation("golden") as world:
        author = Author(world, is_guarded=is_guarded)
        if is_set_back:
            author.write_set_back_story()
        elif is_removed:
            author.write_removed_story()
        else:
            author.write_story()
        for directory in DIRECTORIES:
            (folder / directory).mkdir(exist_ok=True, parents=True)
            for name in author.disk.listing(directory):
                if directory or name == "identity":
                    file = author.disk.open(f"{directory}/{name}" if directory else name)
                    if file.size:  # the ballast is room, not content
                        (folder / directory / name).write_bytes(file.read(0, file.size))
        held = content(author.store, author.disk)
    expected.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    return True


if __name__ == "__main__":
    for is_new in (
        write(),
        write(GUARDED_FOLDER, GUARDED_EXPECTED, is_guarded=True),
        write(SET_BACK_FOLDER, SET_BACK_EXPECTED, is_set_back=True),
        write(REMOVED_FOLDER, REMOVED_EXPECTED, is_removed=True),
    ):
        print("written" if is_new else "it is there already, and is never written again")
