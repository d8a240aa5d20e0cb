"""The replica's side of a snapshot: its files are fetched part by part, checked, and left where they can be installed.

A few parts are under way at a time, whatever the size of a file, and the master says how fast. What has arrived stays
when a connection ends, and is gone on with (`arriving`): all that is read again is the manifest.

Each part has a checksum of its own; and each file is read once more when it is whole, for a power cut may have left
less than its size says. Damage in what came from an earlier attempt means to fetch that file again. Damage in what came
just now is the master's own, and is taken as it is: a start reports it, here as there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fairway import limits
from fairway.batch import checksum
from fairway.delay import arriving, manifest
from fairway.delay.arriving import Disks
from fairway.delay.engine import Engine
from fairway.errors import Code, DiskFull, Refused, RemoteProtocolError, StorageFault
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.frames import stretched
from fairway.protocol.replicating import Fetch, Fetched, Snapshot, SnapshotFile, TakeSnapshot
from fairway.replication.wire import RequestChannel, ResponseFuture
from fairway.storage import action_log, message_log, scan, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.scan import Damage, SegmentScan
from fairway.world.disk import Disk, File, Part

_FILES_MAX = 10_000
_CHECKED_BYTES = 4 * limits.MIB  # read at a time, about 4 ms; then others have a turn of the loop
_LOOK_S = 0.05
_SYNCED_BYTES = 16 * limits.MIB  # arrive between two syncs


@dataclass(frozen=True, slots=True)
class RefillOptions:
    part_bytes: int = limits.MIB
    parts: int = 4  # under way: so much of a snapshot is in memory


class _SnapshotFile(NamedTuple):
    """One file of a snapshot."""

    number: int  # its place in the list
    name: str
    size: int


class SnapshotReceiver:
    """Of one copy that is open; what arrives lies beside what it has. Lives on its loop."""

    def __init__(self, engine: Engine, disks: Disks, options: RefillOptions | None = None) -> None:
        self._engine = engine
        self._disks = disks
        self._identity = engine.store.identity
        self._options = options or RefillOptions()
        self.arrived_bytes = 0  # of this snapshot, what an earlier attempt has left among them
        self.total_bytes = 0
        self.damaged: list[str] = []  # what the master could not give intact
        self._synced: set[str] = set()  # files of which this life knows what is synced; never iterated

    async def messages_end(self) -> int:
        """What the buckets of this copy have; known once they are loaded."""
        while not self._engine.is_loaded:  # noqa: ASYNC110  (a start has no event for it, and takes a while anyhow)
            await asyncio.sleep(_LOOK_S)
        return self._engine.derived_end

    def discard(self) -> None:
        arriving.clear(self._disks)

    async def fetch(self, wire: RequestChannel, group: str, epoch: int, directory_id: int) -> None:
        """Return once everything is on disk and checked. What goes wrong with the connection or the master is raised;
        to go on, call it again."""
        taken, _ = await wire.ask(TakeSnapshot(group, epoch, directory_id), Snapshot)
        places = _places(taken.files)
        arriving.clear(self._disks, epoch, frozenset(each.name for each in places if each.name != manifest.NAME))
        self._measure(epoch, places)
        source = _Source(wire, taken.number, epoch)
        listed: manifest.Manifest | None = None
        covered: checkpoints.Checkpoint | None = None
        sizes = {each.name: each.size for each in places}
        for place in sorted(places, key=_rank):
            data = await self._obtain(source, place, listed)
            if place.name == manifest.NAME:
                listed = manifest.unpack(data)
                arriving.check_buckets(listed, self._identity, sizes)
            elif data:
                covered = checkpoints.unpack(data)
                arriving.check_logs(covered, self._identity, sizes)
        if listed is None or covered is None:
            raise RemoteProtocolError("the master's snapshot has no manifest, or no checkpoint")

    def _measure(self, epoch: int, places: list[_SnapshotFile]) -> None:
        """How much is to come; `Refused` where there is no room for it."""
        self.damaged, self.arrived_bytes, self.total_bytes = [], 0, sum(each.size for each in places)
        sizes = arriving.sizes(self._disks, epoch)
        wanted: dict[Disk, int] = {}
        for place in places:
            disk, here = self._disks.of(arriving.directory_of(place.name)), min(sizes.get(place.name, 0), place.size)
            self.arrived_bytes += here
            wanted[disk] = wanted.get(disk, 0) + place.size - here
        for disk, size in wanted.items():
            free = disk.free_bytes()
            if size > free:
                to_come_mib, free_mib = -(-size // limits.MIB), free // limits.MIB  # said again when it has changed
                raise _no_room(f"{to_come_mib:,} MiB are to come, and {free_mib:,} are free")

    # --- one file ----------------------------------------------------------------------------------------------------

    async def _obtain(self, source: _Source, place: _SnapshotFile, listed: manifest.Manifest | None) -> bytes:
        """Bring a file in, and check it; its content where that says what else there must be."""
        disk = self._disks.of(arriving.directory_of(place.name))
        file = disk.open(arriving.arriving_name(source.epoch, place.name), create=True)
        try:
            if file.size > place.size:
                self._begin_again(disk, file)
            began_at = file.size
            self._secure(disk, file)
            await self._pull(source, place, disk, file)
            if began_at and await self._damage(file, place, listed):
                self._begin_again(disk, file)
                await self._pull(source, place, disk, file)
            why = await self._damage(file, place, listed)
            if why:
                self._accept(place, why)
            return file.read(0, file.size) if _says_more(place) else b""
        finally:
            file.close()

    def _secure(self, disk: Disk, file: File) -> None:
        """An earlier life may have been killed before what it left was synced, or have failed at that: its newest bytes
        are written again."""
        if file.name not in self._synced:
            self._synced.add(file.name)
            if file.size:
                disk.sync(file, max(file.size - 2 * _SYNCED_BYTES, 0))

    def _begin_again(self, disk: Disk, file: File) -> None:
        self.arrived_bytes -= file.size
        disk.truncate(file, 0)

    async def _pull(self, source: _Source, place: _SnapshotFile, disk: Disk, file: File) -> None:
        """What is missing of a file: several parts are under way at a time, and written in order."""
        asked: deque[ResponseFuture] = deque()
        ask_at, unsynced = file.size, 0
        try:
            while file.size < place.size:
                while ask_at < place.size and len(asked) < self._options.parts:
                    size = min(self._options.part_bytes, place.size - ask_at)
                    asked.append(source.ask(place, ask_at, size))
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

    def _accept(self, place: _SnapshotFile, why: str) -> None:
        if _says_more(place):
            raise RemoteProtocolError(f"{place.name} of the master's snapshot is damaged: {why}")
        self.damaged.append(f"{place.name}: {why}")

    # --- checking ----------------------------------------------------------------------------------------------------

    async def _damage(self, file: File, place: _SnapshotFile, listed: manifest.Manifest | None) -> str:
        """What is wrong with a file that is whole; empty: nothing is."""
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
        damage = scan.check_segment_header(file, base, log_id)
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
        """Base and log id that a segment must have."""
        directory, _, name = place.name.partition("/")
        number = segment.base_of(name) or 0
        if directory == message_log.DIRECTORY:
            return number, self._identity.messages_id
        if directory == action_log.DIRECTORY:
            return number, self._identity.actions_id
        buckets = {} if listed is None else {each.number: each.log_id for each in listed.buckets}
        return 0, buckets.get(number, 0)


class _Source(NamedTuple):
    """A snapshot at its master."""

    wire: RequestChannel
    number: int
    epoch: int

    def ask(self, place: _SnapshotFile, position: int, size: int) -> ResponseFuture:
        return self.wire.post(Fetch(self.number, place.number, position, size))


def _places(files: list[SnapshotFile]) -> list[_SnapshotFile]:
    """Those that have anything in them; `RemoteProtocolError` where a name may not be."""
    if len(files) > _FILES_MAX:
        raise RemoteProtocolError(f"the master's snapshot has {len(files)} files: at most {_FILES_MAX} are taken")
    for each in files:
        arriving.directory_of(each.name)
    if len({each.name for each in files}) < len(files):
        raise RemoteProtocolError("the master's snapshot has a file twice")
    return [_SnapshotFile(number, each.name, each.size) for number, each in enumerate(files) if each.size]


def _rank(place: _SnapshotFile) -> int:
    """First what says which others there must be."""
    return 0 if _says_more(place) else 1


def _says_more(place: _SnapshotFile) -> bool:
    return place.name == manifest.NAME or place.name.startswith(checkpoints.DIRECTORY)


def _part(answer: ControlMessage, attached: Sequence[Bytes], position: int, bytes_max: int) -> bytes:
    """The bytes of an answer, if they are the ones that were asked for, and came as they were sent."""
    if not isinstance(answer, Fetched) or answer.position != position:
        raise RemoteProtocolError(f"the master gives another part of its snapshot than the one at {position}")
    data = stretched(attached[0])
    if not data or len(data) > bytes_max or checksum(data) != answer.crc:
        raise RemoteProtocolError(f"a part of the master's snapshot has changed on its way, at {position}")
    return data


async def _committed(disk: Disk, file: File, parts: list[Part], *, sync: bool) -> None:
    """Return once it is written, or all that was written is synced; `Refused` where there is no room."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(fault: StorageFault | None) -> None:
        if future.done():
            return
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(fault)

    disk.commit(file, parts, done, sync=sync)
    try:
        await future
    except DiskFull as full:
        raise _no_room(str(full)) from full


def _no_room(why: str) -> Refused:
    """No fault of the store: it goes on once there is room."""
    return Refused(Code.READ_ONLY, f"there is no room for the master's snapshot: {why}; make room, then it goes on")


def _forget(answer: ResponseFuture) -> None:
    """Nobody waits for it any more."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()
