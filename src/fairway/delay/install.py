"""Install of a received snapshot: its files take the place of what a copy had.

A snapshot in transfer lies in `arriving/` until all its files are there, each as `arriving/<epoch>-<directory>-<file>`.
One process leads in one epoch, and each of its files only grows, except the manifest. So received bytes of a file are
useful for the next snapshot of the same epoch, and useless in another. The message log may be on a disk of its own; a
file arrives on the disk where it will stay.

The install writes its plan to the `installing` file first, and then works in two steps. The file records the step:

    1  set the old files aside (segments, buckets, manifest), or remove them (what can be made again from those)
    2  give the received files their names, and the directory its new id; then remove the plan

Each step can be repeated, and step 2 sets nothing aside. Whoever opens the directory after a crash finishes the
install. Files are renamed, not copied. The directory gets a new id, because it is not the copy that others knew.
`fairway.storage.replica_directory` does the same for a copy that consists of logs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fairway.delay.schedule import bucket_file, manifest
from fairway.delay.schedule.manifest import Manifest
from fairway.errors import Misuse, NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import TEMPORARY, Disk, contents
from fairway.runtime.rng import Rng
from fairway.storage import action_log, checkpoint, directory, message_log, replica_directory, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint
from fairway.storage.directory import DirectoryIdentity

DIRECTORY = "arriving"
LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)
_EPOCH_DIGITS = 20


class Disks(NamedTuple):
    """The disks of a delay server; the two may be the same."""

    logs: Disk
    schedule: Disk

    def of(self, directory: str) -> Disk:
        return self.schedule if directory == manifest.DIRECTORY else self.logs

    def lock(self) -> None:
        for disk in self:
            disk.lock()


def directory_of(name: str) -> str:
    """The directory of a file in a snapshot; `RemoteProtocolError` if a snapshot may not have that file."""
    directory, _, file = name.partition("/")
    is_segment = directory in (*LOGS, manifest.DIRECTORY) and segment.base_of(file) is not None
    is_checkpoint = directory == checkpoint.DIRECTORY and checkpoint.number_of(file) is not None
    if not (is_segment or is_checkpoint or name == manifest.NAME):
        raise RemoteProtocolError(f"the master's snapshot has a file {name[:80]!r}, which none may have")
    return directory


def arriving_name(epoch: int, name: str) -> str:
    """Where a file lies until it takes its place."""
    directory, _, file = name.partition("/")
    return f"{DIRECTORY}/{epoch:0{_EPOCH_DIGITS}d}-{directory}-{file}"


def arrived(disks: Disks, epoch: int) -> Iterator[tuple[Disk, str]]:
    """The disk and the final name of each file that has arrived under an epoch."""
    prefix = f"{epoch:0{_EPOCH_DIGITS}d}-"
    for log in (*LOGS, checkpoint.DIRECTORY, manifest.DIRECTORY):
        disk = disks.of(log)
        begin = f"{prefix}{log}-"
        for name in disk.listing(DIRECTORY):
            if name.startswith(begin) and not name.endswith(TEMPORARY):
                yield disk, f"{log}/{name.removeprefix(begin)}"


def arrived_sizes(disks: Disks, epoch: int) -> dict[str, int]:
    """How many bytes have arrived under an epoch, by the final names of the files."""
    found: dict[str, int] = {}
    for disk, name in arrived(disks, epoch):
        file = disk.open(arriving_name(epoch, name))
        found[name] = file.size
        file.close()
    return found


def content(disks: Disks, epoch: int, name: str) -> bytes:
    """The received bytes of the file with that final name."""
    return contents(disks.of(name.partition("/")[0]), arriving_name(epoch, name))


def clear(disks: Disks, epoch: int = 0, keep: frozenset[str] = frozenset()) -> None:
    """Remove everything except those files of that epoch."""
    kept = {arriving_name(epoch, name) for name in keep}
    for disk in disks:
        for file in disk.listing(DIRECTORY):
            if f"{DIRECTORY}/{file}" not in kept:
                disk.remove(f"{DIRECTORY}/{file}")


def check_buckets(listed: Manifest, identity: DirectoryIdentity, sizes: Mapping[str, int]) -> None:
    """`RemoteProtocolError` if files of these sizes cannot be the ones that the manifest names."""
    if listed.messages_id != identity.messages_id:
        raise RemoteProtocolError("the manifest of the master's snapshot speaks of another message log")
    for each in listed.buckets:
        size = sizes.get(bucket_file.file_name(each.number), 0)
        if size < each.synced_end:
            raise RemoteProtocolError(
                f"bucket {each.number} has {size} bytes in the master's snapshot, and its manifest {each.synced_end}"
            )


def check_logs(covered: Checkpoint, identity: DirectoryIdentity, sizes: Mapping[str, int]) -> None:
    """`RemoteProtocolError` if files of these sizes cannot be the logs of the checkpoint."""
    if (covered.messages_id, covered.actions_id) != (identity.messages_id, identity.actions_id):
        raise RemoteProtocolError("the checkpoint of the master's snapshot speaks of other logs")
    for log, mark in zip(LOGS, (covered.messages, covered.actions), strict=True):
        bases = {segment.base_of(name.removeprefix(f"{log}/")): size for name, size in sizes.items()}
        end = max((base + size for base, size in bases.items() if base is not None), default=0)
        if end < mark.end:
            raise RemoteProtocolError(
                f"the {log} of the master's snapshot end at {end}, and its checkpoint says {mark.end}"
            )


FILE = directory.INSTALLING
MAGIC = b"FWYINS\r\n"
SET_ASIDE, MOVE_IN = 1, 2


class InstallPlan(NamedTuple):
    """What a directory is to become."""

    old_id: int  # 0: the directory was new, or its identity was lost
    identity: DirectoryIdentity
    epoch: int
    step: int


def install(disk: Disk, schedule_disk: Disk, rng: Rng, adopt: DirectoryIdentity, epoch: int) -> list[str]:
    """Replace the copy's files with the snapshot from the master of that epoch. Return the names of the files that were
    set aside. Nobody may have the directories open. `adopt` has the ids of the logs; its directory id does not count.
    """
    disks = Disks(disk, schedule_disk)
    known = directory.identify(disk)
    disks.lock()
    _check_whole(disks, adopt, epoch)
    old_id = known.directory_id if known is not None else 0
    plan = InstallPlan(old_id, directory.renewed(adopt, rng), epoch, SET_ASIDE)
    disk.publish(FILE, [pack(plan)])
    return _carry_out(disks, plan)


def _check_whole(disks: Disks, adopt: DirectoryIdentity, epoch: int) -> None:
    """Refuse half a snapshot, before anything is set aside."""
    sizes = arrived_sizes(disks, epoch)
    newest = [name for name in sizes if name.startswith(checkpoints.DIRECTORY)][-1:]
    try:
        if manifest.NAME not in sizes or not newest:
            raise RemoteProtocolError("there is no manifest, or no checkpoint")
        check_buckets(manifest.unpack(content(disks, epoch, manifest.NAME)), adopt, sizes)
        check_logs(checkpoints.unpack(content(disks, epoch, newest[0])), adopt, sizes)
    except RemoteProtocolError as flaw:
        raise Misuse(f"no whole snapshot of epoch {epoch} has arrived ({flaw}): fetch one first") from flaw


def finish(disk: Disk, schedule_disk: Disk) -> list[str]:
    """Finish an install that was interrupted. Return the names of the files that were set aside by this call."""
    try:
        plan = unpack(contents(disk, FILE))
    except NoSuchFile:
        return []
    disks = Disks(disk, schedule_disk)
    disks.lock()
    directory.secure(disk, FILE)  # a killed process may have left a step only in the page cache
    return _carry_out(disks, plan)


def pack(plan: InstallPlan) -> bytes:
    return replica_directory.pack_reset(MAGIC, *plan)


def unpack(data: bytes) -> InstallPlan:
    """`WrongDirectory` if the plan is damaged, or a newer version wrote it."""
    return InstallPlan(*replica_directory.unpack_reset(FILE, data))


def _carry_out(disks: Disks, plan: InstallPlan) -> list[str]:
    kept: list[str] = []
    if plan.step == SET_ASIDE:
        kept = _set_aside(disks, plan.old_id)
        disks.logs.publish(FILE, [pack(plan._replace(step=MOVE_IN))])
    for disk, name in list(arrived(disks, plan.epoch)):
        disk.move(arriving_name(plan.epoch, name), name)
    if "manifest" not in disks.schedule.listing(manifest.DIRECTORY):
        raise WrongDirectory(
            "this copy was being begun anew, and its schedule log is not on the disk that was named: name the two "
            "directories that it had before"
        )
    directory.publish(disks.logs, plan.identity)
    clear(disks)
    disks.logs.remove(FILE)
    return kept


def _set_aside(disks: Disks, old_id: int) -> list[str]:
    replica_directory.remove_derived(disks.logs)
    return [
        name
        for where in (*LOGS, manifest.DIRECTORY)
        for name in replica_directory.set_aside(disks.of(where), where, old_id)
    ]
