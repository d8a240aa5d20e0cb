"""What a journal works with: segments, entries that are not done, and what is to be written next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fairway.client.spool_record import PlacementRecord
from fairway.errors import StorageFault
from fairway.protocol.diversion import Handed
from fairway.world.disk import Completion, File


class JournalWrite(NamedTuple):
    entry: Handed | None  # None: marks alone
    done: Completion
    numbered: Callable[[int], None] | None = None  # told which entry it is, just before it is done
    placed: Sequence[PlacementRecord] = ()
    instead: int | None = None  # of the entry with this number
    is_needed: bool = False  # marks that somebody builds on: without room for them he is told


class JournalSegment:
    """One file."""

    __slots__ = ("base", "end", "file", "pending")

    def __init__(self, base: int, end: int, file: File) -> None:
        self.base = base
        self.end = end
        self.file = file
        self.pending = 0  # entries


class PendingEntry(NamedTuple):
    """An entry that is not done."""

    messages: int
    segment: JournalSegment
    subject: str
    is_due: bool  # its messages are, later
    was_sent: bool  # before it was written
    group: str  # of brokers that it is meant for, or was sent to; empty: nobody has said yet, or there is but one


def nobody(_: StorageFault | None) -> None:
    """Nobody waits for it."""


def tell_all(jobs: Sequence[JournalWrite], fault: StorageFault | None) -> None:
    for job in jobs:
        job.done(fault)
