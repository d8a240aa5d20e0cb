"""The spool of a cluster client: one journal, a gate beside the connection to each broker group, and the drain.

Each broker group has a gate (`SpoolGate`): batches that neither that group nor another takes go to the journal, while
the other groups' batches go on directly. A further gate, beside the connection to the meta server, takes batches whose
subject has no known broker group yet. `ClusterSpool` owns the journals, and `SpoolAssignment` drains them.

The lock of the connection to the meta server guards the journal. That lock may be taken before the lock of another
connection, and never after. So a gate hands batches over from `run_later`, without a lock, and gets the answer the same
way. The facts that a gate needs at once are its attributes, and the spool writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic

from fairway.batch import MessageId
from fairway.batch.layout import is_delayed
from fairway.client.cluster.client import ClusterClient, Partitioner
from fairway.client.core import ConnectionT
from fairway.client.spool.assignment import SpoolAssignment
from fairway.client.spool.journal import Journal
from fairway.client.spool.spool import (
    ClientSpool,
    SpoolHandle,
    SpoolOptions,
    SpoolPolicy,
    SpoolThread,
    shared_directory_at,
)
from fairway.errors import FairwayError
from fairway.protocol.receipts import SpoolBatchReceipt
from fairway.protocol.route_messages import SubjectRoute
from fairway.protocol.spool_port import Handed, SendPath
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

NOWHERE = ""  # the name of the gate for batches without a group


class SpoolGate(SpoolPolicy, Generic[ConnectionT]):
    """The way into the spool beside the connection to one group. Called under the lock of that connection."""

    def __init__(self, spool: ClusterSpool[ConnectionT], connection: ConnectionT) -> None:
        super().__init__(spool)
        # The spool writes the next three.
        self.is_near = False  # all that was kept for the group is on its way there
        self.is_clear = False  # nothing that was kept for the group is left
        self.must_divert = False  # the spool holds batches without a group, of an ordered subject that this group has
        self.connection_there = connection
        self._of = spool
        self._is_keeping = False

    @property
    def is_connected(self) -> bool:
        return self.connection_there.core.line.is_open

    @property
    def may_hold(self) -> bool:
        return self.is_near and not self._is_keeping

    @property
    def may_go(self) -> bool:
        return self.is_clear and not self._is_keeping

    # --- SpoolPort ---------------------------------------------------------------------------------------------------

    @property
    def stream_key(self) -> bytes:
        return self._spool.stream_key

    @property
    def fault(self) -> FairwayError | None:
        return self._spool.fault

    @property
    def trouble(self) -> str:
        return self._spool.trouble

    def room_for(self, messages: int, size_bytes: int) -> bool:
        return self._spool.room_for(messages, size_bytes)

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        self._is_keeping = True
        self._of.note_handed(handed, 1)
        self.connection_there.core.line.run_later(partial(self._of.keep, self, handed, done))

    def kept(self, done: Callable[[FairwayError | None], None], fault: FairwayError | None) -> None:
        """Report whether the batches that were handed over are safe. Called without any lock."""
        with self.connection_there.link.lock:
            self._is_keeping = False
            done(fault)
        self.connection_there.link.stir()

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return self._spool.receipt(subject, count, first_id)


class ClusterSpool(ClientSpool, Generic[ConnectionT]):
    """The spool of one cluster client.

    Called under the lock of the connection to the meta server, unless a method says otherwise.
    """

    def __init__(
        self,
        options: SpoolOptions,
        own: Journal,
        cluster_client: ClusterClient[ConnectionT],
        clock: Clock,
        rng: Rng,
        *,
        on_finished: Callable[[Journal], None],
    ) -> None:
        self.sorting = SpoolAssignment(cluster_client, clock, rng, self.refresh)
        super().__init__(options, own, clock, self.sorting, on_finished)
        self._cluster_client = cluster_client
        self._lock = cluster_client.meta.link.lock
        self._in_hand: Counter[tuple[str, bool]] = Counter()  # batches without a group on their way to the journal
        self._gates: dict[str, SpoolGate[ConnectionT]] = {}
        with self._lock:
            self._new_gate(NOWHERE, cluster_client.meta)
            cluster_client.meta.core.line.add(self.sorting, clock.monotonic_ns())
            cluster_client.on_connection, cluster_client.on_place, cluster_client.on_routes = (
                self._on_connection,
                self._on_place,
                self._on_routes,
            )

    # --- events of the cluster client --------------------------------------------------------------------------------

    def _on_connection(self, name: str, connection: ConnectionT) -> None:
        """Put a gate beside the connection to one more group, and drain to that group."""
        self.sorting.attach(name, connection)
        self._new_gate(name, connection)
        self.refresh()

    def _new_gate(self, name: str, connection: ConnectionT) -> None:
        gate = self._gates[name] = SpoolGate(self, connection)
        if connection is self._cluster_client.meta:
            connection.producing.divert(gate)
        else:
            with connection.link.lock:
                connection.producing.divert(gate)

    def _on_place(self, partitioner: Partitioner[ConnectionT], route: SubjectRoute) -> None:
        """A subject is about to get these groups. New messages of it go behind those that the spool holds."""
        if route.is_ordered and (partitioner.subject, partitioner.is_due) in self._unplaced():
            for name in route.writable:
                self._gates[name].must_divert = True

    def _on_routes(self) -> None:
        """Routes have changed: try again. Called without the lock."""
        with self._lock:
            self.sorting.look_again()
            self.refresh()

    # --- keeping -----------------------------------------------------------------------------------------------------

    def keep(
        self, gate: SpoolGate[ConnectionT], handed: Sequence[Handed], done: Callable[[FairwayError | None], None]
    ) -> None:
        """Write the batches of a gate to the journal. Called without any lock."""

        def kept(fault: FairwayError | None) -> None:
            self.note_handed(handed, -1)
            self._check()
            self.refresh()
            self.sorting.go_on()
            self._cluster_client.meta.core.line.run_later(partial(gate.kept, done, fault))
            self._cluster_client.meta.link.stir()

        with self._lock:
            self._write(handed, kept)

    def note_handed(self, handed: Sequence[Handed], step: int) -> None:
        """Count batches without a group on their way to the journal: `step` 1 when they leave, -1 when they are kept.

        Only the gate of the meta server's connection hands over batches without a group, and its lock is the spool's.
        """
        for each in handed:
            if each.group == NOWHERE:
                self._in_hand[each.subject, is_delayed(each.data)] += step

    def _unplaced(self) -> set[tuple[str, bool]]:
        """The subjects with batches that have no group yet."""
        counts = [self._in_hand, *(journal.unplaced for journal in (self._own, *self._before))]
        return {key for each in counts for key, count in each.items() if count > 0}

    def refresh(self) -> None:
        """Let go of empty journals, and update the gates."""
        self._let_go()
        first, unplaced = [self._own, *self._before], self._unplaced()
        spots = [self._cluster_client.seek(subject, is_due=is_due) for subject, is_due in unplaced]
        waiting = {name for partitioner in spots for name in partitioner.names}
        ordered = {name for partitioner in spots if partitioner.is_ordered for name in partitioner.names}
        for name, gate in self._gates.items():
            count = sum(journal.held[name] for journal in first)
            is_free = self._has_looked_round and not (unplaced if name == NOWHERE else name in waiting)
            is_near = is_free and count <= self.sorting.loaded[name] and (not count or self.sorting.is_fluent(name))
            news = (name in ordered, is_near, is_free and not count)
            if news != (gate.must_divert, gate.is_near, gate.is_clear):
                gate.must_divert, gate.is_near, gate.is_clear = news
                gate.connection_there.link.stir()

    def adopt(self, journals: Sequence[Journal]) -> None:
        super().adopt(journals)
        self.refresh()

    @property
    def is_in_use(self) -> bool:
        return any(gate.send_path is SendPath.DIVERT for gate in self._gates.values()) or not self._own.is_empty

    @property
    def is_going_on(self) -> bool:
        return bool(self.messages) and self.sorting.is_at_work

    def end(self) -> None:
        with self._lock:
            self.sorting.end()


def open_cluster_spool(
    options: SpoolOptions,
    cluster_client: ClusterClient[ConnectionT],
    clock: Clock,
    rng: Rng,
    *,
    post: Callable[..., object],
) -> SpoolHandle:
    """Open the spool of a cluster client. Raises if the directory cannot be used.

    `post` carries calls from the disk's threads to the lock or loop of the connection to the meta server.
    """
    thread = SpoolThread(options, shared_directory_at(options.directory, post=post), clock, post, is_cluster=True)
    own = thread.make(rng)
    return SpoolHandle(ClusterSpool(options, own, cluster_client, clock, rng, on_finished=thread.finished), thread)
