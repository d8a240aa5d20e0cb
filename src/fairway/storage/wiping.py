"""Beginning a copy anew: what is in the directory is set aside, and the logs begin where the master's begin now.

A copy is begun anew when its history cannot be brought together with its master's: it was away for so long that
retention took what it needs next, or it is damaged beyond mending. The directory gets a new id with it: this is not the
copy that was known, and nobody may take it for that.

What is to become of the directory is written down first (`wiping`); from then on every step can be repeated, and
whoever opens the directory carries the rest out. Segments are renamed, not copied: `aside/` takes no more room than
they did, and it is for an operator to delete.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fairway.batch import checksum
from fairway.errors import NoSuchFile, WrongDirectory
from fairway.storage import action_log, catching_up, directory, index_file, message_log
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint, LogMark
from fairway.storage.directory import Identity
from fairway.storage.recovery import ASIDE
from fairway.storage.subjects import SubjectTable
from fairway.world.disk import TEMPORARY, Disk
from fairway.world.rng import Rng

FILE = directory.WIPING
MAGIC = b"FWYWIP\r\n"
VERSION = 1
# magic, version, length, must, may, old directory id, new one, two log ids, two bases
_COVERED = struct.Struct("<8sHHHHQQQQQQ")
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size


class _Plan(NamedTuple):
    old_id: int  # 0: the directory was new, or its identity lost
    identity: Identity
    messages_base: int
    actions_base: int


def wipe(disk: Disk, rng: Rng, adopt: Identity, messages_base: int, actions_base: int) -> list[str]:
    """Begin anew with these logs, at these bases; the names of what was set aside. Nobody has the directory open.

    Works on a directory that is new, too. `adopt` has the ids of the logs; its directory id does not count."""
    known = directory.identify(disk)
    disk.lock()
    old_id = known.directory_id if known is not None else 0
    plan = _Plan(old_id, directory.renewed(adopt, rng), messages_base, actions_base)
    covered = _COVERED.pack(MAGIC, VERSION, FILE_BYTES, 0, 0, old_id, *plan.identity, messages_base, actions_base)
    disk.publish(FILE, [covered, _CRC.pack(checksum(covered))])
    return _carry_out(disk, plan)


def finish(disk: Disk) -> list[str]:
    """Carry out what an earlier life had begun; the names of what was set aside by now."""
    try:
        file = disk.open(FILE)
    except NoSuchFile:
        return []
    try:
        data = file.read(0, file.size)
    finally:
        file.close()
    return _carry_out(disk, _parse(data))


def _parse(data: bytes) -> _Plan:
    if len(data) != FILE_BYTES or data[_COVERED.size :] != _CRC.pack(checksum(data[: _COVERED.size])):
        raise WrongDirectory(
            f"{FILE} is damaged: this copy was being begun anew, and what it was to become is lost; "
            "choose an empty directory"
        )
    _, version, _, must, _, old_id, *ids, messages_base, actions_base = _COVERED.unpack_from(data)
    if version != VERSION or must:
        raise WrongDirectory(f"{FILE} has format version {version}, this program reads {VERSION}: use a newer one")
    return _Plan(old_id, Identity(*ids), messages_base, actions_base)


def _carry_out(disk: Disk, plan: _Plan) -> list[str]:
    for where in (checkpoints.DIRECTORY, index_file.DIRECTORY):  # made from the segments, and of no use without them
        for name in disk.listing(where):
            disk.remove(f"{where}/{name}")
    disk.remove(catching_up.FILE)
    disk.remove(action_log.BALLAST)
    kept = [_set_aside(disk, plan, log, name) for log in _LOGS for name in disk.listing(log)]
    _begin(disk, plan)
    disk.remove(FILE)
    return [name for name in kept if name is not None]


_LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)


def _set_aside(disk: Disk, plan: _Plan, log: str, name: str) -> str | None:
    if name.endswith(TEMPORARY):
        disk.remove(f"{log}/{name}")
        return None
    aside = f"{ASIDE}/{plan.old_id:016x}-{log}-{name}"
    disk.move(f"{log}/{name}", aside)
    return aside


def _begin(disk: Disk, plan: _Plan) -> None:
    """An identity, and a checkpoint that says where the logs begin."""
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
