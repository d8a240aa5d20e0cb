"""Receiver of a snapshot: a replica fetches the files of its master's snapshot, and checks them, before an install.

The receiver has up to four parts in flight; the master sets the speed. Received parts stay when a connection ends, and
the next attempt goes on from them (`fairway.delay.replica.install`). Only the manifest is read again.

Each part has a checksum. The receiver also reads each file again when it is complete, because a power cut may have left
less than the file's size says. If bytes from an earlier attempt are damaged, the receiver fetches that file again. If
bytes of this attempt are damaged, the master's file is: the receiver keeps them as they are, and the next start reports
the damage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fairway import limits
from fairway.batch import checksum
from fairway.delay.engine import Engine
from fairway.delay.replica import install
from fairway.delay.replica.install import Disks
from fairway.delay.schedule import manifest
from fairway.errors import Code, DiskFull, Refused, RemoteProtocolError, StorageFault
from fairway.protocol import Bytes, ControlMessage
from fairway.protocol.frames import stretched
from fairway.protocol.replication_messages import Fetch, Fetched, Snapshot, SnapshotFile, TakeSnapshot
from fairway.replication.connection import RequestChannel, ResponseFuture
from fairway.runtime.disk import Disk, File, Part
from fairway.storage import action_log, message_log, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.segment import Damage, SegmentScan

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
        source = _Source(wire, taken.number, epoch)
        listed: manifest.Manifest | None = None
        covered: checkpoints.Checkpoint | None = None
        sizes = {each.name: each.size for each in places}
        for place in sorted(places, key=_rank):
            data = await self._obtain(source, place, listed)
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

    async def _obtain(self, source: _Source, place: _SnapshotFile, listed: manifest.Manifest | None) -> bytes:
        """Fetch a file, and check it. Return its content if it lists other files."""
        disk = self._disks.of(install.directory_of(place.name))
        file = disk.open(install.arriving_name(source.epoch, place.name), create=True)
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
        """A process may have been killed before it synced its bytes, or have failed to sync them: write the newest
        bytes again."""
        if file.name not in self._synced:
            self._synced.add(file.name)
            if file.size:
                disk.sync(file, max(file.size - 2 * _SYNCED_BYTES, 0))

    def _begin_again(self, disk: Disk, file: File) -> None:
        self.arrived_bytes -= file.size
        disk.truncate(file, 0)

    async def _pull(self, source: _Source, place: _SnapshotFile, disk: Disk, file: File) -> None:
        """Fetch the missing part of a file: several parts in flight, written in order."""
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


class _Source(NamedTuple):
    """A snapshot at its master."""

    wire: RequestChannel
    number: int
    epoch: int

    def ask(self, place: _SnapshotFile, position: int, size: int) -> ResponseFuture:
        return self.wire.post(Fetch(self.number, place.number, position, size))


def _places(files: list[SnapshotFile]) -> list[_SnapshotFile]:
    """The files that are not empty; `RemoteProtocolError` for a name that is not allowed."""
    if len(files) > _FILES_MAX:
        raise RemoteProtocolError(f"the master's snapshot has {len(files)} files: at most {_FILES_MAX} are taken")
    for each in files:
        install.directory_of(each.name)
    if len({each.name for each in files}) < len(files):
        raise RemoteProtocolError("the master's snapshot has a file twice")
    return [_SnapshotFile(number, each.name, each.size) for number, each in enumerate(files) if each.size]


def _rank(place: _SnapshotFile) -> int:
    """Files that list other files come first."""
    return 0 if _says_more(place) else 1


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
    """Not a fault of the store: the receiver goes on once there is room."""
    return Refused(Code.READ_ONLY, f"there is no room for the master's snapshot: {why}; make room, then it goes on")


def _forget(answer: ResponseFuture) -> None:
    """Drop an answer that nobody waits for."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()
