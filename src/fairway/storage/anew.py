"""What `wiping` has in common with `fairway.delay.installing`: both begin a copy anew.

What is to become of the directory is written down in a small file before anything is touched, and what was there is set
aside. Beside the ids the file has two numbers, whose meaning each of the two knows for itself.
"""

from __future__ import annotations

import struct

from fairway.batch import checksum
from fairway.errors import NoSuchFile, WrongDirectory
from fairway.storage import action_log, catching_up, index_file
from fairway.storage import checkpoint as checkpoints
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import ASIDE
from fairway.world.disk import TEMPORARY, Disk

VERSION = 1
# magic, version, length, must, may, old directory id, new one, two log ids, two numbers
_COVERED = struct.Struct("<8sHHHHQQQQQQ")
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size


def pack(magic: bytes, old_id: int, identity: DirectoryIdentity, one: int, other: int) -> bytes:
    covered = _COVERED.pack(magic, VERSION, FILE_BYTES, 0, 0, old_id, *identity, one, other)
    return covered + _CRC.pack(checksum(covered))


def unpack(name: str, data: bytes) -> tuple[int, DirectoryIdentity, int, int]:
    """The old directory id, what the directory is to become, and the two numbers. `WrongDirectory` where the file of
    that name is damaged, or a newer version wrote it."""
    if len(data) != FILE_BYTES or data[_COVERED.size :] != _CRC.pack(checksum(data[: _COVERED.size])):
        raise WrongDirectory(
            f"{name} is damaged: this copy was being begun anew, and what it was to become is lost; "
            "choose an empty directory"
        )
    _, version, _, must, _, old_id, *ids, one, other = _COVERED.unpack_from(data)
    if version != VERSION or must:
        raise WrongDirectory(f"{name} has format version {version}, this program reads {VERSION}: use a newer one")
    return old_id, DirectoryIdentity(*ids), one, other


def read(disk: Disk, name: str) -> bytes | None:
    """What an earlier life has written down; None if nothing was begun."""
    try:
        file = disk.open(name)
    except NoSuchFile:
        return None
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def remove_derived(disk: Disk) -> None:
    """What is made from the segments, and of no use without them."""
    for where in (checkpoints.DIRECTORY, index_file.DIRECTORY):
        for name in disk.listing(where):
            disk.remove(f"{where}/{name}")
    disk.remove(catching_up.FILE)
    disk.remove(action_log.BALLAST)


def set_aside(disk: Disk, where: str, old_id: int) -> list[str]:
    """All files of that folder; their new names."""
    kept: list[str] = []
    for name in disk.listing(where):
        if name.endswith(TEMPORARY):
            disk.remove(f"{where}/{name}")
        else:
            kept.append(f"{ASIDE}/{old_id:016x}-{where}-{name}")
            disk.move(f"{where}/{name}", kept[-1])
    return kept
