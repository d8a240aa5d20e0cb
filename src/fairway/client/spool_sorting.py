"""What is in journals goes to the groups of brokers of a cluster: each batch to one of them, and stored there once.

Before a batch is sent for the first time, the journal says where to and under which number (`PlacementRecord`). From
then on, until an answer says that it is not stored, it is *pinned*: only that group can tell whether it has it, so it
is sent nowhere else, by whichever process, however long that group is away. All others are free: they go to a group
that takes messages of their subject now, wherever that was when they were written; by choice to the one that they were
meant for.

    stored, or stored before          done
    the connection was lost           what was under way is pinned. All is read again from the journal: what is pinned
                                      when the group is back, the rest now, for another group
    BUSY, READ_ONLY and the like      what is free goes to another group, if one takes it; the rest waits
    a gap, an unknown stream,         as in `spool_drain`: what is certainly not stored has a new number, and so has
    a conflict, a foreign stream      what stands at a place that something else has
    TOO_LARGE, BAD_NAME, ...          set aside, with the reason

A key of an ordered subject belongs to one group, and waits for it. A number that a batch was not born with leaves its
messages the ids that their senders were told.

Called under the lock of the way to the meta server, unless a method says otherwise; takes those of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic

from fairway import batch, limits
from fairway.batch.layout import is_delayed
from fairway.client.fleet import ClusterClient
from fairway.client.spool_drain import (
    AGAIN_MS,
    ELSEWHERE,
    LATER,
    LOADED_BYTES_MAX,
    LOADED_MAX,
    SpooledBatch,
    SubjectQueue,
    is_clean,
    log_taken,
)
from fairway.client.spool_journal import Journal
from fairway.client.spool_leg import PlacedBatch, SpoolSender, StreamKey
from fairway.client.spool_record import PlacementRecord, SpoolEntry
from fairway.client.spot import Partitioner
from fairway.client.ways import WayT
from fairway.errors import Refused, StorageFault
from fairway.lookup.homes import home
from fairway.protocol.backoff import NS_PER_MS
from fairway.protocol.conflict import TAKEN
from fairway.protocol.session import Ask, RequestOutcome
from fairway.world.clock import Clock
from fairway.world.rng import Rng

_CHUNK_BYTES = 64 * limits.KIB  # read at a time: places are noted for all of it at once


class SpoolAssignment(Generic[WayT]):
    """Journals on one side, legs on the other. A session on the line to the meta server, for the sake of time."""

    def __init__(self, fleet: ClusterClient[WayT], clock: Clock, rng: Rng, on_change: Callable[[], None]) -> None:
        """`on_change`: figures are others now; under the lock."""
        self.messages = 0  # delivered
        self.duplicates = 0  # of them, stored before
        self.asides = 0  # messages
        self.loaded: Counter[str] = Counter()  # batches in memory, by group
        self._fleet = fleet
        self._lock = fleet.meta.link.lock
        self._clock = clock
        self._rng = rng
        self._on_change = on_change
        self._journals: list[Journal] = []
        self._legs: dict[str, SpoolSender[WayT]] = {}
        self._open: set[str] = set()  # legs, as they said last
        self._parcels: dict[
            tuple[int, int], SpooledBatch | None
        ] = {}  # in memory, by journal and number; None: on the move
        self._loaded_bytes = 0
        self._left_streams: set[int] = set()  # that something was taken out of: what follows would find a gap
        self._losses = 0  # of connections to groups: what was on its way there is read again
        self._lost_groups: set[str] = set()  # that may have something, and that this cluster does not know
        self._turn = 0
        self._works = 0  # reads and notes under way
        self._noting: set[SubjectQueue] = (
            set()
        )  # about which something is being noted: they stay as they are; never iterated
        self._is_ended = False
        self._retry_ns = 0  # after the disk was full

    # --- for the spool -----------------------------------------------------------------------------------------------

    def add(self, journal: Journal) -> None:
        """One more to drain, behind the others."""
        self._journals.append(journal)
        self.go_on()

    def remove(self, journal: Journal) -> None:
        """It is empty, and not needed any more."""
        self._journals.remove(journal)

    def attach(self, name: str, way: WayT) -> None:
        """There is a way to one more group."""
        leg = self._legs[name] = SpoolSender(name, way, self._rng, self._heard)
        self._lost_groups.discard(name)
        with leg.lock:
            way.core.line.add(leg, self._clock.monotonic_ns())

    def look_again(self) -> None:
        """Something is otherwise with groups or subjects: what could not be placed before may be now."""
        for journal in self._journals:
            journal.rewind()
        self.go_on()

    def end(self) -> None:
        """Read and note nothing more."""
        self._is_ended = True

    @property
    def is_at_work(self) -> bool:
        """Whether anything is on its way to a group that answers."""
        return bool(self._works) or any(self.loaded[name] for name in self._open if self._refused(name) is None)

    def is_fluent(self, group: str) -> bool:
        """Whether nothing was refused there."""
        return group in self._open and self._refused(group) is None

    @property
    def trouble(self) -> str:
        """Why something waits, for people; empty: nothing is known to be wrong."""
        refused = {str(each) for name in self._open if (each := self._refused(name)) is not None}
        lost = [
            f"broker group {name} may have stored something, and this cluster does not know it: start its servers "
            f"again; if it was given up for good: `fairway spool retry --group {name}`"
            for name in self._lost_groups
        ]
        return "; ".join(sorted(refused) + sorted(lost))

    def _refused(self, name: str) -> Refused | None:
        with self._legs[name].lock:
            flows = [flow for flow in self._legs[name].flows.values() if flow.parcels]
            return next((flow.refused for flow in flows if flow.refused is not None), None)

    # --- a session, for the sake of time -----------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """That is no news here."""

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        if self._retry_ns and now_ns >= self._retry_ns:
            self._retry_ns = 0
            self.look_again()
        return ()

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """Nothing is asked of a meta server."""

    def next_deadline(self) -> int | None:
        return self._retry_ns or None

    # --- out of the journals -----------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Keep some in memory."""
        is_room = len(self._parcels) <= LOADED_MAX // 2 and self._loaded_bytes < LOADED_BYTES_MAX
        if self._works or self._is_ended or self._retry_ns or not is_room:
            return
        journal = next((each for each in self._journals if each.has_more and each.fault is None), None)
        if journal is not None:
            self._works += 1
            journal.load(partial(self._on_loaded, journal), _CHUNK_BYTES)

    def _on_loaded(self, journal: Journal, entries: list[SpoolEntry]) -> None:
        fresh = [entry for entry in entries if (journal.number, entry.number) not in self._parcels]
        chosen = [(entry, group) for entry in fresh if (group := self._choose(journal, entry)) is not None]
        self._works -= 1
        if chosen and not self._is_ended:
            self._send(journal, chosen)
        else:
            self._on_change()
            self.go_on()

    def _send(self, journal: Journal, chosen: Sequence[tuple[SpoolEntry, str]]) -> None:
        """Write down where they go, then put them on their way."""
        for entry, _ in chosen:
            self._parcels[journal.number, entry.number] = None
        notes, losses = self._notes(journal, chosen), self._losses

        def noted(fault: StorageFault | None) -> None:
            self._works -= 1
            is_lost = self._losses != losses  # a group that is back by now, too: what goes before them is read again
            for entry, group in chosen:
                if fault is None and not is_lost:
                    self._put(journal, entry, group)
                else:
                    del self._parcels[journal.number, entry.number]
            if fault is not None:
                self._retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
                self._fleet.meta.link.stir()
            elif is_lost:
                self.look_again()
            self._on_change()
            self.go_on()

        self._works += 1  # one thing at a time, or some would overtake others
        if notes:
            journal.place(notes, noted)
        else:
            noted(None)

    def _notes(self, journal: Journal, chosen: Sequence[tuple[SpoolEntry, str]]) -> list[PlacementRecord]:
        """New places; as they were written, where that can be."""
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
            parcel = self._parcels[journal.number, entry.number] = PlacedBatch(entry, flow, journal, group)
            flow.parcels.append(parcel)
        self.loaded[group] += 1
        self._loaded_bytes += len(entry.data)
        leg.way.link.stir()

    def _let_go(self, parcel: PlacedBatch) -> None:
        del self._parcels[parcel.journal.number, parcel.entry.number]
        self._unload(parcel)

    def _unload(self, parcel: PlacedBatch) -> None:
        self.loaded[parcel.group] -= 1
        self._loaded_bytes -= len(parcel.entry.data)

    # --- where to ----------------------------------------------------------------------------------------------------

    def _choose(self, journal: Journal, entry: SpoolEntry) -> str | None:
        """The group that it goes to; None: not now."""
        spot = self._fleet.seek(entry.subject, is_due=is_delayed(entry.data))
        if not (spot.ways or spot.why):  # nobody has said anything yet, and what is pinned must not overtake the rest
            return None
        if not journal.may_be_stored(entry):
            return self._free(spot, entry)
        placed = journal.placed.get(entry.number)
        group = entry.group if placed is None else placed.group
        if spot.ways and group not in self._legs:
            self._lost_groups.add(group)
        return group if group in self._open else None

    def _free(self, spot: Partitioner[WayT], entry: SpoolEntry) -> str | None:
        names = spot.names
        if spot.is_ordered and len(names) > 1:
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
        """Whether it has not just refused what goes to that subject."""
        leg = self._legs[name]
        with leg.lock:
            flow = leg.flows.get(key)
            return flow is None or flow.refused is None or self._clock.monotonic_ns() >= flow.retry_ns

    def _another(self, key: StreamKey, group: str) -> str | None:
        """A group that takes what this one does not."""
        spot = self._fleet.seek(key[0], is_due=key[1])
        if spot.is_ordered:
            return None
        others = (name for name in spot.names if name != group and name in self._open)
        return next((name for name in others if self._takes(name, key)), None)

    # --- what became of it -------------------------------------------------------------------------------------------

    def _heard(self, leg: SpoolSender[WayT]) -> None:
        """An errand, without any lock: something has happened on a leg."""
        with self._lock:
            with leg.lock:
                is_open, stored, broken = leg.report()
            for parcel, is_duplicate in stored:
                self.messages += parcel.entry.messages
                self.duplicates += parcel.entry.messages if is_duplicate else 0
                self._let_go(parcel)
                parcel.journal.note_done(parcel.entry.number)
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
        self._fleet.meta.link.stir()  # for those who wait until nothing is left

    def _withdraw(self, leg: SpoolSender[WayT]) -> bool:
        """The connection is gone, or about to go: out of memory with all that is not under way, to be read again."""
        self._losses += 1
        with leg.lock:
            flows = [flow for flow in leg.flows.values() if not flow.in_flight and flow not in self._noting]
            for flow in flows:
                del leg.flows[flow.key]
        for parcel in (parcel for flow in flows for parcel in flow.parcels):
            if parcel.is_doubtful:
                parcel.journal.doubts.add(parcel.entry.number)
            self._let_go(parcel)  # type: ignore[arg-type]  # there are no others here
        return bool(flows)

    def _noted(self, leg: SpoolSender[WayT], flow: SubjectQueue) -> None:
        """What was to be noted about a flow is: it goes on, if its group is still there."""
        self._noting.discard(flow)
        if leg.name not in self._open:
            self._withdraw(leg)
            self.look_again()
        self._on_change()
        self.go_on()
        leg.way.link.stir()

    def _mend(self, leg: SpoolSender[WayT], flow: SubjectQueue) -> None:
        """Everything that was under way has come back: what to do about the first that is not stored."""
        with leg.lock:
            if leg.flows.get(flow.key) is not flow:
                return  # it was withdrawn meanwhile
            head, trouble = flow.parcels[0], flow.parcels[0].trouble
            flow.begin_again()
            for parcel in flow.parcels:
                if parcel.is_doubtful:
                    parcel.journal.doubts.add(parcel.entry.number)
            flow.refused = trouble if isinstance(trouble, Refused) else None
            if flow.refused is None:
                flow.is_held = False
        if isinstance(trouble, Refused):
            self._judge(leg, flow, head, trouble)
        leg.way.link.stir()

    def _judge(self, leg: SpoolSender[WayT], flow: SubjectQueue, head: SpooledBatch, refused: Refused) -> None:
        if refused.code in LATER:
            free = [parcel for parcel in flow.parcels if not parcel.is_doubtful]
            other = self._another(flow.key, leg.name) if free else None
            with leg.lock:
                wait_ns = 0 if refused.code in ELSEWHERE else flow.backoff.next_ns(refused.retry_after_ms)
                flow.retry_ns = self._clock.monotonic_ns() + wait_ns
                flow.is_held = False
                if other is not None:
                    flow.remove(free)
            if other is not None:
                self._move(free, other)
        elif refused.code in TAKEN:
            log_taken(head, refused)
            self._restream(leg, flow, [head])
        elif is_clean(head, refused.code):
            self._restream(leg, flow, [each for each in flow.parcels if each.producer_id == head.producer_id])
        else:
            self._set_aside(leg, flow, head, refused)

    def _move(self, parcels: Sequence[SpooledBatch], group: str) -> None:
        """They are certainly not stored: to another group with them."""
        by_journal: dict[Journal, list[tuple[SpoolEntry, str]]] = {}
        for parcel in parcels:
            by_journal.setdefault(parcel.journal, []).append((parcel.entry, group))
            self._unload(parcel)  # type: ignore[arg-type]
        for journal, chosen in by_journal.items():
            self._send(journal, chosen)

    def _restream(self, leg: SpoolSender[WayT], flow: SubjectQueue, parcels: Sequence[SpooledBatch]) -> None:
        """These, the first of the flow, have new numbers in the same place: written down, then sent."""
        head = parcels[0]
        journal, first, stream = head.journal, 0, self._new_stream()
        self._left_streams.add(head.producer_id)
        places: list[PlacementRecord] = []
        for parcel in parcels:
            places.append(PlacementRecord(parcel.entry.number, leg.name, stream, first))
            first += parcel.entry.messages

        def noted(fault: StorageFault | None) -> None:
            with leg.lock:
                for parcel in parcels:
                    parcel.is_doubtful = False
                    journal.doubts.discard(parcel.entry.number)
                    parcel.restamp()
                flow.is_held = False
                if fault is not None:
                    flow.retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
            self._noted(leg, flow)

        self._noting.add(flow)
        journal.place(places, noted)

    def _set_aside(self, leg: SpoolSender[WayT], flow: SubjectQueue, head: SpooledBatch, refused: Refused) -> None:
        is_unknown = head.is_doubtful
        reason = f"it may be stored, nobody can tell: {refused}" if is_unknown else str(refused)
        self._left_streams.add(head.producer_id)

        def kept(fault: StorageFault | None) -> None:
            with leg.lock:
                flow.is_held = False
                if fault is None:
                    flow.remove([head])
                    flow.refused = None
                    leg.let_go(flow)
                else:
                    flow.retry_ns = self._clock.monotonic_ns() + AGAIN_MS * NS_PER_MS
            if fault is None:
                self.asides += head.entry.messages
                self._let_go(head)  # type: ignore[arg-type]
            self._noted(leg, flow)

        self._noting.add(flow)
        head.journal.set_aside(head.entry, reason, head.producer_id, is_unknown, kept)
