"""Lists and counts what a spool directory holds, whichever process owns it, without changing anything.

`contents` yields every batch, for a comparison with what brokers have stored. `survey` reports each journal: its owner,
its counts, what was set aside and what is damaged. A journal may be in use meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_record import SpoolRecordKind, entry_of
from fairway.client.spool.recovery import KEPT, Aside, JournalSurvey
from fairway.client.spool.spool import shared_directory_at
from fairway.errors import FairwayError, Misuse, NoSuchFile
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Disk

if TYPE_CHECKING:
    from fairway.runtime.shared_directory import SharedDirectory


_EMPTIED_TRIES = 100  # one try for each segment that its owner removes while we read


class SpoolContent(NamedTuple):
    """One batch in a spool."""

    subject: str
    data: bytes
    aside: str | None  # why the batch was set aside; None: the batch waits to be sent


def contents(directory: str, clock: Clock, troubles: list[str]) -> Iterator[SpoolContent]:
    """Yield every batch in the spool. A journal that cannot be read adds a sentence to `troubles`.

    Raises `Misuse` if there is no spool.
    """
    shared_directory = shared_directory_at(directory)
    if not shared_directory.exists():
        raise Misuse(f"there is no spool at {directory}: name the directory that fairway.connect(spool=...) names")
    for name in shared_directory.names():
        disk = shared_directory.disk(name)
        try:
            yield from _of_journal(disk, int(name, 16), clock)
        except FairwayError as error:
            troubles.append(f"journal {name} of the spool {directory} cannot be read: {error}")
        finally:
            disk.close()


def _of_journal(disk: Disk, number: int, clock: Clock) -> Iterator[SpoolContent]:
    done = -1  # the number of the last entry that was yielded
    for _ in range(_EMPTIED_TRIES):
        try:
            journal = Journal.look(disk, number, clock)
            for _base, record in JournalSurvey(disk, number).walk():
                if record.kind == SpoolRecordKind.ENTRY:
                    entry = entry_of(record.body)
                    if entry.number > done and journal.holds(entry.number):
                        done = entry.number
                        yield SpoolContent(entry.subject, entry.data, None)
            for note in journal.asides():
                _, data = journal.read_aside(f"{note.number:016x}")
                yield SpoolContent(note.subject, data, note.reason)
        except NoSuchFile:  # its owner has sent the segment's entries and removed the file
            continue
        return
    raise FairwayError("it is emptied faster than it can be read: look again")


_TRIES = 3  # a journal in use may change while we read


class JournalReport(msgspec.Struct, frozen=True):
    """The report on one journal."""

    name: str
    process: int | None  # the owner's process id; None: the owner is dead
    messages: int  # not yet at the broker
    batches: int
    size_bytes: int
    since_ms: int | None  # when the oldest batch was written
    set_aside: list[Aside]
    damaged: list[str]  # the files in `kept` of unreadable pieces, those still to be written included
    trouble: str  # why the journal cannot be read; empty if it can
    is_cluster: bool = False  # a cluster client wrote it, and only a cluster client drains it
    pinned: dict[str, int] = {}  # messages that may be stored, by the broker group that would know


class SpoolReport(msgspec.Struct, frozen=True):
    """The report on all journals of a directory."""

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
    """Report on every journal of the spool. Raises `Misuse` if there is no spool."""
    shared_directory = shared_directory_at(directory)
    if not shared_directory.exists():
        raise Misuse(f"there is no spool at {directory}: name the directory that fairway.connect(spool=...) names")
    found = [_look(shared_directory, name, clock) for name in shared_directory.names()]
    return SpoolReport(directory, [each for each in found if each is not None])


def _look(shared_directory: SharedDirectory, name: str, clock: Clock) -> JournalReport | None:
    """Report on one journal. None: the journal has just been removed."""
    disk = shared_directory.disk(name)
    owner = None
    trouble = ""
    try:
        for _ in range(_TRIES):
            owner = disk.owner()
            try:
                return _report(Journal.look(disk, int(name, 16), clock), owner)
            except NoSuchFile:  # a segment was removed while we read
                if name not in shared_directory.names():
                    return None
            except FairwayError as error:
                trouble = str(error)
        return JournalReport(name, owner, 0, 0, 0, None, [], [], trouble)
    finally:
        disk.close()


def _report(journal: Journal, owner: int | None) -> JournalReport:
    # In a journal in use, a record that is just being written looks torn. Only rot counts there.
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
