"""Reset of a replica: its files are set aside, and its logs begin again where the master's logs begin now.

A replica is reset when its history cannot be joined to its master's. Either it was away for so long that retention took
the records that it needs next, or it is damaged beyond repair. The directory gets a new id, so that nobody takes it for
the copy that was known.

First the file `wiping` records what the directory is to become. From then on every step can be repeated, and whoever
opens the directory carries out the rest (`finish`). Segments are renamed, not copied, so `aside/` takes no more room
than they did. An operator may delete them.

`fairway.delay.install` resets the copy of a delay server with the same file format. Beside the ids the file has
two numbers, whose meaning differs between the two modules.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fairway.batch import checksum
from fairway.errors import NoSuchFile, WrongDirectory
from fairway.runtime.disk import TEMPORARY, Disk
from fairway.runtime.rng import Rng
from fairway.storage import action_log, catch_up, directory, index_file, message_log
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint, LogMark
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import ASIDE
from fairway.storage.subjects import SubjectTable

VERSION = 1
# magic, version, length, must, may, old directory id, new one, two log ids, two numbers
_COVERED = struct.Struct("<8sHHHHQQQQQQ")
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size


def pack(magic: bytes, old_id: int, identity: DirectoryIdentity, one: int, other: int) -> bytes:
    covered = _COVERED.pack(magic, VERSION, FILE_BYTES, 0, 0, old_id, *identity, one, other)
    return covered + _CRC.pack(checksum(covered))


def unpack(name: str, data: bytes) -> tuple[int, DirectoryIdentity, int, int]:
    """The old directory id, the new identity, and the two numbers. `WrongDirectory` where the file of that name is
    damaged, or a newer version wrote it."""
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
    """The file that an earlier process wrote; None if no reset was begun."""
    try:
        file = disk.open(name)
    except NoSuchFile:
        return None
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def remove_derived(disk: Disk) -> None:
    """Remove the files that are made from the segments, and are of no use without them."""
    for where in (checkpoints.DIRECTORY, index_file.DIRECTORY):
        for name in disk.listing(where):
            disk.remove(f"{where}/{name}")
    disk.remove(catch_up.FILE)
    disk.remove(action_log.BALLAST)


def set_aside(disk: Disk, where: str, old_id: int) -> list[str]:
    """Move all files of that folder to `aside/`; return their new names."""
    kept: list[str] = []
    for name in disk.listing(where):
        if name.endswith(TEMPORARY):
            disk.remove(f"{where}/{name}")
        else:
            kept.append(f"{ASIDE}/{old_id:016x}-{where}-{name}")
            disk.move(f"{where}/{name}", kept[-1])
    return kept


FILE = directory.WIPING
MAGIC = b"FWYWIP\r\n"


class _Plan(NamedTuple):
    old_id: int  # 0: the directory was new, or its identity lost
    identity: DirectoryIdentity
    messages_base: int
    actions_base: int


def wipe(disk: Disk, rng: Rng, adopt: DirectoryIdentity, messages_base: int, actions_base: int) -> list[str]:
    """Reset the directory to these logs, at these bases; return the names of the files set aside.

    Nobody may have the directory open. A new directory is fine too. `adopt` has the ids of the logs; its directory id
    does not count."""
    known = directory.identify(disk)
    disk.lock()
    old_id = known.directory_id if known is not None else 0
    plan = _Plan(old_id, directory.renewed(adopt, rng), messages_base, actions_base)
    disk.publish(FILE, [pack(MAGIC, *plan)])
    return _carry_out(disk, plan)


def finish(disk: Disk) -> list[str]:
    """Carry out the reset that an earlier process began; return the names of the files set aside by this call."""
    data = read(disk, FILE)
    return [] if data is None else _carry_out(disk, _Plan(*unpack(FILE, data)))


def _carry_out(disk: Disk, plan: _Plan) -> list[str]:
    remove_derived(disk)
    logs = (message_log.DIRECTORY, action_log.DIRECTORY)
    kept = [name for log in logs for name in set_aside(disk, log, plan.old_id)]
    _begin(disk, plan)
    disk.remove(FILE)
    return kept


def _begin(disk: Disk, plan: _Plan) -> None:
    """Publish an identity, and a checkpoint that says where the logs begin."""
    directory.publish(disk, plan.identity)
    picture = Checkpoint(
        number=1,
        messages_id=plan.identity.messages_id,
        actions_id=plan.identity.actions_id,
        epoch=0,
        messages=LogMark(plan.messages_base, plan.messages_base, {}),
        actions=LogMark(plan.actions_base, plan.actions_base, {}),
        subjects=SubjectTable().pack(),
        streams=b"",
        rotten=[],
    )
    disk.publish(checkpoints.file_name(picture.number), checkpoints.pack(picture))
