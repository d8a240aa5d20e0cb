"""What lies in a spool and does not go on by itself, by an operator's word: put back to be sent again, or thrown away.

    set aside                      put back under a new number; or removed
    pinned to a broker group       put back under a new number, and free: any group may have it then
    that was given up

What is put back is written into its journal as a new entry that takes the place of the old one. That is one record, so
a crash leaves the one or the other; the file that it makes worthless is removed next, by us or by whoever opens the
journal after us, before anything of it is sent. Messages keep the ids of their receipts. So one that was stored before,
and is stored again, is known by its id.

Only journals that nobody has are touched, under their lock. And where a batch of unknown fate was set aside, others of
its stream that may be stored are judged by that: it stays until those have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from fairway import batch
from fairway.client.spool import yard_at
from fairway.client.spool_aside import Aside, aside_name
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import SpoolEntry, SpoolRecordKind, entry_of
from fairway.client.spool_recovery import JournalSurvey
from fairway.client.spool_survey import survey
from fairway.errors import FairwayError, Misuse
from fairway.protocol.diversion import Handed
from fairway.world.bell import Bell
from fairway.world.clock import Clock
from fairway.world.disk import Completion
from fairway.world.rng import Rng

if TYPE_CHECKING:
    from fairway.errors import StorageFault
    from fairway.world.yard import SharedDirectory

WaitFor: TypeAlias = Callable[
    [Callable[[Completion], None]], None
]  # calls it, and returns when `done` was called, or raises


class Changed(msgspec.Struct, frozen=True):
    """What was done, and what was not."""

    ids: list[str]  # of batches: that are put back, or removed
    messages: int  # in them
    may_repeat: int  # of these messages, those that may be stored before
    unknown: list[str]  # ids that were asked for, and that are not there
    left: list[str]  # why something stays as it was, a sentence each


class JournalSelection(NamedTuple):
    """What is to be changed in one journal."""

    name: str
    asides: list[Aside]


def batch_id(journal: str, number: int) -> str:
    """How people name a batch: as `fairway spool status` shows it."""
    return f"{journal}/{number}"


# --- one journal ------------------------------------------------------------------------------------------------------


class Bench:
    """One journal that is ours, on which nobody else works. Blocks."""

    def __init__(self, journal: Journal, rng: Rng, wait: WaitFor) -> None:
        self.journal = journal
        self._rng = rng
        self._wait = wait
        self._streams: dict[tuple[str, bool], tuple[int, int]] = {}  # and the next number, by subject and due or not

    def put_back(self, aside: Aside) -> None:
        """What was set aside is to be sent again."""
        self._check_murk(aside)
        _, data = self.journal.read_aside(f"{aside.number:016x}")
        self._put(aside.number, aside.subject, aside.messages, data)
        self.journal.clear_asides()

    def free(self, entry: SpoolEntry) -> None:
        """What is pinned to a group may go to any."""
        self._put(entry.number, entry.subject, entry.messages, entry.data)

    def discard(self, aside: Aside) -> None:
        """What was set aside is never sent."""
        self._check_murk(aside)
        self._wait(lambda done: self.journal.give_up([aside.number], done))
        self.journal.disk.remove(aside_name(aside.number))

    def pinned_to(self, group: str) -> list[SpoolEntry]:
        """What waits for that group, in order: not much, no more than was under way at once."""
        waiting, walk = self.journal.doubtful(), JournalSurvey(self.journal.disk, self.journal.number).walk()
        entries = (entry_of(record.body) for _, record in walk if record.kind == SpoolRecordKind.ENTRY)
        return [entry for entry in entries if waiting.get(entry.number) == group]

    def _put(self, number: int, subject: str, messages: int, data: bytes) -> None:
        try:
            batch.check(data)  # before it has a new checksum
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
    """Put back what was set aside: these batches, or all."""
    chosen, unknown = _choose(directory, ids, clock)
    doubtful = sum(aside.messages for each in chosen for aside in each.asides if aside.is_unknown)
    if doubtful and not may_repeat:
        raise Misuse(
            f"what was set aside may be stored already, in part (messages: {doubtful:,}), and nobody can tell: sent "
            "again, it may be stored twice. Say --may-repeat if it may, or name the ids of the other batches"
        )
    work = _JournalWork(directory, clock, rng)
    for each in chosen:
        work.change(each, Bench.put_back)
    return work.changed(unknown)


def discard(directory: str, ids: Sequence[str] | None, clock: Clock, rng: Rng) -> Changed:
    """Remove what was set aside: these batches, or all."""
    chosen, unknown = _choose(directory, ids, clock)
    work = _JournalWork(directory, clock, rng)
    for each in chosen:
        work.change(each, Bench.discard)
    return work.changed(unknown)


def retry_pinned(directory: str, group: str, clock: Clock, rng: Rng) -> Changed:
    """Put back what waits for a broker group that is no more. Some of it may be stored twice then."""
    work = _JournalWork(directory, clock, rng)
    for each in survey(directory, clock).journals:
        if group in each.pinned:
            work.free(each.name, group)
    return work.changed([])


def _choose(directory: str, ids: Sequence[str] | None, clock: Clock) -> tuple[list[JournalSelection], list[str]]:
    """By journal; and the ids of nothing."""
    there = {
        batch_id(journal.name, aside.number): (journal.name, aside)
        for journal in survey(directory, clock).journals
        for aside in journal.set_aside
    }
    wanted = list(there) if ids is None else list(dict.fromkeys(each.lower() for each in ids))
    by_journal: dict[str, list[Aside]] = {}
    for name, aside in (there[each] for each in wanted if each in there):
        by_journal.setdefault(name, []).append(aside)
    found = [
        JournalSelection(name, sorted(asides, key=lambda aside: aside.number)) for name, asides in by_journal.items()
    ]
    return found, [each for each in wanted if each not in there]


class _JournalWork:
    """On all journals of a directory, one after the other."""

    def __init__(self, directory: str, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._bell = Bell()
        self._yard: SharedDirectory = yard_at(directory, post=self._post)
        self._ids: list[str] = []
        self._messages = 0
        self._may_repeat = 0
        self._left: list[str] = []

    def change(self, chosen: JournalSelection, step: Callable[[Bench, Aside], None]) -> None:
        def work(bench: Bench) -> None:
            here = {each.number for each in bench.journal.asides()}
            for aside in chosen.asides:
                if aside.number in here:  # else somebody was quicker
                    with self._told(f"batch {batch_id(chosen.name, aside.number)}"):
                        step(bench, aside)
                        self._note(chosen.name, aside, may_repeat=aside.is_unknown)

        self._work_on(chosen.name, work)

    def free(self, name: str, group: str) -> None:
        def work(bench: Bench) -> None:
            for entry in bench.pinned_to(group):
                with self._told(f"batch {batch_id(name, entry.number)}"):
                    bench.free(entry)
                    self._note(name, entry, may_repeat=True)

        self._work_on(name, work)

    def changed(self, unknown: list[str]) -> Changed:
        self._yard.close()
        return Changed(self._ids, self._messages, self._may_repeat, unknown, self._left)

    def _work_on(self, name: str, work: Callable[[Bench], None]) -> None:
        with self._told(f"journal {name}"):
            disk = self._yard.claim(name)
            if disk is None:
                self._check_gone(name)
                return
            try:
                work(Bench(Journal.open(disk, int(name, 16), self._clock), self._rng, self._wait))
            finally:
                self._yard.discard(name, disk)

    def _check_gone(self, name: str) -> None:
        if name in self._yard.names():  # else it was empty, and somebody has cleared it away
            disk = self._yard.disk(name)
            owner = disk.owner()
            disk.close()
            raise FairwayError(f"process {owner or 'unknown'} is alive and has it: end that first, then try again")

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What cannot be done is a sentence; the rest goes on."""
        try:
            yield
        except FairwayError as error:
            self._left.append(f"{what}: {error}")

    def _note(self, name: str, what: Aside | SpoolEntry, *, may_repeat: bool) -> None:
        self._ids.append(batch_id(name, what.number))
        self._messages += what.messages
        self._may_repeat += what.messages if may_repeat else 0

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        """From the disk's threads."""
        self._posted.append((callback, args))
        self._bell.ring()

    def _wait(self, work: Callable[[Completion], None]) -> None:
        """A journal is called from one thread: what the disk completes is told here."""
        outcome: list[StorageFault | None] = []
        work(outcome.append)
        while not outcome:
            self._bell.wait(None)
            while self._posted:
                callback, args = self._posted.popleft()
                callback(*args)
        if outcome[0] is not None:
            raise outcome[0]
