"""What a journal has set aside: a batch that the broker will never take, or whose fate nobody knows; one file each."""

from __future__ import annotations

import msgspec

from fairway.client.spool_recovery import ASIDE
from fairway.errors import RemoteProtocolError
from fairway.world.disk import Disk

_SIZE_BYTES = 4  # of the length in front


class Aside(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry that the broker will never take, and why. Its data follows in the file."""

    number: int
    subject: str
    messages: int
    reason: str
    is_unknown: bool  # it may be stored: nobody can tell any more
    producer_id: int
    time_ms: int
    is_cluster: bool = False  # as its journal, whose segments may be gone by the time that somebody asks


def aside_name(number: int) -> str:
    return f"{ASIDE}/{number:016x}"


def aside_parts(aside: Aside, data: bytes) -> list[bytes]:
    """The whole file."""
    said = msgspec.msgpack.encode(aside)
    return [len(said).to_bytes(_SIZE_BYTES, "little"), said, data]


def read_aside(disk: Disk, name: str, journal: str) -> tuple[Aside, bytes]:
    """With its data; blocks."""
    file = disk.open(f"{ASIDE}/{name}")
    try:
        content = file.read(0, file.size)
    finally:
        file.close()
    size = int.from_bytes(content[:_SIZE_BYTES], "little")
    said, data = content[_SIZE_BYTES : _SIZE_BYTES + size], content[_SIZE_BYTES + size :]
    try:
        return msgspec.msgpack.decode(said, type=Aside), data
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"{ASIDE}/{name} of journal {journal} is damaged: {error}") from error
