"""A spool on a real disk: the directory that processes share, and the thread that looks after it.

The thread looks for what dead processes left behind, and clears away what is empty. Reading a journal takes as long as
it is large; nobody who sends waits for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fairway.client.spool import Spool, SpoolOptions, yard_at
from fairway.client.spool_journal import Journal
from fairway.errors import FairwayError, StorageFault
from fairway.world.clock import Clock
from fairway.world.rng import Rng
from fairway.world.workers import Ending, Workers

if TYPE_CHECKING:
    from fairway.client.core import Core
    from fairway.world.real_disk import RealDisk
    from fairway.world.yard import Yard

_STOP_S = 5.0  # for the thread to end


class Keeper:
    """The thread."""

    def __init__(self, options: SpoolOptions, yard: Yard, clock: Clock, post: Callable[..., object]) -> None:
        self._options = options
        self._yard = yard
        self._clock = clock
        self._post = post
        self._ending = Ending()
        self._workers = Workers()
        self._passed_over: set[str] = set()  # journals with nothing to drain, or that cannot be read; never iterated
        self._finished: list[Journal] = []

    def start(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        self._workers.start("fairway-spool", lambda: self._run(adopt))

    def _run(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        is_first = True
        while not self._ending.is_asked:
            with contextlib.suppress(StorageFault):  # the directory cannot be listed now: later, perhaps
                self._clear()
                found = self._orphans()
                if found or is_first:
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                        self._post(adopt, found)
                is_first = False
            self._ending.wait(self._options.adopt_ms / 1_000)

    def _orphans(self) -> list[Journal]:
        found: list[Journal] = []
        for name in self._yard.names():
            if name in self._passed_over or self._ending.is_asked:
                continue
            disk = self._yard.claim(name)
            if disk is None:
                continue
            try:
                journal = Journal.open(disk, int(name, 16), self._clock, is_synced=self._options.is_synced)
            except FairwayError:  # `fairway spool status` says what is wrong with it
                self._passed_over.add(name)
                disk.close()
                continue
            if journal.is_empty:
                self._part(name, disk)
            else:
                found.append(journal)
        return sorted(found, key=lambda journal: journal.since_ms)  # what came first goes first

    def finished(self, journal: Journal) -> None:
        """It is empty: clear it away when there is time."""
        self._finished.append(journal)

    def _clear(self) -> None:
        while self._finished:
            journal = self._finished.pop()
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]  # the yard's own

    def _part(self, name: str, disk: RealDisk) -> None:
        if not self._yard.discard(name, disk):
            self._passed_over.add(name)

    def stop(self, journals: Sequence[Journal]) -> None:
        """End the thread, let go of every journal, remove those that are empty."""
        self._ending.ask()
        self._workers.join(_STOP_S)
        self._clear()
        for journal in journals:
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]


class Spooling:
    """A client's spool, with all that belongs to it."""

    def __init__(
        self,
        options: SpoolOptions,
        core: Core,  # type: ignore[type-arg]  # of whichever face
        clock: Clock,
        rng: Rng,
        *,
        post: Callable[..., object],
        on_change: Callable[[], None],
    ) -> None:
        """`post` brings what happens on the disk's threads to where the core is at home. Raises if the directory
        cannot be used."""
        yard = yard_at(options.directory, post=post)
        number, disk = yard.make(rng)
        self._keeper = Keeper(options, yard, clock, post)
        self.spool = Spool(
            options,
            Journal(disk, number, clock, is_synced=options.is_synced),
            clock,
            rng,
            is_connected=lambda: core.line.is_open,
            on_change=on_change,
            on_success=core.producing.note_success,
            on_finished=self._keeper.finished,
        )
        core.producing.divert(self.spool)
        core.line.add(self.spool.draining, clock.monotonic_ns())

    def start(self) -> None:
        """Look for what dead processes left behind, from now on."""
        self._keeper.start(self.spool.adopt)

    def close(self) -> None:
        """When nothing goes this way any more. Not under a lock that `post` needs."""
        self._keeper.stop(self.spool.journals)
