"""Files of a master's snapshot, on their way to a replica: they lie in `arriving/` until all of them are there.

A file is named there for the master's epoch and for what it is to become: `arriving/<epoch>-schedule-<file>`. In one
epoch one process leads, and every file of it only grows, but for the manifest: so what has arrived of a file is worth
keeping for the next snapshot under the same epoch, and worth nothing under another.

The message log may be on a disk of its own; what arrives lies on the disk where it is to stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fairway.delay import bucket_file, manifest
from fairway.delay.manifest import Manifest
from fairway.errors import RemoteProtocolError
from fairway.storage import action_log, checkpoint, message_log, segment
from fairway.storage.checkpoint import Checkpoint
from fairway.storage.directory import DirectoryIdentity
from fairway.world.disk import TEMPORARY, Disk

DIRECTORY = "arriving"
LOGS = (message_log.DIRECTORY, action_log.DIRECTORY)
_EPOCH_DIGITS = 20


class Disks(NamedTuple):
    """Where a delay server keeps its files; the two may be one."""

    logs: Disk
    schedule: Disk

    def of(self, directory: str) -> Disk:
        return self.schedule if directory == manifest.DIRECTORY else self.logs

    def lock(self) -> None:
        for disk in self:
            disk.lock()


def directory_of(name: str) -> str:
    """The directory of a file that a snapshot may have; `RemoteProtocolError` where it may not have such a file."""
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
    """The disk and the name to be, of each file that is there under an epoch."""
    prefix = f"{epoch:0{_EPOCH_DIGITS}d}-"
    for directory in (*LOGS, checkpoint.DIRECTORY, manifest.DIRECTORY):
        disk = disks.of(directory)
        begin = f"{prefix}{directory}-"
        for name in disk.listing(DIRECTORY):
            if name.startswith(begin) and not name.endswith(TEMPORARY):
                yield disk, f"{directory}/{name.removeprefix(begin)}"


def sizes(disks: Disks, epoch: int) -> dict[str, int]:
    """How much has arrived under an epoch, by the names that files are to have."""
    found: dict[str, int] = {}
    for disk, name in arrived(disks, epoch):
        file = disk.open(arriving_name(epoch, name))
        found[name] = file.size
        file.close()
    return found


def content(disks: Disks, epoch: int, name: str) -> bytes:
    """What has arrived of a file that is to have that name."""
    file = disks.of(name.partition("/")[0]).open(arriving_name(epoch, name))
    try:
        return file.read(0, file.size)
    finally:
        file.close()


def clear(disks: Disks, epoch: int = 0, keep: frozenset[str] = frozenset()) -> None:
    """Remove everything but those files of that epoch."""
    kept = {arriving_name(epoch, name) for name in keep}
    for disk in disks:
        for file in disk.listing(DIRECTORY):
            if f"{DIRECTORY}/{file}" not in kept:
                disk.remove(f"{DIRECTORY}/{file}")


def check_buckets(listed: Manifest, identity: DirectoryIdentity, sizes: Mapping[str, int]) -> None:
    """`RemoteProtocolError` where files of these sizes, by name, cannot be what the manifest speaks of."""
    if listed.messages_id != identity.messages_id:
        raise RemoteProtocolError("the manifest of the master's snapshot speaks of another message log")
    for each in listed.buckets:
        size = sizes.get(bucket_file.file_name(each.number), 0)
        if size < each.synced_end:
            raise RemoteProtocolError(
                f"bucket {each.number} has {size} bytes in the master's snapshot, and its manifest {each.synced_end}"
            )


def check_logs(covered: Checkpoint, identity: DirectoryIdentity, sizes: Mapping[str, int]) -> None:
    """The same for a checkpoint."""
    if (covered.messages_id, covered.actions_id) != (identity.messages_id, identity.actions_id):
        raise RemoteProtocolError("the checkpoint of the master's snapshot speaks of other logs")
    for log, mark in zip(LOGS, (covered.messages, covered.actions), strict=True):
        bases = {segment.base_of(name.removeprefix(f"{log}/")): size for name, size in sizes.items()}
        end = max((base + size for base, size in bases.items() if base is not None), default=0)
        if end < mark.end:
            raise RemoteProtocolError(
                f"the {log} of the master's snapshot end at {end}, and its checkpoint says {mark.end}"
            )
