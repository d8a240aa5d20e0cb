"""Bugs that a storage engine might have, one at a time, so that the campaign can show that it would find them.

Each swaps one piece of the product for a wrong one while its `with` lasts, and names the invariant that must catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from fairway.batch import checksum
from fairway.errors import DiskFull, StorageFault
from fairway.runtime.disk import parent
from fairway.simulation.disk import SimDisk, SimFile
from fairway.storage import record, recovery, replicated_store, store
from fairway.storage.checkpoint import LogMark
from fairway.storage.dedupe import DedupeWindow
from fairway.storage.flusher import Flusher
from fairway.storage.log import Log
from fairway.storage.record import Record
from fairway.storage.recovery import DamageVerdict, Finding, Judgement
from fairway.storage.segment import Damage
from fairway.storage.subjects import SubjectTable
from tests.simulation.truth import Invariant

_COVERED_BYTES = record.HEADER_BYTES - 4  # by the header's CRC; no body has this length, bodies are padded


@dataclass(frozen=True)
class Bug:
    """How to plant it, and which invariant must find it, whatever else does."""

    sentence: str
    plant: Callable[[], AbstractContextManager[None]]
    caught_by: Invariant
    damaged: bool = False  # only damage brings it to light
    seeds: int = 60  # within so many


@contextmanager
def swapped(owner: Any, name: str, wrong: Any) -> Iterator[None]:
    right = owner.__dict__[name]
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, right)


def answer_before_sync() -> AbstractContextManager[None]:
    async def durable(*_: object) -> None:
        """Durable enough."""

    return swapped(Flusher, "durable", durable)


@contextmanager
def crc_without_header() -> Iterator[None]:
    def of_bodies_only(data: bytes) -> int:
        return 0 if len(data) == _COVERED_BYTES else checksum(data)

    with swapped(record, "checksum", of_bodies_only), swapped(record, "checksum_of_bytes", of_bodies_only):
        yield


def cut_at_the_first_bad_record() -> AbstractContextManager[None]:
    def judge(synced_end: int, damages: list[Damage]) -> Judgement:
        if not damages:
            return Judgement(synced_end, damages, [], None)
        return Judgement(min(synced_end, damages[0].start), damages, [], damages[0].start, damages[0].why)

    return swapped(recovery, "judge", judge)


def retry_after_a_failed_sync() -> AbstractContextManager[None]:
    right = Flusher._finished

    def finished(self: Flusher, fault: StorageFault | None) -> None:
        if fault is None or isinstance(fault, DiskFull) or self._in_flight is None:
            right(self, fault)
        else:
            self._disk.commit(self._in_flight.file, [], self._finished)

    return swapped(Flusher, "_finished", finished)


def no_directory_sync() -> AbstractContextManager[None]:
    def sync_entries(self: SimDisk, directory: str) -> None:
        self._count()

    return swapped(SimDisk, "_sync_entries", sync_entries)


def checkpoint_covers_too_much() -> AbstractContextManager[None]:
    right = replicated_store.mark

    def mark(log: Log, _: int) -> LogMark:
        return right(log, log.end)

    return swapped(store, "mark", mark)


def dedupe_forgets_at_restart() -> AbstractContextManager[None]:
    return swapped(DedupeWindow, "unpack", classmethod(lambda cls, *_: cls()))


def sequences_start_over_at_restart() -> AbstractContextManager[None]:
    right = SubjectTable.restate

    def restate(self: SubjectTable, body: bytes, position: int) -> None:
        right(self, body, position)
        for state in self:
            state.next_sequence = 0

    return swapped(SubjectTable, "restate", restate)


def torn_tail_is_kept() -> AbstractContextManager[None]:
    def cut(self: recovery.LogRecovery, cut_at: int, why: str, verdict: DamageVerdict) -> list[Finding]:
        return []  # somebody else will cut it

    return swapped(recovery.LogRecovery, "cut", cut)


@contextmanager
def torn_body_is_served() -> Iterator[None]:
    class AsExpected(int):
        """The header was sound, after all."""

        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    def is_sound_body(body: bytes, crc: int) -> bool:
        return True

    def of_headers_only(data: bytes) -> int:
        return checksum(data) if len(data) == _COVERED_BYTES else AsExpected()

    with swapped(record, "is_sound_body", is_sound_body), swapped(record, "checksum_of_bytes", of_headers_only):
        yield


def full_disk_is_not_undone() -> AbstractContextManager[None]:
    def undo(self: Log, position: int) -> None:
        self.end = position

    return swapped(Log, "_undo", undo)


def recovery_does_not_sync() -> AbstractContextManager[None]:
    def sync(self: SimDisk, file: object, position: int) -> None:
        """What was read must be on the disk, or so one might think."""

    return swapped(SimDisk, "sync", sync)


def recovery_only_syncs() -> AbstractContextManager[None]:
    def sync(self: SimDisk, file: SimFile, position: int) -> None:
        self._sync(file.inode, file.name)
        self._sync_directory(parent(file.name))

    return swapped(SimDisk, "sync", sync)


def replay_stops_at_the_checkpoint() -> AbstractContextManager[None]:
    def take(self: recovery.LogRecovery, found: Record) -> None:
        self.epoch = found.header.epoch
        self.newest_ms[self.at] = found.header.appended_ms
        if self.start == 0:
            self.apply(found)

    return swapped(recovery.LogRecovery, "_take", take)


_I = Invariant
BUGS: dict[str, Bug] = {
    "answer-before-sync": Bug("a batch is answered when it is appended", answer_before_sync, _I.LOST),
    "crc-without-header": Bug("the CRC covers bodies only", crc_without_header, _I.UNREPORTED, damaged=True),
    "cut-at-first-bad-record": Bug("rot is cut off", cut_at_the_first_bad_record, _I.LOST, damaged=True),
    "retry-after-failed-sync": Bug("a failed sync is tried again", retry_after_a_failed_sync, _I.LOST),
    "no-directory-sync": Bug("a new name is not synced", no_directory_sync, _I.LOST),
    "checkpoint-covers-too-much": Bug("it speaks of what is not committed", checkpoint_covers_too_much, _I.DEDUPE),
    "dedupe-forgets": Bug("the checkpoint's window is not read", dedupe_forgets_at_restart, _I.DEDUPE),
    "sequences-start-over": Bug("a subject begins again at 0", sequences_start_over_at_restart, _I.RENAMED),
    "torn-tail-is-kept": Bug("a torn tail stays where it is", torn_tail_is_kept, _I.ACTIONS),
    "torn-body-is-served": Bug("no body is checked", torn_body_is_served, _I.CORRUPT),
    "full-disk-not-undone": Bug("the views keep what was undone", full_disk_is_not_undone, _I.BROKE),
    "recovery-does-not-sync": Bug("what a killed process left is believed", recovery_does_not_sync, _I.LOST),
    "recovery-only-syncs": Bug("a sync after a failed one is believed", recovery_only_syncs, _I.LOST),
    "replay-stops-at-checkpoint": Bug("what came after it is not read", replay_stops_at_the_checkpoint, _I.LOST),
}
