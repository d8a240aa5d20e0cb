"""All that lies in a spool's directory, batch by batch, whoever it belongs to: for who holds it against what brokers
have. Nothing is changed, and a journal that is in use may go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fairway.client.spool import yard_at
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import SpoolRecordKind, entry_of
from fairway.client.spool_recovery import JournalSurvey
from fairway.errors import FairwayError, Misuse, NoSuchFile
from fairway.world.clock import Clock
from fairway.world.disk import Disk

_TRIES = 100  # each for a segment that was emptied and removed while we read


class SpoolContent(NamedTuple):
    """An entry: one batch."""

    subject: str
    data: bytes
    aside: str | None  # why the broker will never take it; None: it waits to be sent


def contents(directory: str, clock: Clock, troubles: list[str]) -> Iterator[SpoolContent]:
    """`Misuse` where there is no spool; a journal that cannot be read is one more of `troubles`."""
    yard = yard_at(directory)
    if not yard.exists():
        raise Misuse(f"there is no spool at {directory}: name the directory that fairway.connect(spool=...) names")
    for name in yard.names():
        disk = yard.disk(name)
        try:
            yield from _of_journal(disk, int(name, 16), clock)
        except FairwayError as error:
            troubles.append(f"journal {name} of the spool {directory} cannot be read: {error}")
        finally:
            disk.close()


def _of_journal(disk: Disk, number: int, clock: Clock) -> Iterator[SpoolContent]:
    done = -1  # the last entry that was told
    for _ in range(_TRIES):
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
        except NoSuchFile:  # what was in it is at the broker by now
            continue
        return
    raise FairwayError("it is emptied faster than it can be read: look again")
