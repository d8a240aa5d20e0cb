"""The layout of a data directory, and its identity file, which is written first and read first.

    identity        the directory's id, and the ids of its two logs
    lock            held by the process that owns the directory
    messages/       segments of the message log
    actions/        segments of the action log, and the ballast
    index/          the consume log's entries, a file per complete segment
    checkpoints/    the last two
    aside/          tails that recovery cut off, and the segments of a copy that was reset
    retention       how long messages are kept, if anybody or a default chose that
    promise         of a copy: the highest epoch that it serves
    catching-up     of a replica that is far behind: how far it was synced when it began to catch up
    wiping          of a copy that is being reset: what it is to become
    installing      the same, of a delay server's copy that begins with files of its master (`fairway.delay`)

A directory with files but no identity belongs to another program, and is left alone. The exception is a directory whose
segments are Fairway's: the identity is then made again from them, under a new directory id, because a damaged copy is
not the copy that was known. So a wiped disk never passes for the disk that was there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from fairway import limits
from fairway.batch import checksum
from fairway.errors import NoSuchFile, RemoteProtocolError, StorageFault, WrongDirectory
from fairway.runtime.disk import Disk
from fairway.runtime.rng import Rng
from fairway.storage import action_log, message_log, segment


def remove_in_order(disk: Disk, names: Sequence[str], ended: Callable[[StorageFault | None], None]) -> None:
    """Delete files one after another, off the loop, and call `ended(None)` when all are gone. A crash, or a fault,
    leaves the later files: an older checkpoint may still name them."""
    if not names:
        ended(None)
        return

    def removed(fault: StorageFault | None) -> None:
        if fault is not None:
            ended(fault)
        else:
            remove_in_order(disk, names[1:], ended)

    disk.remove_later(names[0], removed)


IDENTITY = "identity"
CATCHING_UP = "catching-up"  # how far a replica that is far behind was synced when it began to catch up
WIPING = "wiping"  # what a copy that is being reset is to become
INSTALLING = "installing"  # the same, for a copy that begins with more than empty logs
_ID_BITS = 63  # ids travel in control messages too, and many languages have only signed numbers
MAGIC = b"FWYDIR\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQQQ20x")  # magic, version, header length, must, may, directory id, two log ids
_CRC = struct.Struct("<I")
IDENTITY_BYTES = _COVERED.size + _CRC.size
# Files that a first start leaves when it is killed; `fairway up` keeps delayed messages in the subdirectory `delay`.
# A copy's `promise` (fairway.replication) and its `wiping` may be there before anything else is.
_FIRST_FILES = (IDENTITY, WIPING, "promise")
_NOT_YET_OURS = frozenset({"lock", "lost+found", "delay", WIPING, "promise", *(f"{name}.tmp" for name in _FIRST_FILES)})


class DirectoryIdentity(NamedTuple):
    directory_id: int
    messages_id: int
    actions_id: int


def identify(disk: Disk) -> DirectoryIdentity | None:
    """Whose directory it is, touching nothing: None for an empty one, `WrongDirectory` for a foreign one."""
    try:
        return _read(disk)
    except NoSuchFile:
        if WIPING in disk.listing(""):
            return None
        if not set(disk.listing("")) - _NOT_YET_OURS:
            return None
        if not _segments(disk):
            raise WrongDirectory(
                "the directory holds files, but no Fairway data: choose an empty directory, or one that Fairway made"
            ) from None
    except RemoteProtocolError as error:
        if WIPING in disk.listing(""):
            return None
        if not _segments(disk):
            raise WrongDirectory(f"{IDENTITY} is damaged ({error}) and there is no segment to make it from") from error
    return _from_segments(disk)


def claim(disk: Disk, rng: Rng, adopt: DirectoryIdentity | None = None) -> tuple[DirectoryIdentity, str | None]:
    """The directory's identity, made where there is none; and what was wrong with it, if anything.

    `adopt` has the ids of the logs that are to be copied; its directory id does not count.
    """
    known = identify(disk)
    if adopt is not None and known is not None and not _is_of(known, adopt):
        if _segments(disk):
            raise _foreign(known, adopt)
        known = DirectoryIdentity(
            known.directory_id, adopt.messages_id, adopt.actions_id
        )  # nothing was ever written to the logs
        publish(disk, known)
    if known is None:
        made = renewed(adopt or DirectoryIdentity(0, 0, 0), rng)
        publish(disk, made)
        return made, None
    if known.directory_id:
        secure(disk, IDENTITY)  # before anything else is made: files without an identity are another program's
        return known, None
    remade = renewed(known if adopt is None else adopt, rng)
    publish(disk, remade)
    return remade, f"{IDENTITY} was missing or damaged: made again from the segments, under a new directory id"


def _is_of(known: DirectoryIdentity, adopt: DirectoryIdentity) -> bool:
    """Whether a directory's logs are the logs to be copied; an id of 0 is unknown."""
    pairs = ((known.messages_id, adopt.messages_id), (known.actions_id, adopt.actions_id))
    return all(own in (0, wanted) for own, wanted in pairs)


def _foreign(known: DirectoryIdentity, adopt: DirectoryIdentity) -> WrongDirectory:
    own, wanted = (f"{each.messages_id:016x} and {each.actions_id:016x}" for each in (known, adopt))
    return WrongDirectory(
        f"the directory holds the logs {own}, those of the group are {wanted}: it belongs to another group; choose an "
        "empty directory, or the one that belongs to this group"
    )


def renewed(logs: DirectoryIdentity, rng: Rng) -> DirectoryIdentity:
    """The same logs under a new directory id; a log id of 0 is made too."""
    directory_id = rng.bits(_ID_BITS)
    return DirectoryIdentity(
        directory_id, logs.messages_id or rng.bits(_ID_BITS), logs.actions_id or rng.bits(_ID_BITS)
    )


def publish(disk: Disk, identity: DirectoryIdentity) -> None:
    """Write the identity file."""
    disk.publish(IDENTITY, [_pack(identity)])


def secure(disk: Disk, name: str) -> None:
    """Sync a published file: whoever published it may have been killed before its name was durable."""
    with closing(disk.open(name)) as file:
        disk.sync(file, file.size)


def _pack(identity: DirectoryIdentity) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, IDENTITY_BYTES, 0, 0, *identity)
    return covered + _CRC.pack(checksum(covered))


def _read(disk: Disk) -> DirectoryIdentity:
    """Read the identity. In every version the file begins with magic and version, and ends with a CRC of the rest."""
    with closing(disk.open(IDENTITY)) as file:
        data = file.read(0, limits.KIB)
    covered, crc = data[: -_CRC.size], data[-_CRC.size :]
    if not data.startswith(MAGIC) or crc != _CRC.pack(checksum(covered)):
        raise RemoteProtocolError("it fails its checksum")
    version = int.from_bytes(data[8:10], "little")
    if version != VERSION or len(data) != IDENTITY_BYTES:
        raise WrongDirectory(
            f"the directory has format version {version}, this program reads {VERSION}: use the version that wrote it"
        )
    _, _, _, must, _, *ids = _COVERED.unpack(covered)
    if must:
        raise WrongDirectory(f"{IDENTITY} has flags {must:#x} that this version does not know: use a newer one")
    return DirectoryIdentity(*ids)


def _segments(disk: Disk) -> list[str]:
    return [
        f"{directory}/{name}"
        for directory in (message_log.DIRECTORY, action_log.DIRECTORY)
        for name in disk.listing(directory)
        if segment.base_of(name) is not None
    ]


def _from_segments(disk: Disk) -> DirectoryIdentity:
    """The log ids that the segments name; the directory id is lost, so 0."""
    log_ids = {message_log.DIRECTORY: 0, action_log.DIRECTORY: 0}
    for name in _segments(disk):
        try:
            with closing(disk.open(name)) as file:
                log_id, _ = segment.parse_header(file.read(0, segment.HEADER_BYTES))
        except segment.UnknownVersion as error:
            raise WrongDirectory(f"{name}: {error}") from error
        except RemoteProtocolError:
            continue
        directory = name.partition("/")[0]
        log_ids[directory] = log_ids[directory] or log_id
    if not log_ids[message_log.DIRECTORY] and disk.listing(message_log.DIRECTORY):
        raise WrongDirectory(f"{IDENTITY} is missing and no segment header can be read: restore {IDENTITY} from a copy")
    return DirectoryIdentity(0, log_ids[message_log.DIRECTORY], log_ids[action_log.DIRECTORY])
