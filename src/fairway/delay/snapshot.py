"""Snapshot of a delay server: the master's files for a replica that is too far behind to follow the logs.

A snapshot equals what a power cut at one instant would leave: the newest checkpoint, the manifest, the buckets that it
names, and the segments of both logs, each up to its synced end. A delay server can start from such files, whatever the
instant. So can a replica, which follows the logs from there.

The master copies nothing and stops nothing. It keeps the files open: a removed file stays readable while it is open,
and the server only appends to a file, or repairs damaged bytes in it. A snapshot ends with the connection that it was
taken for, or when nothing was fetched of it for a minute. Until then, removed files take room on the disk.

`SnapshotReceiver` is the replica's side. It fetches the files of its master's snapshot, and checks them, before an
install. It has up to four parts in flight; the master sets the speed. Received parts stay when a connection ends, and
the next attempt goes on from them (`fairway.delay.install`). Only the manifest is read again.

Each part has a checksum. The receiver also reads each file again when it is complete, because a power cut may have left
less than the file's size says. If bytes from an earlier attempt are damaged, the receiver fetches that file again. If
bytes of this attempt are damaged, the master's file is: the receiver keeps them as they are, and the next start reports
the damage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fairway import limits
from fairway.batch import checksum
from fairway.delay import install
from fairway.delay.engine import Engine
from fairway.delay.install import Disks
from fairway.delay.schedule import bucket_file, manifest
from fairway.errors import Code, DiskFull, NoSuchFile, Refused, RemoteProtocolError, StorageFault
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.frames import stretch, stretched
from fairway.protocol.replication_messages import Fetch, Fetched, Snapshot, SnapshotFile, TakeSnapshot
from fairway.replication.connection import RequestChannel, ResponseFuture
from fairway.replication.peers import NS_PER_MS, NS_PER_S, Connected, ReplicaQuestion
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk, File, Part, settles
from fairway.storage import action_log, message_log, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.log import Log
from fairway.storage.segment import Damage, SegmentScan

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
        question.respond(Snapshot(self._epoch, kept.number, files))

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


_FILES_MAX = 10_000
_CHECKED_BYTES = 4 * limits.MIB  # read at a time, about 4 ms; then the loop has a turn
_LOOK_S = 0.05
_SYNCED_BYTES = 16 * limits.MIB  # received between two syncs


@dataclass(frozen=True, slots=True)
class RefillOptions:
    part_bytes: int = limits.MIB
    parts: int = 4  # in flight: this much of a snapshot is in memory


class _SnapshotFile(NamedTuple):
    """One file of a snapshot."""

    number: int  # its index in the list
    name: str
    size: int


_Ask: TypeAlias = Callable[[_SnapshotFile, int, int], ResponseFuture]  # for bytes at a position of a file


class SnapshotReceiver:
    """Receives snapshots for one open copy, beside the copy's own files. Lives on its loop."""

    def __init__(self, engine: Engine, disks: Disks, options: RefillOptions | None = None) -> None:
        self._engine = engine
        self._disks = disks
        self._identity = engine.store.identity
        self._options = options or RefillOptions()
        self.arrived_bytes = 0  # of this snapshot, including an earlier attempt
        self.total_bytes = 0
        self.damaged: list[str] = []  # files that the master could not send intact
        self._synced: set[str] = set()  # files whose synced end is known in this run; never iterated

    async def messages_end(self) -> int:
        """The end of the messages in this copy's buckets. Waits until the buckets are loaded."""
        while not self._engine.is_loaded:  # noqa: ASYNC110  (a start has no event for it, and takes a while anyhow)
            await asyncio.sleep(_LOOK_S)
        return self._engine.derived_end

    def discard(self) -> None:
        install.clear(self._disks)

    async def fetch(self, wire: RequestChannel, group: str, epoch: int, directory_id: int) -> None:
        """Return once every file is on disk and checked. Raises the failure of the connection or of the master; call
        again to go on."""
        taken, _ = await wire.ask(TakeSnapshot(group, epoch, directory_id), Snapshot)
        places = _places(taken.files)
        install.clear(self._disks, epoch, frozenset(each.name for each in places if each.name != manifest.NAME))
        self._measure(epoch, places)

        def ask(place: _SnapshotFile, position: int, size: int) -> ResponseFuture:
            return wire.post(Fetch(taken.number, place.number, position, size))

        listed: manifest.Manifest | None = None
        covered: checkpoints.Checkpoint | None = None
        sizes = {each.name: each.size for each in places}
        for place in sorted(places, key=lambda each: not _says_more(each)):  # files that list other files come first
            data = await self._obtain(epoch, ask, place, listed)
            if place.name == manifest.NAME:
                listed = manifest.unpack(data)
                install.check_buckets(listed, self._identity, sizes)
            elif data:
                covered = checkpoints.unpack(data)
                install.check_logs(covered, self._identity, sizes)
        if listed is None or covered is None:
            raise RemoteProtocolError("the master's snapshot has no manifest, or no checkpoint")

    def _measure(self, epoch: int, places: list[_SnapshotFile]) -> None:
        """Count the bytes to come; `Refused` if the disk has no room for them."""
        self.damaged, self.arrived_bytes, self.total_bytes = [], 0, sum(each.size for each in places)
        sizes = install.arrived_sizes(self._disks, epoch)
        wanted: dict[Disk, int] = {}
        for place in places:
            disk, here = self._disks.of(install.directory_of(place.name)), min(sizes.get(place.name, 0), place.size)
            self.arrived_bytes += here
            wanted[disk] = wanted.get(disk, 0) + place.size - here
        for disk, size in wanted.items():
            free = disk.free_bytes()
            if size > free:
                to_come_mib, free_mib = -(-size // limits.MIB), free // limits.MIB  # rounded: the text changes rarely
                raise _no_room(f"{to_come_mib:,} MiB are to come, and {free_mib:,} are free")

    # --- one file ----------------------------------------------------------------------------------------------------

    async def _obtain(self, epoch: int, ask: _Ask, place: _SnapshotFile, listed: manifest.Manifest | None) -> bytes:
        """Fetch a file, and check it. Return its content if it lists other files."""
        disk = self._disks.of(install.directory_of(place.name))
        file = disk.open(install.arriving_name(epoch, place.name), create=True)
        try:
            if file.size > place.size:
                self._begin_again(disk, file)
            began_at = file.size
            self._secure(disk, file)
            await self._pull(ask, place, disk, file)
            if began_at and await self._damage(file, place, listed):
                self._begin_again(disk, file)
                await self._pull(ask, place, disk, file)
            why = await self._damage(file, place, listed)
            if why and _says_more(place):
                raise RemoteProtocolError(f"{place.name} of the master's snapshot is damaged: {why}")
            if why:
                self.damaged.append(f"{place.name}: {why}")
            return file.read(0, file.size) if _says_more(place) else b""
        finally:
            file.close()

    def _secure(self, disk: Disk, file: File) -> None:
        """A process may have been killed before it synced its bytes, or have failed to sync them: write the newest
        bytes again."""
        if file.name not in self._synced:
            self._synced.add(file.name)
            if file.size:
                disk.sync(file, max(file.size - 2 * _SYNCED_BYTES, 0))

    def _begin_again(self, disk: Disk, file: File) -> None:
        self.arrived_bytes -= file.size
        disk.truncate(file, 0)

    async def _pull(self, ask: _Ask, place: _SnapshotFile, disk: Disk, file: File) -> None:
        """Fetch the missing part of a file: several parts in flight, written in order."""
        asked: deque[ResponseFuture] = deque()
        ask_at, unsynced = file.size, 0
        try:
            while file.size < place.size:
                while ask_at < place.size and len(asked) < self._options.parts:
                    size = min(self._options.part_bytes, place.size - ask_at)
                    asked.append(ask(place, ask_at, size))
                    ask_at += size
                data = _part(*await asked.popleft(), file.size, self._options.part_bytes)
                await _committed(disk, file, [data], sync=False)
                unsynced += len(data)
                self.arrived_bytes += len(data)
                if file.size >= place.size or unsynced >= _SYNCED_BYTES:
                    unsynced = 0
                    await _committed(disk, file, [], sync=True)
        finally:
            for each in asked:
                _forget(each)

    # --- checking ----------------------------------------------------------------------------------------------------

    async def _damage(self, file: File, place: _SnapshotFile, listed: manifest.Manifest | None) -> str:
        """What is wrong with a complete file; empty: nothing."""
        try:
            if place.name == manifest.NAME:
                manifest.unpack(file.read(0, file.size))
            elif place.name.startswith(checkpoints.DIRECTORY):
                checkpoints.unpack(file.read(0, file.size))
            else:
                return await self._damage_of_segment(file, place, listed)
        except RemoteProtocolError as error:
            return str(error)
        return ""

    async def _damage_of_segment(self, file: File, place: _SnapshotFile, listed: manifest.Manifest | None) -> str:
        base, log_id = self._log_of(place, listed)
        damage = segment.check_segment_header(file, base, log_id)
        if damage is not None:
            return damage.why
        checked = 0
        for found in SegmentScan(file, base, base + segment.HEADER_BYTES, log_id):
            if isinstance(found, Damage):
                return f"{found.why}, at {found.start}"
            checked += found.header.end - found.header.position
            if checked >= _CHECKED_BYTES:
                checked = 0
                await asyncio.sleep(0)
        return ""

    def _log_of(self, place: _SnapshotFile, listed: manifest.Manifest | None) -> tuple[int, int]:
        """The base and log id that a segment must have."""
        directory, _, name = place.name.partition("/")
        number = segment.base_of(name) or 0
        if directory == message_log.DIRECTORY:
            return number, self._identity.messages_id
        if directory == action_log.DIRECTORY:
            return number, self._identity.actions_id
        buckets = {} if listed is None else {each.number: each.log_id for each in listed.buckets}
        return 0, buckets.get(number, 0)


def _places(files: list[SnapshotFile]) -> list[_SnapshotFile]:
    """The files that are not empty; `RemoteProtocolError` for a name that is not allowed."""
    if len(files) > _FILES_MAX:
        raise RemoteProtocolError(f"the master's snapshot has {len(files)} files: at most {_FILES_MAX} are taken")
    for each in files:
        install.directory_of(each.name)
    if len({each.name for each in files}) < len(files):
        raise RemoteProtocolError("the master's snapshot has a file twice")
    return [_SnapshotFile(number, each.name, each.size) for number, each in enumerate(files) if each.size]


def _says_more(place: _SnapshotFile) -> bool:
    return place.name == manifest.NAME or place.name.startswith(checkpoints.DIRECTORY)


def _part(answer: ControlMessage, attached: Sequence[Bytes], position: int, bytes_max: int) -> bytes:
    """The bytes of an answer, if they are the requested ones and arrived intact."""
    if not isinstance(answer, Fetched) or answer.position != position:
        raise RemoteProtocolError(f"the master gives another part of its snapshot than the one at {position}")
    data = stretched(attached[0])
    if not data or len(data) > bytes_max or checksum(data) != answer.crc:
        raise RemoteProtocolError(f"a part of the master's snapshot has changed on its way, at {position}")
    return data


async def _committed(disk: Disk, file: File, parts: list[Part], *, sync: bool) -> None:
    """Return once the parts are written, or with `sync`, once everything written is synced. `Refused` if the disk is
    full."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    disk.commit(file, parts, settles(future), sync=sync)
    try:
        await future
    except DiskFull as full:
        raise _no_room(str(full)) from full


def _no_room(why: str) -> Refused:
    """Not a fault of the store: the receiver goes on once there is room."""
    return Refused(Code.READ_ONLY, f"there is no room for the master's snapshot: {why}; make room, then it goes on")


def _forget(answer: ResponseFuture) -> None:
    """Drop an answer that nobody waits for."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()
