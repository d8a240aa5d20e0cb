"""The spool of a client of a cluster: one journal, a gate at each way, and the sorting of what lies in journals.

Each group of brokers has a gate: what that group does not take, and no other does, goes to the journal, while the rest
goes on directly. So does what waits on the way to the meta server because nobody has said where its subject is.

The journal is under the lock of the way to the meta server, which may be taken before that of another way and never
after it. So a gate hands over by an errand, and is told by another; what it must know at once is written to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic

from fairway.batch import MessageId
from fairway.batch.layout import is_delayed
from fairway.client.fleet import ClusterClient
from fairway.client.spool import Keeping, SpoolOptions, SpoolState
from fairway.client.spool_journal import Journal
from fairway.client.spool_sorting import SpoolAssignment
from fairway.client.spool_way import SpoolPolicy
from fairway.client.spot import Partitioner
from fairway.client.ways import WayT
from fairway.errors import FairwayError
from fairway.protocol.diversion import Buffer, Handed, SendPath
from fairway.protocol.pending import SpoolBatchReceipt
from fairway.protocol.routing import SubjectRoute
from fairway.world.clock import Clock
from fairway.world.rng import Rng

NOWHERE = ""  # the gate of what has no group yet


class SpoolGate(Generic[WayT]):
    """The other way than that to one group; called under the lock of that way."""

    def __init__(self, spool: ClusterSpool[WayT], way: WayT) -> None:
        self.is_near = False  # all that was kept for the group is on its way there; written by the spool
        self.is_clear = False  # nothing that was is left
        self.must_divert = False  # something is kept of a subject whose keys have their places, and has none yet
        self.way_there = way
        self._spool = spool
        self._choice = SpoolPolicy(spool.options, self)
        self._is_keeping = False

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.way_there.link.lock

    # --- how it stands -----------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self.way_there.core.line.is_open

    @property
    def may_hold(self) -> bool:
        return self.is_near and not self._is_keeping

    @property
    def may_go(self) -> bool:
        return self.is_clear and not self._is_keeping

    # --- Diversion ---------------------------------------------------------------------------------------------------

    @property
    def way(self) -> SendPath:
        return self._choice.way

    @property
    def stream_key(self) -> bytes:
        return self._spool.stream_key

    @property
    def fault(self) -> FairwayError | None:
        return self._spool.fault

    @property
    def trouble(self) -> str:
        return self._spool.keeping.full_sentence

    def look(self, buffer: Buffer, now_ns: int) -> None:
        self._choice.look(buffer, now_ns)

    def next_look_ns(self) -> int | None:
        if self.way is SendPath.DIVERT:
            return self._spool.keeping.full_until_ns or None
        return self._choice.next_look_ns()

    def room_for(self, messages: int, size_bytes: int) -> bool:
        return self._spool.keeping.room_for(messages, size_bytes) and self.fault is None

    def keep(self, handed: Sequence[Handed], done: Callable[[FairwayError | None], None]) -> None:
        self._is_keeping = True
        self._spool.note_handed(handed, 1)
        self.way_there.core.line.run_later(partial(self._spool.keep, self, handed, done))

    def kept(self, done: Callable[[FairwayError | None], None], fault: FairwayError | None) -> None:
        """An errand: what was handed over is safe, or not."""
        with self.lock:
            self._is_keeping = False
            done(fault)
        self.way_there.link.stir()

    def receipt(self, subject: str, count: int, first_id: MessageId) -> SpoolBatchReceipt:
        return self._spool.keeping.receipt(subject, count, first_id)


class ClusterSpool(Generic[WayT]):
    """One client's. Called under the lock of the way to the meta server, unless a method says otherwise."""

    def __init__(
        self,
        options: SpoolOptions,
        own: Journal,
        fleet: ClusterClient[WayT],
        clock: Clock,
        rng: Rng,
        *,
        on_finished: Callable[[Journal], None],
    ) -> None:
        """`on_finished`: a journal of a dead process is empty, and may go."""
        self.options = options
        self.fault: FairwayError | None = None
        self.keeping = Keeping(options, own, clock)
        self.sorting = SpoolAssignment(fleet, clock, rng, self.refresh)
        self._fleet = fleet
        self._lock = fleet.meta.link.lock
        self._on_finished = on_finished
        self._own = own
        self._before: list[Journal] = []  # of the dead, from before our first message: they go first
        self._others: list[Journal] = []  # found later
        self._has_looked_round = False
        self._in_hand: Counter[tuple[str, bool]] = Counter()  # what has no group and is not in the journal yet
        self._gates: dict[str, SpoolGate[WayT]] = {}
        with self._lock:
            self._new_gate(NOWHERE, fleet.meta)
            fleet.meta.core.line.add(self.sorting, clock.monotonic_ns())
            fleet.on_way, fleet.on_place, fleet.on_routes = self._on_way, self._on_place, self._on_routes

    # --- the fleet ---------------------------------------------------------------------------------------------------

    def _on_way(self, name: str, way: WayT) -> None:
        """There is a way to one more group."""
        self.sorting.attach(name, way)
        self._new_gate(name, way)
        self.refresh()

    def _new_gate(self, name: str, way: WayT) -> None:
        gate = self._gates[name] = SpoolGate(self, way)
        if way is self._fleet.meta:
            way.producing.divert(gate)
        else:
            with way.link.lock:
                way.producing.divert(gate)

    def _on_place(self, spot: Partitioner[WayT], route: SubjectRoute) -> None:
        """A subject is about to have these groups: what is sent to it from now on goes behind what is kept of it."""
        if route.is_ordered and (spot.subject, spot.is_due) in self._unplaced():
            for name in route.writable:
                self._gates[name].must_divert = True

    def _on_routes(self) -> None:
        """Without the lock: subjects may be elsewhere now."""
        with self._lock:
            self.sorting.look_again()
            self.refresh()

    # --- in ----------------------------------------------------------------------------------------------------------

    def keep(
        self, gate: SpoolGate[WayT], handed: Sequence[Handed], done: Callable[[FairwayError | None], None]
    ) -> None:
        """An errand, without any lock."""

        def kept(fault: FairwayError | None) -> None:
            self.note_handed(handed, -1)
            self.fault = self.fault or self.keeping.check()
            self.refresh()
            self.sorting.go_on()
            self._fleet.meta.core.line.run_later(partial(gate.kept, done, fault))
            self._fleet.meta.link.stir()

        with self._lock:
            self.keeping.keep(handed, kept)

    def note_handed(self, handed: Sequence[Handed], step: int) -> None:
        """On its way to the journal, or there. What has no group comes from the gate whose lock this is."""
        for each in handed:
            if each.group == NOWHERE:
                self._in_hand[each.subject, is_delayed(each.data)] += step

    def _unplaced(self) -> set[tuple[str, bool]]:
        """Subjects with something that has no group yet."""
        counts = [self._in_hand, *(journal.unplaced for journal in (self._own, *self._before))]
        return {key for each in counts for key, count in each.items() if count > 0}

    def refresh(self) -> None:
        """Tell the gates how it stands."""
        self._let_go()
        first, unplaced = [self._own, *self._before], self._unplaced()
        spots = [self._fleet.seek(subject, is_due=is_due) for subject, is_due in unplaced]
        waiting = {name for spot in spots for name in spot.names}
        ordered = {name for spot in spots if spot.is_ordered for name in spot.names}
        for name, gate in self._gates.items():
            count = sum(journal.held[name] for journal in first)
            is_free = self._has_looked_round and not (unplaced if name == NOWHERE else name in waiting)
            is_near = is_free and count <= self.sorting.loaded[name] and (not count or self.sorting.is_fluent(name))
            news = (name in ordered, is_near, is_free and not count)
            if news != (gate.must_divert, gate.is_near, gate.is_clear):
                gate.must_divert, gate.is_near, gate.is_clear = news
                gate.way_there.link.stir()

    @property
    def stream_key(self) -> bytes:
        """For all ways alike: what they hand over lies in one journal."""
        return self._own.key

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left at all, of ours or of the dead."""
        return self._has_looked_round and not self.keeping.busy and not self.messages

    @property
    def is_going_on(self) -> bool:
        """Whether it drains by itself just now."""
        return bool(self.messages) and self.sorting.is_at_work

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.journals)

    def state(self) -> SpoolState:
        sorting, journals = self.sorting, self.journals
        faults = [str(each.fault) for each in journals if each.fault is not None]
        return SpoolState(
            any(gate.way is SendPath.DIVERT for gate in self._gates.values()) or not self._own.is_empty,
            self.messages,
            sum(each.size_bytes for each in journals),
            sorting.messages,
            sorting.duplicates,
            sorting.asides,
            "; ".join(filter(None, [*faults, self.keeping.full_sentence, sorting.trouble])),
        )

    # --- journals of the dead ----------------------------------------------------------------------------------------

    def adopt(self, journals: Sequence[Journal]) -> None:
        """What was found by a look round; the first time it goes before our own."""
        is_first = not self._has_looked_round
        self._has_looked_round = True
        for journal in journals:
            (self._before if is_first else self._others).append(journal)
            self.sorting.add(journal)
        if is_first:
            self.sorting.add(self._own)
        self.refresh()

    def _let_go(self) -> None:
        """Those that are empty by now."""
        for journals in (self._before, self._others):
            for journal in [each for each in journals if each.is_empty and not each.is_busy]:
                journals.remove(journal)
                self.sorting.remove(journal)
                self._on_finished(journal)

    @property
    def journals(self) -> list[Journal]:
        """All that this client has."""
        return [self._own, *self._before, *self._others]

    def end(self) -> None:
        """Without the lock: nothing more is to be read or noted."""
        with self._lock:
            self.sorting.end()
