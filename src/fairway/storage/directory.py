"""Whose directory is this? The identity file, written first and read first.

    identity        this directory's id, and the ids of the two logs in it
    lock            held by the process that owns the directory
    messages/       segments of the message log
    actions/        segments of the action log, and the ballast
    index/          the consume log's entries, a file per complete segment
    checkpoints/    the last two
    aside/          tails that recovery cut off, and the segments of a copy that was begun anew
    promise         of a copy: the highest epoch that it serves
    catching-up     of a copy that is far behind: how far it was synced when it began to catch up
    wiping          of a copy that is being begun anew: what it is to become
    installing      the same, of a copy of a delay server that begins with files of its master (`fairway.delay`)

A directory with files but no identity belongs to another program, and is left alone; unless its segments say that it
is ours, in which case the identity is made again from them under a new directory id (a damaged copy is not the copy
that was known). A wiped disk therefore never passes for the one that was there."""

from __future__ import annotations

import struct
from typing import NamedTuple

from fairway import limits
from fairway.batch import checksum
from fairway.errors import NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.storage import action_log, message_log, segment
from fairway.world.disk import Disk
from fairway.world.rng import Rng

IDENTITY = "identity"
WIPING = "wiping"  # what a copy that is begun anew is to become
INSTALLING = "installing"  # the same, where it begins with more than empty logs
_ID_BITS = 63  # ids travel in control messages too, and many languages have signed numbers only
MAGIC = b"FWYDIR\r\n"
VERSION = 1
_COVERED = struct.Struct("<8sHHHHQQQ20x")  # magic, version, header length, must, may, directory id, two log ids
_CRC = struct.Struct("<I")
IDENTITY_BYTES = _COVERED.size + _CRC.size
# What a first start that was killed leaves behind; `fairway up` keeps delayed messages in the directory `delay` in it.
# A copy's `promise` (fairway.replication) and its `wiping` may be there before anything else is.
_FIRST_FILES = (IDENTITY, WIPING, "promise")
_NOT_YET_OURS = frozenset({"lock", "lost+found", "delay", WIPING, "promise", *(f"{name}.tmp" for name in _FIRST_FILES)})


class DirectoryIdentity(NamedTuple):
    directory_id: int
    messages_id: int
    actions_id: int


def identify(disk: Disk) -> DirectoryIdentity | None:
    """Whose directory it is, touching nothing: None for an empty one, `WrongDirectory` for one that is not ours."""
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

    `adopt` has the ids of the logs that a copy is to be made of; its directory id does not count.
    """
    known = identify(disk)
    if adopt is not None and known is not None and not _is_of(known, adopt):
        if _segments(disk):
            raise _foreign(known, adopt)
        known = DirectoryIdentity(
            known.directory_id, adopt.messages_id, adopt.actions_id
        )  # nothing was ever written to it
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
    """Whether a directory's logs are those that are to be copied; an id of 0 is not known."""
    pairs = ((known.messages_id, adopt.messages_id), (known.actions_id, adopt.actions_id))
    return all(own in (0, wanted) for own, wanted in pairs)


def _foreign(known: DirectoryIdentity, adopt: DirectoryIdentity) -> WrongDirectory:
    own, wanted = (f"{each.messages_id:016x} and {each.actions_id:016x}" for each in (known, adopt))
    return WrongDirectory(
        f"the directory holds the logs {own}, those of the group are {wanted}: it belongs to another group; choose an "
        "empty directory, or the one that belongs to this group"
    )


def renewed(logs: DirectoryIdentity, rng: Rng) -> DirectoryIdentity:
    """The same logs in a directory that is not the one that was known; a log's id of 0 is made too."""
    directory_id = rng.bits(_ID_BITS)
    return DirectoryIdentity(
        directory_id, logs.messages_id or rng.bits(_ID_BITS), logs.actions_id or rng.bits(_ID_BITS)
    )


def publish(disk: Disk, identity: DirectoryIdentity) -> None:
    """Say whose directory it is from now on."""
    disk.publish(IDENTITY, [_pack(identity)])


def secure(disk: Disk, name: str) -> None:
    """Make sure that a published file has its name for good: whoever published it may have been killed too early."""
    file = disk.open(name)
    try:
        disk.sync(file, file.size)
    finally:
        file.close()


def _pack(identity: DirectoryIdentity) -> bytes:
    covered = _COVERED.pack(MAGIC, VERSION, IDENTITY_BYTES, 0, 0, *identity)
    return covered + _CRC.pack(checksum(covered))


def _read(disk: Disk) -> DirectoryIdentity:
    """In every version the file begins with magic and version and ends with the CRC of all before it."""
    file = disk.open(IDENTITY)
    try:
        data = file.read(0, limits.KIB)
    finally:
        file.close()
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
    """The log ids that the segments name; the directory id is 0, for it is lost."""
    log_ids = {message_log.DIRECTORY: 0, action_log.DIRECTORY: 0}
    for name in _segments(disk):
        file = disk.open(name)
        try:
            log_id, _ = segment.parse_header(file.read(0, segment.HEADER_BYTES))
        except segment.UnknownVersion as error:
            raise WrongDirectory(f"{name}: {error}") from error
        except RemoteProtocolError:
            continue
        finally:
            file.close()
        directory = name.partition("/")[0]
        log_ids[directory] = log_ids[directory] or log_id
    if not log_ids[message_log.DIRECTORY] and disk.listing(message_log.DIRECTORY):
        raise WrongDirectory(f"{IDENTITY} is missing and no segment header can be read: restore {IDENTITY} from a copy")
    return DirectoryIdentity(0, log_ids[message_log.DIRECTORY], log_ids[action_log.DIRECTORY])
