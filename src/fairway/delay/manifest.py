"""The manifest: which buckets there are, and how far the message log is in them. One small file, replaced as a whole.

A bucket that the manifest does not name does not exist: a start deletes its file. That makes a split one step: a
manifest that names the new buckets and no longer the old one. And it makes `moved_end` sound: everything in the message
log below it is in buckets that this manifest names, synced; a start moves again only what lies above.
"""

from __future__ import annotations

import struct

import msgspec

from fairway.batch import checksum
from fairway.delay.buckets import Grain, Span
from fairway.errors import NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.world.disk import Disk, Part

DIRECTORY = "schedule"
NAME = f"{DIRECTORY}/manifest"
MAGIC = b"FWYSCH\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQII")  # magic, version, header length, must, may, body length, body CRC, zero
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _COVERED.size + _CRC.size


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """One bucket file."""

    number: int
    log_id: int
    grain: int
    start_ms: int
    end_ms: int
    synced_end: int  # the file was synced up to here: damage below it is rot
    catalogue_at: int = 0  # where its newest catalogue lies; 0: it has none

    @property
    def span(self) -> Span:
        return Span(Grain(self.grain), self.start_ms, self.end_ms)


class Manifest(msgspec.Struct, frozen=True):
    """What a start needs to know of the schedule log."""

    messages_id: int  # the message log that sequences and `moved_end` speak of
    moved_end: int
    next_number: int  # of bucket files; a number is never used again
    buckets: list[Bucket]


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


def read_or_make(disk: Disk, messages_id: int, messages_base: int) -> Manifest:
    """The manifest of this message log, which begins at that position. A first start writes an empty one, before there
    is any bucket, and before the message log has let go of anything."""
    try:
        file = disk.open(NAME)
    except NoSuchFile:
        if any(name.endswith(".log") for name in disk.listing(DIRECTORY)):
            raise WrongDirectory(f"{NAME} is missing but there are buckets: restore it from a copy") from None
        if messages_base > 0:
            raise WrongDirectory(
                f"{NAME} is missing, and the message log does not go back to the beginning: restore the folder "
                f"`{DIRECTORY}` from a copy"
            ) from None
        return _make(disk, messages_id)
    try:
        found = unpack(file.read(0, file.size))
    except RemoteProtocolError as error:
        raise WrongDirectory(f"{NAME} is damaged ({error}): restore it from a copy") from error
    finally:
        file.close()
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
    disk.publish(NAME, pack(_first(messages_id)))
    return _first(messages_id)
