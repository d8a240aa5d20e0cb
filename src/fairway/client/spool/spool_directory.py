"""The tools for a spool directory: list and count what it holds, send stuck batches again, or discard them.

`contents` yields every batch, for a comparison with what brokers have stored. `survey` reports each journal: its owner,
its counts, what was set aside and what is damaged. Both change nothing, and a journal may be in use meanwhile.

    batch                                        operator's choice
    set aside                                    `retry` puts the batch back under a new number, `discard` removes it
    pinned to a broker group that was given up   `retry_pinned` puts it back under a new number, for any group

A batch that is put back becomes a new entry of its journal, which replaces the old entry. One record does both, so a
crash leaves either the old entry or the new one. Then the old entry's file is removed: by this process, or by the next
process that opens the journal, before that process sends anything. The messages keep the ids of their receipts. So a
reader recognises a message that is stored twice by its id.

Only journals without a living owner are changed, under their lock. A batch of unknown fate that was set aside stays
while its journal holds other batches that may be stored: the drain needs the first to judge the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from fairway import batch
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import (
    KEPT,
    Aside,
    JournalSurvey,
    SpoolEntry,
    SpoolRecordKind,
    aside_name,
    entry_of,
)
from fairway.client.spool.spool import shared_directory_at
from fairway.errors import FairwayError, Misuse, NoSuchFile
from fairway.protocol.spool_port import Handed
from fairway.runtime.clock import Clock
from fairway.runtime.disk import Completion, Disk
from fairway.runtime.rng import Rng
from fairway.runtime.threads import Wakeup

if TYPE_CHECKING:
    from fairway.errors import StorageFault
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
    shared_directory = _existing(directory)
    for name in shared_directory.names():
        disk = shared_directory.disk(name)
        try:
            yield from _of_journal(disk, int(name, 16), clock)
        except FairwayError as error:
            troubles.append(f"journal {name} of the spool {directory} cannot be read: {error}")
        finally:
            disk.close()


def _existing(directory: str) -> SharedDirectory:
    shared_directory = shared_directory_at(directory)
    if not shared_directory.exists():
        raise Misuse(f"there is no spool at {directory}: name the directory that fairway.connect(spool=...) names")
    return shared_directory


def _of_journal(disk: Disk, number: int, clock: Clock) -> Iterator[SpoolContent]:
    done = -1  # the number of the last entry that was yielded
    for _ in range(_EMPTIED_TRIES):
        try:
            journal = Journal.look(disk, number, clock)
            for entry in _entries(journal):
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


def _entries(journal: Journal) -> Iterator[SpoolEntry]:
    """Every readable entry in the journal's files, in order."""
    walk = JournalSurvey(journal.disk, journal.number).walk()
    return (entry_of(record.body) for _, record in walk if record.kind == SpoolRecordKind.ENTRY)


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
    shared_directory = _existing(directory)
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


# --- changes ----------------------------------------------------------------------------------------------------------

# Calls its argument with a completion, and returns when the completion is called. Raises the fault, if there is one.
WaitFor: TypeAlias = Callable[[Callable[[Completion], None]], None]


class Changed(msgspec.Struct, frozen=True):
    """The result of a retry or a discard."""

    ids: list[str]  # of the batches that were put back or removed
    messages: int  # in these batches
    may_repeat: int  # of these messages: those that may be stored already
    unknown: list[str]  # ids that the operator named and that do not exist
    left: list[str]  # a sentence for each batch or journal that was left as it was


def batch_id(journal: str, number: int) -> str:
    """The name of a batch for people, as `fairway spool status` shows it."""
    return f"{journal}/{number}"


# --- one journal ------------------------------------------------------------------------------------------------------


class Bench:
    """Changes one journal, which this process has locked. Its methods block."""

    def __init__(self, journal: Journal, rng: Rng, wait: WaitFor) -> None:
        self.journal = journal
        self._rng = rng
        self._wait = wait
        # The new stream and its next sequence, by subject and whether due later.
        self._streams: dict[tuple[str, bool], tuple[int, int]] = {}

    def put_back(self, aside: Aside) -> None:
        """Send a set-aside batch again."""
        self._check_murk(aside)
        _, data = self.journal.read_aside(f"{aside.number:016x}")
        self._put(aside.number, aside.subject, aside.messages, data)
        self.journal.clear_asides()

    def free(self, entry: SpoolEntry) -> None:
        """Let any group take a batch that is pinned to one."""
        self._put(entry.number, entry.subject, entry.messages, entry.data)

    def discard(self, aside: Aside) -> None:
        """Remove a set-aside batch for good."""
        self._check_murk(aside)
        self._wait(lambda done: self.journal.give_up([aside.number], done))
        self.journal.disk.remove(aside_name(aside.number))

    def pinned_to(self, group: str) -> list[SpoolEntry]:
        """The batches pinned to a group, in order. There are few: no more than were in flight at once."""
        waiting = self.journal.doubtful()
        return [entry for entry in _entries(self.journal) if waiting.get(entry.number) == group]

    def _put(self, number: int, subject: str, messages: int, data: bytes) -> None:
        try:
            batch.check(data)  # a new checksum would hide damage
        except FairwayError as error:
            raise FairwayError(f"it is damaged, or no batch ({error}): nobody can send it") from error
        key = (subject, batch.is_delayed(data))
        stream, first = self._streams.get(key) or (self._rng.bits(64) or 1, 0)
        handed = Handed(subject, messages, False, batch.reborn(data, producer_id=stream, first_sequence=first))
        self._wait(lambda done: self.journal.put_back(handed, number, done))
        self._streams[key] = stream, first + messages

    def _check_murk(self, aside: Aside) -> None:
        waiting = len(self.journal.doubtful())
        if aside.is_unknown and waiting:
            raise FairwayError(
                f"what waits in its journal and may be stored too ({waiting:,} more) is judged by it: "
                "`fairway spool drain` first, or `fairway spool retry --group` if their broker group was given up"
            )


# --- a directory ------------------------------------------------------------------------------------------------------


def retry(directory: str, ids: Sequence[str] | None, clock: Clock, rng: Rng, *, may_repeat: bool = False) -> Changed:
    """Put back set-aside batches: those with these ids, or all."""
    chosen, unknown = _choose(directory, ids, clock)
    doubtful = sum(aside.messages for asides in chosen.values() for aside in asides if aside.is_unknown)
    if doubtful and not may_repeat:
        raise Misuse(
            f"what was set aside may be stored already, in part (messages: {doubtful:,}), and nobody can tell: sent "
            "again, it may be stored twice. Say --may-repeat if it may, or name the ids of the other batches"
        )
    return _JournalWork(directory, clock, rng).changed_all(chosen, Bench.put_back, unknown)


def discard(directory: str, ids: Sequence[str] | None, clock: Clock, rng: Rng) -> Changed:
    """Remove set-aside batches: those with these ids, or all."""
    chosen, unknown = _choose(directory, ids, clock)
    return _JournalWork(directory, clock, rng).changed_all(chosen, Bench.discard, unknown)


def retry_pinned(directory: str, group: str, clock: Clock, rng: Rng) -> Changed:
    """Put back the batches pinned to a broker group that was given up. Some may then be stored twice."""
    work = _JournalWork(directory, clock, rng)
    for each in survey(directory, clock).journals:
        if group in each.pinned:
            work.free(each.name, group)
    return work.changed([])


def _choose(directory: str, ids: Sequence[str] | None, clock: Clock) -> tuple[dict[str, list[Aside]], list[str]]:
    """The chosen batches by journal, in the order of their numbers, and the ids that do not exist."""
    there = {
        batch_id(journal.name, aside.number): (journal.name, aside)
        for journal in survey(directory, clock).journals
        for aside in journal.set_aside
    }
    wanted = list(there) if ids is None else list(dict.fromkeys(each.lower() for each in ids))
    chosen: dict[str, list[Aside]] = {}
    for name, aside in (there[each] for each in wanted if each in there):
        chosen.setdefault(name, []).append(aside)
    for asides in chosen.values():
        asides.sort(key=lambda aside: aside.number)
    return chosen, [each for each in wanted if each not in there]


class _JournalWork:
    """Changes the journals of a directory, one after the other, and collects the result."""

    def __init__(self, directory: str, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wakeup = Wakeup()
        self._shared_directory: SharedDirectory = shared_directory_at(directory, post=self._post)
        self._ids: list[str] = []
        self._messages = 0
        self._may_repeat = 0
        self._left: list[str] = []

    def changed_all(
        self, chosen: dict[str, list[Aside]], step: Callable[[Bench, Aside], None], unknown: list[str]
    ) -> Changed:
        for name, asides in chosen.items():
            self._work_on(name, partial(self._change, name, asides, step))
        return self.changed(unknown)

    def _change(self, name: str, asides: list[Aside], step: Callable[[Bench, Aside], None], bench: Bench) -> None:
        here = {each.number for each in bench.journal.asides()}
        for aside in asides:
            if aside.number in here:  # otherwise another process has changed it since the survey
                with self._told(f"batch {batch_id(name, aside.number)}"):
                    step(bench, aside)
                    self._note(name, aside, may_repeat=aside.is_unknown)

    def free(self, name: str, group: str) -> None:
        def work(bench: Bench) -> None:
            for entry in bench.pinned_to(group):
                with self._told(f"batch {batch_id(name, entry.number)}"):
                    bench.free(entry)
                    self._note(name, entry, may_repeat=True)

        self._work_on(name, work)

    def changed(self, unknown: list[str]) -> Changed:
        self._shared_directory.close()
        return Changed(self._ids, self._messages, self._may_repeat, unknown, self._left)

    def _work_on(self, name: str, work: Callable[[Bench], None]) -> None:
        with self._told(f"journal {name}"):
            disk = self._shared_directory.claim(name)
            if disk is None:
                self._check_gone(name)
                return
            try:
                work(Bench(Journal.open(disk, int(name, 16), self._clock), self._rng, self._wait))
            finally:
                self._shared_directory.discard(name, disk)

    def _check_gone(self, name: str) -> None:
        if name in self._shared_directory.names():  # otherwise the journal was empty, and another process removed it
            disk = self._shared_directory.disk(name)
            owner = disk.owner()
            disk.close()
            raise FairwayError(f"process {owner or 'unknown'} is alive and has it: end that first, then try again")

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn an error into a sentence of the result, and let the rest go on."""
        try:
            yield
        except FairwayError as error:
            self._left.append(f"{what}: {error}")

    def _note(self, name: str, what: Aside | SpoolEntry, *, may_repeat: bool) -> None:
        self._ids.append(batch_id(name, what.number))
        self._messages += what.messages
        self._may_repeat += what.messages if may_repeat else 0

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        """Queue a call. The disk's threads call this."""
        self._posted.append((callback, args))
        self._wakeup.signal()

    def _wait(self, work: Callable[[Completion], None]) -> None:
        """Start a journal's write and wait for it. Completions run here, because one thread alone calls a journal."""
        outcome: list[StorageFault | None] = []
        work(outcome.append)
        while not outcome:
            self._wakeup.wait(None)
            while self._posted:
                callback, args = self._posted.popleft()
                callback(*args)
        if outcome[0] is not None:
            raise outcome[0]
