"""What is in a spool's directory, whoever it belongs to: looked at, and left as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fairway.client.spool import yard_at
from fairway.client.spool_aside import Aside
from fairway.client.spool_journal import Journal
from fairway.client.spool_recovery import KEPT
from fairway.errors import FairwayError, Misuse, NoSuchFile
from fairway.world.clock import Clock

if TYPE_CHECKING:
    from fairway.world.yard import SharedDirectory

_TRIES = 3  # a journal that is in use may change under our eyes


class JournalReport(msgspec.Struct, frozen=True):
    """One journal."""

    name: str
    process: int | None  # that has it; None: nobody, its process is dead
    messages: int  # not yet at the broker
    batches: int
    size_bytes: int
    since_ms: int | None  # when the oldest was written
    set_aside: list[Aside]
    damaged: list[str]  # pieces that could not be read: the files in which they were kept, or will be
    trouble: str  # why it cannot be read; empty where it can
    is_cluster: bool = False  # its client was one of a cluster, and only such a one drains it
    pinned: dict[str, int] = {}  # messages that may be stored, by the broker group that would know


class SpoolReport(msgspec.Struct, frozen=True):
    """All of them."""

    directory: str
    journals: list[JournalReport]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was set aside, damaged or unreadable."""
        return not any(each.set_aside or each.damaged or each.trouble for each in self.journals)


def survey(directory: str, clock: Clock) -> SpoolReport:
    """`Misuse` where there is no spool."""
    yard = yard_at(directory)
    if not yard.exists():
        raise Misuse(f"there is no spool at {directory}: name the directory that fairway.connect(spool=...) names")
    found = [_look(yard, name, clock) for name in yard.names()]
    return SpoolReport(directory, [each for each in found if each is not None])


def _look(yard: SharedDirectory, name: str, clock: Clock) -> JournalReport | None:
    """None: it was there a moment ago."""
    disk = yard.disk(name)
    owner = None
    trouble = ""
    try:
        for _ in range(_TRIES):
            owner = disk.owner()
            try:
                return _report(Journal.look(disk, int(name, 16), clock), owner)
            except NoSuchFile:  # a segment was emptied and removed while we looked
                if name not in yard.names():
                    return None
            except FairwayError as error:
                trouble = str(error)
        return JournalReport(name, owner, 0, 0, 0, None, [], [], trouble)
    finally:
        disk.close()


def _report(journal: Journal, owner: int | None) -> JournalReport:
    # What is being written is not torn: of a journal in use, only rot below its synced end counts.
    fresh = [each.file for each in journal.damages if owner is None or each.kind == "rotten"]
    kept = [f"{KEPT}/{name}" for name in journal.disk.listing(KEPT)]
    return JournalReport(
        journal.name,
        owner,
        journal.messages,
        journal.entries,
        journal.size_bytes,
        None if journal.is_empty else journal.since_ms,
        journal.asides(),
        sorted({*fresh, *kept}),
        "",
        journal.is_cluster,
        journal.pinned(),
    )
