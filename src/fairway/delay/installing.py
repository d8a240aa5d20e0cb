"""A snapshot that has arrived takes the place of what a copy had: `storage.wiping`, for a copy that is more than logs.

What is to become of the directory is written down first (`installing`), and with it how far it is:

    1  what was there is set aside (segments, buckets, manifest), or removed (what can be made again from them)
    2  what has arrived gets its names, and the directory its new id; then the file goes

Within each of the two every step can be repeated, and in the second nothing is set aside any more: whoever opens the
directory carries the rest out. Files are renamed, not copied. The directory has another id afterwards: this is not the
copy that was known, and nobody may take it for that.
"""

from __future__ import annotations

from typing import NamedTuple

from fairway.delay import arriving, manifest
from fairway.delay.arriving import LOGS, Disks
from fairway.errors import Misuse, RemoteProtocolError, WrongDirectory
from fairway.storage import anew, directory
from fairway.storage import checkpoint as checkpoints
from fairway.storage.directory import DirectoryIdentity
from fairway.world.disk import Disk
from fairway.world.rng import Rng

FILE = directory.INSTALLING
MAGIC = b"FWYINS\r\n"
SET_ASIDE, MOVE_IN = 1, 2


class InstallPlan(NamedTuple):
    """What a directory is to become."""

    old_id: int  # 0: the directory was new, or its identity lost
    identity: DirectoryIdentity
    epoch: int
    step: int


def install(disk: Disk, schedule_disk: Disk, rng: Rng, adopt: DirectoryIdentity, epoch: int) -> list[str]:
    """Begin anew with the snapshot that has arrived from the master of that epoch; the names of what was set aside.
    Nobody has the directories open. `adopt` has the ids of the logs; its directory id does not count."""
    disks = Disks(disk, schedule_disk)
    known = directory.identify(disk)
    disks.lock()
    _check_whole(disks, adopt, epoch)
    old_id = known.directory_id if known is not None else 0
    plan = InstallPlan(old_id, directory.renewed(adopt, rng), epoch, SET_ASIDE)
    disk.publish(FILE, [pack(plan)])
    return _carry_out(disks, plan)


def _check_whole(disks: Disks, adopt: DirectoryIdentity, epoch: int) -> None:
    """So that nothing is set aside for half a snapshot."""
    sizes = arriving.sizes(disks, epoch)
    newest = [name for name in sizes if name.startswith(checkpoints.DIRECTORY)][-1:]
    try:
        if manifest.NAME not in sizes or not newest:
            raise RemoteProtocolError("there is no manifest, or no checkpoint")
        arriving.check_buckets(manifest.unpack(arriving.content(disks, epoch, manifest.NAME)), adopt, sizes)
        arriving.check_logs(checkpoints.unpack(arriving.content(disks, epoch, newest[0])), adopt, sizes)
    except RemoteProtocolError as flaw:
        raise Misuse(f"no whole snapshot of epoch {epoch} has arrived ({flaw}): fetch one first") from flaw


def finish(disk: Disk, schedule_disk: Disk) -> list[str]:
    """Carry out what an earlier life had begun; the names of what was set aside by now."""
    data = anew.read(disk, FILE)
    if data is None:
        return []
    plan = unpack(data)
    disks = Disks(disk, schedule_disk)
    disks.lock()
    directory.secure(disk, FILE)  # a killed process may have left a step that only the page cache knows of
    return _carry_out(disks, plan)


def pack(plan: InstallPlan) -> bytes:
    return anew.pack(MAGIC, *plan)


def unpack(data: bytes) -> InstallPlan:
    """`WrongDirectory` where it is damaged, or a newer version wrote it."""
    return InstallPlan(*anew.unpack(FILE, data))


def _carry_out(disks: Disks, plan: InstallPlan) -> list[str]:
    kept: list[str] = []
    if plan.step == SET_ASIDE:
        kept = _set_aside(disks, plan.old_id)
        disks.logs.publish(FILE, [pack(plan._replace(step=MOVE_IN))])
    for disk, name in list(arriving.arrived(disks, plan.epoch)):
        disk.move(arriving.arriving_name(plan.epoch, name), name)
    if "manifest" not in disks.schedule.listing(manifest.DIRECTORY):
        raise WrongDirectory(
            "this copy was being begun anew, and its schedule log is not on the disk that was named: name the two "
            "directories that it had before"
        )
    directory.publish(disks.logs, plan.identity)
    arriving.clear(disks)
    disks.logs.remove(FILE)
    return kept


def _set_aside(disks: Disks, old_id: int) -> list[str]:
    anew.remove_derived(disks.logs)
    return [name for where in (*LOGS, manifest.DIRECTORY) for name in anew.set_aside(disks.of(where), where, old_id)]
