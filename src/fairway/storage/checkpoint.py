"""The checkpoint: the views as they were at a committed position, so that a start reads only later records.

A checkpoint has two uses. It saves time: without one, a start rebuilds everything from the logs. And it vouches that
the logs were synced up to the ends that it names, so damage below them is rot. It never covers more than the committed
end. The last two are kept. If the newest is unreadable, a start uses the one before; without any, it rebuilds the views
in full, and never takes the system for empty.
"""

from __future__ import annotations

import struct
from contextlib import closing

import msgspec

from fairway.batch import checksum
from fairway.errors import RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import Disk, Part, contents
from fairway.storage.directory import DirectoryIdentity

DIRECTORY = "checkpoints"
MAGIC = b"FWYCKP\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQII")  # magic, version, header length, must, may, body length, body CRC, zero
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _COVERED.size + _CRC.size


class LogMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the checkpoint covers a log."""

    first_base: int  # retention deleted everything before it
    end: int
    newest_ms: dict[int, int]  # by segment: append time of its last record
    set_back_ms: dict[int, int] = {}  # of its first record, by segment, where append times go back


class RotMark(msgspec.Struct, frozen=True):
    """A known rotten span."""

    log: str
    start: int
    end: int
    why: str

    def touches(self, start: int, end: int) -> bool:
        """Whether the span has bytes in [start, end). An empty span counts as its first byte."""
        return self.start < end and start < max(self.end, self.start + 1)


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that a start needs to know of earlier records."""

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
    aging_ms: int = 0  # the earliest that the time can have been, where append times are ahead of that; else 0
    latest_ms: int = 0  # the latest that the time can have been, where that is more than a minute later; else 0
    verifiers: bytes = b""  # of streams that began with a secret
    action_bounds: dict[int, int] = {}  # by action segment: how far its actions' messages reach in the message log
    pictures: list[int] = []  # positions of GROUPS records in the action log
    held_to_ms: int = 0  # the time, if a jump of the clock is right that things are not old by yet; 0: there is none
    held_for_ms: int = 0  # how long processes have held that jump back


def file_name(number: int) -> str:
    return f"{DIRECTORY}/{number:020d}.ckpt"


def number_of(name: str) -> int | None:
    """The number in a file's name; None where the file is no checkpoint."""
    stem, dot, suffix = name.rpartition(".")
    is_one = dot + suffix == ".ckpt" and len(stem) == 20 and stem.isascii() and stem.isdigit()
    return int(stem) if is_one else None


def numbers(disk: Disk) -> list[int]:
    """The numbers of all checkpoints, readable or not, oldest first."""
    return [number for name in disk.listing(DIRECTORY) if (number := number_of(name)) is not None]


def pack(checkpoint: Checkpoint) -> list[Part]:
    # As a map of the fields that are there: the header of a struct depends on the number of all its fields.
    body = msgspec.msgpack.encode(msgspec.to_builtins(checkpoint, builtin_types=(bytes, bytearray, memoryview)))
    covered = _COVERED.pack(MAGIC, VERSION, HEADER_BYTES, 0, 0, len(body), checksum(body), 0)
    return [covered, _CRC.pack(checksum(covered)), body]


def unpack(data: bytes) -> Checkpoint:
    """`RemoteProtocolError` for an untrustworthy file; `WrongDirectory` where a newer version wrote it."""
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
    """`WrongDirectory` where a newer version wrote the checkpoint; reads only the header."""
    try:
        with closing(disk.open(file_name(number))) as file:
            _check_header(file.read(0, HEADER_BYTES))
    except WrongDirectory as error:
        raise WrongDirectory(f"{file_name(number)}: {error}") from error
    except RemoteProtocolError:
        pass  # damage does not mean a newer version


def read(disk: Disk, number: int, identity: DirectoryIdentity) -> Checkpoint:
    """One checkpoint of these logs; `RemoteProtocolError` where it cannot be trusted."""
    check_version(disk, number)
    found = unpack(contents(disk, file_name(number)))
    if (found.messages_id, found.actions_id) != (identity.messages_id, identity.actions_id):
        raise RemoteProtocolError("it belongs to another data directory")
    return found


def newest(disk: Disk, identity: DirectoryIdentity) -> tuple[Checkpoint | None, list[str]]:
    """The newest readable checkpoint of these logs, and what is wrong with newer ones."""
    unreadable: list[str] = []
    for number in reversed(numbers(disk)):
        try:
            return read(disk, number, identity), unreadable
        except RemoteProtocolError as error:
            unreadable.append(f"{file_name(number)}: {error}")
    return None, unreadable
