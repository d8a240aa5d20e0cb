"""Beginning a copy anew: what is in the directory is set aside, and the logs begin where the master's begin now.

A copy is begun anew when its history cannot be brought together with its master's: it was away for so long that
retention took what it needs next, or it is damaged beyond mending. The directory gets a new id with it: this is not the
copy that was known, and nobody may take it for that.

What is to become of the directory is written down first (`wiping`); from then on every step can be repeated, and
whoever opens the directory carries the rest out. Segments are renamed, not copied: `aside/` takes no more room than
they did, and it is for an operator to delete.
"""

from __future__ import annotations

from typing import NamedTuple

from fairway.storage import action_log, anew, directory, message_log
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint, LogMark
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.subjects import SubjectTable
from fairway.world.disk import Disk
from fairway.world.rng import Rng

FILE = directory.WIPING
MAGIC = b"FWYWIP\r\n"


class _Plan(NamedTuple):
    old_id: int  # 0: the directory was new, or its identity lost
    identity: DirectoryIdentity
    messages_base: int
    actions_base: int


def wipe(disk: Disk, rng: Rng, adopt: DirectoryIdentity, messages_base: int, actions_base: int) -> list[str]:
    """Begin anew with these logs, at these bases; the names of what was set aside. Nobody has the directory open.

    Works on a directory that is new, too. `adopt` has the ids of the logs; its directory id does not count."""
    known = directory.identify(disk)
    disk.lock()
    old_id = known.directory_id if known is not None else 0
    plan = _Plan(old_id, directory.renewed(adopt, rng), messages_base, actions_base)
    disk.publish(FILE, [anew.pack(MAGIC, *plan)])
    return _carry_out(disk, plan)


def finish(disk: Disk) -> list[str]:
    """Carry out what an earlier life had begun; the names of what was set aside by now."""
    data = anew.read(disk, FILE)
    return [] if data is None else _carry_out(disk, _Plan(*anew.unpack(FILE, data)))


def _carry_out(disk: Disk, plan: _Plan) -> list[str]:
    anew.remove_derived(disk)
    logs = (message_log.DIRECTORY, action_log.DIRECTORY)
    kept = [name for log in logs for name in anew.set_aside(disk, log, plan.old_id)]
    _begin(disk, plan)
    disk.remove(FILE)
    return kept


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
