"""The golden journals of a spool: small, with every kind of record, opened by every later version.

    python -m tests.golden.spool        writes those that are not there yet

They are never written again, like the directory of the store. Version 2 is that of a client of a cluster; versions 3
and 4 are the same two with a key for the secrets of their streams.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from pathlib import Path

from fairway import batch
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry, PlacementRecord
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.simulation.disk import SimDisk

FOLDER = Path(__file__).parent / "spool_v1"
CLUSTER_FOLDER = Path(__file__).parent / "spool_v2"
KEYED_FOLDER = Path(__file__).parent / "spool_v3"
KEYED_CLUSTER_FOLDER = Path(__file__).parent / "spool_v4"
KEY = bytes(range(16))
NUMBER = 0x0123456789ABCDEF
START_MS = 1_700_000_000_000
SEGMENT_BYTES = 500


def data(first: int, *payloads: bytes) -> bytes:
    return batch.encode(payloads, producer_id=77, first_sequence=first, created_ms=START_MS)


class JournalStage:
    """A journal on a disk whose operations are done when the test says so."""

    def __init__(self, *, is_cluster: bool, key: bytes = b"") -> None:
        self._timers: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._disk = SimDisk(SeededRng("golden"), self._later)
        clock = ManualClock(START_MS)
        self.journal = Journal(self._disk, NUMBER, clock, segment_bytes=SEGMENT_BYTES, is_cluster=is_cluster, key=key)

    def _later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._timers, (seconds, next(self._numbers), callback, args))

    def settle(self) -> None:
        while self._timers:
            _, _, callback, args = heapq.heappop(self._timers)
            callback(*args)

    def keep(self, *handed: Handed) -> None:
        self.journal.keep(handed, nobody)
        self.settle()

    def load(self) -> list[SpoolEntry]:
        loaded: list[SpoolEntry] = []
        self.journal.load(loaded.extend)
        self.settle()
        return loaded

    def files(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for directory in ("log", "aside"):
            for name in self._disk.listing(directory):
                file = self._disk.open(f"{directory}/{name}")
                found[f"{directory}/{name}"] = file.read(0, file.size)
        return found


def nobody(_: object) -> None:
    """Nobody waits for it."""


def files(key: bytes = b"") -> dict[str, bytes]:
    """What this version writes, from fixed inputs."""
    coordinator = JournalStage(is_cluster=False, key=key)
    coordinator.keep(Handed("orders", 2, True, data(0, b"a", b"b")))
    coordinator.keep(Handed("bills.EU-1_x", 1, False, data(2, b"c")), Handed("orders", 1, False, data(3, b"")))
    coordinator.keep(Handed("orders", 1, False, data(4, b"d" * 300)))
    coordinator.keep(Handed("orders", 1, False, data(5, b"e")))
    loaded = coordinator.load()
    coordinator.journal.mark_sent(3, nobody)
    coordinator.settle()
    coordinator.journal.restream(77, 3, 78, nobody)
    coordinator.journal.set_aside(loaded[1], "BAD_NAME: no", 77, False, nobody)
    coordinator.settle()
    coordinator.journal.note_done(0)
    coordinator.journal.mark_sent(4, nobody)
    coordinator.settle()
    return coordinator.files()


def cluster_files(key: bytes = b"") -> dict[str, bytes]:
    """The same of a client of a cluster."""
    coordinator = JournalStage(is_cluster=True, key=key)
    coordinator.keep(Handed("orders", 2, True, data(0, b"a", b"b"), "east"))
    coordinator.keep(Handed("bills.EU-1_x", 1, False, data(2, b"c")), Handed("orders", 1, False, data(3, b""), "east"))
    loaded = coordinator.load()
    coordinator.journal.place([PlacementRecord(1, "west-2", 77, 2), PlacementRecord(2, "west-2", 0xFFEEDDCCBBAA9988, 0)], nobody)
    coordinator.settle()
    coordinator.keep(Handed("orders", 1, False, data(4, b"d" * 300), "west-2"))
    coordinator.keep(Handed("orders", 1, False, data(5, b"e"), "east"))
    coordinator.journal.set_aside(loaded[1], "BAD_NAME: no", 77, False, nobody)
    coordinator.journal.place([PlacementRecord(2, "east", 79, 0)], nobody)
    coordinator.settle()
    return coordinator.files()


def write() -> None:
    for folder, found in (
        (FOLDER, files()),
        (CLUSTER_FOLDER, cluster_files()),
        (KEYED_FOLDER, files(KEY)),
        (KEYED_CLUSTER_FOLDER, cluster_files(KEY)),
    ):
        for name, content in found.items():
            path = folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


if __name__ == "__main__":
    write()
