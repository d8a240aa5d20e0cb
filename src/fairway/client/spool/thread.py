"""A client's spool on a real disk: the thread that adopts the journals of dead processes, and the client's handle.

`SpoolThread` looks for journals that dead processes left behind, and removes empty ones. Reading a large journal takes
long, and the thread keeps senders from waiting for that. `SpoolHandle` and `ClusterSpoolHandle` put a spool, its
journal and its thread together; a client holds one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol

from fairway.batch.identity import new_secret
from fairway.client.core import ConnectionT
from fairway.client.spool.cluster import ClusterSpool
from fairway.client.spool.journal import Journal
from fairway.client.spool.spool import Spool, SpoolOptions, SpoolState, shared_directory_at
from fairway.errors import FairwayError, StorageFault
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng
from fairway.runtime.signals import Ending, Workers

if TYPE_CHECKING:
    from fairway.client.cluster.client import ClusterClient
    from fairway.client.core import ClientCore
    from fairway.runtime.real_disk import RealDisk
    from fairway.runtime.shared_directory import SharedDirectory

_STOP_S = 5.0  # how long `stop` waits for the thread to end


class SpoolThread:
    """The thread that looks for journals of dead processes and removes empty ones."""

    def __init__(
        self,
        options: SpoolOptions,
        shared_directory: SharedDirectory,
        clock: Clock,
        post: Callable[..., object],
        *,
        is_cluster: bool = False,
    ) -> None:
        """`is_cluster`: adopt the journals of cluster clients; otherwise adopt all others."""
        self._options = options
        self._is_cluster = is_cluster
        self._shared_directory = shared_directory
        self._clock = clock
        self._post = post
        self._ending = Ending()
        self._workers = Workers()
        self._passed_over: set[str] = set()  # unreadable, of another kind of client, or with nothing to drain
        self._finished: list[Journal] = []

    def start(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        self._workers.start("fairway-spool", lambda: self._run(adopt))

    def _run(self, adopt: Callable[[Sequence[Journal]], None]) -> None:
        is_first = True
        while not self._ending.is_asked:
            with contextlib.suppress(StorageFault):  # the directory cannot be listed now: try again next time
                self._clear()
                found = self._orphans()
                if found or is_first:
                    with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the client
                        self._post(adopt, found)
                is_first = False
            self._ending.wait(self._options.adopt_ms / 1_000)

    def _orphans(self) -> list[Journal]:
        found: list[Journal] = []
        for name in self._shared_directory.names():
            if name in self._passed_over or self._ending.is_asked:
                continue
            disk = self._shared_directory.claim(name)
            if disk is None:
                continue
            try:
                journal = Journal.open(disk, int(name, 16), self._clock, is_synced=self._options.is_synced)
            except FairwayError:  # `fairway spool status` shows the reason
                self._passed_over.add(name)
                disk.close()
                continue
            if journal.is_empty:
                self._part(name, disk)
            elif journal.is_cluster is not self._is_cluster:  # only a client of the same kind knows where entries went
                self._passed_over.add(name)
                disk.close()
            else:
                found.append(journal)
        return sorted(found, key=lambda journal: journal.since_ms)  # the oldest drains first

    def finished(self, journal: Journal) -> None:
        """Remove an empty journal at the next turn of the thread."""
        self._finished.append(journal)

    def _clear(self) -> None:
        while self._finished:
            journal = self._finished.pop()
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]  # a disk of `SharedDirectory`

    def _part(self, name: str, disk: RealDisk) -> None:
        if not self._shared_directory.discard(name, disk):
            self._passed_over.add(name)

    def stop(self, journals: Callable[[], Sequence[Journal]]) -> None:
        """End the thread, close every journal, remove the empty ones."""
        self._ending.ask()
        self._workers.join(_STOP_S)
        # `journals` is called only now, and the dict counts each journal once: a disk that completes meanwhile moves
        # its journal to `_finished`.
        left = {journal.name: journal for journal in (*journals(), *self._finished)}
        for journal in left.values():
            self._part(journal.name, journal.disk)  # type: ignore[arg-type]
        self._shared_directory.close()


class Spooled(Protocol):
    """What a client asks of its spool, under its lock."""

    @property
    def is_drained(self) -> bool: ...

    @property
    def is_going_on(self) -> bool: ...

    @property
    def messages(self) -> int: ...

    def state(self) -> SpoolState: ...


class AnySpoolHandle(Protocol):
    """A client's spool, of one broker or of a cluster."""

    @property
    def spool(self) -> Spooled: ...

    def start(self) -> None:
        """Start the thread that adopts the journals of dead processes."""

    def close(self) -> None:
        """Close the spool when nothing is sent through it any more. The caller holds no lock that `post` needs."""


class SpoolHandle:
    """The spool of a client with one broker: its directory, journal and thread."""

    def __init__(
        self,
        options: SpoolOptions,
        core: ClientCore,  # type: ignore[type-arg]  # of the blocking or the asyncio client
        clock: Clock,
        rng: Rng,
        *,
        post: Callable[..., object],
        on_change: Callable[[], None],
    ) -> None:
        """`post` carries calls from the disk's threads to the core's lock or loop.

        Raises if the directory cannot be used.
        """
        shared_directory = shared_directory_at(options.directory, post=post)
        number, disk = shared_directory.make(rng)
        self._keeper = SpoolThread(options, shared_directory, clock, post)
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


class ClusterSpoolHandle(Generic[ConnectionT]):
    """The spool of a cluster client: its directory, journal and thread."""

    def __init__(
        self,
        options: SpoolOptions,
        cluster_client: ClusterClient[ConnectionT],
        clock: Clock,
        rng: Rng,
        *,
        post: Callable[..., object],
    ) -> None:
        """`post` carries calls from the disk's threads to the lock or loop of the connection to the meta server."""
        shared_directory = shared_directory_at(options.directory, post=post)
        number, disk = shared_directory.make(rng)
        own = Journal(disk, number, clock, is_synced=options.is_synced, is_cluster=True, key=new_secret(rng))
        self._keeper = SpoolThread(options, shared_directory, clock, post, is_cluster=True)
        self._spool = ClusterSpool(options, own, cluster_client, clock, rng, on_finished=self._keeper.finished)

    @property
    def spool(self) -> Spooled:
        return self._spool

    def start(self) -> None:
        self._keeper.start(self._spool.adopt)

    def close(self) -> None:
        self._spool.end()
        self._keeper.stop(lambda: self._spool.journals)
