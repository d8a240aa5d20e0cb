"""The file `catching-up`: this replica is far behind, and takes in more per sync than its master wrote.

A record names the end that was synced when the master wrote it. A replica may trust that end for itself only if it
syncs everything below before it writes the record. Then it syncs as often as its master did, which is too slow for a
replica that was away for a day. While this file is there, such ends count only up to the ends that the file states:
everything below those was synced here. Damage above them is torn, not rotten.

A recovery ends the catch-up, because it leaves the logs whole and synced.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from fairway.batch import checksum
from fairway.errors import FairwayError, Misuse, NoSuchFile, WrongDirectory
from fairway.runtime.disk import Disk
from fairway.storage import action_log, message_log
from fairway.storage.flusher import OnDurable
from fairway.storage.log import Log

FILE = "catching-up"
MAGIC = b"FWYCUP\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQQ")  # magic, version, length, must, may, two synced ends
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size


def begin(disk: Disk, messages_end: int, actions_end: int) -> None:
    """Write how far both logs are synced; durable when this returns."""
    covered = _COVERED.pack(MAGIC, VERSION, FILE_BYTES, 0, 0, messages_end, actions_end)
    disk.publish(FILE, [covered, _CRC.pack(checksum(covered))])


def read(disk: Disk) -> dict[str, int]:
    """By log, the highest synced end that records may name; empty where no catch-up is under way. A damaged file counts
    as 0 for both logs."""
    try:
        file = disk.open(FILE)
    except NoSuchFile:
        return {}
    try:
        data = file.read(0, file.size)
    finally:
        file.close()
    messages_end, actions_end = _parse(data)
    return {message_log.DIRECTORY: messages_end, action_log.DIRECTORY: actions_end}


def _parse(data: bytes) -> tuple[int, int]:
    if len(data) < FILE_BYTES or data[_COVERED.size : FILE_BYTES] != _CRC.pack(checksum(data[: _COVERED.size])):
        return 0, 0
    magic, version, _, must, _, messages_end, actions_end = _COVERED.unpack_from(data)
    if magic != MAGIC:
        return 0, 0
    if version != VERSION or must:
        raise WrongDirectory(f"{FILE} has format version {version}, this program reads {VERSION}: use a newer one")
    return messages_end, actions_end


class CatchUp:
    """Whether a store is catching up. `merges`: it may write more per sync than its master did."""

    def __init__(self, disk: Disk, logs: Sequence[Log]) -> None:
        self._disk = disk
        self._logs = logs
        self.merges = False
        self.is_on = False  # the file exists

    def begin(self) -> None:
        if self.is_on and not self.merges:
            raise Misuse("the last catching up has not ended yet: wait until it is said to be done")
        messages, actions = self._logs
        begin(self._disk, messages.synced_end, actions.synced_end)
        self.is_on = self.merges = True

    def end(self, done: OnDurable) -> None:
        """From now on sync as often as the master did. The file goes once everything before is synced."""
        self.merges = False
        if self.is_on:
            self._sync(list(self._logs), done)
        else:
            done(None)

    def _sync(self, logs: list[Log], done: OnDurable) -> None:
        def synced(fault: FairwayError | None) -> None:
            if fault is not None:
                done(fault)
            else:
                self._sync(logs[1:], done)

        def removed(fault: FairwayError | None) -> None:
            self.is_on = fault is not None
            done(fault)

        if logs:
            logs[0].flusher.when_synced(logs[0].end, synced)
        else:
            self._disk.remove_later(FILE, removed)
