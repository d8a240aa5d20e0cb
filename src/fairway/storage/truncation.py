"""Truncation: cuts both logs of a directory back to where their history parts from the master's.

A deposed master may have written records that no other copy ever had. When it comes back as a replica, that tail goes.
The tail is kept aside, as recovery keeps a torn one, and every file that speaks of the tail goes first. After a kill at
any point, the directory can be opened (with a longer prefix of its own history, or the cut one), and the cut repeated.
"""

from __future__ import annotations

from fairway.errors import RemoteProtocolError
from fairway.runtime.disk import Disk
from fairway.storage import action_log, catch_up, directory, index_file, message_log, segment
from fairway.storage import checkpoint as checkpoints
from fairway.storage.directory import DirectoryIdentity
from fairway.storage.recovery import DamageVerdict, Finding, LogRecovery, witness_name

_WHY = "not in the master's history"


def cut(disk: Disk, messages_at: int, actions_at: int) -> list[Finding]:
    """Truncate both logs at these positions, where records end. Nobody may have the directory open."""
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
    bases = [base for name in disk.listing(message_log.DIRECTORY) if (base := segment.base_of(name)) is not None]
    cut_base = max((base for base in bases if base < messages_at), default=0)
    for name in disk.listing(index_file.DIRECTORY):
        if name >= index_file.file_name(cut_base).rpartition("/")[2]:
            disk.remove(f"{index_file.DIRECTORY}/{name}")


def _lower_catching_up(disk: Disk, places: dict[str, int]) -> None:
    """Lower the ends that the file `catching-up` states: none may lie beyond the cut."""
    stated = catch_up.read(disk)
    if any(end > places[log] for log, end in stated.items()):
        catch_up.begin(disk, *(min(stated[log], places[log]) for log in (message_log.DIRECTORY, action_log.DIRECTORY)))


def _lower_witness(disk: Disk, recovery: LogRecovery, at: int) -> None:
    """Lower the synced end that an earlier recovery wrote down: write the lower one before the higher ones go."""
    beyond = [end for end in recovery.witnessed() if end > at]
    if beyond:
        disk.publish(witness_name(recovery.directory, at), [])
    for end in beyond:
        disk.remove(witness_name(recovery.directory, end))
