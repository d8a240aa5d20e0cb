"""The manifest: which buckets there are, and how far the message log is in them. One small file, replaced as a whole.

It is kept twice, written one after the other, and nothing that follows from a manifest is done before both are written:
so each of the two is right by itself, whenever a crash came, and a start goes on with the one that can be read. A start
that has no room for the copy removes the old copy instead, and goes on.

A bucket that the manifest does not name does not exist: a start deletes its file. That makes a split one step: a
manifest that names the new buckets and no longer the old one. And it makes `moved_end` sound: everything in the message
log below it is in buckets that this manifest names, synced; a start moves again only what lies above.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from fairway.batch import checksum
from fairway.delay.buckets import Grain, TimeRange
from fairway.errors import DiskFull, NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.world.disk import Disk, Part

DIRECTORY = "schedule"
NAME = f"{DIRECTORY}/manifest"
COPY = f"{DIRECTORY}/manifest.copy"
DAMAGED = f"{DIRECTORY}/manifest.damaged"  # what was found in the place of the first one, for people to look at
MAGIC = b"FWYSCH\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQII")  # magic, version, header length, must, may, body length, body CRC, zero
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _COVERED.size + _CRC.size


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """One bucket file."""

    number: int
    log_id: int
    grain: int
    start_ms: int
    end_ms: int
    synced_end: int  # the file was synced up to here: damage below it is rot
    catalogue_at: int = 0  # where its newest catalogue lies; 0: it has none

    @property
    def span(self) -> TimeRange:
        return TimeRange(Grain(self.grain), self.start_ms, self.end_ms)


class Manifest(msgspec.Struct, frozen=True):
    """What a start needs to know of the schedule log."""

    messages_id: int  # the message log that sequences and `moved_end` speak of
    moved_end: int
    next_number: int  # of bucket files; a number is never used again
    buckets: list[BucketEntry]


def pack(manifest: Manifest) -> list[Part]:
    body = msgspec.msgpack.encode(manifest)
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, len(body), checksum(body), 0)
    return [covered, _CRC.pack(checksum(covered)), body]


def unpack(data: bytes) -> Manifest:
    """`RemoteProtocolError` where it is not to be trusted; `WrongDirectory` where a newer version wrote it."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("cut short")
    covered, body = data[: _COVERED.size], data[HEADER_BYTES:]
    magic, version, header_bytes, must, _, body_bytes, body_crc, _ = _COVERED.unpack(covered)
    if magic != MAGIC or data[_COVERED.size : HEADER_BYTES] != _CRC.pack(checksum(covered)):
        raise RemoteProtocolError("the header fails its checksum")
    if version != VERSION or must or header_bytes != HEADER_BYTES:
        raise WrongDirectory(
            f"{NAME} has format version {version}, newer than this program, which reads {VERSION}: "
            "use the version that wrote it"
        )
    if len(body) != body_bytes or checksum(body) != body_crc:
        raise RemoteProtocolError("the body fails its checksum")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the body cannot be read: {error}") from error


class Read(NamedTuple):
    """One of the two files, as it is on disk."""

    data: bytes
    manifest: Manifest | None  # None: it cannot be trusted
    why: str = ""


def read(disk: Disk, name: str) -> Read | None:
    """None: it is not there."""
    try:
        file = disk.open(name)
    except NoSuchFile:
        return None
    try:
        data = file.read(0, file.size)
    finally:
        file.close()
    try:
        return Read(data, unpack(data))
    except RemoteProtocolError as error:
        return Read(data, None, str(error))


class Recovered(NamedTuple):
    """The manifest that a start goes on with."""

    manifest: Manifest
    why: str = ""  # what was wrong with the first one, if anything
    is_full: bool = False  # one of the two found no room: the next manifest that is written puts that right
    name: str = NAME  # the file that it was read from


def read_or_make(disk: Disk, messages_id: int, messages_base: int) -> Recovered:
    """The manifest of this message log, which begins at that position. A first start writes an empty one, before there
    is any bucket, and before the message log has let go of anything. A full disk stops no later start."""
    first, copy = read(disk, NAME), read(disk, COPY)
    if first is not None and first.manifest is not None:
        found = _checked(disk, first.manifest, messages_id, messages_base)
        if found is not first.manifest or (copy is not None and copy.data == first.data):
            return Recovered(found)
        is_full = not _published(disk, COPY, first.data)
        if is_full:  # a start next deletes what the copy may still name: no copy is better than an old one
            disk.remove(COPY)
        return Recovered(found, is_full=is_full)
    if copy is not None and copy.manifest is not None:
        return _restored(disk, first, copy, messages_id, messages_base)
    if first is not None:
        raise WrongDirectory(f"{NAME} is damaged ({first.why}), and so is its copy: restore it from a copy")
    if any(name.endswith(".log") for name in disk.listing(DIRECTORY)):
        raise WrongDirectory(f"{NAME} is missing but there are buckets: restore it from a copy")
    if messages_base > 0:
        raise WrongDirectory(
            f"{NAME} is missing, and the message log does not go back to the beginning: restore the folder "
            f"`{DIRECTORY}` from a copy"
        )
    return Recovered(_make(disk, messages_id))


def _restored(disk: Disk, first: Read | None, copy: Read, messages_id: int, messages_base: int) -> Recovered:
    """The copy takes the place of the first one, as soon as there is room for it. A bucket that it names must be there:
    an older version of this program may have gone on without writing the copy."""
    if copy.manifest is None:
        raise WrongDirectory(f"{COPY} is damaged")
    why = "it is missing" if first is None else f"it is damaged ({first.why})"
    names = disk.listing(DIRECTORY)
    lost = [each.number for each in copy.manifest.buckets if f"{each.number:020}.log" not in names]
    if lost:
        raise WrongDirectory(f"{NAME} cannot be used: {why}, and its copy names a bucket that is gone: restore it")
    if first is not None:
        _published(disk, DAMAGED, first.data)  # only people need it
    is_full = not _published(disk, NAME, copy.data)
    found = _checked(disk, copy.manifest, messages_id, messages_base)
    if is_full:
        return Recovered(found, f"{why}: its copy is used, and takes its place when there is room", is_full, COPY)
    return Recovered(found, f"{why}: its copy took its place")


def _published(disk: Disk, name: str, data: bytes) -> bool:
    """Publish a file; False where the disk is full."""
    try:
        disk.publish(name, [data])
    except DiskFull:
        return False
    return True


def _checked(disk: Disk, found: Manifest, messages_id: int, messages_base: int) -> Manifest:
    if found.messages_id == messages_id:
        return found
    if messages_base == 0 and found == _first(found.messages_id):  # it has taken a group's logs in place of empty ones
        return _make(disk, messages_id)
    raise WrongDirectory(
        f"{NAME} belongs to another message log: give the delay server the directory it has always had"
    )


def _first(messages_id: int) -> Manifest:
    return Manifest(messages_id, 0, 1, [])


def _make(disk: Disk, messages_id: int) -> Manifest:
    for name in (NAME, COPY):
        disk.publish(name, pack(_first(messages_id)))
    return _first(messages_id)
