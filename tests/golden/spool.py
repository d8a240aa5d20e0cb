"""The golden journal of a spool: small, with every kind of record, opened by every later version.

    python -m tests.golden.spool        writes it where it is not there yet

It is never written again, like the directory of the store.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from pathlib import Path

from fairway import batch
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import Entry
from fairway.protocol.diversion import Handed
from fairway.world.clock import ManualClock
from fairway.world.rng import SeededRng
from fairway.world.sim_disk import SimDisk

FOLDER = Path(__file__).parent / "spool_v1"
NUMBER = 0x0123456789ABCDEF
START_MS = 1_700_000_000_000
SEGMENT_BYTES = 500


def data(first: int, *payloads: bytes) -> bytes:
    return batch.encode(payloads, producer_id=77, first_sequence=first, created_ms=START_MS)


def files() -> dict[str, bytes]:
    """What this version writes, from fixed inputs."""
    timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
    numbers = count()

    def later(seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(timers, (seconds, next(numbers), callback, args))

    def settle() -> None:
        while timers:
            _, _, callback, args = heapq.heappop(timers)
            callback(*args)

    disk = SimDisk(SeededRng("golden"), later)
    journal = Journal(disk, NUMBER, ManualClock(START_MS), segment_bytes=SEGMENT_BYTES)
    loaded: list[Entry] = []
    for handed in (
        [Handed("orders", 2, True, data(0, b"a", b"b"))],
        [Handed("bills.EU-1_x", 1, False, data(2, b"c")), Handed("orders", 1, False, data(3, b""))],
        [Handed("orders", 1, False, data(4, b"d" * 300))],
        [Handed("orders", 1, False, data(5, b"e"))],
    ):
        journal.keep(handed, lambda _: None)
        settle()
    journal.load(loaded.extend)
    settle()
    journal.mark_sent(3, lambda _: None)
    settle()
    journal.restream(77, 3, 78, lambda _: None)
    journal.set_aside(loaded[1], "BAD_NAME: no", 77, False, lambda _: None)
    settle()
    journal.note_done(0)
    journal.mark_sent(4, lambda _: None)
    settle()
    found: dict[str, bytes] = {}
    for directory in ("log", "aside"):
        for name in disk.listing(directory):
            file = disk.open(f"{directory}/{name}")
            found[f"{directory}/{name}"] = file.read(0, file.size)
    return found


def write() -> None:
    for name, content in files().items():
        path = FOLDER / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    write()
