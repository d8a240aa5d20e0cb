"""How long this directory keeps messages: the choice, recorded in the directory itself.

A broker that begins new logs keeps messages for 168 hours, and records that. A directory without the file `retention`
was made before there was a default, or is a copy of another. It keeps messages for ever until somebody chooses: nothing
that was kept on purpose is deleted by an upgrade. A choice that is given (`--keep-hours`) is recorded, and holds until
another one is given.

A copy that joins a group records nothing by itself: the master decides what goes, and a copy that takes over must not
delete what its group has kept. An empty directory is not a new one yet: it may still become a copy. So the default is
recorded when the first epoch of the logs begins, not when the directory is opened.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import replace

from fairway import limits
from fairway.batch import checksum
from fairway.errors import DiskFull, NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.storage.retention import Policy
from fairway.world.disk import Disk

FILE = "retention"
MAGIC = b"FWYRET\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQ")  # magic, version, length of the file, must, may, age in ms; 0: for ever
_CRC = struct.Struct("<I4x")
FILE_BYTES = _COVERED.size + _CRC.size
_HOUR_MS = 3_600_000

UNCHOSEN = (
    "no message is deleted for its age here: this directory was made before there was a default, or as a copy of "
    f"another, and nobody has chosen since; give --keep-hours {limits.KEEP_HOURS}, or --keep-hours forever"
)


class AgeSource(enum.Enum):
    """Where the greatest age of messages comes from."""

    OPTIONS = "options"  # as the policy has it; nothing is read or recorded
    CHOICE = "choice"  # the same, and the directory records it
    DIRECTORY = "directory"  # what the directory records


def settle(disk: Disk, policy: Policy, source: AgeSource, *, is_new: bool) -> tuple[Policy, list[str]]:
    """The policy in force, and what to tell the operator, if anything. `is_new`: the logs are empty and may be begun
    here; `found` is called when they are."""
    if source is AgeSource.OPTIONS:
        return policy, []
    if source is AgeSource.CHOICE:
        _record(disk, policy.age_ms_max)
        return policy, []
    try:
        return replace(policy, age_ms_max=_read(disk)), []
    except NoSuchFile:
        pass
    except RemoteProtocolError as error:
        return replace(policy, age_ms_max=None), [f"{FILE} is damaged ({error}): {UNCHOSEN}"]
    return replace(policy, age_ms_max=None), [] if is_new else [UNCHOSEN]


def found(disk: Disk, policy: Policy, source: AgeSource) -> tuple[Policy, list[str]]:
    """The same where new logs have just been begun: without a choice, the default is recorded and in force."""
    if source is AgeSource.DIRECTORY and FILE not in disk.listing(""):
        age_ms = limits.KEEP_HOURS * _HOUR_MS
        try:
            _record(disk, age_ms)
        except DiskFull as full:
            return policy, [f"{FILE} was not written: {full}; {UNCHOSEN}"]
        return replace(policy, age_ms_max=age_ms), []
    return policy, []


def pack(age_ms: int | None) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, FILE_BYTES, 0, 0, age_ms or 0)
    return covered + seal(covered)


def seal(covered: bytes) -> bytes:
    """What stands behind everything else: its checksum."""
    return _CRC.pack(checksum(covered))


def unpack(data: bytes) -> int | None:
    """`RemoteProtocolError` where it is damaged, `WrongDirectory` where a newer version wrote it."""
    if len(data) != FILE_BYTES:
        raise RemoteProtocolError("it has another length")
    covered = data[: _COVERED.size]
    magic, version, length, must, _, age_ms = _COVERED.unpack(covered)
    if magic != MAGIC or data[_COVERED.size : FILE_BYTES] != seal(covered):
        raise RemoteProtocolError("it fails its checksum")
    if version != VERSION or must or length != FILE_BYTES:
        raise WrongDirectory(f"{FILE} has format version {version}, this program reads {VERSION}: use a newer one")
    return age_ms or None


def _read(disk: Disk) -> int | None:
    file = disk.open(FILE)
    try:
        return unpack(file.read(0, FILE_BYTES))
    finally:
        file.close()


def _record(disk: Disk, age_ms: int | None) -> None:
    """Written only where it says something new: a start on a full disk need not write."""
    try:
        if _read(disk) == age_ms:
            return
    except (NoSuchFile, RemoteProtocolError):
        pass
    disk.publish(FILE, [pack(age_ms)])
