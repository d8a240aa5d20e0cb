"""Cutting both logs of a directory back to where their history parts from the one that counts.

A master that was deposed may have written what no other copy ever had. When it comes back as a copy, that tail goes:
it is kept aside, as recovery keeps what it cuts, and every file that speaks of it goes first. Killed at any point, the
directory can be opened as it is (a longer prefix of the same history, or the cut one), and the cut made again.
"""

from __future__ import annotations

from fairway.errors import RemoteProtocolError
from fairway.storage import action_log, catching_up, directory, index_file, message_log, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import DamageVerdict, Finding, LogRecovery, witness_name
from fairway.world.disk import Disk

_WHY = "not in the master's history"


def cut(disk: Disk, messages_at: int, actions_at: int) -> list[Finding]:
    """Let both logs end at these positions, where records end. Nobody has the directory open."""
    known = directory.identify(disk)
    disk.lock()
    places = {message_log.DIRECTORY: messages_at, action_log.DIRECTORY: actions_at}
    _remove_checkpoints(disk, known or DirectoryIdentity(0, 0, 0), messages_at, actions_at)
    _remove_indexes(disk, messages_at)
    _lower_catching_up(disk, places)
    findings: list[Finding] = []
    for log, at in places.items():
        recovery = LogRecovery(disk, log, log_id=0)
        recovery.measure()
        _lower_witness(disk, recovery, at)
        findings += recovery.cut(at, _WHY, DamageVerdict.PARTED)
    return findings


def _remove_checkpoints(disk: Disk, known: DirectoryIdentity, messages_at: int, actions_at: int) -> None:
    """Those that say more, the newest first: what is left is never newer than what is gone."""
    for number in reversed(checkpoints.numbers(disk)):
        try:
            found = checkpoints.read(disk, number, known)
            is_kept = found.messages.end <= messages_at and found.actions.end <= actions_at
        except RemoteProtocolError:
            is_kept = False
        if not is_kept:
            disk.remove(checkpoints.file_name(number))


def _remove_indexes(disk: Disk, messages_at: int) -> None:
    """Those of segments that the cut shortens or removes: the segments may grow again to just the same size."""
    bases = [base for name in disk.listing(message_log.DIRECTORY) if (base := segment.base_of(name)) is not None]
    cut_base = max((base for base in bases if base < messages_at), default=0)
    for name in disk.listing(index_file.DIRECTORY):
        if name >= index_file.file_name(cut_base).rpartition("/")[2]:
            disk.remove(f"{index_file.DIRECTORY}/{name}")


def _lower_catching_up(disk: Disk, places: dict[str, int]) -> None:
    """It states ends that are synced: no end is beyond the cut."""
    stated = catching_up.read(disk)
    if any(end > places[log] for log, end in stated.items()):
        catching_up.begin(
            disk, *(min(stated[log], places[log]) for log in (message_log.DIRECTORY, action_log.DIRECTORY))
        )


def _lower_witness(disk: Disk, recovery: LogRecovery, at: int) -> None:
    """The same for an end that an earlier recovery wrote down: the lower one is there before the higher one goes."""
    beyond = [end for end in recovery.witnessed() if end > at]
    if beyond:
        disk.publish(witness_name(recovery.directory, at), [])
    for end in beyond:
        disk.remove(witness_name(recovery.directory, end))
