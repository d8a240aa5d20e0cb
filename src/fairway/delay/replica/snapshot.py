"""Snapshot of a delay server: the master's files for a replica that is too far behind to follow the logs.

A snapshot equals what a power cut at one instant would leave: the newest checkpoint, the manifest, the buckets that it
names, and the segments of both logs, each up to its synced end. A delay server can start from such files, whatever the
instant. So can a replica, which follows the logs from there.

The master copies nothing and stops nothing. It keeps the files open: a removed file stays readable while it is open,
and the server only appends to a file, or repairs damaged bytes in it. A snapshot ends with the connection that it was
taken for, or when nothing was fetched of it for a minute. Until then, removed files take room on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fairway import limits
from fairway.batch import checksum
from fairway.delay.engine import Engine
from fairway.delay.replica.install import Disks
from fairway.delay.schedule import bucket_file, manifest
from fairway.errors import Code, NoSuchFile, Refused, RemoteProtocolError, StorageFault
from fairway.protocol.frames import stretch
from fairway.protocol.replication_messages import Fetch, Fetched, SnapshotFile, TakeSnapshot
from fairway.protocol.replication_messages import Snapshot as SnapshotTaken
from fairway.replication.peer import NS_PER_MS, NS_PER_S, Connected, ReplicaQuestion
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk, File
from fairway.storage import checkpoint as checkpoints
from fairway.storage import segment
from fairway.storage.log import Log

QUESTIONS = (TakeSnapshot, Fetch)  # as a constant: building the union at each call costs 1 µs
_UNKNOWN = Refused(Code.FENCED, "this snapshot is not kept any more: ask for another")
FETCH_BYTES_MAX = limits.MIB


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """How a master serves snapshots."""

    idle_ms: int = 60_000  # a snapshot is dropped when nothing was fetched of it for so long
    kept_max: int = 4
    fetches_max: int = 8  # in flight for one snapshot
    bytes_per_s: int = 128 * limits.MIB  # to each replica, as in a catch-up


class _Item(NamedTuple):
    name: str
    size: int
    disk: Disk
    file: File


class OpenSnapshot:
    """The files of one instant, open."""

    def __init__(self) -> None:
        self.items: list[_Item] = []

    @classmethod
    def take(cls, engine: Engine, disks: Disks) -> OpenSnapshot:
        """Open the files as they are now. `Refused` (DAMAGED) if a necessary file is missing or cannot be read."""
        taken = cls()
        try:
            taken._add_checkpoint(disks.logs)
            taken._add_buckets(engine, disks.schedule)
            for log in (engine.store.messages.log, engine.store.actions.log):
                taken._add_segments(log, disks.logs)
        except (StorageFault, RemoteProtocolError) as flaw:  # also a rotten manifest
            taken.close()
            raise Refused(Code.DAMAGED, f"no snapshot can be taken: {flaw}") from flaw
        except BaseException:
            taken.close()
            raise
        return taken

    def _add_checkpoint(self, disk: Disk) -> None:
        """The newest: earlier ones may be removed at any time."""
        number = max(checkpoints.numbers(disk), default=None)
        if number is None:
            raise Refused(Code.BUSY, "no checkpoint could be written: see to the master's disk", retry_after_ms=5_000)
        self._add(disk, checkpoints.file_name(number))

    def _add_buckets(self, engine: Engine, disk: Disk) -> None:
        """The buckets that the manifest on disk names. A bucket that is not open any more is about to be removed, and
        complete."""
        listing = self._add(disk, manifest.NAME)
        for each in manifest.unpack(listing.read(0, listing.size)).buckets:
            known = engine.log.files.get(each.number)
            self._add(disk, bucket_file.file_name(each.number), None if known is None else known.synced_end)

    def _add_segments(self, log: Log, disk: Disk) -> None:
        """All segments on disk. The newest checkpoint may refer to segments that the log has dropped. A segment that no
        checkpoint needs may be removed meanwhile, and nobody misses it."""
        ends = {each.base: min(each.end, log.synced_end) for each in log.segments}
        for name in disk.listing(log.directory):
            base = segment.base_of(name)
            if base is None:
                continue
            try:
                self._add(disk, f"{log.directory}/{name}", max(ends[base] - base, 0) if base in ends else None)
            except NoSuchFile:
                if base in ends:
                    raise

    def _add(self, disk: Disk, name: str, size: int | None = None) -> File:
        """Keep a file open, up to a size; None: all of it."""
        file = disk.open(name)
        self.items.append(_Item(name, file.size if size is None else size, disk, file))
        return file

    def close(self) -> None:
        for each in self.items:
            each.file.close()
        self.items = []


class _Kept:
    """A snapshot, and the connection that it is kept for."""

    def __init__(self, number: int, taken: OpenSnapshot, session: Connected, now_ns: int) -> None:
        self.number = number
        self.taken = taken
        self.session = session
        self.fetched_ns = now_ns
        self.free_ns = now_ns  # no read before this time: replicas are throttled
        self.under_way = 0


class Snapshots:
    """The snapshots that a master keeps in one epoch. Lives on the loop of its engine."""

    def __init__(
        self,
        engine: Engine,
        disks: Disks,
        clock: Clock,
        call_later: Callable[..., asyncio.TimerHandle],
        group: str,
        epoch: int,
        check_follower: Callable[[ReplicaQuestion, TakeSnapshot], object],
        options: SnapshotOptions | None = None,
    ) -> None:
        """`check_follower` raises `Refused` if a replica asks over another connection than the one that it follows
        on."""
        self._engine = engine
        self._disks = disks
        self._clock = clock
        self._call_later = call_later
        self._group = group
        self._epoch = epoch
        self._check_follower = check_follower
        self._options = options or SnapshotOptions()
        self._kept: dict[int, _Kept] = {}  # by the id of the replica's directory
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.bytes = 0  # sent

    def __len__(self) -> int:
        """Snapshots that are kept."""
        return len(self._kept)

    def close(self) -> None:
        """Answer nothing any more, and keep nothing."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for directory_id in list(self._kept):
            self._drop(directory_id)

    def answer(self, question: ReplicaQuestion) -> None:
        """Answer one of `QUESTIONS`; raises `Refused` if that is impossible."""
        message = question.message
        if isinstance(message, TakeSnapshot):
            self._take(question, message)
        elif isinstance(message, Fetch):
            self._fetch(question, message)

    # --- taking ------------------------------------------------------------------------------------------------------

    def _take(self, question: ReplicaQuestion, message: TakeSnapshot) -> None:
        if message.group != self._group:
            raise Refused(Code.BAD_REQUEST, f"this is a copy of group {self._group}, not of {message.group}")
        if message.epoch != self._epoch:
            raise Refused(Code.FENCED, f"the master leads under epoch {self._epoch}, not {message.epoch}")
        self._check_follower(question, message)
        self._drop(message.directory_id)
        self._look()
        self._check_room()
        # A fresh checkpoint leaves the replica little to read again, and proves that one can be read.
        self._engine.store.checkpoint(then=lambda: self._checkpointed(question, message.directory_id))

    def _check_room(self) -> None:
        if len(self._kept) >= self._options.kept_max:
            raise Refused(Code.BUSY, "snapshots are being fetched by others: wait for them", retry_after_ms=5_000)

    def _checkpointed(self, question: ReplicaQuestion, directory_id: int) -> None:
        if self._is_over or question.session.is_gone or self._engine.fault is not None:
            question.end()
            return
        self._drop(directory_id)
        try:
            self._check_room()  # others may have asked meanwhile
            taken = OpenSnapshot.take(self._engine, self._disks)
        except Refused as refused:
            question.refuse(refused)
            return
        self._number += 1
        kept = _Kept(self._number, taken, question.session, self._clock.monotonic_ns())
        self._kept[directory_id] = kept
        self._arm()
        files = [SnapshotFile(each.name, each.size) for each in taken.items]
        question.respond(SnapshotTaken(self._epoch, kept.number, files))

    def _drop(self, directory_id: int) -> None:
        kept = self._kept.pop(directory_id, None)
        if kept is not None:
            kept.taken.close()

    def _arm(self) -> None:
        if self._timer is None and self._kept:
            self._timer = self._call_later(self._options.idle_ms / 12_000, self._on_time)  # 5 s by default

    def _on_time(self) -> None:
        self._timer = None
        if not self._is_over:
            self._look()
            self._arm()

    def _look(self) -> None:
        """Drop snapshots that nobody fetches."""
        oldest_ns = self._clock.monotonic_ns() - self._options.idle_ms * NS_PER_MS
        for directory_id, kept in list(self._kept.items()):
            if kept.session.is_gone or (kept.fetched_ns < oldest_ns and not kept.under_way):
                self._drop(directory_id)

    # --- fetching ----------------------------------------------------------------------------------------------------

    def _fetch(self, question: ReplicaQuestion, message: Fetch) -> None:
        kept = next((each for each in self._kept.values() if each.number == message.number), None)
        if kept is None or kept.session is not question.session:
            raise _UNKNOWN
        if message.file >= len(kept.taken.items):
            raise Refused(Code.BAD_REQUEST, f"there is no file {message.file} in this snapshot")
        if kept.under_way >= self._options.fetches_max:
            raise Refused(Code.BUSY, f"{kept.under_way} parts are under way: wait for them", retry_after_ms=100)
        item = kept.taken.items[message.file]
        size = message.size
        if not 0 < size <= FETCH_BYTES_MAX or message.position + size > item.size:
            raise Refused(
                Code.BAD_REQUEST,
                f"{size} bytes at {message.position} of {item.name}: it has {item.size}, and at most "
                f"{FETCH_BYTES_MAX} are given at a time",
            )
        now_ns = self._clock.monotonic_ns()
        wait_ns = max(kept.free_ns - now_ns, 0)
        kept.free_ns = now_ns + wait_ns + size * NS_PER_S // self._options.bytes_per_s
        kept.fetched_ns = now_ns + wait_ns
        kept.under_way += 1
        if wait_ns:
            self._call_later(wait_ns / NS_PER_S, self._read, kept, item, question, message.position, size)
        else:
            self._read(kept, item, question, message.position, size)

    def _read(self, kept: _Kept, item: _Item, question: ReplicaQuestion, position: int, size: int) -> None:
        """Read off the loop: most of a snapshot is not in the page cache."""
        if kept not in self._kept.values():
            question.end()
            return

        def done(data: bytes | StorageFault) -> None:
            kept.under_way -= 1
            if self._is_over:
                question.end()
            elif isinstance(data, StorageFault):
                question.refuse(Refused(Code.DAMAGED, f"{item.name} cannot be read: {data}"))
            elif len(data) < size:
                question.refuse(Refused(Code.DAMAGED, f"{item.name} is cut short"))
            else:
                self.bytes += size
                question.respond(Fetched(position, checksum(data)), [stretch(data)])

        item.disk.fetch(item.file, position, size, done)
