"""The directory of a replica that does not fit its master: cut back, reset, or catching up.

Cut. A deposed master may have written records that no other copy ever had. When it comes back as a replica, that tail
goes (`cut`). The tail is kept aside, as recovery keeps a torn one, and every file that speaks of the tail goes first.
After a kill at any point, the directory can be opened (with a longer prefix of its own history, or the cut one), and
the cut repeated.

Reset. A replica is reset (`wipe`) when its history cannot be joined to its master's. Either it was away for so long
that retention took the records that it needs next, or it is damaged beyond repair. Its files are set aside, and its
logs begin again where the master's logs begin now. The directory gets a new id, so that nobody takes it for the copy
that was known. First the file `wiping` records what the directory is to become. From then on every step can be
repeated, and whoever opens the directory carries out the rest (`finish`). Segments are renamed, not copied, so `aside/`
takes no more room than they did. An operator may delete them. `fairway.delay.install` resets the copy of a
delay server with the same file format. Beside the ids the file has two numbers, whose meaning differs between the two
modules.

Catch up. A record names the end that was synced when the master wrote it. A replica may trust that end for itself only
if it syncs everything below before it writes the record. Then it syncs as often as its master did, which is too slow
for a replica that was away for a day. While the file `catching-up` is there, the replica takes in more per sync
(`CatchUp`), and such ends count only up to the ends that the file states: everything below those was synced here.
Damage above them is torn, not rotten. A recovery ends the catch-up, because it leaves the logs whole and synced.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from fairway.batch import checksum
from fairway.errors import FairwayError, Misuse, NoSuchFile, RemoteProtocolError, WrongDirectory
from fairway.runtime.disk import TEMPORARY, Disk, contents
from fairway.runtime.rng import Rng
from fairway.storage import action_log, directory, index_file, message_log, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.checkpoint import Checkpoint, LogMark
from fairway.storage.directory import CATCHING_UP, WIPING, DirectoryIdentity
from fairway.storage.flusher import OnDurable
from fairway.storage.log import Log
from fairway.storage.recovery import ASIDE, DamageVerdict, Finding, LogRecovery, witness_name
from fairway.storage.subjects import SubjectTable

_VERSION = 1
_CRC = struct.Struct("<I4x")

# --- cut -------------------------------------------------------------------------------------------------------------


def cut(disk: Disk, messages_at: int, actions_at: int) -> list[Finding]:
    """Truncate both logs at these positions, where records end. Nobody may have the directory open."""
    known = directory.identify(disk)
    disk.lock()
    places = {message_log.DIRECTORY: messages_at, action_log.DIRECTORY: actions_at}
    _remove_checkpoints(disk, known or DirectoryIdentity(0, 0, 0), messages_at, actions_at)
    _remove_indexes(disk, messages_at)
    _lower_catch_up(disk, places)
    findings: list[Finding] = []
    for log, at in places.items():
        recovery = LogRecovery(disk, log, log_id=0)
        recovery.measure()
        _lower_witness(disk, recovery, at)
        findings += recovery.cut(at, "not in the master's history", DamageVerdict.PARTED)
    return findings


def _remove_checkpoints(disk: Disk, known: DirectoryIdentity, messages_at: int, actions_at: int) -> None:
    """Remove the checkpoints that cover more, newest first: those that remain are never newer than those removed."""
    for number in reversed(checkpoints.numbers(disk)):
        try:
            found = checkpoints.read(disk, number, known)
            is_kept = found.messages.end <= messages_at and found.actions.end <= actions_at
        except RemoteProtocolError:
            is_kept = False
        if not is_kept:
            disk.remove(checkpoints.file_name(number))


def _remove_indexes(disk: Disk, messages_at: int) -> None:
    """Remove the indexes of segments that the cut shortens or removes: a segment may grow again to just that size."""
    bases = segment.bases(disk, message_log.DIRECTORY)
    cut_base = max((base for base in bases if base < messages_at), default=0)
    for name in disk.listing(index_file.DIRECTORY):
        if name >= index_file.file_name(cut_base).rpartition("/")[2]:
            disk.remove(f"{index_file.DIRECTORY}/{name}")


def _lower_catch_up(disk: Disk, places: dict[str, int]) -> None:
    """Lower the ends that the file `catching-up` states: none may lie beyond the cut."""
    stated = read_catch_up(disk)
    if any(end > places[log] for log, end in stated.items()):
        _write_catch_up(disk, *(min(stated[log], places[log]) for log in (message_log.DIRECTORY, action_log.DIRECTORY)))


def _lower_witness(disk: Disk, recovery: LogRecovery, at: int) -> None:
    """Lower the synced end that an earlier recovery wrote down: write the lower one before the higher ones go."""
    beyond = [end for end in recovery.witnessed() if end > at]
    if beyond:
        disk.publish(witness_name(recovery.directory, at), [])
    for end in beyond:
        disk.remove(witness_name(recovery.directory, end))


# --- reset -----------------------------------------------------------------------------------------------------------

# magic, version, length, must, may, old directory id, new one, two log ids, two numbers
_RESET = struct.Struct("<8sHHHHQQQQQQ")
RESET_BYTES = _RESET.size + _CRC.size
_WIPING_MAGIC = b"FWYWIP\r\n"


class _ResetPlan(NamedTuple):
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
    plan = _ResetPlan(old_id, directory.renewed(adopt, rng), messages_base, actions_base)
    disk.publish(WIPING, [pack_reset(_WIPING_MAGIC, *plan)])
    return _carry_out(disk, plan)


def finish(disk: Disk) -> list[str]:
    """Carry out the reset that an earlier process began; return the names of the files set aside by this call."""
    try:
        plan = _ResetPlan(*unpack_reset(WIPING, contents(disk, WIPING)))
    except NoSuchFile:
        return []
    return _carry_out(disk, plan)


def _carry_out(disk: Disk, plan: _ResetPlan) -> list[str]:
    remove_derived(disk)
    logs = (message_log.DIRECTORY, action_log.DIRECTORY)
    kept = [name for log in logs for name in set_aside(disk, log, plan.old_id)]
    _begin(disk, plan)
    disk.remove(WIPING)
    return kept


def _begin(disk: Disk, plan: _ResetPlan) -> None:
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


def pack_reset(magic: bytes, old_id: int, identity: DirectoryIdentity, one: int, other: int) -> bytes:
    """The file that says what a directory is to become."""
    covered = _RESET.pack(magic, _VERSION, RESET_BYTES, 0, 0, old_id, *identity, one, other)
    return covered + _CRC.pack(checksum(covered))


def unpack_reset(name: str, data: bytes) -> tuple[int, DirectoryIdentity, int, int]:
    """The old directory id, the new identity, and the two numbers. `WrongDirectory` where the file of that name is
    damaged, or a newer version wrote it."""
    if len(data) != RESET_BYTES or data[_RESET.size :] != _CRC.pack(checksum(data[: _RESET.size])):
        raise WrongDirectory(
            f"{name} is damaged: this copy was being begun anew, and what it was to become is lost; "
            "choose an empty directory"
        )
    _, version, _, must, _, old_id, *ids, one, other = _RESET.unpack_from(data)
    _check_version(name, version, must)
    return old_id, DirectoryIdentity(*ids), one, other


def _check_version(name: str, version: int, must_flags: int) -> None:
    if version != _VERSION or must_flags:
        raise WrongDirectory(f"{name} has format version {version}, this program reads {_VERSION}: use a newer one")


def remove_derived(disk: Disk) -> None:
    """Remove the files that are made from the segments, and are of no use without them."""
    for where in (checkpoints.DIRECTORY, index_file.DIRECTORY):
        for name in disk.listing(where):
            disk.remove(f"{where}/{name}")
    disk.remove(CATCHING_UP)
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


# --- catch up --------------------------------------------------------------------------------------------------------

_CATCH_UP_MAGIC = b"FWYCUP\r\n"
_CATCH_UP = struct.Struct("<8sHHHHQQ")  # magic, version, length, must, may, two synced ends
_CATCH_UP_BYTES = _CATCH_UP.size + _CRC.size


def _write_catch_up(disk: Disk, messages_end: int, actions_end: int) -> None:
    """Write how far both logs are synced; durable when this returns."""
    covered = _CATCH_UP.pack(_CATCH_UP_MAGIC, _VERSION, _CATCH_UP_BYTES, 0, 0, messages_end, actions_end)
    disk.publish(CATCHING_UP, [covered, _CRC.pack(checksum(covered))])


def read_catch_up(disk: Disk) -> dict[str, int]:
    """By log, the highest synced end that records may name; empty where no catch-up is under way. A damaged file counts
    as 0 for both logs."""
    try:
        data = contents(disk, CATCHING_UP)
    except NoSuchFile:
        return {}
    covered, ends = data[: _CATCH_UP.size], (0, 0)
    if data[_CATCH_UP.size : _CATCH_UP_BYTES] == _CRC.pack(checksum(covered)):
        magic, version, _, must, _, *stated = _CATCH_UP.unpack(covered)
        if magic == _CATCH_UP_MAGIC:
            _check_version(CATCHING_UP, version, must)
            ends = (stated[0], stated[1])
    return dict(zip((message_log.DIRECTORY, action_log.DIRECTORY), ends, strict=True))


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
        _write_catch_up(self._disk, messages.synced_end, actions.synced_end)
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
            self._disk.remove_later(CATCHING_UP, removed)
