"""Data directories for tests: written by the real store, then copied, compared or spoiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fairway import batch
from fairway.group_events import ActionKind, GroupEvent
from fairway.names import Subject
from fairway.runtime.clock import ManualClock
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import SeededRng
from fairway.storage.action_log import Action
from fairway.storage.store import Store, StoreOptions

KIB = 1024
SMALL = StoreOptions(segment_bytes=8 * KIB, action_segment_bytes=4 * KIB, low_water_bytes=0)
ORDERS, STOCK = Subject("orders.changed"), Subject("stock.moved")


def make(
    root: Path, *, batches: int = 40, then: Callable[[Store], object] = lambda _: None, options: StoreOptions = SMALL
) -> None:
    """Append `batches` of 5 messages, two thirds to ORDERS, an ack for each; close in order."""
    asyncio.run(_make(root, batches, then, options))


async def _make(root: Path, batches: int, then: Callable[[Store], object], options: StoreOptions) -> None:
    store = await open_store(root, options=options)
    await append(store, batches)
    then(store)
    await store.close()


async def open_store(root: Path, *, seed: int = 1, options: StoreOptions = SMALL) -> Store:
    loop = asyncio.get_running_loop()
    disk = RealDisk(root, post=loop.call_soon_threadsafe)
    try:
        return Store.open(disk, ManualClock(), SeededRng(seed), defer=loop.call_soon, options=options)
    except BaseException:
        disk.close()
        raise


async def append(store: Store, batches: int, *, stream: int = 0) -> None:
    sent = {ORDERS: 0, STOCK: 0}
    for number in range(batches):
        subject = STOCK if number % 3 == 2 else ORDERS
        payloads = [f"{subject} {sent[subject] + index}".encode() * 4 for index in range(5)]
        producer_id = 2 * stream + (1 if subject is ORDERS else 2)
        data = batch.encode(payloads, producer_id=producer_id, first_sequence=sent[subject], created_ms=1_000 + number)
        sent[subject] += 5
        receipt = store.produce(subject, data)
        span = (receipt.first_sequence, receipt.count)
        store.act([Action(7, receipt.subject_id, GroupEvent(ActionKind.ACK, 2_000 + number, ranges=(span,)))])
        await store.durable(receipt)


def tree(root: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes; None is a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def segments(root: Path, log: str = "messages") -> list[Path]:
    return sorted((root / log).glob("*.log"))


def flip(path: Path, offset: int) -> None:
    """Turn one bit over."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
