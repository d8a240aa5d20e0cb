"""A spool on a real disk: the directory that processes share, and the thread that looks after it.

The thread looks for what dead processes left behind, and clears away what is empty. Reading a journal takes as long as
it is large; nobody who sends waits for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol

from fairway.batch.secret import new_secret
from fairway.client.spool import Spool, SpoolOptions, SpoolState, yard_at
from fairway.client.spool_fleet import ClusterSpool
from fairway.client.spool_journal import Journal
from fairway.client.ways import WayT
from fairway.errors import FairwayError, StorageFault
from fairway.world.clock import Clock
from fairway.world.rng import Rng
from fairway.world.workers import Ending, Workers

if TYPE_CHECKING:
    from fairway.client.core import ClientCore
    from fairway.client.fleet import ClusterClient
    from fairway.world.real_disk import RealDisk
    from fairway.world.yard import SharedDirectory

_STOP_S = 5.0  # for the thread to end


class SpoolThread:
    """The thread."""

    def __init__(
        self,
        options: SpoolOptions,
        yard: SharedDirectory,
        clock: Clock,
        post: Callable[..., object],
        *,
        is_cluster: bool = False,
    ) -> None:
        """`is_cluster`: the journals to take over are those of clients of a cluster, and else all others."""
        self._options = options
        self._is_cluster = is_cluster
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
            elif journal.is_cluster is not self._is_cluster:  # where its entries went is not ours to say
                self._passed_over.add(name)
                disk.close()
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

    def stop(self, journals: Callable[[], Sequence[Journal]]) -> None:
        """End the thread, let go of every journal, remove those that are empty."""
        self._ending.ask()
        self._workers.join(_STOP_S)
        # Asked for only now, and each counted once: a disk that completes meanwhile moves its journal to the finished.
        left = {journal.name: journal for journal in (*journals(), *self._finished)}
        for journal in left.values():
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]
        self._yard.close()


class Spooled(Protocol):
    """What faces ask of a spool; with the lock."""

    @property
    def is_drained(self) -> bool: ...

    @property
    def is_going_on(self) -> bool: ...

    @property
    def messages(self) -> int: ...

    def state(self) -> SpoolState: ...


class AnySpoolHandle(Protocol):
    """A client's spool, of whichever kind."""

    @property
    def spool(self) -> Spooled: ...

    def start(self) -> None:
        """Look for what dead processes left behind, from now on."""

    def close(self) -> None:
        """When nothing goes this way any more. Not under a lock that `post` needs."""


class SpoolHandle:
    """A client's spool, with all that belongs to it."""

    def __init__(
        self,
        options: SpoolOptions,
        core: ClientCore,  # type: ignore[type-arg]  # of whichever face
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
        self._keeper = SpoolThread(options, yard, clock, post)
        self._spool = Spool(
            options,
            Journal(disk, number, clock, is_synced=options.is_synced, key=new_secret(rng)),
            clock,
            rng,
            is_connected=lambda: core.line.is_open,
            on_change=on_change,
            on_success=core.producing.note_success,
            on_finished=self._keeper.finished,
        )
        core.producing.divert(self._spool)
        core.line.add(self._spool.draining, clock.monotonic_ns())

    @property
    def spool(self) -> Spooled:
        return self._spool

    def start(self) -> None:
        self._keeper.start(self._spool.adopt)

    def close(self) -> None:
        self._keeper.stop(lambda: self._spool.journals)


class ClusterSpoolHandle(Generic[WayT]):
    """The same of a client of a cluster."""

    def __init__(
        self, options: SpoolOptions, fleet: ClusterClient[WayT], clock: Clock, rng: Rng, *, post: Callable[..., object]
    ) -> None:
        """`post` brings what happens on the disk's threads to where the way to the meta server is at home."""
        yard = yard_at(options.directory, post=post)
        number, disk = yard.make(rng)
        own = Journal(disk, number, clock, is_synced=options.is_synced, is_cluster=True, key=new_secret(rng))
        self._keeper = SpoolThread(options, yard, clock, post, is_cluster=True)
        self._spool = ClusterSpool(options, own, fleet, clock, rng, on_finished=self._keeper.finished)

    @property
    def spool(self) -> Spooled:
        return self._spool

    def start(self) -> None:
        self._keeper.start(self._spool.adopt)

    def close(self) -> None:
        self._spool.end()
        self._keeper.stop(lambda: self._spool.journals)
