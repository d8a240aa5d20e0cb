"""Sends the batches of journals to the broker groups of a cluster: each batch to one group, stored there once.

`SpoolSender` is the session on the connection to one broker group. `SpoolAssignment` loads batches from the journals,
chooses a group for each, and decides what follows a refusal.

Before a batch is sent for the first time, the journal records the group and the number (`PlacementRecord`). From then
on the batch is *pinned*, until an answer says that the batch is not stored. Only its group can tell whether it has a
pinned batch, so every process sends the batch to that group alone, however long the group is away. All other batches
are free: each goes to a group that takes its subject now, and first of all to the group that its producer chose.

    outcome                           what follows
    stored now, or stored before      the batch is done
    the connection was lost           batches in flight are pinned. All batches are read again from the journal: pinned
                                      ones when their group is back, the others now, for another group
    BUSY, READ_ONLY and the like      free batches go to another group, if one takes them; pinned batches wait
    a gap, an unknown stream          as in `drain`: batches that are certainly not stored get new numbers
    a conflict, a foreign stream      the batch at the taken place gets a new number
    TOO_LARGE, BAD_NAME, ...          the batch is set aside, with the reason

A key of an ordered subject belongs to one group, and its batches wait for that group. A batch that gets another number
keeps the message ids that its sender was given.

Locks: the caller holds the lock of the connection to the meta server when it calls `SpoolAssignment`, unless a method
says otherwise. That lock may be taken before the lock of another connection, and never after. A `SpoolSender` is called
under the lock of its own connection, so it collects its news and reports them later, from `run_later`, without a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeAlias

from fairway import batch, limits
from fairway.batch.layout import is_delayed
from fairway.client.cluster.client import ClusterClient, Partitioner
from fairway.client.core import ConnectionT
from fairway.client.spool.drain import (
    AGAIN_MS,
    LOADED_BYTES_MAX,
    LOADED_MAX,
    JournalDrain,
    SpooledBatch,
    SubjectQueue,
)
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import PlacementRecord, SpoolEntry
from fairway.errors import Refused, StorageFault
from fairway.lookup.routes import home
from fairway.protocol.line import NS_PER_MS, Answer, Ask, RequestOutcome
from fairway.protocol.resend import SendOutcome, is_repeat, outcome_of
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

StreamKey: TypeAlias = tuple[str, bool]  # a subject, and whether its messages are due later


class PlacedBatch(SpooledBatch):
    """A batch on its way to the broker group that its journal recorded."""

    __slots__ = ("group",)

    def __init__(self, entry: SpoolEntry, flow: SubjectQueue, journal: Journal, group: str) -> None:
        super().__init__(entry, flow, journal)
        self.group = group
        self.is_doubtful = journal.may_be_stored(entry)

    def identity(self, producer_id: int, first: int) -> tuple[int, int]:
        placed = self.journal.placed.get(self.entry.number)
        return (producer_id, first) if placed is None else (placed.stream, placed.first)


class SpoolSender(Generic[ConnectionT]):
    """The session on the connection to one broker group.

    Its methods are called under the lock of that connection; it calls `told` without any lock.
    """

    def __init__(
        self, name: str, connection: ConnectionT, rng: Rng, told: Callable[[SpoolSender[ConnectionT]], None]
    ) -> None:
        self.name = name
        self.connection = connection
        self.flows: dict[StreamKey, SubjectQueue] = {}
        self._rng = rng
        self._told = told
        self._is_telling = False
        self._is_open = False
        self._stored: list[tuple[PlacedBatch, bool]] = []  # each with whether the broker had stored it before
        # Queues with a failed batch and nothing in flight, held until `SpoolAssignment` has decided what follows.
        self._broken: list[SubjectQueue] = []

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.connection.link.lock

    def flow(self, key: StreamKey) -> SubjectQueue:
        return self.flows.get(key) or self.flows.setdefault(key, SubjectQueue(key, self._rng))

    def report(self) -> tuple[bool, list[tuple[PlacedBatch, bool]], list[SubjectQueue]]:
        """Whether the connection is open, and the news since the last report, which are forgotten."""
        stored, self._stored = self._stored, []
        broken, self._broken = self._broken, []
        self._is_telling = False
        return self._is_open, stored, broken

    def let_go(self, flow: SubjectQueue) -> None:
        """Forget an empty queue. A refused queue stays: its refusal keeps other batches from that subject for now."""
        if flow.is_empty and flow.refused is None:
            self.flows.pop(flow.key, None)

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self._look()

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        self._look()
        asks: list[Ask] = []
        for flow in self.flows.values():
            asks += flow.asks(room - len(asks), now_ns)
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        spooled: PlacedBatch = token  # type: ignore[assignment]
        flow = spooled.flow
        if flow.answered(spooled, outcome):
            self._stored.append((spooled, is_repeat(outcome)))
            self.let_go(flow)
            if isinstance(outcome, Answer):
                self.connection.producing.note_success()
        if flow.must_decide:
            flow.is_held = True
            self._broken.append(flow)
        self._tell()

    def next_deadline(self) -> int | None:
        waits = (flow for flow in self.flows.values() if flow.waiting and flow.retry_ns and not flow.is_held)
        return min((flow.retry_ns for flow in waits), default=None)

    def _look(self) -> None:
        is_open = self.connection.core.line.is_open
        if is_open is not self._is_open:
            self._is_open = is_open
            self._tell()

    def _tell(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self.connection.core.line.run_later(lambda: self._told(self))


_CHUNK_BYTES = 64 * limits.KIB  # per read; the places of all its batches are recorded at once


class SpoolAssignment(JournalDrain, Generic[ConnectionT]):
    """Moves batches from the journals to the senders of the broker groups.

    It is a session on the line to the meta server only to be woken when a wait is over.
    """

    def __init__(
        self, cluster_client: ClusterClient[ConnectionT], clock: Clock, rng: Rng, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called under the lock when the counts have changed."""
        super().__init__()
        self.loaded: Counter[str] = Counter()  # batches in memory, by group
        self._cluster_client = cluster_client
        self._lock = cluster_client.meta.link.lock
        self._clock = clock
        self._rng = rng
        self._on_change = on_change
        self._legs: dict[str, SpoolSender[ConnectionT]] = {}
        self._open: set[str] = set()  # groups whose sender last reported an open connection
        # Batches in memory, by journal and number. None: the journal is recording the batch's place.
        self._spooled_batches: dict[tuple[int, int], SpooledBatch | None] = {}
        self._loaded_bytes = 0
        self._left_streams: set[int] = set()  # streams that a batch has left: later batches would meet a gap there
        self._losses = 0  # of connections to groups; the batches on their way there are read again
        self._lost_groups: set[str] = set()  # groups of pinned batches that this cluster does not know
        self._turn = 0
        self._works = 0  # reads and journal writes under way
        self._noting: set[SubjectQueue] = set()  # wait for a journal write, so must not change; never iterated
        self._is_ended = False
        self._retry_ns = 0  # when to try again after the disk was full

    # --- for the spool -----------------------------------------------------------------------------------------------

    def add(self, journal: Journal) -> None:
        super().add(journal)
        self.go_on()

    def attach(self, name: str, connection: ConnectionT) -> None:
        """Use the connection to one more broker group."""
        leg = self._legs[name] = SpoolSender(name, connection, self._rng, self._heard)
        self._lost_groups.discard(name)
        with leg.lock:
            connection.core.line.add(leg, self._clock.monotonic_ns())

    def look_again(self) -> None:
        """Read the journals again: groups or routes have changed, so batches without a place may have one now."""
        for journal in self._journals:
            journal.rewind()
        self.go_on()

    def end(self) -> None:
        """Stop reading from the journals."""
        self._is_ended = True

    @property
    def is_at_work(self) -> bool:
        """Whether a read or write is under way, or batches are on their way to a group that takes them."""
        return bool(self._works) or any(self.loaded[name] for name in self._open if self._refused(name) is None)

    def is_fluent(self, group: str) -> bool:
        """Whether the group is connected and refuses nothing."""
        return group in self._open and self._refused(group) is None

    @property
    def trouble(self) -> str:
        refused = {str(each) for name in self._open if (each := self._refused(name)) is not None}
        lost = [
            f"broker group {name} may have stored something, and this cluster does not know it: start its servers "
            f"again; if it was given up for good: `fairway spool retry --group {name}`"
            for name in self._lost_groups
        ]
        return "; ".join(sorted(refused) + sorted(lost))

    def _refused(self, name: str) -> Refused | None:
        with self._legs[name].lock:
            flows = [flow for flow in self._legs[name].flows.values() if not flow.is_empty]
            return next((flow.refused for flow in flows if flow.refused is not None), None)

    # --- Session: timers only ----------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """Do nothing: this session asks nothing of the meta server."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        if self._retry_ns and now_ns >= self._retry_ns:
            self._retry_ns = 0
            self.look_again()
        return ()

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """Do nothing: this session asks nothing of the meta server."""

    def next_deadline(self) -> int | None:
        return self._retry_ns or None

    # --- loading and placing -----------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Load the next batches, if there is room in memory and no read or write is under way."""
        is_room = len(self._spooled_batches) <= LOADED_MAX // 2 and self._loaded_bytes < LOADED_BYTES_MAX
        if self._works or self._is_ended or self._retry_ns or not is_room:
            return
        journal = next((each for each in self._journals if each.has_more and each.fault is None), None)
        if journal is not None:
            self._works += 1
            journal.load(partial(self._on_loaded, journal), _CHUNK_BYTES)

    def _on_loaded(self, journal: Journal, entries: list[SpoolEntry]) -> None:
        fresh = [entry for entry in entries if (journal.number, entry.number) not in self._spooled_batches]
        chosen = [(entry, group) for entry in fresh if (group := self._choose(journal, entry)) is not None]
        self._works -= 1
        if chosen and not self._is_ended:
            self._send(journal, chosen)
        else:
            self._on_change()
            self.go_on()

    def _send(self, journal: Journal, chosen: Sequence[tuple[SpoolEntry, str]]) -> None:
        """Record the places of these batches in the journal, then queue them."""
        for entry, _ in chosen:
            self._spooled_batches[journal.number, entry.number] = None
        notes, losses = self._notes(journal, chosen), self._losses

        def noted(fault: StorageFault | None) -> None:
            self._works -= 1
            # Also if the group is back by now: the batches that go before these are read again, so these are, too.
            is_lost = self._losses != losses
            for entry, group in chosen:
                if fault is None and not is_lost:
                    self._put(journal, entry, group)
                else:
                    del self._spooled_batches[journal.number, entry.number]
            if fault is not None:
                self._retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
                self._cluster_client.meta.link.stir()
            elif is_lost:
                self.look_again()
            self._on_change()
            self.go_on()

        self._works += 1  # one step at a time, or batches would overtake others
        if notes:
            journal.place(notes, noted)
        else:
            noted(None)

    def _notes(self, journal: Journal, chosen: Sequence[tuple[SpoolEntry, str]]) -> list[PlacementRecord]:
        """The places to record. A batch keeps the number that it was written with, where possible."""
        notes: list[PlacementRecord] = []
        streams: dict[tuple[str, str, bool], tuple[int, int]] = {}
        for entry, group in chosen:
            placed = journal.placed.get(entry.number)
            if journal.may_be_stored(entry):
                continue
            if placed is not None and placed.group == group and placed.stream not in self._left_streams:
                continue
            header = batch.peek(entry.data)
            if placed is None and group == entry.group and header.producer_id not in self._left_streams:
                notes.append(PlacementRecord(entry.number, group, header.producer_id, header.first_sequence))
                continue
            self._left_streams.add(header.producer_id if placed is None else placed.stream)
            key = (group, entry.subject, is_delayed(entry.data))
            stream, first = streams.get(key) or (self._new_stream(), 0)
            streams[key] = stream, first + entry.messages
            notes.append(PlacementRecord(entry.number, group, stream, first))
        return notes

    def _new_stream(self) -> int:
        return self._rng.bits(64) or 1

    def _put(self, journal: Journal, entry: SpoolEntry, group: str) -> None:
        leg = self._legs[group]
        with leg.lock:
            flow = leg.flow((entry.subject, is_delayed(entry.data)))
            spooled = self._spooled_batches[journal.number, entry.number] = PlacedBatch(entry, flow, journal, group)
            flow.waiting.append(spooled)
        self.loaded[group] += 1
        self._loaded_bytes += len(entry.data)
        leg.connection.link.stir()

    def _let_go(self, spooled: PlacedBatch) -> None:
        del self._spooled_batches[spooled.journal.number, spooled.entry.number]
        self._unload(spooled)

    def _unload(self, spooled: PlacedBatch) -> None:
        self.loaded[spooled.group] -= 1
        self._loaded_bytes -= len(spooled.entry.data)

    # --- choosing a group --------------------------------------------------------------------------------------------

    def _choose(self, journal: Journal, entry: SpoolEntry) -> str | None:
        """The group to send the entry to; None: not now."""
        partitioner = self._cluster_client.seek(entry.subject, is_due=is_delayed(entry.data))
        # Without an answer about the subject, pinned batches wait too: they must not overtake the free ones.
        if not (partitioner.connections or partitioner.why):
            return None
        if not journal.may_be_stored(entry):
            return self._free(partitioner, entry)
        placed = journal.placed.get(entry.number)
        group = entry.group if placed is None else placed.group
        if partitioner.connections and group not in self._legs:
            self._lost_groups.add(group)
        return group if group in self._open else None

    def _free(self, partitioner: Partitioner[ConnectionT], entry: SpoolEntry) -> str | None:
        names = partitioner.names
        if partitioner.is_ordered and len(names) > 1:
            group = entry.group if entry.group in names else self._home(entry, names)
            return group if group in self._open else None
        self._turn += not entry.group
        by_turns = [names[(self._turn + step) % len(names)] for step in range(len(names))]
        wanted = [name for name in (entry.group, *by_turns) if name in names and name in self._open]
        key = (entry.subject, is_delayed(entry.data))
        return next((name for name in wanted if self._takes(name, key)), wanted[0] if wanted else None)

    def _home(self, entry: SpoolEntry, names: Sequence[str]) -> str:
        key = batch.decode(entry.data).key(0)
        return names[0 if key is None else home(key, names)]

    def _takes(self, name: str, key: StreamKey) -> bool:
        """Whether the group has not just refused a batch of that subject."""
        leg = self._legs[name]
        with leg.lock:
            flow = leg.flows.get(key)
            return flow is None or flow.refused is None or self._clock.monotonic_ns() >= flow.retry_ns

    def _another(self, key: StreamKey, group: str) -> str | None:
        """Another group that takes the subject now; None for an ordered subject, or if no group does."""
        partitioner = self._cluster_client.seek(key[0], is_due=key[1])
        if partitioner.is_ordered:
            return None
        others = (name for name in partitioner.names if name != group and name in self._open)
        return next((name for name in others if self._takes(name, key)), None)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def _heard(self, leg: SpoolSender[ConnectionT]) -> None:
        """Take the report of a sender. The line calls this later, without any lock."""
        with self._lock:
            with leg.lock:
                is_open, stored, broken = leg.report()
            for spooled, is_duplicate in stored:
                self._let_go(spooled)
                self.note_stored(spooled, is_duplicate=is_duplicate)
            if all(journal.is_empty for journal in self._journals):
                self._left_streams.clear()
            was_open = leg.name in self._open
            (self._open.add if is_open else self._open.discard)(leg.name)
            is_otherwise = is_open is not was_open
            if is_open:
                for flow in broken:
                    self._mend(leg, flow)
            else:
                is_otherwise |= self._withdraw(leg)
            if is_otherwise:
                self.look_again()
            self._on_change()
            self.go_on()
        self._cluster_client.meta.link.stir()  # wake callers that wait until the spool is empty

    def _withdraw(self, leg: SpoolSender[ConnectionT]) -> bool:
        """Drop the queues without requests in flight: the connection is gone, and their batches are read again.

        Returns whether there were any.
        """
        self._losses += 1
        with leg.lock:
            flows = [flow for flow in leg.flows.values() if not flow.in_flight and flow not in self._noting]
            for flow in flows:
                del leg.flows[flow.key]
        for spooled in [spooled for flow in flows for spooled in flow.batches()]:
            if spooled.is_doubtful:
                spooled.journal.doubts.add(spooled.entry.number)
            self._let_go(spooled)  # type: ignore[arg-type]  # a sender queues only `PlacedBatch`
        return bool(flows)

    def _noted(self, leg: SpoolSender[ConnectionT], flow: SubjectQueue) -> None:
        """Let a queue go on after its journal write, if its group is still connected."""
        self._noting.discard(flow)
        if leg.name not in self._open:
            self._withdraw(leg)
            self.look_again()
        self._on_change()
        self.go_on()
        leg.connection.link.stir()

    def _mend(self, leg: SpoolSender[ConnectionT], flow: SubjectQueue) -> None:
        """Decide about the first batch that is not stored, once every batch in flight is answered."""
        with leg.lock:
            if leg.flows.get(flow.key) is not flow:
                return  # withdrawn meanwhile
            head, trouble = flow.begin_again()
            for spooled in flow.waiting:
                if spooled.is_doubtful:
                    spooled.journal.doubts.add(spooled.entry.number)
            flow.refused = trouble if isinstance(trouble, Refused) else None
            if flow.refused is None:
                flow.is_held = False
        if isinstance(trouble, Refused):
            self._judge(leg, flow, head, trouble)
        leg.connection.link.stir()

    def _judge(self, leg: SpoolSender[ConnectionT], flow: SubjectQueue, head: SpooledBatch, refused: Refused) -> None:
        outcome = outcome_of(refused.code)
        if outcome is SendOutcome.LATER:
            free = [spooled for spooled in flow.waiting if not spooled.is_doubtful]
            other = self._another(flow.key, leg.name) if free else None
            with leg.lock:
                flow.set_retry(refused, self._clock.monotonic_ns())
                flow.is_held = False
                for spooled in free if other is not None else ():
                    flow.remove(spooled)
            if other is not None:
                self._move(free, other)
        elif outcome is SendOutcome.TAKEN:
            head.warn_taken(refused)
            self._restream(leg, flow, [head])
        elif head.is_clean(refused.code):
            self._restream(leg, flow, [each for each in flow.waiting if each.producer_id == head.producer_id])
        else:
            self._set_aside(leg, flow, head, refused)

    def _move(self, spooled_batches: Sequence[SpooledBatch], group: str) -> None:
        """Send batches that are certainly not stored to another group."""
        by_journal: dict[Journal, list[tuple[SpoolEntry, str]]] = {}
        for spooled in spooled_batches:
            by_journal.setdefault(spooled.journal, []).append((spooled.entry, group))
            self._unload(spooled)  # type: ignore[arg-type]
        for journal, chosen in by_journal.items():
            self._send(journal, chosen)

    def _restream(
        self, leg: SpoolSender[ConnectionT], flow: SubjectQueue, spooled_batches: Sequence[SpooledBatch]
    ) -> None:
        """Give the first batches of the queue new numbers: record them, then send the batches in the same order."""
        head = spooled_batches[0]
        journal, first, stream = head.journal, 0, self._new_stream()
        self._left_streams.add(head.producer_id)
        places: list[PlacementRecord] = []
        for spooled in spooled_batches:
            places.append(PlacementRecord(spooled.entry.number, leg.name, stream, first))
            first += spooled.entry.messages

        def noted(fault: StorageFault | None) -> None:
            with leg.lock:
                for spooled in spooled_batches:
                    spooled.is_doubtful = False
                    journal.doubts.discard(spooled.entry.number)
                    spooled.restamp()
                flow.is_held = False
                if fault is not None:
                    flow.retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
            self._noted(leg, flow)

        self._noting.add(flow)
        journal.place(places, noted)

    def _set_aside(
        self, leg: SpoolSender[ConnectionT], flow: SubjectQueue, head: SpooledBatch, refused: Refused
    ) -> None:
        self._left_streams.add(head.producer_id)

        def kept(fault: StorageFault | None) -> None:
            with leg.lock:
                flow.is_held = False
                if fault is None:
                    flow.remove(head)
                    flow.refused = None
                    leg.let_go(flow)
                else:
                    flow.retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
            if fault is None:
                self.asides += head.entry.messages
                self._let_go(head)  # type: ignore[arg-type]
            self._noted(leg, flow)

        self._noting.add(flow)
        head.set_aside(refused, kept)
