"""The checkpoint: a picture of the views at a committed position, so that start-up reads only what came after it.

A checkpoint is a convenience and a witness. A convenience: without one, everything is rebuilt from the logs. A
witness: it vouches that the logs were synced up to the ends it names, so damage below them is rot. It never covers
more than the committed end. The last two are kept; an unreadable one means the one before it, and none at all means a
full rebuild, never "an empty system"."""

from __future__ import annotations

import struct

import msgspec

from fairway.batch import checksum
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.storage.directory import DirectoryIdentity
from fairway.world.disk import Disk, Part

DIRECTORY = "checkpoints"
MAGIC = b"FWYCKP\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQII")  # magic, version, header length, must, may, body length, body CRC, zero
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _COVERED.size + _CRC.size


class LogMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a log is covered."""

    first_base: int  # retention deleted what lies before it
    end: int
    newest_ms: dict[int, int]  # by segment: append time of its last record
    set_back_ms: dict[int, int] = {}  # of its first record, by segment, where append times go back


class RotMark(msgspec.Struct, frozen=True):
    """A rotten span that is known already."""

    log: str
    start: int
    end: int
    why: str


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What start-up needs to know of the past."""

    number: int
    messages_id: int
    actions_id: int
    epoch: int
    messages: LogMark
    actions: LogMark
    subjects: bytes
    streams: bytes
    rotten: list[RotMark]
    groups: bytes = b""  # the broker's view of the action log, if there is one
    aging_ms: int = 0  # by which things were old when it was made, where append times are ahead of that; else 0
    latest_ms: int = 0  # it was no later than that when it was made, where that may be more than a minute later; else 0
    verifiers: bytes = b""  # of streams that were begun with a secret
    action_bounds: dict[int, int] = {}  # by action segment: how far the messages reach that it speaks of
    pictures: list[int] = []  # where the action log states the groups


def file_name(number: int) -> str:
    return f"{DIRECTORY}/{number:020d}.ckpt"


def number_of(name: str) -> int | None:
    """The number that a file's name states, or None where the file is no checkpoint."""
    stem, dot, suffix = name.rpartition(".")
    is_one = dot + suffix == ".ckpt" and len(stem) == 20 and stem.isascii() and stem.isdigit()
    return int(stem) if is_one else None


def numbers(disk: Disk) -> list[int]:
    """The checkpoints that are there, readable or not, oldest first."""
    return [number for name in disk.listing(DIRECTORY) if (number := number_of(name)) is not None]


def pack(checkpoint: Checkpoint) -> list[Part]:
    body = msgspec.msgpack.encode(checkpoint)
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, len(body), checksum(body), 0)
    return [covered, _CRC.pack(checksum(covered)), body]


def unpack(data: bytes) -> Checkpoint:
    """`RemoteProtocolError` where it is not to be trusted; `WrongDirectory` where a newer version wrote it."""
    body_bytes, body_crc = _check_header(data)
    body = data[HEADER_BYTES:]
    if len(body) != body_bytes or checksum(body) != body_crc:
        raise RemoteProtocolError("the body fails its checksum")
    try:
        return msgspec.msgpack.decode(body, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the body cannot be read: {error}") from error


def _check_header(data: bytes) -> tuple[int, int]:
    """Length and checksum of the body."""
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError("cut short")
    covered = data[: _COVERED.size]
    magic, version, header_bytes, must, _, body_bytes, body_crc, _ = _COVERED.unpack(covered)
    if magic != MAGIC or data[_COVERED.size : HEADER_BYTES] != _CRC.pack(checksum(covered)):
        raise RemoteProtocolError("the header fails its checksum")
    if version != VERSION or must or header_bytes != HEADER_BYTES:
        raise WrongDirectory(
            f"checkpoint format version {version} is newer than this program, which reads {VERSION}: "
            "use the version that wrote it"
        )
    return body_bytes, body_crc


def check_version(disk: Disk, number: int) -> None:
    """`WrongDirectory` where a newer version wrote it; reads the header alone."""
    file = disk.open(file_name(number))
    try:
        _check_header(file.read(0, HEADER_BYTES))
    except WrongDirectory as error:
        raise WrongDirectory(f"{file.name}: {error}") from error
    except RemoteProtocolError:
        pass  # rotten is not newer
    finally:
        file.close()


def read(disk: Disk, number: int, identity: DirectoryIdentity) -> Checkpoint:
    """One checkpoint of these logs; `RemoteProtocolError` where it is not to be trusted."""
    check_version(disk, number)
    file = disk.open(file_name(number))
    try:
        found = unpack(file.read(0, file.size))
    finally:
        file.close()
    if (found.messages_id, found.actions_id) != (identity.messages_id, identity.actions_id):
        raise RemoteProtocolError("it belongs to another data directory")
    return found


def newest(disk: Disk, identity: DirectoryIdentity) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of these logs that can be read, and what is wrong with those that are newer."""
    unreadable: list[str] = []
    for number in reversed(numbers(disk)):
        try:
            return read(disk, number, identity), unreadable
        except RemoteProtocolError as error:
            unreadable.append(f"{file_name(number)}: {error}")
    return None, unreadable
