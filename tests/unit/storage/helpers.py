"""A store on a simulated disk, through as many lives as a test wants, and words for what tests do to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fairway import batch
from fairway.errors import Refused
from fairway.group_events import ActionKind, GroupEvent
from fairway.limits import GIB, KIB
from fairway.names import Subject
from fairway.runtime.disk import Disk
from fairway.simulation import Simulation
from fairway.simulation.disk import SimDisk
from fairway.storage import segment
from fairway.storage.action_log import Action, unpack
from fairway.storage.message_log import AppendReceipt
from fairway.storage.record import Record, RecordKind
from fairway.storage.recovery import DamageVerdict, Finding
from fairway.storage.segment import SegmentScan
from fairway.storage.store import Store, StoreOptions

T = TypeVar("T")

ORDERS = Subject("orders")
BILLS = Subject("bills")
EVERYTHING = 1 << 40
SMALL = StoreOptions(segment_bytes=4 * KIB, action_segment_bytes=4 * KIB, low_water_bytes=0)
ROOMY = StoreOptions(low_water_bytes=0, action_segment_bytes=64 * KIB)

FIRST_MESSAGES = segment.file_name("messages", 0)
FIRST_ACTIONS = segment.file_name("actions", 0)


def batch_of(
    payloads: list[bytes], *, producer: int = 1, first: int = 0, epoch: int = 0, tags: list[list[str]] | None = None
) -> bytes:
    return batch.encode(
        payloads,
        producer_id=producer,
        first_sequence=first,
        created_ms=1_700_000_000_000,
        producer_epoch=epoch,
        tags=tags,
    )


def ack(first: int, count: int = 1, *, group: int = 1, detail: bytes = b"") -> Action:
    return Action(group, 1, GroupEvent(ActionKind.ACK, 1_700_000_000_000, ranges=((first, count),), detail=detail))


class World:
    """One data directory and the machine it is on.

    `produce` goes on where the producer's stream stands; `crash` and `kill` end the store's life, `open` begins the
    next one.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        options: StoreOptions = SMALL,
        capacity_bytes: int = GIB,
        disk: SimDisk | None = None,
    ) -> None:
        self.sim = Simulation(seed)
        self.clock = self.sim.clock
        self.options = options
        self.disk = disk or SimDisk(self.sim.rng.child("disk"), self.sim.loop.call_later, capacity_bytes=capacity_bytes)
        self.sequences: dict[int, int] = {}
        self._life = 0
        self.store = self.open()

    def open(self, options: StoreOptions | None = None, disk: Disk | None = None) -> Store:
        self.options = options or self.options
        self.store = Store.open(
            disk or self.disk,
            self.clock,
            self.sim.rng.child(f"store {self.sim.loop.now_ns()}"),
            defer=self._defer,
            options=self.options,
        )
        return self.store

    def _defer(self, callback: Callable[[], None]) -> None:
        """What a process had in mind to do dies with it."""
        life = self._life
        self.sim.loop.call_soon(lambda: callback() if self._life == life else None)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.sim.run(main)

    def settle(self) -> None:
        """Until both logs are synced and the disk has nothing left to do."""
        self.run(_settled(self.store))

    def settle_undone(self) -> None:
        """The same where a full disk will undo some of it."""
        with suppress(Refused):
            self.settle()
        self.run(asyncio.sleep(1))

    def send(self, payloads: list[bytes], subject: Subject = ORDERS, producer: int = 1) -> AppendReceipt:
        """Append the producer's next batch; not yet synced."""
        first = self.sequences.get(producer, 0)
        receipt = self.store.produce(subject, batch_of(payloads, producer=producer, first=first))
        self.sequences[producer] = first + len(payloads)
        return receipt

    def produce(self, payloads: list[bytes], subject: Subject = ORDERS, producer: int = 1) -> AppendReceipt:
        """Append the producer's next batch, and wait until it is durable."""
        receipt = self.send(payloads, subject, producer)
        self.run(self.store.durable(receipt))
        return receipt

    def act(self, *actions: Action) -> None:
        header = self.store.act(actions)
        self.run(self.store.actions.log.flusher.durable(header.end))

    def checkpoint(self) -> None:
        self.run(_checkpointed(self.store))

    def close(self) -> None:
        self.run(self.store.close())
        self._life += 1
        self.disk = self.disk.crash_process()  # all is done and synced: this only makes the disk usable again

    def reopen(self) -> Store:
        self.close()
        return self.open()

    def crash(self) -> None:
        """The power goes."""
        self._life += 1
        self.disk = self.disk.crash()

    def kill(self) -> None:
        """The process dies, the machine lives on."""
        self._life += 1
        self.disk = self.disk.crash_process()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sim.__exit__(kind, problem, traceback)


async def _settled(store: Store) -> None:
    for log in (store.messages.log, store.actions.log):
        await log.flusher.durable(log.end)
    await asyncio.sleep(1)  # of virtual time: indexes and checkpoints that are being written


async def _checkpointed(store: Store) -> None:
    ended = asyncio.Event()
    store.checkpoint(then=ended.set)
    await ended.wait()


# --- what is there ---------------------------------------------------------------------------------------------------


def messages(store: Store, subject: Subject = ORDERS, sequence: int = 0) -> dict[int, bytes]:
    """What a reader who starts at `sequence` gets, by sequence."""
    state = store.messages.views.subjects.find(subject)
    found: dict[int, bytes] = {}
    while state is not None:
        stored = store.messages.read(state.id, sequence, messages_max=100, bytes_max=KIB)
        if not stored:
            break
        for each in stored:
            payloads = batch.decode(each.data).payloads
            for index, payload in enumerate(payloads):
                assert each.entry.first_sequence + index not in found
                found[each.entry.first_sequence + index] = payload
        sequence = stored[-1].entry.end_sequence
    return found


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(str(path.readlink()))
    return found


def actions_in(records: Iterable[Record]) -> list[Action]:
    return [each for found in records if found.header.kind == RecordKind.ACTIONS for each in unpack(found.body)]


def content(disk: Disk, name: str) -> bytes:
    file = disk.open(name)
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def names(disk: Disk, directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in disk.listing(directory)]


def records_of(disk: Disk, name: str, log_id: int) -> list[Record]:
    """The intact records of a segment; there is nothing else in it."""
    base = segment.base_of(name.rpartition("/")[2])
    assert base is not None
    file = disk.open(name)
    try:
        found = list(SegmentScan(file, base, base + segment.HEADER_BYTES, log_id))
    finally:
        file.close()
    records = [each for each in found if isinstance(each, Record)]
    assert len(records) == len(found)
    return records


def verdicts(findings: Iterable[Finding]) -> list[tuple[DamageVerdict, str]]:
    return [(each.verdict, each.damage.why) for each in findings]
