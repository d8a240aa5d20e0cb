"""The cost of the storage engine: append, read, recover, many subjects, beside the bare system calls.

    python -m bench.storage            a table: figure, bar, met or not
    python -m bench.storage --quick    a few seconds, small data: shows that it runs, not how fast it is
    python -m bench.storage --json     the same figures for a program
    python -m bench.storage --strict   exit status 1 where a bar is missed

The yardstick for append is a loop that only writes and fdatasyncs: the very chunks that the store's group commit made,
one after the other, never waiting for anybody. For lone requests it is fdatasync of as many bytes, for reads `pread`
of the same ranges. Batches are encoded beforehand (that is the producer's work), and checked within the measurement
(that is the store's). Rounds are interleaved and the median is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from bench import machine
from fairway import batch, limits
from fairway.errors import FairwayError
from fairway.names import Subject
from fairway.runtime.clock import RealClock
from fairway.runtime.disk import Completion, File, Part
from fairway.runtime.file_system import write_all
from fairway.runtime.real_disk import RealDisk
from fairway.runtime.rng import RealRng
from fairway.runtime.service import run
from fairway.storage import checkpoint, directory, index_file, message_log
from fairway.storage.store import Store, StoreOptions

T = TypeVar("T")

PAYLOAD = b"x" * 100
RANGE_BYTES = 256 * limits.KIB
OPTIONS = StoreOptions(low_water_bytes=64 * limits.MIB)
SUBJECT = Subject.parse("bench")


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rounds: int
    append_batches: int
    lone_requests: int
    read_bytes: int
    log_bytes: int
    small_log_bytes: int  # of batches with one message
    subjects: int


FULL = Sizes(7, 4_000, 400, 64 * limits.MIB, limits.GIB, 64 * limits.MIB, 10_000)
QUICK = Sizes(2, 200, 20, 2 * limits.MIB, 8 * limits.MIB, limits.MIB, 300)


@dataclass(frozen=True)
class Line:
    """One figure; `bar` is what it has to reach, `at_least` or at most."""

    what: str
    figure: float
    unit: str
    bar: float | None = None
    at_least: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar


class RecordingDisk(RealDisk):
    """Remembers the chunks that were committed to the message log, so that the yardstick can write the same ones."""

    chunks: list[list[Part]]

    def commit(self, file: File, parts: Sequence[Part], done: Completion, *, sync: bool = True) -> None:
        if file.name.startswith(message_log.DIRECTORY):
            self.chunks.append(list(parts))
        super().commit(file, parts, done, sync=sync)


def open_store(root: Path) -> tuple[Store, RecordingDisk]:
    loop = asyncio.get_running_loop()
    disk = RecordingDisk(root, post=loop.call_soon_threadsafe)
    disk.chunks = []
    return Store.open(disk, RealClock(), RealRng(), defer=loop.call_soon, options=OPTIONS), disk


async def abandon(store: Store, disk: RecordingDisk) -> None:
    """Leave the directory as a crash would: all of it synced, no last checkpoint."""
    for log in (store.messages.log, store.actions.log):
        await log.flusher.durable(log.end)
        log.close()
    disk.close()


def encoded(batches: int, messages: int, *, producer_id: int = 1, first: int = 0) -> list[bytes]:
    payloads = [PAYLOAD] * messages
    return [
        batch.encode(payloads, producer_id=producer_id, first_sequence=first + index * messages, created_ms=1)
        for index in range(batches)
    ]


@contextmanager
def scratch(data: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fairway-bench-", dir=data))
    os.sync()  # what an earlier part left to the system is not written during this one
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# --- append ----------------------------------------------------------------------------------------------------------


async def append(root: Path, batches: Sequence[bytes], in_flight: int) -> tuple[float, list[list[Part]]]:
    """Seconds for all batches, that many in flight at any time; and the chunks in which they were committed.

    Driven as the broker drives it: a callback per batch, and the next batch of a client arrives when it was answered.
    """
    store, disk = open_store(root)
    flusher = store.messages.log.flusher
    await flusher.durable(store.messages.log.end)
    disk.chunks.clear()
    waiting = iter(batches)
    finished = asyncio.Event()
    under_way = 0

    def send() -> None:
        nonlocal under_way
        data = next(waiting, None)
        if data is not None:
            under_way += 1
            receipt = store.produce(SUBJECT, data)
            flusher.when_durable(receipt.end, answered, receipt.undos)

    def answered(outcome: FairwayError | None) -> None:
        nonlocal under_way
        if outcome is not None:
            raise outcome
        under_way -= 1
        send()
        if not under_way:
            finished.set()

    started = time.perf_counter()
    for _ in range(in_flight // 2):
        send()
    await asyncio.sleep(0)
    for _ in range(in_flight - in_flight // 2):  # while the others are synced, as clients would: no lockstep
        send()
    await finished.wait()
    elapsed = time.perf_counter() - started
    await abandon(store, disk)
    return elapsed, disk.chunks


def write_only(path: Path, chunks: Sequence[list[Part]]) -> float:
    """Seconds for a loop that only writes and syncs these chunks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        position = 0
        started = time.perf_counter()
        for parts in chunks:
            position = write_all(fd, parts, position)
            os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def append_lines(data: Path, sizes: Sizes, messages: int, in_flight: int, bar: float | None) -> list[Line]:
    count = sizes.append_batches if messages > 1 else sizes.append_batches * 2
    batches = encoded(count, messages)
    ours, bare, chunk_counts = [], [], []
    for round_ in range(sizes.rounds + 1):
        with scratch(data) as folder:
            seconds, chunks = run(append(folder / "store", batches, in_flight))
            alone = write_only(folder / "bare", chunks)
        if round_:  # the first one finds its memory cold
            ours.append(seconds)
            bare.append(alone)
            chunk_counts.append(len(chunks))
    ours_s, bare_s = statistics.median(ours), statistics.median(bare)
    ratio = statistics.median(alone / seconds for alone, seconds in zip(bare, ours, strict=True))
    what = f"append, {messages} × 100 B, {in_flight} in flight"
    size = sum(map(len, batches))
    note = (
        f"{count * messages / ours_s:,.0f} messages/s, {count / statistics.median(chunk_counts):.0f} batches per sync"
    )
    return [
        Line(what, size / ours_s / 1e6, "MB/s", note=note),
        Line(f"{what}: write and fdatasync alone", size / bare_s / 1e6, "MB/s"),
        Line(f"{what}: ratio, median of rounds", ratio, "×", bar, note=_spread(bare, ours)),
    ]


def _spread(bare: Sequence[float], ours: Sequence[float]) -> str:
    ratios = sorted(alone / seconds for alone, seconds in zip(bare, ours, strict=True))
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds"


def lone_lines(data: Path, sizes: Sizes) -> list[Line]:
    """One request at a time, each followed by the bare sync of as many bytes."""
    batches = encoded(sizes.lone_requests, 1)

    async def alternate(folder: Path) -> tuple[list[float], list[float]]:
        store, disk = open_store(folder / "store")
        fd = os.open(folder / "bare", os.O_RDWR | os.O_CREAT, 0o644)
        ours, bare, position = [], [], 0
        for each in batches:
            started = time.perf_counter()
            await store.durable(store.produce(SUBJECT, each))
            ours.append(time.perf_counter() - started)
            started = time.perf_counter()
            position += os.pwritev(fd, disk.chunks[-1], position)
            os.fdatasync(fd)
            bare.append(time.perf_counter() - started)
        os.close(fd)
        await abandon(store, disk)
        return ours, bare

    with scratch(data) as folder:
        ours, bare = run(alternate(folder))
    lines = []
    for name, rank in (("p50", 50), ("p99", 99)):
        mine, alone = (statistics.quantiles(times, n=100)[rank - 1] for times in (ours, bare))
        note = f"fdatasync alone {alone * 1e3:.2f} ms, {mine / alone:.2f} ×"
        lines.append(Line(f"lone durable request, {name}", mine * 1e3, "ms", note=note))
    return lines


# --- read ------------------------------------------------------------------------------------------------------------


READS = 9  # times as many rounds as elsewhere: one takes only 30 ms, and whoever shares the machine takes longer


def read_lines(data: Path, sizes: Sizes) -> list[Line]:
    batches = encoded(sizes.read_bytes // 10_500, 100)

    async def measure(root: Path) -> tuple[list[float], list[float], int]:
        store, disk = open_store(root)
        for some in _slices(batches, 1_000):
            receipts = [store.produce(SUBJECT, each) for each in some]
            await store.durable(receipts[-1])
        ours, bare, size = [], [], 0
        for _ in range(sizes.rounds * READS):
            size, seconds = _timed(lambda: _read_all(store))
            ours.append(seconds)
            bare.append(_timed(lambda: _pread_all(store, root))[1])
        await abandon(store, disk)
        return ours, bare, size

    with scratch(data) as folder:
        ours, bare, size = run(measure(folder / "store"))
    ours_s, bare_s = statistics.median(ours), statistics.median(bare)
    note = f"pread alone {size / bare_s / 1e9:.1f} GB/s, ratio {bare_s / ours_s:.2f}"
    return [Line("hot reads of 256 KiB ranges, verified", size / ours_s / 1e9, "GB/s", 2.0, note=note)]


def _read_all(store: Store) -> int:
    subject_id = next(iter(store.messages.views.subjects)).id
    sequence = size = 0
    while stored := store.messages.read(subject_id, sequence, messages_max=1 << 30, bytes_max=RANGE_BYTES):
        size += sum(len(each.data) for each in stored)
        sequence = stored[-1].entry.end_sequence
    return size


def _pread_all(store: Store, root: Path) -> None:
    for segment in store.messages.log.segments:
        fd = os.open(root / message_log.DIRECTORY / f"{segment.base:020d}.log", os.O_RDONLY)
        position = 0
        while data := os.pread(fd, RANGE_BYTES, position):
            position += len(data)
        os.close(fd)


# --- recovery --------------------------------------------------------------------------------------------------------


async def fill(root: Path, log_bytes: int, messages: int) -> None:
    """A log of that size, left as a crash leaves it: with the checkpoints of its growth, without a last one."""
    store, disk = open_store(root)
    first = 0
    while store.messages.log.end < log_bytes:
        some = encoded(500, messages, first=first)
        first += 500 * messages
        await store.durable([store.produce(SUBJECT, each) for each in some][-1])
        disk.chunks.clear()
    await abandon(store, disk)


async def reopen(root: Path) -> float:
    started = time.perf_counter()
    store, disk = open_store(root)
    elapsed = time.perf_counter() - started
    await abandon(store, disk)
    return elapsed


def recovery_lines(data: Path, sizes: Sizes) -> list[Line]:
    lines = []
    for messages, log_bytes, bar in ((100, sizes.log_bytes, 500.0), (1, sizes.small_log_bytes, None)):
        with scratch(data) as folder:
            root = folder / "store"
            run(fill(root, log_bytes, messages))
            size = _log_size(root)
            if messages > 1:
                lines += _recovery_with_checkpoint(root, sizes, size)
            for heat, prepare in (("hot", _touch), ("cold", _chill)):
                rebuilds = []
                for _ in range(max(sizes.rounds // 2, 1)):
                    for view in (checkpoint.DIRECTORY, index_file.DIRECTORY):
                        shutil.rmtree(root / view, ignore_errors=True)
                    prepare(root)
                    rebuilds.append(run(reopen(root)))
                seconds = statistics.median(rebuilds)
                what = f"full rebuild, {size / limits.MIB:,.0f} MiB of {messages}-message batches, page cache {heat}"
                lines.append(Line(what, size / seconds / 1e6, "MB/s", bar, note=f"{seconds:.2f} s"))
    return lines


def _recovery_with_checkpoint(root: Path, sizes: Sizes, size: int) -> list[Line]:
    disk = RealDisk(root)
    identity = directory.identify(disk)
    known, _ = checkpoint.newest(disk, identity) if identity else (None, [])
    note = f"{(size - (known.messages.end if known else 0)) / limits.MIB:,.0f} MiB of it after the checkpoint"
    lines = []
    for heat, prepare in (("hot", _touch), ("cold", _chill)):
        opens = []
        for _ in range(sizes.rounds):
            prepare(root)
            opens.append(run(reopen(root)))
        what = f"recovery of {size / limits.MIB:,.0f} MiB with a checkpoint, page cache {heat}"
        lines.append(Line(what, statistics.median(opens), "s", 1.0, at_least=False, note=note))
    return lines


def _segments(root: Path) -> list[Path]:
    return sorted((root / message_log.DIRECTORY).glob("*.log"))


def _log_size(root: Path) -> int:
    return sum(path.stat().st_size for path in _segments(root))


def _touch(root: Path) -> None:
    for path in _segments(root):
        with path.open("rb", buffering=0) as file:
            while file.read(limits.MIB):
                pass


def _chill(root: Path) -> None:
    """Ask the kernel to forget what it has cached of these files; nobody else's are touched."""
    for path in _segments(root):
        with path.open("rb", buffering=0) as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- many subjects ---------------------------------------------------------------------------------------------------


def subject_lines(data: Path, sizes: Sizes) -> list[Line]:
    async def measure(root: Path) -> tuple[int, int]:
        descriptors, resident = machine.descriptors(), machine.resident_bytes()
        store, _ = open_store(root)
        for number in range(sizes.subjects):
            subject = Subject.parse(f"subject-{number}")
            receipt = store.produce(subject, encoded(1, 1, producer_id=number + 1)[0])
            if number % 500 == 0:
                await store.durable(receipt)
        opened = machine.descriptors() - descriptors
        grown = machine.resident_bytes() - resident
        await store.close()
        return opened, grown

    with scratch(data) as folder:
        root = folder / "store"
        descriptors, resident = run(measure(root))
        files = sum(path.is_file() for path in root.rglob("*"))
        seconds = statistics.median(run(reopen(root)) for _ in range(sizes.rounds))
    what = f"{sizes.subjects:,} subjects"
    return [
        Line(f"{what}: files", files, "", 100, at_least=False),
        Line(f"{what}: descriptors", descriptors, "", 100, at_least=False),
        Line(
            f"{what}: resident memory",
            resident / limits.MIB,
            "MiB",
            note=f"{resident / sizes.subjects:,.0f} bytes each",
        ),
        Line(f"{what}: reopen", seconds, "s"),
    ]


# --- all of it -------------------------------------------------------------------------------------------------------


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def measure(data: Path, sizes: Sizes) -> list[Line]:
    return [
        *subject_lines(data, sizes),  # first: what it adds to the process is seen best while that is small
        *append_lines(data, sizes, 100, 64, bar=0.60),
        *append_lines(data, sizes, 100, 256, bar=None),
        *append_lines(data, sizes, 100, 16, bar=None),
        *append_lines(data, sizes, 1, 64, bar=None),
        *lone_lines(data, sizes),
        *read_lines(data, sizes),
        *recovery_lines(data, sizes),
    ]


def show(lines: Sequence[Line]) -> None:
    table = Table("what", "figure", "bar", "", "remark", title="the storage engine")
    for line in lines:
        bar = "" if line.bar is None else f"{'≥' if line.at_least else '≤'} {line.bar:g} {line.unit}"
        verdict = {None: "", True: "met", False: "not met"}[line.met]
        figure = (
            f"{line.figure:,.0f}" if line.figure >= 100 or line.figure == int(line.figure) else f"{line.figure:.2f}"
        )
        table.add_row(line.what, f"{figure} {line.unit}", bar, verdict, line.note)
    Console().print(table)


def status(lines: Sequence[Line], *, strict: bool) -> int:
    return int(strict and any(line.met is False for line in lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what the storage engine costs, beside the bare system calls")
    parser.add_argument("--quick", action="store_true", help="small data, few rounds")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir()), help="where to write; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strict", action="store_true", help="exit status 1 where a bar is missed")
    options = parser.parse_args(argv)
    lines = measure(options.data, QUICK if options.quick else FULL)
    described = machine.describe(options.data)
    if options.json:
        print(json.dumps({"machine": described, "lines": [asdict(line) | {"met": line.met} for line in lines]}))
    else:
        show(lines)
        print(described)
    return status(lines, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
